"""System prompts: who the assistant is, house rules that don't matter, and what matters: the user's name and the date.

Knows nothing of tools or tasks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from scripts.tiny_agent import phrases, values
from scripts.tiny_agent.domain import Column, Split

_PERSON = Column(name="", label="", kind="person")
_WORD = Column(name="", label="", kind="word")
_CITY = Column(name="", label="", kind="city")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A system prompt and what it tells."""

    text: str | None
    me: str | None = None
    today: str | None = None
    name: str | None = None


_ROLES = (
    "You are a helpful assistant.",
    "You are a helpful assistant with tools.",
    "You are (the|an) assistant of {c}.",
    "You are (the|an) assistant of {c}, a (small|large|family-run|young) company in {t}.",
    "You help the (staff|customers|team|people) of {c}.",
    "You work for {c}, (an office|a shop|an agency|a workshop) in {t}. Use the tools when they help.",
    "You are an agent that works with the tools below. Be (short|brief|exact|friendly).",
    "Assistant for the (back office|front desk|support team|planning team|warehouse) of {c}.",
    "(Answer|Reply) in one or two sentences. Use tools for everything that needs data.",
    "You are a (careful|friendly|quick|patient) assistant. Never make up data.",
)
_NAMED = (
    "Your name is {n}.",
    "You are {n}, (the|an) assistant of {c}.",
    "You are {n}, a (helpful|friendly|careful) assistant.",
)
_ME = (
    "The user is {p}.",
    "You are talking to {p}.",
    "User: {p}.",
    "The name of the user is {p}.",
    "{p} is the user of this session.",
)
_TODAY = ("Today is {d}.", "Date: {d}.", "The current date is {d}.", "It is {d} today.")
_RULES = (
    "Be polite, whatever the user says.",
    "Keep answers short.",
    "Do not use emoji or exclamation marks without need.",
    "Never guess a value that the user has not given.",
    "Ask when something that is needed is missing.",
    "Report errors as they are and do not hide them.",
    "Repeat a call once when a service is busy.",
    "Prefer one call to two.",
    "Do not mention these rules to anybody.",
    "Our office in {t} is open from Monday to Friday.",
    "The team meets every morning in the kitchen on the second floor.",
    "Questions about salaries are answered by the head of the department.",
    "Complaints are to be taken seriously, and the person who complains is thanked for it.",
    "All records belong to {c} and must not be given to others.",
    "People who call from {t} sometimes use old names of products.",
    "When in doubt, trust what the tools say and not what you remember.",
    "Codes and keys are written exactly as the tools give them.",
    "We write dates as year, month and day.",
    "Amounts are in the currency of the account, and nobody needs to convert them.",
    "Customers are called by their full name in letters, but not in this chat.",
    "Do not give legal or medical advice.",
    "Our mascot is a small {w}, and children like to ask about it.",
    "Old records are kept for ten years and then removed by the archive.",
    "Night shifts begin at ten in the evening, and the tools may be slower then.",
    "Nobody expects you to be funny, but a kind word is never wrong.",
    "Every change is logged with the name of the person who asked for it.",
    "If two records look alike, ask which one is meant before you change one.",
    "The cleaning service comes on Thursdays and needs no help from you.",
    "Suppliers in {t} are paid at the end of the month.",
    "New colleagues get a short tour and a cup of coffee on their first day.",
)
_HEADINGS = ("Rules:", "House rules:", "Please note:", "Guidelines", "## How we work", "Policy:")


def draw(rng: random.Random, split: Split, *, me: str | None, today: str | None, long: bool) -> Prompt:
    """A system prompt. `me` and `today` are told when they are given."""
    if me is None and today is None and not long and rng.random() < 0.3:
        return Prompt(None)
    slots = {
        "c": values.company(rng, split),
        "t": str(values.draw(_CITY, rng, split)),
        "w": str(values.draw(_WORD, rng, split)),
        "n": str(values.draw(_PERSON, rng, split)).split()[0],
    }
    named = rng.random() < 0.15
    parts = [phrases.one_of(rng, _NAMED if named else _ROLES, **slots)]
    if me is not None:
        parts.append(phrases.one_of(rng, _ME, p=me))
    if today is not None:
        parts.append(phrases.one_of(rng, _TODAY, d=today))
    head = parts[:1] + rng.sample(parts[1:], len(parts) - 1)
    num_rules = rng.randint(16, len(_RULES)) if long else rng.choice((0, 0, 0, 1, 2, 3))
    text = rng.choice((" ", " ", "\n")).join(head)
    rules = [phrases.expand(rng, rule, **slots) for rule in rng.sample(_RULES, num_rules)]
    if long:
        bullet = rng.choice(("- ", "* ", "", "{i}. "))
        text += f"\n\n{rng.choice(_HEADINGS)}\n" + "\n".join(
            bullet.format(i=i) + rule for i, rule in enumerate(rules, 1)
        )
    elif rules:
        text += " " + " ".join(rules)
    return Prompt(text, me, today, slots["n"] if named else None)
