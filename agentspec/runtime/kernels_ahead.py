"""Compiles an engine's kernels ahead of their first launch: a separate process (engine/kernel_worker.py) lists and
compiles them while the engine loads its weights.

Owns that process, and the note in the compiler's cache that marks an engine's kernels as complete: if the note exists,
no process is started, and the compiler prepares to find the kernels in its cache. Uses the compiler only through
kernels.KernelCompiler. A kernel that is still missing is compiled at its first launch.
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
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from agentspec import kernels
from agentspec.config import EngineConfig
from agentspec.files import read_bytes
from agentspec.types import Progress

logger = logging.getLogger("agentspec")

WORKER = ("-P", "-m", "agentspec.engine.kernel_worker")
"""Python's arguments for the process. -P: don't import from the working directory."""

_PACKAGE = Path(__file__).parents[1]
_ROOMS = ("kernels", "models", "mtp", "runtime")
_SETTINGS = (
    "dtype",
    "kv_dtype",
    "tensor_parallel",
    "draft_tokens",
    "copy_drafts",
    "state_form",
    "draft_vocab_size",
    "draft_precision",
    "max_running",
    "max_context",
    "force_acceptance",
    "allow_forced_output",
)
"""Settings that change which kernels are launched."""


class KernelJob(msgspec.Struct, frozen=True, kw_only=True):
    """The engine whose kernels are to be compiled."""

    config: EngineConfig
    model_dir: str
    machine: kernels.Machine
    max_pages: int | None = None
    """Pages of a sequence, where memory holds less than the whole context; None: the whole context fits."""

    def note(self) -> str:
        """The name of the note: a hash of everything that decides which kernels exist, except Triton's own part."""
        digest = hashlib.sha256()
        settings = {name: getattr(self.config, name) for name in _SETTINGS}
        digest.update(msgspec.json.encode([settings, self.machine, self.max_pages]))
        digest.update(read_bytes(Path(self.model_dir) / "config.json"))
        for room in _ROOMS:
            for path in sorted([*(_PACKAGE / room).rglob("*.py"), *(_PACKAGE / room).rglob("*.json")]):
                digest.update(path.read_bytes())
        return digest.hexdigest()


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """A progress line of the worker, with the arguments of types.Progress."""

    name: str
    done: int
    total: int


class KernelReport(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """The worker's last line."""

    num_kernels: int
    num_compiled: int
    """Kernels that were not in the cache."""
    failures: tuple[str, ...] = ()


class KernelsAhead:
    """The compilation of one engine's kernels into the compiler's cache. Starts when the object is made."""

    def __init__(
        self,
        job: KernelJob,
        progress: Progress,
        *,
        compiler: kernels.KernelCompiler | None = None,
        worker: Sequence[str] = WORKER,
        believe_note: bool = True,
    ) -> None:
        """progress: called from a thread. compiler: None: the one of `kernels.compiler`. believe_note: False: look up
        each kernel even if there is a note."""
        self.job = job
        self.report: KernelReport | None = None
        """What was done; None until the worker has ended, and if a note made it unnecessary."""
        compiler = kernels.compiler() if compiler is None else compiler
        self._progress = progress
        self._process: subprocess.Popen[bytes] | None = None
        if believe_note and compiler.has_note(job.note()):
            work = compiler.read_sources
        else:
            self._process = subprocess.Popen(
                [sys.executable, *worker],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            work = partial(self._follow, self._process, job, compiler)
        self._thread = threading.Thread(target=work, name="agentspec-kernels", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every kernel that compiles is in the cache, for `timeout` seconds at most. Returns whether the
        work is done."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Kill the process if it still runs, as it does when the engine's start has failed."""
        if self._process is not None:
            self._process.kill()
        self.wait()

    def _follow(self, process: subprocess.Popen[bytes], job: KernelJob, compiler: kernels.KernelCompiler) -> None:
        """Start the worker's job, pass its progress on, and prepare this process meanwhile."""
        assert process.stdin is not None
        assert process.stdout is not None
        with process, suppress(BrokenPipeError):  # the process died at once; it writes no line
            process.stdin.write(msgspec.json.encode(job))
            process.stdin.close()
            compiler.read_sources()
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
