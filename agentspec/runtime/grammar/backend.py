"""The used part of xgrammar's API. Loaded when the first grammar comes, because its dependencies take a second to
import."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from agentspec.runtime.constraint import MaskRows
from agentspec.runtime.grammar.frames import CompileJob, Vocabulary

_MAX_THREADS = 8


class Backend:
    """A grammar compiler for one vocabulary. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises ImportError when xgrammar isn't installed."""
        import xgrammar

        self._xgrammar = xgrammar
        self.num_words = -(-vocabulary.vocab_size // 32)
        self._info = xgrammar.TokenizerInfo(
            vocabulary.token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.vocab_size,
            stop_token_ids=vocabulary.stop_token_ids,
        )
        num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
        # xgrammar's rule cache fails for expressions with repetition counts above 128. GrammarCompiler caches whole
        # grammars.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=num_threads, cache_enabled=False)

    def compile(self, job: CompileJob) -> Any:
        """Compile a grammar. Raises xgrammar's own errors. May take unbounded time or memory, or crash the process.
        Other threads continue meanwhile."""
        make = self._xgrammar.Grammar.from_ebnf if job.kind == "ebnf" else self._xgrammar.Grammar.from_structural_tag
        grammar = make(job.source)
        if job.lead:
            grammar = self._xgrammar.Grammar.concat(self._xgrammar.Grammar.from_ebnf(job.lead), grammar)
        return self._compiler.compile_grammar(grammar)

    def matcher(self, compiled: Any) -> Matcher:
        return Matcher(self._xgrammar.GrammarMatcher(compiled))


class Matcher:
    """The position of one text in a grammar."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def fill(self, rows: MaskRows, row: int) -> None:
        """Write the mask of tokens that may come next into rows[row]."""
        self._handle.fill_next_token_bitmask(rows, row)

    def accept(self, token_id: int) -> bool:
        """Advance by a token; returns False, without advancing, if the grammar doesn't allow it."""
        return bool(self._handle.accept_token(token_id))

    def roll_back(self, num_tokens: int) -> None:
        self._handle.rollback(num_tokens)

    @property
    def is_ended(self) -> bool:
        """A stop id was accepted: nothing follows, and there are no more masks."""
        return bool(self._handle.is_terminated())


def new_rows(num_rows: int, num_words: int) -> MaskRows:
    """Mask rows that allow everything."""
    return np.full((num_rows, num_words), -1, dtype=np.int32)
