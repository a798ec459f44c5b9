"""Values of columns: what records hold, what users say and what calls pass on, and how people say them.

Everything comes from a seeded generator and the pools of a split. Knows nothing of domains, tools or phrases.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from scripts.tiny_agent import pools
from scripts.tiny_agent.domain import Column, Kind, Split
from scripts.tiny_agent.pages import fact_lines, facts, page
from scripts.tiny_agent.sentences import sentence, title

__all__ = ["draw", "fact_lines", "facts", "page", "sentence", "spoken", "title"]

_CITY_FIRST = (
    "New",
    "Port",
    "North",
    "South",
    "East",
    "West",
    "Upper",
    "Lower",
    "Old",
    "Fort",
    "Lake",
    "Mount",
    "San",
    "St",
)
_CITY_LAST = ("Bay", "City", "Falls", "Hill", "Springs", "Park", "Heath", "Bridge", "Cross", "Harbor", "Point", "Ridge")
_CITY_ENDS = (
    "ton",
    "ville",
    "burg",
    "holm",
    "ford",
    "field",
    "by",
    "wick",
    "stad",
    "haven",
    "mouth",
    "ia",
    "ora",
    "grad",
)
_FOLDERS = (
    "docs",
    "src",
    "config",
    "notes",
    "reports",
    "data",
    "scripts",
    "app",
    "lib",
    "tests",
    "drafts",
    "archive",
    "assets",
    "team",
)
_SUFFIXES = (".md", ".txt", ".py", ".json", ".yaml", ".toml", ".csv", ".log", ".ini", ".html")
_MAIL_ENDS = ("com", "org", "net", "io", "eu", "dev")
_UPPER = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def draw(column: Column, rng: random.Random, split: Split) -> Any:
    """A value of the column, as JSON."""
    if column.kind == "choice":
        return rng.choice(column.choices)
    if column.kind == "code":
        return code(column.form or "####", rng)
    return _DRAWS[column.kind](rng, split)


def spoken(column: Column, value: Any) -> str:
    """The value as users and answers say it: texts, numbers, dates and codes verbatim, lists as "Ana, Bo and Cy", flags
    as yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        words = [str(item) for item in value]
        return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words) or "none"
    return str(value)


def code(form: str, rng: random.Random) -> str:
    """A code of this form: `#` is a digit, `@` a capital letter, `&` a small one. Numbers begin with 1 to 8: counting
    up keeps their width."""
    out: list[str] = []
    for index, mark in enumerate(form):
        if mark == "#":
            out.append(rng.choice("0123456789" if index and form[index - 1] == "#" else "12345678"))
        elif mark == "@":
            out.append(rng.choice(_UPPER))
        elif mark == "&":
            out.append(rng.choice(_UPPER).lower())
        else:
            out.append(mark)
    return "".join(out)


def person(rng: random.Random, split: Split) -> str:
    """First and last name, or a first name alone."""
    first = pools.name(pools.FIRST_NAMES, rng, split)
    return first if rng.random() < 0.25 else f"{first} {pools.name(pools.LAST_NAMES, rng, split)}"


def people(rng: random.Random, split: Split) -> list[str]:
    """One to four persons, all with their first name or all with both, none twice."""
    full = rng.random() < 0.4
    names: dict[str, None] = {}
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4))):
        first = pools.name(pools.FIRST_NAMES, rng, split)
        names[f"{first} {pools.name(pools.LAST_NAMES, rng, split)}" if full else first] = None
    return list(names)


def city(rng: random.Random, split: Split) -> str:
    if rng.random() < 0.6:
        return pools.CITIES.draw(rng, split)
    made = pools.made_up(rng, split, 1 if rng.random() < 0.5 else 2)
    roll = rng.random()
    if roll < 0.4:
        return (made + rng.choice(_CITY_ENDS)).capitalize()
    if roll < 0.6:
        return f"{rng.choice(_CITY_FIRST)} {made.capitalize()}"
    return f"{made.capitalize()} {rng.choice(_CITY_LAST)}" if roll < 0.75 else made.capitalize()


