"""Ranks of a benchmark that share a model: one process a GPU, all of which run the same program.

Every rank has an engine of its own, plans by itself and makes the same choices, because drafts and tokens are the same
on all of them. What a rank alone knows, time and free memory, is agreed on. An engine's own ranks are led by one of
them (engine/ranks.py): `check_small_model` takes that way.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from torch import distributed

from agentspec.config import Device
from agentspec.engine.ranks import meet
from agentspec.kernels import RankGroup, group_of
from agentspec.models.shards import SINGLE_RANK, Rank

EXCHANGES_A_GRAPH, REPLAYS = 50, 9
_WAKE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedModel:
    """This process's place among the ranks."""

    rank: Rank = SINGLE_RANK
    process_group: distributed.ProcessGroup | None = None
    group: RankGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank.index == 0

    def largest(self, value: float) -> float:
        """Of all ranks' values; all must call this."""
        return max(self._all(value))

    def of_first(self, value: float) -> float:
        """The first rank's value; all must call this."""
        return self._all(value)[0]

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self._all(0.0)

    def _all(self, value: float) -> list[float]:
        if self.process_group is None:
            return [value]
        mine = torch.tensor([value], dtype=torch.float64)
        parts = [torch.empty_like(mine) for _ in range(self.rank.count)]
        distributed.all_gather(parts, mine, group=self.process_group)
        return [float(part) for part in parts]

    def exchange_us(self, num_tokens: int, hidden_size: int, device: torch.device) -> float:
        """Device time of one sum of bfloat16 partial sums [num_tokens, hidden_size] within a CUDA graph, with its
        residual; of the slowest rank."""
        assert self.group is not None
        group = self.group
        residual_NH, partial_NH = (
            torch.zeros(num_tokens, hidden_size, dtype=torch.bfloat16, device=device) for _ in range(2)
        )

        def exchange() -> None:
            for _ in range(EXCHANGES_A_GRAPH):
                group.add_partial(residual_NH, partial_NH, None)

        exchange()
        torch.cuda.synchronize(device)
        self.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            exchange()
        times = []
        for _ in range(REPLAYS):
            torch.cuda.synchronize(device)
            self.meet()
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            graph.replay()
            after.record()
            torch.cuda.synchronize(device)
            times.append(before.elapsed_time(after) * 1e3 / EXCHANGES_A_GRAPH)
        return self.largest(statistics.median(times))


