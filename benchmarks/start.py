"""Time from the start of a server to its first answer: `python -m benchmarks.start`.

`agentspec serve` with its defaults serves a model of published shapes with random weights: first with an empty kernel
cache, then with the cache of that start, then with a separate cache filled by `agentspec warm` only. Each server must
answer a request before its times count. Needs a GPU; on a CPU (--model tiny-agent) it only shows that it works.

The stages are read from /health every few milliseconds while the server loads; some run in parallel.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from agentspec.engine import bundled
from benchmarks.published import CONFIG_FILES
from benchmarks.served_directory import write_directory

POLL_SECONDS = 0.01
COMMAND = (sys.executable, "-c", "from agentspec.commands.cli import main; raise SystemExit(main())")
CHAT = {
    "messages": [{"role": "user", "content": "Where is order 7?"}],
    "temperature": 0,
    "max_tokens": 8,
    "ignore_eos": True,
}


@dataclass(kw_only=True, slots=True)
class Start:
    """Times in seconds since the process was started."""

    listening: float = 0.0
    """The first answer of any kind."""
    ready: float = 0.0
    """/health answers 200."""
    answered: float = 0.0
    """A short chat request, sent then, is completely answered."""
    stages: dict[str, tuple[float, float]] = field(default_factory=dict)
    """First and last time at which each one was seen."""
    page: str = ""
    """The settings on the server's start page."""

    def see(self, text: str, now: float) -> None:
        for stage in text.split("), "):
            name = stage.partition(" (")[0]
            self.stages[name] = self.stages.get(name, (now, now))[0], now


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(model: str, flags: Sequence[str], environment: Mapping[str, str]) -> Start:
    """Start a server, send it a request, and end it."""
    port, result = free_port(), Start()
    began = time.perf_counter()
    command = [*COMMAND, "serve", model, "--port", str(port), *flags]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client,
    ):
        try:
            await_health(server, client, result, began)
            name = client.get("/v1/models").json()["data"][0]["id"]
            answer = client.post("/v1/chat/completions", json=CHAT | {"model": name})
            result.answered = time.perf_counter() - began
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] == CHAT["max_tokens"], answer.text
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.stdout is not None
            result.page = server.stdout.read()
    assert server.returncode == 0, f"the server ended with {server.returncode}"
    return result


def await_health(server: subprocess.Popen[str], client: httpx.Client, result: Start, began: float) -> None:
    while True:
        assert server.poll() is None, "the server ended before it served"
        time.sleep(POLL_SECONDS)
        try:
            answer = client.get("/health")
        except httpx.ConnectError:
            continue
        now = time.perf_counter() - began
        result.listening = result.listening or now
        if answer.status_code == 200:
            result.ready = now
            return
        result.see(answer.json()["stage"], now)


def warm(model: str, flags: Sequence[str], environment: Mapping[str, str]) -> tuple[float, str]:
    """Run `agentspec warm`; return its seconds and its output."""
    began = time.perf_counter()
    done = subprocess.run(
        [*COMMAND, "warm", model, *flags],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        check=True,
    )
    return time.perf_counter() - began, done.stdout.strip()


def row(name: str, measured: Start) -> str:
    stages = "; ".join(f"{stage} {first:.1f} to {last:.1f}" for stage, (first, last) in measured.stages.items())
    return f"| {name} | {measured.listening:.2f} | {measured.ready:.2f} | {measured.answered:.2f} | {stages} |"


def machine() -> str:
    if found := shutil.which("nvidia-smi"):
        query = [found, "--query-gpu=name", "--format=csv,noheader"]
        gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    else:
        gpu = "no GPU"
    return f"{gpu}, {os.cpu_count()} cores, Python {platform.python_version()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=(bundled.NAME, *CONFIG_FILES), default="4B")
    parser.add_argument("--repeats", type=int, default=2, help="second starts (default 2)")
    parser.add_argument("--no-warm", action="store_true", help="leave out `agentspec warm` and the start after it")
    parser.add_argument(
        "--no-cold", action="store_true", help="leave out the starts from nothing: with the caches that are there"
    )
    args, flags = parser.parse_known_args()
    print(f"{machine()}; agentspec serve {args.model} {' '.join(flags)}".rstrip())
    print("| start | listening, s | ready, s | first answer, s | stages, from to |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = bundled.NAME
        if args.model != bundled.NAME:
            model = str(write_directory(args.model, Path(scratch)))
            flags.append("--random-weights")
        caches = {} if args.no_cold else {"TRITON_CACHE_DIR": str(Path(scratch) / "served")}
        names = ["second"] * args.repeats if args.no_cold else ["from nothing", *["second"] * args.repeats]
        for name in names:
            measured = start(model, flags, caches)
            print(row(name, measured), flush=True)
        if not args.no_warm:
            caches = {"TRITON_CACHE_DIR": str(Path(scratch) / "warmed")}
            seconds, words = warm(model, flags, caches)
            print(row("after `warm` alone", start(model, flags, caches)), flush=True)
            print(f"\n`agentspec warm`: {seconds:.1f} s. {words}")
        print(
            "\n" + "\n".join(line for line in measured.page.splitlines() if "graphs" in line or "host memory" in line)
        )


if __name__ == "__main__":
    main()
