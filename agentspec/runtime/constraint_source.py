"""Makes the constraint of a request from its grammar, with a compiler that is built when the first grammar comes, or
before.

A compiler has to take in the whole vocabulary first, which takes seconds: a server's engine builds it while it starts,
others see a grammar first, for most of them never do. Knows nothing of how grammars are compiled, nor of who waits for
one.
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
        """A constraint at the beginning of the grammar."""
        ...


class Compiler(Protocol):
    """runtime/grammar.py has the real one."""

    def compile(self, grammar: Grammar) -> Compiled:
        """Blocks; thread-safe. Raises RequestError."""
        ...

    def known(self, grammar: Grammar) -> Compiled | None:
        """What `compile` would return, if it is at hand; never blocks."""
        ...

    def close(self) -> None:
        """Compiles that still run end with an error."""
        ...


class ConstraintSource:
    """Thread-safe."""

    def __init__(self, new_compiler: Callable[[], Compiler] | None, *, refusal: str = "") -> None:
        """refusal: why this engine takes no grammar at all, where there is no compiler."""
        self._new_compiler = new_compiler
        self._refusal = refusal
        self._lock = threading.Lock()
        self._compiler: Compiler | None = None
        self._is_closed = False

    def make(self, grammar: Grammar) -> Constraint:
        """Blocks while the grammar compiles. Raises RequestError when it can't be served, EngineClosedError after
        `close`."""
        if self._new_compiler is None:
            raise RequestError("grammar", grammar.kind, self._refusal)
        return self._built(self._new_compiler).compile(grammar).constraint()

    def known(self, grammar: Grammar) -> Constraint | None:
        """Like `make`, for a grammar that was compiled before and is still at hand; None for any other. Blocks for no
        compile."""
        compiler = self._compiler
        compiled = None if compiler is None else compiler.known(grammar)
        return None if compiled is None else compiled.constraint()

    def prepare(self) -> None:
        """Begin to build the compiler, on a thread of its own. What goes wrong there goes wrong again when a grammar
        comes, and is said then."""

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
        """Waits for a compiler that is being built: nothing of it outlives the engine."""
        with self._lock:
            self._is_closed = True
            compiler, self._compiler = self._compiler, None
        if compiler is not None:
            compiler.close()