ALONE = SharedModel()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Of a benchmark that `run` runs. It has --device, --json and --max-seconds, too."""
    parser.add_argument(
        "--tensor-parallel", nargs="+", type=int, default=[1], help="GPUs that share each model; several: in turns"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)


class Check(Protocol):
    def __call__(self, device: Device, *, num_ranks: int) -> str:
        """Return what was checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How the figures of several numbers of GPUs compare."""

    read: Callable[[Path], dict[str, float]]
    """The figure of every case of a file, by the case without its number of GPUs."""
    figure: Callable[[float], str]
    """What a figure is."""
    ratio: Callable[[float, float], str]
    """What it is beside the one of the fewest GPUs; before "on" and their number."""

    def print(self, files: Mapping[int, Path]) -> None:
        """files: by number of GPUs."""
        figures = {count: self.read(path) for count, path in files.items()}
        fewest = min(figures, default=0)
        for count, cases in sorted(figures.items()):
            for case, value in cases.items():
                alone = figures[fewest].get(case)
                ratio = "" if alone is None else f", {self.ratio(value, alone)} on {fewest}"
                print(f"{case}, {count} GPUs: {self.figure(value)}{ratio}")


def run(
    module: str,
    options: argparse.Namespace,
    measure: Callable[[argparse.Namespace], int],
    comparison: Comparison,
    *,
    check: Check,
) -> int:
    """The main function of a benchmark: `measure` on one GPU; for other numbers of GPUs, `measure` in processes of
    their own for each number, and then a comparison of what was written.

    measure: writes its figures to options.json, on the first rank. check: before several ranks are measured."""
    if options.rank is not None:
        run_rank(options, measure)
    if options.tensor_parallel != [1]:
        return _run_counts(module, options, comparison, check)
    return measure(options)


def run_rank(options: argparse.Namespace, measure: Callable[[argparse.Namespace], int]) -> NoReturn:
    """`measure` as one of several ranks, and the end of this process."""
    status = 1
    try:
        torch.cuda.set_device(options.rank)
        faulthandler.dump_traceback_later(options.max_seconds + 100, exit=True)
        status = measure(options)
    except BaseException:
        traceback.print_exc()
    end(status)


def _run_counts(module: str, options: argparse.Namespace, comparison: Comparison, check: Check) -> int:
    if options.device != "cuda":
        sys.exit("--tensor-parallel: the benchmark's ranks are GPUs; tests/test_ranks.py runs ranks on a CPU")
    files, status = {}, 0
    with tempfile.TemporaryDirectory() as directory:
        for count in options.tensor_parallel:
            if count > torch.cuda.device_count():
                print(f"skipped: {count} ranks need {count} GPUs, torch sees {torch.cuda.device_count()}", flush=True)
                continue
            files[count] = with_count(options.json or Path(directory, "figures.json"), count)
            if count > 1:
                print(f"checked: {check(options.device, num_ranks=count)}", flush=True)
                torch.cuda.empty_cache()
            given = [*sys.argv[1:], "--tensor-parallel", str(count), "--json", str(files[count])]
            try:
                run_ranks(module, given, count, patience=options.max_seconds + 120)
            except SystemExit as error:  # the other counts are still worth measuring
                print(error, flush=True)
                status = 1
        comparison.print({count: path for count, path in files.items() if path.exists()})
    return status


def of_options(options: argparse.Namespace) -> tuple[SharedModel, torch.device]:
    """This process's place among the ranks, and its GPU."""
    (count,) = options.tensor_parallel
    if options.rank is None:
        return ALONE, torch.device(options.device)
    device = torch.device(options.device, options.rank)
    return (join(options.rank, count, options.meeting, device) if count > 1 else ALONE), device


def join(index: int, count: int, meeting: str, device: torch.device) -> SharedModel:
    """Meet the other ranks. SIGUSR1 prints where each thread is."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank = Rank(index, count)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    process_group = meet(meeting, rank)
    return SharedModel(rank=rank, process_group=process_group, group=group_of(process_group, device))


def run_ranks(module: str, arguments: Sequence[str], count: int, *, patience: float) -> None:
    """Run `python -m MODULE ARGUMENTS --rank INDEX --meeting FILE` for every rank, and wait for all.

    After `patience` seconds, or when one fails, the others say where they are and are killed. Raises SystemExit."""
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments, "--rank", str(rank), "--meeting", f"{directory}/meeting"]
            )
            for rank in range(count)
        ]
        deadline = time.monotonic() + patience
        try:
            while any(process.poll() is None for process in processes):
                failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
                if failed or time.monotonic() > deadline:
                    _say_where(processes)
                    what = f"rank {failed[0]} failed" if failed else f"not done after {patience:.0f} s"
                    raise SystemExit(f"{count} ranks: {what}")
                time.sleep(0.05)
            if any(process.returncode for process in processes):
                raise SystemExit(f"{count} ranks: exit codes {[process.returncode for process in processes]}")
        finally:
            for process in processes:
                process.kill()
                process.wait()


def _say_where(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(_WAKE_SECONDS)


def end(status: int) -> NoReturn:
    """End this rank's process at once: what it has mapped must not be given back while a peer runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def with_count(path: Path, count: int) -> Path:
    """A file's name for one number of ranks."""
    return path.with_name(f"{path.stem}-{count}-ranks{path.suffix}")
