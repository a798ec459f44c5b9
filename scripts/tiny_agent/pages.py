"""Long texts of many lines with single facts in them: config files, code, logs, meeting notes, inventories.

A page's facts are read back from its text, so a text is all that a record has to hold. Knows nothing of columns,
domains or tools.
"""

from __future__ import annotations

import random
import re

from scripts.tiny_agent import pools
from scripts.tiny_agent.domain import Split
from scripts.tiny_agent.sentences import sentence, title

_FACT = re.compile(
    r"^(?:"
    r"(?P<setting>[a-z][a-z0-9_]*): (?P<setting_value>\S.*)"
    r"|(?P<constant>[A-Z][A-Z0-9_]*) = (?P<constant_value>.+)"
    r"|The (?P<topic>[a-z-]+ [a-z-]+) is (?P<topic_value>.+)\."
    r"|- (?P<item>[a-z -]+): (?P<item_value>.+)"
    r"|\d\d:\d\d (?P<event>[a-z -]+) = (?P<event_value>.+)"
    r")$"
)
_CLOCK = len("00:00 ")
_SETTINGS = pools.read_groups("settings")
_FIRST, _SECOND = tuple(_SETTINGS["first"]), tuple(_SETTINGS["second"])
_HEADERS = ("# {t}", "# settings for {t}", "# {t}, see below", "# do not edit by hand", "# checked by {f}")
_IMPORTS = ("import os", "import json", "from pathlib import Path", "import logging", "import sys")


def page(rng: random.Random, split: Split, num_lines: int) -> tuple[str, list[tuple[str, str]]]:
    """A text of `num_lines` lines and its facts: (what one asks for, the value verbatim), labels unique."""
    text = "\n".join(rng.choice(_WRITERS)(rng, split, num_lines)[:num_lines])
    return text, facts(text)


def facts(text: str) -> list[tuple[str, str]]:
    """The single facts of a page: (what one asks for, the value), in the text's order. None for other texts."""
    return [(label, value) for label, (value, _) in _found(text).items()]


def fact_lines(text: str) -> dict[str, str]:
    """The line of each fact, without a log's time of day, by its label; each occurs exactly once in the text."""
    return {label: line for label, (_, line) in _found(text).items()}


def _found(text: str) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for line in text.split("\n"):
        match = _FACT.match(line)
        if match is None or text.count(line) != 1:
            continue
        kind = match.lastgroup
        assert kind is not None
        label = match[kind.removesuffix("_value")].replace("_", " ").lower()
        entry = line[_CLOCK:] if kind == "event_value" else line
        if text.count(entry) == 1:
            found[label] = (match[kind].strip('"'), entry)
    return found


def _labels(rng: random.Random, split: Split, count: int) -> list[str]:
    """Unique labels of two words; one in three with a word of the split's pools."""
    labels: dict[str, None] = {}
    while len(labels) < count:
        first = rng.choice(_FIRST) if rng.random() < 0.7 else pools.word(pools.NOUNS, rng, split)
        second = rng.choice(_SECOND) if rng.random() < 0.8 else pools.NOUNS.draw(rng, split)
        labels[f"{first} {second}"] = None
    return list(labels)


def _value(rng: random.Random, split: Split) -> str:
    """A short value: a number, a word, a name, a time, a code."""
    roll = rng.random()
    if roll < 0.35:
        return str(rng.randint(1, rng.choice((20, 100, 1000, 9000))))
    if roll < 0.45:
        return f"{rng.randint(1, 99)}.{rng.randint(1, 9)}"
    if roll < 0.65:
        return pools.word(pools.NOUNS, rng, split)
    if roll < 0.75:
        return pools.name(pools.FIRST_NAMES, rng, split) + " " + pools.name(pools.LAST_NAMES, rng, split)
    if roll < 0.83:
        return pools.CITIES.draw(rng, split)
    if roll < 0.9:
        return f"{rng.randint(6, 21):02}:{rng.choice((0, 15, 30, 45)):02}"
    return f"{rng.choice('ABCDEFGHKLMNPRSTW')}{rng.choice('ABCDEFGHKLMNPRSTW')}-{rng.randint(100, 9999)}"


def _header(rng: random.Random, split: Split) -> str:
    return rng.choice(_HEADERS).format(t=title(rng, split).lower(), f=pools.name(pools.FIRST_NAMES, rng, split))


def _settings(rng: random.Random, split: Split, num_lines: int) -> list[str]:
    lines = [_header(rng, split)] if rng.random() < 0.6 else []
    for label in _labels(rng, split, num_lines):
        if rng.random() < 0.08:
            lines.append(_header(rng, split))
        lines.append(f"{label.replace(' ', '_').replace('-', '_')}: {_value(rng, split)}")
    return lines


def _code(rng: random.Random, split: Split, num_lines: int) -> list[str]:
    lines = [f'"""{title(rng, split)}."""', rng.choice(_IMPORTS), ""] if num_lines > 5 else []
    for label in _labels(rng, split, num_lines):
        if rng.random() < 0.06:
            lines += ["", _header(rng, split)]
        value = _value(rng, split)
        quoted = f'"{value}"'
        number = value.replace(".", "", 1).isdigit()
        lines.append(f"{label.upper().replace(' ', '_').replace('-', '_')} = {value if number else quoted}")
    return lines


def _log(rng: random.Random, split: Split, num_lines: int) -> list[str]:
    lines, minute = [], rng.randint(0, 600)
    for label in _labels(rng, split, num_lines):
        minute = min(minute + rng.randint(0, 9), 1439)
        clock = f"{minute // 60:02}:{minute % 60:02}"
        lines.append(
            f"{clock} {label} = {_value(rng, split)}" if rng.random() < 0.6 else f"{clock} {sentence(rng, split)}"
        )
    return lines


def _notes(rng: random.Random, split: Split, num_lines: int) -> list[str]:
    lines = [title(rng, split)]
    for label in _labels(rng, split, num_lines):
        lines.append(f"The {label} is {_value(rng, split)}." if rng.random() < 0.6 else sentence(rng, split))
    return lines


def _inventory(rng: random.Random, split: Split, num_lines: int) -> list[str]:
    lines = [f"{title(rng, split)}:"]
    names: dict[str, None] = {}
    while len(names) < num_lines:
        names[f"{pools.ADJECTIVES.draw(rng, split)} {pools.word(pools.NOUNS, rng, split)}"] = None
    for name in names:
        lines.append(f"- {name}: {_value(rng, split)}")
    return lines


_WRITERS = (_settings, _code, _log, _notes, _inventory)
