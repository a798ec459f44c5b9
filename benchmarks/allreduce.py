"""Sums over ranks on GPUs of one host: `python -m benchmarks.allreduce`.

Compares the package's one-shot and what it does for many tokens, which add the residual too, and the one-shot that also
norms the result, with NCCL and torch's one-shot and two-shot, which do neither. Each is timed as in a step: a
CUDA graph of many exchanges in sequence, on the slowest rank. The floor is the least number of bytes that a rank must
send, at the measured bandwidth of a copy to a peer, plus an empty launch. Before anything is timed it is checked: ours
bit for bit against the sum in the order of ranks, the others within rounding.

Starts one process a GPU for each number of ranks, and says which it skips. Writes $OUT/allreduce.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from agentspec.kernels import Norm
from agentspec.kernels.peer_memory import ExchangeLayout, PeerMemory
from agentspec.kernels.reference import rms_norm
from agentspec.kernels.triton.exchange import ExchangeGroup

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HIDDEN = (2560, 4096, 5120)
RANKS = (2, 4, 8)
MOST_ELEMENTS = max(TOKENS) * max(HIDDEN)
EXCHANGES_A_GRAPH, REPLAYS = 50, 7
COPIED_BYTES = 256 << 20
PATIENCE_SECONDS = 600
METHODS = ("ours one-shot", "with norm", "ours in bulk", "nccl", "torch one-shot", "torch two-shot")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One number of tokens. Microseconds per exchange."""

    ranks: int
    tokens: int
    hidden: int
    partials: str
    floor_us: float
    times_us: dict[str, float]


def floor_bytes(num_bytes: int, ranks: int) -> float:
    """The least that a rank sends for a sum of tensors of this size: in one shot the whole to every peer, in two shots
    its parts and then its result."""
    return min(ranks - 1, 2 * (ranks - 1) / ranks) * num_bytes


def table(cells: list[Cell]) -> str:
    """A Markdown table."""
    lines = [
        "| ranks | tokens x hidden | partials | floor | " + " | ".join(METHODS) + " |",
        "|---" * (4 + len(METHODS)) + "|",
    ]
    for cell in cells:
        times = [f"{cell.times_us[method]:.1f}" if method in cell.times_us else "-" for method in METHODS]
        lines.append(
            f"| {cell.ranks} | {cell.tokens} x {cell.hidden} | {cell.partials} | {cell.floor_us:.1f} | "
            + " | ".join(times)
            + " |"
        )
    return "\n".join(lines)


