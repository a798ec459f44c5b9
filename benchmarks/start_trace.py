"""Where the start of an engine's process goes: `python -m benchmarks.start_trace --model 4B`.

A process imports and assembles what `agentspec serve` would, with random weights, and prints when each part began and
ended, in seconds since the process was started, with the processor time of the calling thread: a part that takes much
longer than its processor time waits, for the device or for Python's lock. Parts that run on other threads are marked.
`--profile` prints which functions took most of the time from the first graph to the last. The starts share one kernel
cache: the first one fills it.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import os
import pstats
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from agentspec.engine import bundled, start

PARTS = (
    "device_of",
    "free_bytes",
    "weight_bytes",
    "KernelsAhead",
    "load_model",
    "_choose_drafts",
    "_limit_drafts",
    "device_side",
    "_await_kernels",
    "make_ready",
    "new_step_loop",
)
"""Functions of engine/assembly.py whose calls are timed."""


class Parts:
    """The parts of a start, in the order in which they end."""

    def __init__(self, began: float) -> None:
        self._began = began
        self.rows: list[str] = []

    def add(self, name: str, first: float, processor: float) -> None:
        now = time.time()
        where = "" if threading.current_thread() is threading.main_thread() else ", beside"
        times = f"{first - self._began:.2f} | {now - self._began:.2f} | {now - first:.2f} | {processor:.2f}"
        self.rows.append(f"| {name}{where} | {times} |")

    def timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            first, processor = time.time(), time.thread_time()
            try:
                return work(*arguments, **keywords)
            finally:
                self.add(name, first, time.thread_time() - processor)

        return run


def child(model: str, began: float, profiles: bool) -> None:
    """Start an engine in this process as engine/start.py does, and print its parts."""
    parts = Parts(began)
    parts.add("Python, and the imports of this script", began, time.process_time())
    is_random = model != str(bundled.DIRECTORY)
    if is_random:  # on a GPU
        opening = parts.timed("opening the device", start.open_device)
        threading.Thread(target=opening, daemon=True).start()
    gc.disable()
    parts.timed("imports of the engine", start.import_with_deferred)("agentspec.engine.process")
    gc.freeze()
    gc.enable()
    assembly = import_module("agentspec.engine.assembly")
    config = import_module("agentspec.config").EngineConfig(model=model, random_weights=is_random)
    for name in PARTS:
        setattr(assembly, name, parts.timed(name, getattr(assembly, name)))
    tokenizer = assembly.Tokenizer
    tokenizer.from_directory = parts.timed("tokenizer", tokenizer.from_directory)
    profile = cProfile.Profile()
    if profiles:
        ready = vars(assembly)["make_ready"]
        vars(assembly)["make_ready"] = partial(profile.runcall, ready)
    parts.timed("assemble", assembly.assemble)(config, serves=True)
    print("| part | from, s | to, s | takes, s | of the processor, s |\n|---|---|---|---|---|")
    print("\n".join(parts.rows), flush=True)
    if profiles:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        pstats.Stats(profile).sort_stats("cumtime").print_stats(40)
    sys.stdout.flush()
    os._exit(0)  # without waiting for what is left to prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="4B", help="as for benchmarks.start (default 4B)")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="of the last start")
    parser.add_argument("--child", nargs=2, metavar=("DIRECTORY", "BEGAN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], float(args.child[1]), args.profile)
    from benchmarks.served_directory import write_directory  # not in the child: it imports torch

    with tempfile.TemporaryDirectory() as scratch:
        model = str(bundled.DIRECTORY if args.model == bundled.NAME else write_directory(args.model, Path(scratch)))
        for number in range(args.starts):
            print(f"\nstart {number + 1} of {args.starts}, {args.model}", flush=True)
            command = [sys.executable, "-m", "benchmarks.start_trace", "--child", model, str(time.time())]
            profiles = ["--profile"] if args.profile and number == args.starts - 1 else []
            subprocess.run([*command, *profiles], check=True)


if __name__ == "__main__":
    main()
