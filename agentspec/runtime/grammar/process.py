"""The engine's side of the grammar trial process: starts it, and restarts it after a grammar has killed it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

from agentspec.errors import EngineClosedError
from agentspec.runtime.grammar.frames import CompileJob, Verdict, Vocabulary, read_message, write_message

_WORKER = "agentspec.runtime.grammar.worker"


class TrialProcess:
    """Runs one trial at a time. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._turn = threading.Lock()
        self._lifecycle = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process and send the vocabulary before the first job comes."""
        with self._turn, contextlib.suppress(EngineClosedError):
            self._started()

    def run(self, job: CompileJob) -> Verdict:
        """Try one grammar. Blocks until it has passed, is refused, or has killed the process. Raises EngineClosedError
        if `close` is called first."""
        with self._turn:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                write_message(process.stdin, job)
                answer = read_message(process.stdout, Verdict)
            except (BrokenPipeError, ValueError):  # ValueError: `close` closed the pipes
                answer = None
            return self._buried(process) if answer is None else answer

    @property
    def pid(self) -> int | None:
        """The process's id; None while it doesn't run."""
        with self._lifecycle:
            return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Kill the process at once, whatever it is doing."""
        with self._lifecycle:
            self._is_closed = True
            process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _started(self) -> subprocess.Popen[bytes]:
        """The running process, started if necessary. Call with `_turn` held."""
        with self._lifecycle:
            if self._is_closed:
                raise EngineClosedError("the engine is closed")
            if self._process is not None:
                return self._process
            # A session of its own, so that Ctrl-C reaches only the engine. The process ends when its standard input is
            # closed, so it doesn't outlive this one.
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", _WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,
            )
        assert process.stdin is not None
        # Outside the lock, so that `close` doesn't wait for the write. A process that died or was closed meanwhile is
        # noticed by the job.
        with contextlib.suppress(BrokenPipeError, ValueError):
            write_message(process.stdin, self._vocabulary)
        return process

    def _buried(self, process: subprocess.Popen[bytes]) -> Verdict:
        with self._lifecycle:
            if self._is_closed:
                raise EngineClosedError("the engine was closed")
            self._process = None
        code = _end(process)
        if code == -signal.SIGALRM:
            return Verdict(error="takes too long to compile")
        return Verdict(
            error=f"can't be compiled: it takes too much memory or nests too deep (the compiler ended with {code})"
        )


def _end(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    code = process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # input that it didn't read is lost
                stream.close()
    return code