def word(rng: random.Random, split: Split) -> str:
    """One or two words in small letters; now and then with capitals, as brands have them."""
    text = pools.word(pools.NOUNS, rng, split)
    if rng.random() < 0.4:
        text = f"{pools.ADJECTIVES.draw(rng, split)} {text}"
    return text.title() if rng.random() < 0.15 else text


def count(rng: random.Random, split: Split) -> int:
    """A whole number from 1 to a few hundred; small ones are more frequent."""
    return rng.randint(1, rng.choice((9, 20, 60, 100, 400, 999)))


def amount(rng: random.Random, split: Split) -> int | float:
    """Up to two decimals; a whole number is an int, so that it is written without a point."""
    cents = rng.randint(100, rng.choice((2_000, 10_000, 100_000, 900_000)))
    if rng.random() < 0.35:
        return cents // 100
    value = cents / (100 if rng.random() < 0.7 else 10)
    return int(value) if value == int(value) else value


def date(rng: random.Random, split: Split) -> str:
    """YYYY-MM-DD of the years 2023 to 2032."""
    return f"{rng.randint(2023, 2032)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def time(rng: random.Random, split: Split) -> str:
    return f"{rng.randint(0, 23):02}:{rng.choice((0, 0, 15, 30, 30, 45, rng.randint(0, 59))):02}"


def email(rng: random.Random, split: Split) -> str:
    first = pools.name(pools.FIRST_NAMES, rng, split).lower()
    local = rng.choice(
        (first, f"{first}.{pools.name(pools.LAST_NAMES, rng, split).lower()}", f"{first}{rng.randint(1, 99)}")
    )
    host = pools.name(pools.COMPANIES, rng, split).lower()
    return f"{_ascii(local)}@{host}.{rng.choice(_MAIL_ENDS)}"


def phone(rng: random.Random, split: Split) -> str:
    form = rng.choice(("+## ### ######", "0##-######", "555-####", "+# ### ### ####", "0### ######"))
    return code(form, rng)


def path(rng: random.Random, split: Split) -> str:
    stem = pools.word(pools.NOUNS, rng, split)
    if rng.random() < 0.4:
        stem += rng.choice("_-") + pools.word(pools.TOPICS, rng, split).replace(" ", "_")
    folder = rng.choice(_FOLDERS) if rng.random() < 0.7 else pools.word(pools.NOUNS, rng, split)
    return f"{folder}/{stem}{rng.choice(_SUFFIXES)}" if rng.random() < 0.8 else stem + rng.choice(_SUFFIXES)


def tags(rng: random.Random, split: Split) -> list[str]:
    """One to three words, none twice."""
    return list(dict.fromkeys(tag(rng, split) for _ in range(rng.choice((1, 2, 2, 3)))))


def tag(rng: random.Random, split: Split) -> str:
    return pools.word(pools.TAGS if rng.random() < 0.7 else pools.NOUNS, rng, split)


def company(rng: random.Random, split: Split) -> str:
    ending = rng.choice(
        ("", "", " Ltd", " Group", " Foods", " Labs", " Works", " Partners", " Travel", " Supply", " Media")
    )
    return pools.name(pools.COMPANIES, rng, split) + ending


def short_page(rng: random.Random, split: Split) -> str:
    """A page of the usual length: 8 to 24 lines, one in four up to 60, a few up to 120."""
    roll = rng.random()
    longest = 24 if roll < 0.7 else 60 if roll < 0.95 else 120
    return page(rng, split, rng.randint(8, longest))[0]


def _ascii(text: str) -> str:
    return text.replace("ö", "o").replace(" ", "")


_DRAWS: dict[Kind, Callable[[random.Random, Split], Any]] = {
    "person": person,
    "people": people,
    "city": city,
    "word": word,
    "title": title,
    "text": sentence,
    "page": short_page,
    "flag": lambda rng, _: rng.random() < 0.5,
    "count": count,
    "amount": amount,
    "date": date,
    "time": time,
    "email": email,
    "phone": phone,
    "path": path,
    "tags": tags,
}
