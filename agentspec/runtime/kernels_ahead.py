"""Kernels before they are needed: engine/kernel_worker.py lists and compiles them in a process of its own while the
engine loads its weights.

Owns that process, and the note in the compiler's cache which says that everything for such an engine is there: with it
nothing is started. Knows no compiler but by kernels.KernelCompiler. A kernel that is missing in spite of all this is
compiled at its first launch.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from agentspec import kernels
from agentspec.config import EngineConfig
from agentspec.files import read_bytes
from agentspec.types import Progress

logger = logging.getLogger("agentspec")

WORKER = ("-P", "-m", "agentspec.engine.kernel_worker")
"""What Python runs in the process. -P: the working directory is no place to import from."""

_PACKAGE = Path(__file__).parents[1]
_ROOMS = ("kernels", "models", "mtp", "runtime")
_SETTINGS = (
    "dtype",
    "draft_tokens",
    "draft_vocab_size",
    "draft_precision",
    "max_running",
    "max_context",
    "force_acceptance",
    "allow_forced_output",
)
"""Those that change which kernels are launched."""


class KernelJob(msgspec.Struct, frozen=True, kw_only=True):
    """An engine whose kernels are wanted."""

    config: EngineConfig
    model_dir: str
    machine: kernels.Machine
    max_pages: int | None = None
    """Of a sequence, where memory allows less than the whole context; None: it doesn't."""

    def note(self) -> str:
        """A name for everything that decides which kernels there are, Triton's own part of it apart."""
        digest = hashlib.sha256()
        settings = {name: getattr(self.config, name) for name in _SETTINGS}
        digest.update(msgspec.json.encode([settings, self.machine, self.max_pages]))
        digest.update(read_bytes(Path(self.model_dir) / "config.json"))
        for room in _ROOMS:
            for path in sorted([*(_PACKAGE / room).rglob("*.py"), *(_PACKAGE / room).rglob("*.json")]):
                digest.update(path.read_bytes())
        return digest.hexdigest()


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """A line of the worker: what it is at, as a types.Progress is told."""

    name: str
    done: int
    total: int


class KernelReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The worker's last line."""

    num_kernels: int
    num_compiled: int
    """Those that were not in the cache."""
    failures: tuple[str, ...] = ()


class KernelsAhead:
    """The kernels of one engine, on their way into the compiler's cache from the moment when this is made."""

    def __init__(
        self,
        job: KernelJob,
        progress: Progress,
        *,
        compiler: kernels.KernelCompiler | None = None,
        worker: Sequence[str] = WORKER,
        believe_note: bool = True,
    ) -> None:
        """progress: is called from a thread. compiler: None: that of `kernels.compiler`. believe_note: False: look for
        each kernel."""
        self.job = job
        self.report: KernelReport | None = None
        """What was done; None as long as that isn't known, and where a note said that there was nothing to do."""
        compiler = kernels.compiler() if compiler is None else compiler
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        if believe_note and compiler.has_note(job.note()):
            return
        self._process = subprocess.Popen(
            [sys.executable, *worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._thread = threading.Thread(
            target=self._follow, args=(self._process, job), name="agentspec-kernels", daemon=True
        )
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Until every kernel is in the cache, as far as that can be, for `timeout` seconds at most. Returns whether
        that is so."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """End the process, if it still runs: a start failed meanwhile."""
        if self._process is not None:
            self._process.kill()
        self.wait()

    def _follow(self, process: subprocess.Popen[bytes], job: KernelJob) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with process, suppress(BrokenPipeError):  # it died at once: there will be no line
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            for line in process.stdout:
                told = msgspec.json.decode(line, type=Stage | KernelReport)
                if isinstance(told, KernelReport):
                    self.report = told
                else:
                    self._progress(told.name, told.done, told.total)
        if self.report is None:
            logger.warning(
                "kernels are compiled at their first launch: the process for it ended early (exit status %d)",
                process.returncode,
            )
        else:
            for failure in self.report.failures:
                logger.warning("a kernel could not be compiled ahead of its launch: %s", failure)
