"""Live progress of a replay: counters, and their display on a terminal or in a log."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TextIO

from agentspec.replay.measure import TurnRecord

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 5.0


@dataclass(kw_only=True, slots=True)
class Tally:
    num_sessions: int
    num_turns: int
    """Grows while sessions with a world run, since their calls cause further requests."""
    num_live: int = 0
    """Number of running sessions with a world."""
    sessions_done: int = 0
    turns_done: int = 0
    num_failed: int = 0
    num_running: int = 0
    """Requests in flight."""
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    forced_acceptance: bool = False
    measured_from: float | None = 0.0
    """When the measurement began, in seconds of the run; None: not yet."""

    def count_turn(self, turn: TurnRecord) -> None:
        """Count a turn that has ended."""
        self.turns_done += turn.error is None
        self.num_failed += turn.error is not None
        self.output_tokens += turn.completion_tokens or 0
        self.forced_acceptance |= turn.forced_acceptance
        if turn.prompt_tokens is not None and turn.cached_tokens is not None:
            self.prompt_tokens += turn.prompt_tokens
            self.cached_tokens = (self.cached_tokens or 0) + turn.cached_tokens

    def line(self, seconds: float) -> str:
        """Return the progress line after `seconds` of the run."""
        parts = [
            f"{seconds:5.0f} s",
            f"sessions {self.sessions_done}/{self.num_sessions}",
            f"turns {self.turns_done}/{self.num_turns}{'+' if self.num_live else ''}",
            f"{self.num_running} running",
        ]
        if self.measured_from is None:
            parts.append("warm-up")
        elif self.output_tokens and seconds > self.measured_from:
            parts.append(f"{self.output_tokens / (seconds - self.measured_from):.0f} tok/s")
        if self.cached_tokens is not None and self.prompt_tokens:
            parts.append(f"prefix hit {self.cached_tokens / self.prompt_tokens:.1%}")
        if self.num_failed:
            parts.append(f"{self.num_failed} FAILED")
        if self.forced_acceptance:
            parts.append("FORCED ACCEPTANCE")
        return "  ".join(parts)


class Progress:
    """Displays a tally during the run: one line rewritten in place on a terminal, elsewhere a line every few
    seconds."""

    def __init__(self, tally: Tally, stream: TextIO) -> None:
        self._tally = tally
        self._stream = stream
        self._task: asyncio.Task[None] | None = None
        self._start = 0.0

    async def __aenter__(self) -> Progress:
        self._start = asyncio.get_running_loop().time()
        self._task = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait((self._task,))
        self._show()
        if self._stream.isatty():
            self._stream.write("\n")

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(_TERMINAL_SECONDS if self._stream.isatty() else _LOG_SECONDS)
            self._show()

    def _show(self) -> None:
        line = self._tally.line(asyncio.get_running_loop().time() - self._start)
        self._stream.write(f"\r\x1b[K{line}" if self._stream.isatty() else f"{line}\n")
        self._stream.flush()
