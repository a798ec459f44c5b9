"""Time products of a step's tokens with 4-bit experts: `python -m benchmarks.four_bit_experts` on a CUDA device.

See expert_work.py for what is timed; FP8 is timed beside, by its own kernels. Every plan is checked against float64
first. With --sweep, candidates are compiled and checked in parallel processes, and all are timed; else only what
`agentspec.kernels.triton.four_bit_experts` says. With --tensor-parallel N the shapes are those of one of N ranks.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace

from agentspec.kernels.four_bit_tiles import TILE_COLUMNS
from agentspec.kernels.triton.four_bit_layers import FourBitPlan
from benchmarks.expert_work import AnyPlan, Cell, add_flags, cells_of, check, time_plans
from benchmarks.four_bit import FORMS, checked

BLOCK_OS, SHARES, ROWS_OF_WARPS, AHEADS = (16, 32, 64, 128), (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 3, 4, 8)
MOST_WARPS = 8
MOST_ON_THE_WAY = 128
"""Of `ahead` times the rows of a warp: a lane keeps as many registers of codes, which are those of two steps."""

UNROLLED_STEPS, MOST_UNROLLED = 8, 16
"""Loops of so few steps are unrolled; of more groups of columns than this that takes the compiler too long."""


def candidates(chosen: FourBitPlan, rows: int, depth: int) -> Iterator[FourBitPlan]:
    """Plans with the same tokens in a block. Every group of warps has whole steps."""
    groups = depth // TILE_COLUMNS
    for block_o, shares, of_rows, ahead in itertools.product(BLOCK_OS, SHARES, ROWS_OF_WARPS, AHEADS):
        warps = shares * of_rows
        if warps > MOST_WARPS or 16 * of_rows > block_o or ahead * block_o > MOST_ON_THE_WAY * of_rows:
            continue
        if groups <= UNROLLED_STEPS * shares * ahead and groups > MOST_UNROLLED * shares:
            continue
        if rows % block_o == 0 and groups % (shares * ahead) == 0:
            yield replace(chosen, block_o=block_o, ahead=ahead, warps=warps, shares=shares)


def plans_of(cell: Cell, *, sweep: bool) -> list[AnyPlan]:
    """What a step uses, and with `sweep` the candidates."""
    chosen, (_, rows, depth) = cell.chosen, cell.shape
    assert isinstance(chosen, FourBitPlan)
    return list(dict.fromkeys([chosen, *(candidates(chosen, rows, depth) if sweep else ())]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Time products with 4-bit experts.")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["int4", "nvfp4"])
    add_flags(parser, tokens=(4, 16, 32))
    options = parser.parse_args()
    jobs: list[tuple[Cell, AnyPlan]] = []
    for cell in cells_of(options, options.forms):
        plans = plans_of(cell, sweep=options.sweep)
        print(f"{cell}: {len(plans)} plans")
        jobs += [(cell, plan) for plan in plans]
    time_plans(checked(jobs, check, options.processes), options.json, beside_fp8=True)


if __name__ == "__main__":
    main()
