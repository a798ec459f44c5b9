"""The process that compiles an engine's kernels during its start: what it reports, and every way in which it ends. Here
the process is a script of the test."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.kernels import Machine
from agentspec.runtime.kernels_ahead import KernelJob, KernelReport, KernelsAhead, Stage
from tests.kernels.test_compile_pool import Files

JOB = KernelJob(
    config=EngineConfig(max_running=4),
    model_dir=str(bundled.DIRECTORY),
    machine=Machine(capability=(9, 0), num_multiprocessors=132),
)
REPORT = KernelReport(num_kernels=7, num_compiled=2)


class Noted(Files):
    """A compiler with one note."""

    def __init__(self, name: str = "") -> None:
        super().__init__(Path())
        self._name = name

    def has_note(self, name: str) -> bool:
        return name == self._name


class Told:
    def __init__(self) -> None:
        self.stages: list[tuple[str, int, int]] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.stages.append((stage, done, total))


def worker(*lines: Stage | KernelReport, then: str = "") -> list[str]:
    """Python's arguments for a process that prints the lines after it has read the whole job."""
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines).decode()
    return [
        "-c",
        "import sys, json, os, threading\njson.load(sys.stdin)\n"
        f"sys.stdout.write({text!r})\nsys.stdout.flush()\n{then}",
    ]


def test_stages_are_reported_and_the_report_is_kept() -> None:
    told, stages = Told(), (Stage("compiling kernels", 0, 2), Stage("compiling kernels", 2, 2))
    with KernelsAhead(JOB, told, compiler=Noted(), worker=worker(*stages, REPORT)) as ahead:
        assert ahead.wait()
        assert ahead.report == REPORT
    assert told.stages == [("compiling kernels", 0, 2), ("compiling kernels", 2, 2)]


def test_existing_note_starts_no_process() -> None:
    nobody = ["-c", "raise SystemExit('started')"]
    ahead = KernelsAhead(JOB, Told(), compiler=Noted(JOB.note()), worker=nobody)
    assert ahead.wait()
    assert ahead.report is None
    asked = KernelsAhead(JOB, Told(), compiler=Noted(JOB.note()), worker=worker(REPORT), believe_note=False)
    assert asked.wait()
    assert asked.report == REPORT


@pytest.mark.parametrize(
    "other",
    [
        msgspec.structs.replace(JOB, max_pages=12),
        msgspec.structs.replace(JOB, config=EngineConfig(max_running=5)),
        msgspec.structs.replace(JOB, config=EngineConfig(max_running=4, dtype="bfloat16")),
        msgspec.structs.replace(JOB, config=EngineConfig(max_running=4, state_form="ring", copy_drafts=0)),
        msgspec.structs.replace(JOB, config=EngineConfig(max_running=4, copy_drafts=3)),
        msgspec.structs.replace(JOB, machine=Machine(capability=(9, 0), num_multiprocessors=114)),
    ],
)
def test_setting_that_changes_kernels_changes_the_note(other: KernelJob) -> None:
    assert other.note() != JOB.note()


def test_setting_that_changes_no_kernel_keeps_the_note() -> None:
    config = EngineConfig(max_running=4, memory_gib=3, seed=5, prefix_cache=False, random_weights=True)
    assert msgspec.structs.replace(JOB, config=config).note() == JOB.note()


def test_dead_process_is_logged_and_start_continues(caplog: pytest.LogCaptureFixture) -> None:
    with KernelsAhead(
        JOB, Told(), compiler=Noted(), worker=worker(Stage("compiling kernels", 1, 9), then="os._exit(7)")
    ) as ahead:
        assert ahead.wait()
        assert ahead.report is None
    assert [record.getMessage() for record in caplog.records] == [
        "kernels are compiled at their first launch: the process for it ended early (exit status 7)"
    ]


def test_kernel_that_does_not_compile_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    report = msgspec.structs.replace(REPORT, failures=("_attend: ValueError: no such layout",))
    with KernelsAhead(JOB, Told(), compiler=Noted(), worker=worker(report)) as ahead:
        ahead.wait()
    assert "_attend: ValueError: no such layout" in caplog.text


def test_failed_start_kills_the_process() -> None:
    ahead = KernelsAhead(JOB, Told(), compiler=Noted(), worker=worker(then="threading.Event().wait()"))
    with ahead:
        assert not ahead.wait(0)
    assert ahead.wait(0), "the process and its reader thread have ended"
