"""A random writer that follows a grammar, preferring tokens that lead to an end; and the same text again, in windows
with drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from agentspec.engine import bundled
from agentspec.runtime.constraint import Constraint, MaskRows
from agentspec.runtime.grammar.backend import Backend
from agentspec.runtime.grammar.constraint import GrammarConstraint
from agentspec.runtime.grammar.frames import CompileJob, Vocabulary
from agentspec.text.tokenizer import Tokenizer
from agentspec.wire import Grammar

_ENDINGS = ('"', "}", "]", "\n</parameter>\n", "</think>", "<tool_call>", "</function>")
"""What brings an open text, list or object to its end."""


@dataclass(frozen=True)
class Walk:
    ids: list[int]
    """Stop id included, if the grammar came to it."""
    rows: list[MaskRows]
    """The mask before each id."""
    is_complete: bool


class Writer:
    """Draws tokens by a seeded generator."""

    def __init__(self, tokenizer: Tokenizer, stop_id: int, rng: random.Random) -> None:
        self._stop_id = stop_id
        self._rng = rng
        self._num_tokens = len(tokenizer.token_bytes)
        self._endings = [tokenizer.encode(text) for text in _ENDINGS]
        self._planned: list[int] = []

    def write(self, constraint: Constraint, max_tokens: int) -> Walk:
        """One token at a time, up to a stop id."""
        ids: list[int] = []
        rows: list[MaskRows] = []
        self._planned = []
        while len(ids) < max_tokens and (not ids or ids[-1] != self._stop_id):
            row = constraint.masks([])[0]
            allowed = allowed_ids(row, self._num_tokens)
            assert len(allowed), f"nothing may follow after {ids}"
            ids.append(self._choose(allowed, len(ids)))
            rows.append(row)
            constraint.advance(ids[-1:])
        return Walk(ids, rows, ids[-1] == self._stop_id)

    def _choose(self, allowed: Sequence[int], num_written: int) -> int:
        known = set(allowed)
        if self._stop_id in known and (len(known) == 1 or self._rng.random() < (0.3 if num_written < 40 else 0.9)):
            return self._stop_id
        if self._planned and self._planned[0] in known:
            return self._planned.pop(0)
        self._planned = []
        if self._rng.random() < (0.25 if num_written < 40 else 0.9):
            open_ends = [ending for ending in self._endings if ending[0] in known]
            if open_ends:
                self._planned = list(self._rng.choice(open_ends))
                return self._planned.pop(0)
        return int(self._rng.choice(allowed))


def allowed_ids(row: MaskRows, num_tokens: int) -> Sequence[int]:
    bits = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")[:num_tokens]
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def check_windows(constraint: Constraint, walk: Walk, rng: random.Random, num_tokens: int) -> None:
    """Repeat the walk in windows of 0 to 5 drafts, some of them wrong: every mask up to the first wrong draft equals
    the single step's."""
    place = 0
    while place < len(walk.ids):
        drafts = walk.ids[place : place + rng.randint(0, 5)]
        num_right = len(drafts)
        if drafts and rng.random() < 0.4:
            num_right = rng.randrange(len(drafts))
            drafts[num_right] = rng.randrange(num_tokens)
            while num_right < len(drafts) and drafts[num_right] == walk.ids[place + num_right]:
                num_right += 1
        rows = constraint.masks(drafts)
        assert len(rows) == len(drafts) + 1
        for offset in range(min(num_right + 1, len(walk.ids) - place)):
            assert np.array_equal(rows[offset], walk.rows[place + offset]), (
                f"the mask {offset} drafts behind token {place} differs"
            )
        num_emitted = rng.randint(1, min(num_right + 1, len(walk.ids) - place))
        constraint.advance(walk.ids[place : place + num_emitted])
        place += num_emitted


class Admission:
    """Reports which texts a grammar admits, with the bundled vocabulary."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
        assert tokenizer is not None
        assert tokenizer.eos_id is not None
        self.tokenizer = tokenizer
        self.stop_id = tokenizer.eos_id
        self.num_tokens = tokenizer.vocab_size
        self._backend = Backend(
            Vocabulary(
                token_bytes=tokenizer.token_bytes,
                vocab_size=self.num_tokens,
                stop_token_ids=[self.stop_id],
                job_seconds=60,
            )
        )
        self._compiled: dict[Grammar, Any] = {}

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        assert grammar.kind in ("ebnf", "structural_tag")
        if grammar not in self._compiled:
            self._compiled[grammar] = self._backend.compile(CompileJob(kind=grammar.kind, source=grammar.source))
        return GrammarConstraint(
            self._backend.matcher(self._compiled[grammar]), self._backend.num_words, [self.stop_id], None
        )

    def admitted(self, grammar: Grammar, text: str) -> str:
        """The longest prefix of the text that the grammar admits; "whole" if it admits all of it and then a stop."""
        constraint = self.constraint(grammar)
        ids = self.tokenizer.encode(text)
        for index, token_id in enumerate([*ids, self.stop_id]):
            if token_id not in allowed_ids(constraint.masks([])[0], self.num_tokens):
                return self.tokenizer.decode(ids[:index])
            constraint.advance([token_id])
        return "whole"
