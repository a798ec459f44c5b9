"""xgrammar, as much of it as is used here. Loaded when the first grammar comes: it brings packages along that take a
second to import."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from agentspec.runtime.constraint import MaskRows
from agentspec.runtime.grammar.frames import CompileJob, Vocabulary

_MAX_THREADS = 8


class Backend:
    """One vocabulary's compiler. Thread-safe."""

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
        # Its cache of rules that grammars share fails for expressions that count beyond 128; whole grammars are cached
        # by GrammarCompiler.
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=num_threads, cache_enabled=False)

    def compile(self, job: CompileJob) -> Any:
        """A compiled grammar. Raises xgrammar's own errors; may take any time, any memory, or the process. Other
        threads go on meanwhile."""
        make = self._xgrammar.Grammar.from_ebnf if job.kind == "ebnf" else self._xgrammar.Grammar.from_structural_tag
        grammar = make(job.source)
        if job.lead:
            grammar = self._xgrammar.Grammar.concat(self._xgrammar.Grammar.from_ebnf(job.lead), grammar)
        return self._compiler.compile_grammar(grammar)

    def matcher(self, compiled: Any) -> Matcher:
        return Matcher(self._xgrammar.GrammarMatcher(compiled))


class Matcher:
    """Where one text stands in a grammar."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def fill(self, rows: MaskRows, row: int) -> None:
        """Set the bits of what may come next."""
        self._handle.fill_next_token_bitmask(rows, row)

    def accept(self, token_id: int) -> bool:
        """Go on by a token; stay where it is and say False when the grammar doesn't allow it."""
        return bool(self._handle.accept_token(token_id))

    def roll_back(self, num_tokens: int) -> None:
        self._handle.rollback(num_tokens)

    @property
    def is_ended(self) -> bool:
        """A stop id was accepted: nothing follows, and there is no mask any more."""
        return bool(self._handle.is_terminated())


def new_rows(num_rows: int, num_words: int) -> MaskRows:
    """Rows that allow everything."""
    return np.full((num_rows, num_words), -1, dtype=np.int32)
