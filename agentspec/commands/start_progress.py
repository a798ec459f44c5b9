"""How far a start is: what `serve` and `warm` print while they wait, and what a server that still loads answers about
itself.

Knows stages by the names that a Progress is called with, and nothing of what is done in them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TextIO

FIRST_SECONDS = 1.0
"""A start that is over by then prints nothing."""
LINE_SECONDS = 5.0
"""Between two lines where no terminal shows them: a log keeps each one."""
TICK_SECONDS = 0.25
"""How often a terminal's line is brought up to date."""

_BEGIN_LINE = "\r\x1b[K"


class StartProgress:
    """A types.Progress that remembers. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._turn = threading.Lock()
        self._has_begun = False
        self._stages: dict[str, tuple[int, int]] = {}
        """Those that run, in the order of their beginnings: (done, total)."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._turn:
            self._has_begun = True
            if stage not in self._stages:  # one without an end of its own ends with the next one's beginning
                self._stages = {name: counts for name, counts in self._stages.items() if counts[1]}
            if total and done >= total:
                self._stages.pop(stage, None)
            else:
                self._stages[stage] = done, total

    @property
    def seconds(self) -> float:
        """Since the start."""
        return self._clock() - self._began

    def describe(self) -> str:
        """The stages that run, in words; some run side by side."""
        with self._turn:
            parts = [
                f"{name} ({done:,} of {total:,})" if total else name for name, (done, total) in self._stages.items()
            ]
            return ", ".join(parts) or ("finishing" if self._has_begun else "starting")


class ProgressLines:
    """Prints what a start is at: one line that changes on a terminal, else a line now and then."""

    def __init__(self, progress: StartProgress, stream: TextIO) -> None:
        self._progress, self._stream = progress, stream
        self._on_terminal = stream.isatty()
        self._last, self._last_seconds = "", FIRST_SECONDS - LINE_SECONDS

    def tick(self) -> None:
        """Print what is new. To be called every TICK_SECONDS."""
        text, seconds = self._progress.describe(), self._progress.seconds
        if self._on_terminal:
            if seconds >= FIRST_SECONDS:
                self._write(f"{_BEGIN_LINE}agentspec: {text}, {seconds:.0f} s")
        elif text != self._last and seconds - self._last_seconds >= LINE_SECONDS:
            self._last, self._last_seconds = text, seconds
            self._write(f"agentspec: {text}, {seconds:.0f} s\n")

    def clear(self) -> None:
        """Take the terminal's line away."""
        if self._on_terminal:
            self._write(_BEGIN_LINE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