class RankOfBenchmark:
    def __init__(self, process_group: distributed.ProcessGroup, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        self.device, self.process_group = device, process_group
        self.rank, self.ranks = process_group.rank(), process_group.size()
        self.name = process_group.group_name
        self.groups = {
            "ours one-shot": self._group(one_shot_elements=MOST_ELEMENTS),
            "ours in bulk": self._group(one_shot_elements=1),
        }
        self.whole = symmetric_memory.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
        self.handle: Any = symmetric_memory.rendezvous(self.whole, process_group)
        mine = torch.empty_like(self.whole).random_()
        peer = self.handle.get_buffer((self.rank + 1) % self.ranks, (COPIED_BYTES,), torch.uint8)
        self.link_bandwidth = COPIED_BYTES / self.seconds(lambda: peer.copy_(mine), 1)
        one = torch.zeros(1, device=device)
        self.launch_seconds = self.seconds(lambda: one.add_(1), EXCHANGES_A_GRAPH)

    def _group(self, *, one_shot_elements: int) -> ExchangeGroup:
        layout = ExchangeLayout(ranks=self.ranks, one_shot_elements=one_shot_elements)
        return ExchangeGroup(PeerMemory.of_symmetric_memory(layout, self.process_group, self.device), layout)

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Device time of one of `repeats` runs in a graph; of the slowest rank."""
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        distributed.barrier(self.process_group)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                run()
        graph.replay()
        milliseconds = []
        for _ in range(REPLAYS):
            torch.cuda.synchronize()
            distributed.barrier(self.process_group)
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            graph.replay()
            after.record()
            torch.cuda.synchronize()
            milliseconds.append(before.elapsed_time(after))
        found: list[float] = [0.0] * self.ranks
        distributed.all_gather_object(found, statistics.median(milliseconds) / repeats / 1e3, group=self.process_group)
        return max(found)

    def cell(self, tokens: int, hidden: int, dtype: torch.dtype) -> Cell:
        generator = torch.Generator(self.device).manual_seed(tokens * hidden)
        parts = [
            torch.randn(tokens, hidden, device=self.device, generator=generator).to(dtype) for _ in range(self.ranks)
        ]
        residual = torch.randn(tokens, hidden, device=self.device, generator=generator).to(dtype)
        norm = Norm(weight=torch.randn(hidden, device=self.device, generator=generator).to(dtype), eps=1e-6)
        total = sum((part.float() for part in parts[1:]), parts[0].float())
        times = {}
        for method, group in self.groups.items():
            if method == "ours one-shot" and tokens * hidden > MOST_ELEMENTS:
                continue
            x = residual.clone()
            group.add_partial(x, parts[self.rank], None)
            assert torch.equal(x, (residual.float() + total).to(dtype)), f"{method}: wrong at {tokens} x {hidden}"
            times[method] = self.seconds(lambda: group.add_partial(x, parts[self.rank], None), EXCHANGES_A_GRAPH)  # noqa: B023
        x, one_shot = residual.clone(), self.groups["ours one-shot"]
        _, normed = one_shot.add_partial(x, parts[self.rank], norm)
        if normed is not None:
            torch.testing.assert_close(normed, rms_norm(x, norm), rtol=0.02, atol=0.02)
            with_norm = lambda: one_shot.add_partial(x, parts[self.rank], norm)  # noqa: E731
            times["with norm"] = self.seconds(with_norm, EXCHANGES_A_GRAPH)
        for method, run, result in self.yardsticks(parts[self.rank]):
            torch.testing.assert_close(result().float(), total, rtol=0.02, atol=0.1)
            times[method] = self.seconds(run, EXCHANGES_A_GRAPH)
        num_bytes = parts[0].numel() * parts[0].element_size()
        floor = floor_bytes(num_bytes, self.ranks) / self.link_bandwidth + self.launch_seconds
        return Cell(
            ranks=self.ranks,
            tokens=tokens,
            hidden=hidden,
            partials=str(dtype).removeprefix("torch."),
            floor_us=floor * 1e6,
            times_us={method: seconds * 1e6 for method, seconds in times.items()},
        )

    def yardsticks(self, part: Tensor) -> list[tuple[str, Callable[[], object], Callable[[], Tensor]]]:
        """(name, what is timed, a fresh result) of the sums of others."""
        ops = torch.ops.symm_mem
        shared = self.whole[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)
        plain = part.clone()

        def refill(x: Tensor, run: Callable[[], object]) -> Tensor:
            x.copy_(part)
            torch.cuda.synchronize()
            distributed.barrier(self.process_group)
            out = run()
            result = (out if isinstance(out, Tensor) else x).clone()
            torch.cuda.synchronize()
            distributed.barrier(self.process_group)
            x.zero_()  # sums in place would grow with every replay
            return result

        runs: dict[str, tuple[Tensor, Callable[[], object]]] = {
            "nccl": (plain, lambda: distributed.all_reduce(plain)),
            "torch one-shot": (shared, lambda: ops.one_shot_all_reduce(shared, "sum", self.name)),
            "torch two-shot": (shared, lambda: ops.two_shot_all_reduce_(shared, "sum", self.name)),
        }
        return [(name, run, lambda x=x, run=run: refill(x, run)) for name, (x, run) in runs.items()]  # type: ignore[misc]


def run_rank(rank: int, ranks: int, tokens: list[int], hidden: list[int], directory: str) -> None:
    """The process of one rank. Ends by os._exit: freeing symmetric memory synchronises the device."""
    status = 0
    try:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        store = distributed.FileStore(f"{directory}/meeting", ranks)  # type: ignore[attr-defined]
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=60),
            device_id=device,
        )
        # Objects and barriers go through gloo.
        meeting = distributed.new_group(backend="gloo")
        assert meeting is not None
        under_test = RankOfBenchmark(meeting, device)
        cells = [
            under_test.cell(num_tokens, width, dtype)
            for dtype in (torch.float32, torch.bfloat16)
            for width in hidden
            for num_tokens in tokens
        ]
        if rank == 0:
            Path(directory, "cells.json").write_text(json.dumps([asdict(cell) for cell in cells]))
            print(
                f"{ranks} ranks: a copy to a peer takes {under_test.link_bandwidth / 1e9:.0f} GB/s, "
                f"a launch {under_test.launch_seconds * 1e6:.1f} us"
            )
        distributed.barrier(meeting)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_ranks(ranks: int, tokens: list[int], hidden: list[int]) -> list[Cell]:
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, tokens, hidden, directory)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            # One that fails leaves the others waiting for it.
            while all(process.exitcode in (None, 0) for process in processes):
                running = [process.sentinel for process in processes if process.exitcode is None]
                if not running or not wait(running, PATIENCE_SECONDS):
                    break
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
        if codes != [0] * ranks:
            raise SystemExit(f"{ranks} ranks: exit codes {codes}")
        return [Cell(**cell) for cell in json.loads(Path(directory, "cells.json").read_text())]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--hidden", type=int, nargs="+", default=list(HIDDEN))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    given = parser.parse_args(arguments)
    if max(given.tokens) * max(given.hidden) * 4 > COPIED_BYTES:
        parser.error(f"at most {COPIED_BYTES // 4:,} elements fit the buffer that torch's sums share")
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    num_devices = torch.cuda.device_count()
    cells: list[Cell] = []
    for ranks in given.ranks:
        if ranks > num_devices:
            print(f"skipped: {ranks} ranks need {ranks} CUDA devices, torch sees {num_devices}")
            continue
        cells += run_ranks(ranks, given.tokens, given.hidden)
    if cells:
        print(table(cells))
        (given.out / "allreduce.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")


if __name__ == "__main__":
    main()
