"""Pools of words, split into those for training and those that are held out, and words made up from syllables.

A stable hash of its spelling assigns a word to a split, generated words included. So a held-out word never occurs in
training, in any pool. Independent of columns, domains and sentences.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from scripts.tiny_agent.domain import Split

_FOLDER = Path(__file__).parent / "words"
_HELD_OUT_PERCENT = 12
_HELD_OUT_RATE = 0.8
"""Probability that a held-out draw takes a held-out item instead of a known one."""
_MADE_UP_RATE = 0.35
_BLEND_RATE = 0.5


def is_held_out(word: str) -> bool:
    """Whether a word, or an item of a pool, must not occur in training."""
    return zlib.crc32(word.casefold().encode()) % 100 < _HELD_OUT_PERCENT


@dataclass(frozen=True, slots=True)
class Pool:
    """Items of one role, by split."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    @classmethod
    def of(cls, items: list[str], *, known: Collection[str] = (), reserved: Collection[str] = ()) -> Pool:
        """Splits the items; one that occurs twice counts once. `known` ones are for training and `reserved` ones held
        out, whatever their hash."""
        unique = list(dict.fromkeys(items))
        held_out = [item for item in unique if item in reserved or (item not in known and is_held_out(item))]
        return cls(tuple(item for item in unique if item not in held_out), tuple(held_out))

    def draw(self, rng: random.Random, split: Split) -> str:
        if split == "held_out" and rng.random() < _HELD_OUT_RATE:
            return rng.choice(self.held_out)
        return rng.choice(self.train)

    def strict(self, split: Split) -> tuple[str, ...]:
        """The items that occur in this split alone (held_out), or in training."""
        return self.train if split == "train" else self.held_out


def read_list(name: str) -> list[str]:
    """Items of a word list: separated by commas when there are any, by white space when not."""
    text = (_FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    return [item.strip() for item in text.replace("\n", " ").split(",")] if "," in text else text.split()


def read_groups(name: str) -> dict[str, list[str]]:
    """A word list of lines `group: item, item`."""
    lines = (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    groups = (line.split(": ", 1) for line in lines)
    return {group: [item.strip() for item in items.split(",")] for group, items in groups}


FIRST_NAMES = Pool.of(read_list("first_names"))
LAST_NAMES = Pool.of(read_list("last_names"))
CITIES = Pool.of(read_list("cities"))
NOUNS = Pool.of(read_list("nouns"))
ADJECTIVES = Pool.of(read_list("adjectives"))
GERUNDS = Pool.of(read_list("gerunds"))
TOPICS = Pool.of(read_list("topics"))
TAGS = Pool.of(read_list("tags"))
COMPANIES = Pool.of(read_list("companies"))

_SYLLABLES = read_groups("syllables")
_ONSETS, _VOWELS, _CODAS = (tuple(_SYLLABLES[part]) for part in ("onsets", "vowels", "codas"))
_LINKS = "lmnrst"
"""Letters that may end a syllable inside a word."""
_NEXT = "bdfgklmnprstvz"


_BLENDED = tuple(
    word for pool in (NOUNS, ADJECTIVES, GERUNDS, TAGS) for word in pool.train if word.isalpha() and len(word) > 4
)
_KNOWN = frozenset(
    word
    for path in sorted(_FOLDER.glob("*.txt"))
    if path.stem != "syllables"
    for word in re.findall(r"[a-z]+", path.read_text(encoding="utf-8").lower())
)


def made_up(rng: random.Random, split: Split, num_syllables: int | None = None) -> str:
    """A lower-case word of this split that is in no dictionary: pronounceable syllables, or the halves of two known
    words, like an unknown word."""
    while True:
        word = (
            _blend(rng) if rng.random() < _BLEND_RATE else _syllables(rng, num_syllables or rng.choice((2, 2, 2, 3, 3)))
        )
        if word not in _KNOWN and is_held_out(word) == (split == "held_out"):
            return word


def _blend(rng: random.Random) -> str:
    first, second = rng.choice(_BLENDED), rng.choice(_BLENDED)
    return first[: rng.randint(2, len(first) - 2)] + second[rng.randint(2, len(second) - 2) :]


def _syllables(rng: random.Random, count: int) -> str:
    parts: list[str] = [rng.choice(_ONSETS) if rng.random() < 0.85 else ""]
    for index in range(count):
        parts.append(rng.choice(_VOWELS))
        if index + 1 < count:
            parts.append(rng.choice(_ONSETS) if rng.random() < 0.75 else rng.choice(_LINKS) + rng.choice(_NEXT))
    if rng.random() < 0.9:
        parts.append(rng.choice(_CODAS))
    return "".join(parts)


def word(pool: Pool, rng: random.Random, split: Split) -> str:
    """An item of the pool or, about a third of the time, a made-up word."""
    return made_up(rng, split) if rng.random() < _MADE_UP_RATE else pool.draw(rng, split)


def name(pool: Pool, rng: random.Random, split: Split) -> str:
    """As `word`, with a capital letter."""
    return made_up(rng, split).capitalize() if rng.random() < _MADE_UP_RATE else pool.draw(rng, split)
