"""Titles and sentences with words of a split in their slots: texts of records, which users repeat verbatim."""

from __future__ import annotations

import random
import re

from scripts.tiny_agent import pools
from scripts.tiny_agent.domain import Split

_TITLES = (
    "{a} {t}", "{a} {t}", "{n} {t}", "{n} {t}", "{t} of the {n}", "{g} the {n}", "{g} the {a} {n}", "{a} {n} {t}",
    "{t} with {f}", "{t} in {c}",
    "{o} {t}", "{n} and {n}", "{g} and {g}", "{t} {d}", "{a} {n}", "{f} on {t}", "{c} {t}", "{t} for {o}",
    "{g} {n} {t}", "The {a} {n}", "{l} {t}",
    "{t} part {d}", "How {n} meets {n}", "{n} {g} {t}", "{a} {g} {t}", "A {n} for {f}", "{g} at {c}", "{t} and {t}",
)  # fmt: skip
_CLAUSES = (
    "the {n} in the {a} {n} is {a}", "please bring the {a} {n} and two {n} "
    "boxes", "{f} will look after the {n} {t}", "we moved the {t} to {c}",
    "our {t} starts near the {a} {n}", "keep the {n} {a} and the {n} {a}", "{f} {l} asked for a {a} {n}",
    "the {a} {n} needs {g} again",
    "nobody has seen the {n} since {day}", "there are {d} {n} parts left in the {n}", "call {f} about the {a} {t}",
    "the {t} was {a} and rather {a}", "leave the {n} next to the {a} {n}", "{o} sent {d} pieces of {a} {n}",
    "the {n} smells of {n} and {n}",
    "use the {a} door behind the {n}", "{g} takes longer than {g} this time", "my {n} broke while {g}",
    "the {t} for {c} is still {a}",
    "{f} prefers a {a} {n} without {n}", "put {d} spare {n} clips into the {n}", "everyone liked the {a} {t} in {c}",
    "the {n} makes a {a} noise",
    "they want {g} before the {t}", "ask {f} for the {n} key", "the colour should be {a} like a {n}",
    "we need more {n} for the {t}",
    "{f} and {f} share one {a} {n}", "a {a} {n} fell off the {n}", "the {o} {t} went well", "send the {n} back to {c}",
    "check the {n} for {a} spots", "{f} is away until {day}", "the last {t} had no {n}", "do not forget the {a} {n} "
    "under the {n}",
    "wrap the {n} in {a} {n}", "no {n} was found during the {t}", "it works best with a {a} {n}", "the {n} arrived "
    "{a} and with {d} scratches",
    "{c} is too far for the {t}", "the {a} one belongs to {f}", "start with the {n} and end with the "
    "{n}", "this {n} replaces the {a} one from {c}",
    "visitors may touch the {n} but not the "
    "{n}", "{g} was moved to {day} because of the {n}", "{o} pays for the {t}", "half of the {n} is gone",
    "turn the {n} {d} times", "the guide from {c} speaks slowly",
)  # fmt: skip
_LINKS = (
    " and ",
    ", but ",
    " because ",
    ", so ",
    " while ",
    " until ",
    "; ",
    " as ",
    ", since ",
    " unless ",
    " although ",
    " and then ",
)
_TAILS = (
    " after the {t}", " before {day}", " near {c}", " for {f}", " as agreed with {o}", " with {a} {n}", " at the {n}",
    " this {day}",
    " {d} days later", " without {g}", " for the {a} {t}", " from {c} to {c}", " next to {f}", " on a {a} {day}", "",
    "", "", "",
)  # fmt: skip
_DAYS = (
    "Monday",
    "Tuesday",
    "Wednesday",
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "spring",
    "noon",
    "winter",
    "July",
    "March",
    "October",
)
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeiou])")


class _Slots(dict[str, str]):
    """Fills a template's slots, each with a word of its own."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self._rng = rng
        self._split: Split = split

    def __getitem__(self, slot: str) -> str:
        rng, split = self._rng, self._split
        if slot == "d":
            return str(rng.randint(2, rng.choice((9, 30, 90))))
        if slot == "day":
            return rng.choice(_DAYS)
        if slot == "c" and rng.random() < 0.7:
            return pools.CITIES.draw(rng, split)
        pool, named = _POOLS[slot]
        if rng.random() < 0.2:
            made = pools.made_up(rng, split)
            return made.capitalize() if named else made
        return pool.draw(rng, split)


_POOLS = {
    "a": (pools.ADJECTIVES, False),
    "n": (pools.NOUNS, False),
    "g": (pools.GERUNDS, False),
    "t": (pools.TOPICS, False),
    "f": (pools.FIRST_NAMES, True),
    "l": (pools.LAST_NAMES, True),
    "c": (pools.CITIES, True),
    "o": (pools.COMPANIES, True),
}


def _spelled(text: str) -> str:
    """The text with `an` before vowels."""
    return _ARTICLE.sub(r"\1n ", text)


def title(rng: random.Random, split: Split) -> str:
    """Two to five words or so: mostly a capital first letter, sometimes capitals all over or none."""
    text = _spelled(rng.choice(_TITLES).format_map(_Slots(rng, split)))
    roll = rng.random()
    if roll < 0.3:
        return " ".join(word[0].upper() + word[1:] for word in text.split(" "))
    return text if roll < 0.4 else text[0].upper() + text[1:]


def sentence(rng: random.Random, split: Split) -> str:
    """A sentence of about 6 to 20 words."""
    slots = _Slots(rng, split)
    text = rng.choice(_CLAUSES).format_map(slots)
    if rng.random() < 0.55:
        text += rng.choice(_LINKS) + rng.choice(_CLAUSES).format_map(slots)
    text = _spelled(text + rng.choice(_TAILS).format_map(slots))
    return text[0].upper() + text[1:] + rng.choice((".", ".", ".", ".", "!", ""))
