"""Makes a request's constraint from its grammar, with a compiler that is built when the first grammar comes, or
earlier.

A compiler must read the whole vocabulary first, which takes seconds. A server's engine builds it in the background as
soon as it is ready; other engines wait for a first grammar, since most never get one. Knows nothing of how grammars are
compiled, nor of waiting requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from agentspec.errors import AgentspecError, EngineClosedError, RequestError
from agentspec.runtime.constraint import Constraint
from agentspec.wire import Grammar


class Compiled(Protocol):
    def constraint(self) -> Constraint:
        """A new constraint at the beginning of the grammar."""


class Compiler(Protocol):
    """Compiles grammars; runtime/grammar/ has the real one."""

    def compile(self, grammar: Grammar) -> Compiled:
        """Blocks; thread-safe. Raises RequestError."""

    def known(self, grammar: Grammar) -> Compiled | None:
        """The result of `compile`, if it is cached; never blocks."""

    def close(self) -> None:
        """Running compiles end with an error."""


class ConstraintSource:
    """A lazily built compiler and its constraints. Thread-safe."""

    def __init__(self, new_compiler: Callable[[], Compiler] | None, *, refusal: str = "") -> None:
        """new_compiler: None: this engine takes no grammar, for the reason in `refusal`."""
        self._new_compiler = new_compiler
        self._refusal = refusal
        self._lock = threading.Lock()
        self._compiler: Compiler | None = None
        self._is_closed = False

    def make(self, grammar: Grammar) -> Constraint:
        """A request's constraint; blocks while its grammar compiles. Raises RequestError if it can't be served,
        EngineClosedError after `close`."""
        if self._new_compiler is None:
            raise RequestError("grammar", grammar.kind, self._refusal)
        return self._built(self._new_compiler).compile(grammar).constraint()

    def known(self, grammar: Grammar) -> Constraint | None:
        """Like `make`, for a grammar that is still cached; None for any other. Never waits for a compile."""
        compiler = self._compiler
        compiled = None if compiler is None else compiler.known(grammar)
        return None if compiled is None else compiled.constraint()

    def prepare(self) -> None:
        """Start building the compiler on a thread. An error there occurs again, and is reported, when a grammar
        comes."""

        def build(new_compiler: Callable[[], Compiler]) -> None:
            with suppress(AgentspecError):
                self._built(new_compiler)

        if self._new_compiler is not None:
            threading.Thread(
                target=build, args=(self._new_compiler,), name="agentspec-grammar-start", daemon=True
            ).start()

    def _built(self, new_compiler: Callable[[], Compiler]) -> Compiler:
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine is closed")
            if self._compiler is None:
                self._compiler = new_compiler()
            return self._compiler

    def close(self) -> None:
        """Close the compiler; waits for one that is being built, so that none of it outlives the engine."""
        with self._lock:
            self._is_closed = True
            compiler, self._compiler = self._compiler, None
        if compiler is not None:
            compiler.close()
