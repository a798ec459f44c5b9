"""Progress of a start, as `serve` and `warm` print it and as a loading server reports it.

Knows stages only by the names that a Progress is called with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TextIO

FIRST_SECONDS = 1.0
"""A start that takes less prints nothing."""
LINE_SECONDS = 5.0
"""Minimum time between two lines in a log."""
TICK_SECONDS = 0.25
"""How often a terminal's line is updated."""

_BEGIN_LINE = "\r\x1b[K"


class StartProgress:
    """A types.Progress that stores the running stages. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._turn = threading.Lock()
        self._has_begun = False
        self._stages: dict[str, tuple[int, int]] = {}
        """Running stages in order of their start: (done, total)."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        with self._turn:
            self._has_begun = True
            if stage not in self._stages:  # a stage of unknown length ends when the next one starts
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
        """The running stages as text; several may run in parallel."""
        with self._turn:
            parts = [
                f"{name} ({done:,} of {total:,})" if total else name for name, (done, total) in self._stages.items()
            ]
            return ", ".join(parts) or ("finishing" if self._has_begun else "starting")


class ProgressLines:
    """Prints the progress of a start: a line that is updated in place on a terminal, else a new line every
    LINE_SECONDS."""

    def __init__(self, progress: StartProgress, stream: TextIO) -> None:
        self._progress, self._stream = progress, stream
        self._on_terminal = stream.isatty()
        self._last, self._last_seconds = "", FIRST_SECONDS - LINE_SECONDS

    def tick(self) -> None:
        """Print progress that is new. To be called every TICK_SECONDS."""
        text, seconds = self._progress.describe(), self._progress.seconds
        if self._on_terminal:
            if seconds >= FIRST_SECONDS:
                self._write(f"{_BEGIN_LINE}agentspec: {text}, {seconds:.0f} s")
        elif text != self._last and seconds - self._last_seconds >= LINE_SECONDS:
            self._last, self._last_seconds = text, seconds
            self._write(f"agentspec: {text}, {seconds:.0f} s\n")

    def clear(self) -> None:
        """Erase the terminal's line."""
        if self._on_terminal:
            self._write(_BEGIN_LINE)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
