"""Time products of a step's tokens with block-scaled 8-bit experts: `python -m benchmarks.fp8_experts` on a CUDA
device.

See expert_work.py for what is timed. Every tiling is checked against float64 first. With --sweep, candidates are
compiled and checked in parallel processes, and all are timed; else only what `mixture.gate_up_tiles` and `down_tiles`
say. With --tensor-parallel N the shapes are those of one of N ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from agentspec.kernels.triton.experts import Tiles
from benchmarks.expert_work import FP8, AnyPlan, Cell, add_flags, cells_of, check, time_plans
from benchmarks.four_bit import checked
from benchmarks.linear import SHARED_BYTES

TILINGS = (
    (16, 256, 1),
    (16, 512, 1),
    (32, 128, 2),
    (32, 256, 2),
    (32, 512, 2),
    (64, 128, 2),
    (64, 128, 4),
    (64, 256, 2),
    (64, 256, 4),
    (64, 512, 4),
    (128, 128, 4),
    (128, 128, 8),
    (128, 256, 4),
    (128, 256, 8),
)
"""(block_o, block_k, warps): a warp has 16 to 32 rows."""
BLOCK_M = 8
"""Tokens of a tile, for its shared memory."""


def candidates(chosen: Tiles, product: str, depth: int) -> Iterator[Tiles]:
    """Tilings whose pipeline fits shared memory and isn't longer than the loop. Those with the same code are adjacent:
    a worker then compiles it once."""
    for block_o, block_k, warps in TILINGS:
        if depth % block_k:
            continue
        num_steps = depth // block_k
        depths = (3, 4) if block_k > 128 else (3, 5) if product == "down" else (3, 4, 5)
        for stages in sorted({min(stages, num_steps + 1) for stages in depths}):
            if stages * block_k * (block_o + 2 * BLOCK_M) > SHARED_BYTES:
                continue
            tiling = replace(chosen, block_o=block_o, block_k=block_k, warps=warps, stages=stages)
            for ahead, release in _moments(product, num_steps):
                yield replace(tiling, ahead=ahead, release=release)


def _moments(product: str, num_steps: int) -> list[tuple[int, int]]:
    """(ahead, release) to try: the steps whose weights are prefetched before the previous kernel has ended, and those
    left when the next one may start."""
    if product == "gate_up":
        return [(0, 2), (0, 6)]
    tried = ((0, 1), (1, 1), (1, 3), (4, 4)) if num_steps <= 4 else ((0, 1), (1, 3), (4, 4))
    return list(dict.fromkeys((min(ahead, num_steps), min(release, num_steps)) for ahead, release in tried))


def plans_of(cell: Cell, *, sweep: bool) -> list[AnyPlan]:
    """What a step uses, and with `sweep` the candidates."""
    chosen = cell.chosen
    assert isinstance(chosen, Tiles)
    return list(dict.fromkeys([chosen, *(candidates(chosen, cell.product, cell.shape[-1]) if sweep else ())]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time products with 8-bit experts.")
    add_flags(parser, tokens=(4,))
    options = parser.parse_args()
    jobs: list[tuple[Cell, AnyPlan]] = []
    for cell in cells_of(options, [FP8]):
        plans = plans_of(cell, sweep=options.sweep)
        print(f"{cell}: {len(plans)} plans")
        jobs += [(cell, plan) for plan in plans]
    time_plans(checked(jobs, check, options.processes), options.json)


if __name__ == "__main__":
    main()
