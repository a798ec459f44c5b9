"""A server as a user starts it, its processes, and their resources. Linux only: it reads /proc."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from agentspec.engine.remote import ENGINE_ENTRY
from tests.chaos.connection import Answer, exchange, request_bytes

ROOT = Path(__file__).resolve().parents[2]
LIGHT = ("-m", "tests.chaos.light_serve")
REAL = ("-m", "agentspec")
QUIET_SECONDS = 30.0
"""Time limit for counters to return to zero."""
END_SECONDS = 60.0
"""Time limit for a server's termination."""

ZERO_STATS = ("running", "waiting")
ZERO_CACHE = ("leases", "checkpoints_locked", "tree_pages_locked")
ZERO_METRICS = ("agentspec_requests_running", "agentspec_requests_waiting", "agentspec_kv_usage_ratio")


def children(pid: int) -> list[int]:
    """All descendant processes of `pid`, without their threads."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, above in parents.items() if above == parent]
    return found[1:]


def role(pid: int) -> str:
    """What one of our processes is: `engine`, or else the last name of the module that it runs: `light_engine`,
    `text_process`; "" if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    following = [after.decode() for word, after in pairwise(words) if word == b"-m"]
    if not following:
        return words[0].decode() or "?"
    return "engine" if following[0] == ENGINE_ENTRY[-1] else following[0].rpartition(".")[2]


def is_there(pid: int) -> bool:
    """Whether it is running or stopped, but not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def rss_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 0.0 if found is None else int(found[1]) / 1024


class Served:
    """A running server. A context manager: it and its child processes end no later than its context."""

    def __init__(self, process: subprocess.Popen[str], *, model: str, log: Path | None) -> None:
        self.process, self.model, self.log = process, model, log
        self.port = 0
        self.key: str | None = None
        """Headers of requests to it."""

    @classmethod
    def launch(
        cls,
        *flags: str,
        light: bool = True,
        port: int = 0,
        files: int | None = None,
        variables: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> Self:
        """Start one. files: its limit of open files. log: file for its stderr; None: discarded."""
        entry = LIGHT if light else REAL
        own = () if light else ("--device", "cpu", "--memory", "0.2")
        command = [sys.executable, *entry, "serve", "--port", str(port), *own, *flags]
        if files is not None:
            command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *command]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
        }
        environment |= variables or {}
        with Path(os.devnull if log is None else log).open("a") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment
            )
        return cls(process, model="light" if light else "tiny-agent", log=log)

    @classmethod
    async def start(cls, *flags: str, **settings: Any) -> Self:
        """Start one, and wait until it serves."""
        served = cls.launch(*flags, **settings)
        try:
            served.port = await asyncio.to_thread(served._read_port)
        except BaseException:
            served.kill()
            raise
        return served

    def _read_port(self) -> int:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
                return int(found[1])
        raise AssertionError(
            f"the server ended before it served: {'' if self.log is None else self.log.read_text()[-2000:]}"
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self.process.pid

    def all_pids(self) -> list[int]:
        return [self.pid, *children(self.pid)]

    def engine(self) -> int | None:
        return next((pid for pid in children(self.pid) if role(pid) in ("light_engine", "engine")), None)

    def kill(self) -> None:
        """Kill all its processes."""
        pids = self.all_pids()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    async def ended(self) -> int | None:
        """Wait for the server's process; return its exit code, None if it doesn't end within END_SECONDS."""
        try:
            return await asyncio.to_thread(self.process.wait, END_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def rss(self) -> dict[str, float]:
        """MiB by role; processes of one role are summed."""
        found: dict[str, float] = {}
        for pid in self.all_pids():
            with suppress(OSError):
                name = "server" if pid == self.pid else role(pid)
                found[name] = found.get(name, 0.0) + rss_mib(pid)
        return found

    def num_files(self) -> int:
        """Open files of the server's own process; 0 if it has ended."""
        try:
            return len(os.listdir(f"/proc/{self.pid}/fd"))
        except OSError:
            return 0

    async def get(self, path: str) -> Answer:
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return await exchange(self.port, request_bytes(path, headers=headers))

    async def stats(self) -> dict[str, Any]:
        answer = await self.get("/stats")
        assert answer.status == 200, f"/stats answered {answer.status}: {answer.body[:500]!r}"
        found: dict[str, Any] = answer.json()
        return found

    async def left(self) -> list[str]:
        """Counters that are not zero, by name; empty for an idle server."""
        answer = await self.get("/stats")
        if answer.status != 200:
            return [f"/stats answered {answer.status}: {answer.body[:200]!r}"]
        stats = answer.json()
        cache = stats["cache"]
        found = [f"stats.{name}={stats[name]}" for name in ZERO_STATS if stats[name]]
        found += [f"stats.cache.{name}={cache[name]}" for name in ZERO_CACHE if cache[name]]
        if cache["pages_used"] != cache["tree_pages"]:
            found.append(f"stats.cache.pages_used={cache['pages_used']}, of the tree {cache['tree_pages']}")
        if cache["rows_used"] != cache["checkpoints_live"]:
            found.append(f"stats.cache.rows_used={cache['rows_used']}, checkpoints {cache['checkpoints_live']}")
        metrics = (await self.get("/metrics")).body.decode()
        for name in ZERO_METRICS:
            value = re.search(rf"^{name}\{{[^}}]*\}} (\S+)$", metrics, re.MULTILINE)
            if value is None or float(value[1]):
                found.append(f"metrics.{name}={'absent' if value is None else value[1]}")
        return found

    async def quiet(self) -> list[str]:
        """Wait until the server is idle; return the counters that are still not zero after QUIET_SECONDS."""
        found = ["never asked"]
        with suppress(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS):
                while found := await self.left():
                    await asyncio.sleep(0.1)
        return found
