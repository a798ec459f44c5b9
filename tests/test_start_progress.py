"""The progress of a start: parallel stages, lines for a log, one line on a terminal."""

from __future__ import annotations

import io

from agentspec.commands.start_progress import FIRST_SECONDS, LINE_SECONDS, ProgressLines, StartProgress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_stages_run_in_parallel_until_they_are_done() -> None:
    progress = StartProgress()
    assert progress.describe() == "starting"
    progress("loading weights", 0, 0)
    assert progress.describe() == "loading weights"
    progress("listing kernels", 0, 0)
    assert progress.describe() == "listing kernels", "a stage of unknown length ends when the next one starts"
    progress("loading weights", 1200, 4000)
    progress("compiling kernels", 3, 134)
    assert progress.describe() == "loading weights (1,200 of 4,000), compiling kernels (3 of 134)"
    progress("loading weights", 4000, 4000)
    assert progress.describe() == "compiling kernels (3 of 134)"
    progress("compiling kernels", 134, 134)
    assert progress.describe() == "finishing"


def test_a_log_gets_a_new_line_at_intervals() -> None:
    clock, stream = Clock(), io.StringIO()
    progress = StartProgress(clock)
    lines = ProgressLines(progress, stream)
    progress("compiling kernels", 1, 9)
    lines.tick()
    assert stream.getvalue() == "", "a short start prints nothing"
    clock.now += FIRST_SECONDS
    lines.tick()
    progress("compiling kernels", 2, 9)
    lines.tick()
    assert stream.getvalue() == "agentspec: compiling kernels (1 of 9), 1 s\n"
    clock.now += LINE_SECONDS
    lines.tick()
    clock.now += LINE_SECONDS
    lines.tick()
    lines.clear()
    assert stream.getvalue().splitlines()[1:] == ["agentspec: compiling kernels (2 of 9), 6 s"], "nothing new, no line"


def test_a_terminal_has_one_line_that_is_erased() -> None:
    clock, stream = Clock(), Terminal()
    progress = StartProgress(clock)
    lines = ProgressLines(progress, stream)
    lines.tick()
    assert stream.getvalue() == ""
    clock.now += FIRST_SECONDS
    progress("capturing graphs", 5, 54)
    lines.tick()
    progress("capturing graphs", 6, 54)
    lines.tick()
    lines.clear()
    shown = stream.getvalue().split("\r\x1b[K")
    assert shown == ["", "agentspec: capturing graphs (5 of 54), 1 s", "agentspec: capturing graphs (6 of 54), 1 s", ""]
