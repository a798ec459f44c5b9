"""Time products with 4-bit weights: `python -m benchmarks.four_bit` on a CUDA device.

Each is timed as in a step (linear.seconds_a_launch), over weights that together exceed the L2. Every plan
is checked against float64 first, at the real depth. With --sweep, candidates are compiled and checked in parallel
processes, and all are timed; else only what a step uses (`four_bit_layers`). With --hopper, other plans of
linear_hopper.py are timed as well, of integers without zero points.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.kernels.four_bit import FourBitForm
from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.triton import linear_hopper
from agentspec.kernels.triton.four_bit_layers import FourBitPlan, hopper_plan_for, launch_product, plan_for
from agentspec.kernels.triton.linear_plans import Plan
from agentspec.kernels.weights import FP8
from benchmarks.bandwidth import measure_bandwidth
from benchmarks.linear import hopper_programs, hopper_stages, seconds_a_launch

FORMS = {
    "int4": FourBitForm(kind="int4", group=128),
    "int4 zeros": FourBitForm(kind="int4", group=128, has_zeros=True),
    "nvfp4": FourBitForm(kind="e2m1", group=16, scale_dtype=FP8),
}
SHAPES = {
    "27B ffn in": (34816, 5120),
    "27B ffn out": (5120, 17408),
    "27B delta in": (16384, 5120),
    "27B delta out": (5120, 6144),
    "4B ffn in": (18432, 2560),
    "4B ffn out": (2560, 9216),
    "4B delta in": (12288, 2560),
    "4B delta out": (2560, 4096),
}
"""(O, K); "ffn in": gate and up, multiplied after."""
TOLERANCE = 6e-3
"""Relative difference by norms, in bfloat16."""
ROTATED_BYTES = 300e6
EXPECTED_BYTES_PER_SECOND = 2e12
"""Sets the number of launches that are timed at a time."""
CHECKED_TILES = 4


def random_tiles(
    form: FourBitForm, shape: tuple[int, ...], seed: int, device: torch.device | str = "cuda"
) -> FourBitTiles:
    """Random codes, in weights of about the size of real ones."""
    generator = torch.Generator(device).manual_seed(seed)
    tiles = FourBitTiles.empty(form, shape, torch.device(device))
    size = tiles.values.shape
    tiles.values.copy_(torch.randint(-(2**31), 2**31, size, generator=generator, device=device))
    if form.kind == "e2m1":
        tiles.scales.copy_(torch.randint(40, 90, tiles.scales.shape, generator=generator, device=device))
        assert tiles.multipliers is not None
        tiles.multipliers.fill_(shape[-1] ** -0.5 / 20)
    else:
        tiles.scales.uniform_(0.5, 1.5, generator=generator).mul_(shape[-1] ** -0.5 / 5)
    if tiles.zeros is not None:
        tiles.zeros.random_(0, 16, generator=generator)
    return tiles


class Work:
    """A product of some tokens with one of several weights."""

    def __init__(self, name: str, form: str, num_tokens: int, shape: tuple[int, int], num_weights: int) -> None:
        self.is_swiglu = name.endswith("ffn in")
        self.weights = [random_tiles(FORMS[form], shape, seed) for seed in range(num_weights)]
        generator = torch.Generator("cuda").manual_seed(num_tokens)
        num_outputs, depth = shape
        self.x = torch.randn(num_tokens, depth, generator=generator, device="cuda", dtype=torch.bfloat16)
        num_outputs //= 1 + self.is_swiglu
        self.out = torch.empty(num_tokens, num_outputs, device="cuda", dtype=torch.bfloat16)
        self.residual = None if self.is_swiglu else torch.randn_like(self.out)

    def run(self, plan: AnyPlan, weight: FourBitTiles) -> Tensor:
        if isinstance(plan, Plan):
            linear_hopper.launch_four_bit(plan, self.x, weight, self.out, self.residual, is_swiglu=self.is_swiglu)
        else:
            launch_product(plan, self.x, weight, self.out, self.residual, is_swiglu=self.is_swiglu)
        return self.out

    def error(self, plan: AnyPlan) -> float:
        """Relative to float64; infinite if a second run differs."""
        (weight,) = self.weights
        self.out.fill_(torch.nan)
        first = self.run(plan, weight).clone()
        self.out.fill_(torch.nan)
        if not torch.equal(first, self.run(plan, weight)):
            return torch.inf
        y = self.x.double() @ weight.dequantize(torch.float64).t()
        if self.is_swiglu:
            gate, up = y.chunk(2, -1)
            y = silu(gate) * up
        elif self.residual is not None:
            y += self.residual
        return float((first.double() - y).norm() / y.norm())

    def microseconds(self, plan: AnyPlan) -> float:
        expected = self.weights[0].nbytes / EXPECTED_BYTES_PER_SECOND
        return 1e6 * seconds_a_launch(lambda index: self.run(plan, self.weights[index % len(self.weights)]), expected)


AnyPlan = FourBitPlan | Plan
Cell = tuple[str, str, int]
"""Layer, form, tokens."""
Job = TypeVar("Job", bound=tuple[object, object])


def walk_plan(cell: Cell) -> FourBitPlan:
    """Of linear_four_bit.py."""
    name, form, num_tokens = cell
    return plan_for(*SHAPES[name], num_tokens, FORMS[form].format)


def chosen_plan(cell: Cell, sm_count: int) -> AnyPlan:
    """What a step uses on Hopper."""
    name, form, num_tokens = cell
    hopper = None
    if form == "int4":
        hopper = hopper_plan_for(*SHAPES[name], num_tokens, sm_count, is_swiglu=name.endswith("ffn in"))
    return walk_plan(cell) if hopper is None else hopper


def check(cell: Cell, plan: AnyPlan) -> str:
    """In a worker: compile a plan, and run it on a few tiles. Return its fault."""
    name, form, num_tokens = cell
    try:
        error = Work(name, form, num_tokens, (CHECKED_TILES * plan.block_o, SHAPES[name][1]), 1).error(plan)
    except Exception as error_of_compiler:  # a failing candidate is only dropped
        return f"{type(error_of_compiler).__name__}: {str(error_of_compiler)[:200]}"
    return "" if error < TOLERANCE else f"relative error {error}"


def candidates(chosen: FourBitPlan, shape: tuple[int, int], *, is_swiglu: bool) -> Iterator[FourBitPlan]:
    """Plans with the same tokens in a block."""
    for block_o, shares, rows, ahead in itertools.product((16, 32, 64), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        warps = shares * rows
        if not 2 <= warps <= 8 or 16 * rows > block_o or ahead * block_o > 128 * rows:
            continue
        for split, far in itertools.product((1,) if is_swiglu else splits_of(shape[1] // 128), (0, 4)):
            programs = shape[0] // block_o * split * warps
            if 1000 <= programs <= 12000 and split * shares <= shape[1] // 128:
                yield replace(
                    chosen,
                    block_o=block_o,
                    ahead=ahead,
                    warps=warps,
                    shares=shares,
                    split=split,
                    far=far,
                    max_registers=None,
                )


def splits_of(num_groups: int) -> list[int]:
    """Some, and those by which every program has as many groups of columns."""
    return sorted({1, 2, 4, 8, 12} | {split for split in range(1, 36) if num_groups % split == 0})


def hopper_candidates(shape: tuple[int, int], num_tokens: int, sm_count: int, *, is_swiglu: bool) -> Iterator[Plan]:
    """Plans of linear_hopper.py."""
    block_m = next((size for size in (16, 32, 64) if size >= num_tokens), 64)
    for block_o in (256,) if is_swiglu else (256, 128):
        if shape[0] % block_o:
            continue
        most = hopper_stages(block_m, 64 * block_o, has_residual=not is_swiglu)
        for programs, stages, release in itertools.product(
            hopper_programs(shape[0] // block_o, sm_count), sorted({min(most, 16), min(most, 6)}), (2, 8)
        ):
            yield Plan(
                block_o=block_o,
                block_m=block_m,
                block_k=128,
                stages=stages,
                warps=8,
                programs=programs,
                release=release,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time products with 4-bit weights.")
    parser.add_argument("--layers", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[4, 16, 32])
    parser.add_argument("--sweep", action="store_true", help="time other plans as well")
    parser.add_argument("--hopper", action="store_true", help="time plans of linear_hopper.py as well")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write all times here")
    options = parser.parse_args()
    cells: list[Cell] = list(itertools.product(options.layers, options.forms, options.tokens))
    jobs: list[tuple[Cell, AnyPlan]] = []
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    for name, form, num_tokens in cells:
        cell, is_swiglu = (name, form, num_tokens), name.endswith("ffn in")
        plans = [chosen_plan(cell, sm_count), walk_plan(cell)]
        if options.sweep:
            plans += candidates(walk_plan(cell), SHAPES[name], is_swiglu=is_swiglu)
        if options.hopper and form == "int4" and num_tokens > 8:
            plans += hopper_candidates(SHAPES[name], num_tokens, sm_count, is_swiglu=is_swiglu)
        jobs += [(cell, plan) for plan in dict.fromkeys(plans)]
    good = checked(jobs, check, options.processes)
    _time(cells, good, measure_bandwidth(torch.device("cuda")).read, sm_count, options.json)


def checked(jobs: Sequence[Job], check: Callable[..., str], num_processes: int) -> list[Job]:
    """The (cell, plan) without a fault, which `check` finds in parallel processes; prints those that are dropped."""
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        faults = list(pool.map(check, *zip(*jobs, strict=True), chunksize=4))
    for job, fault in zip(jobs, faults, strict=True):
        if fault:
            print(f"dropped: {job}: {fault}")
    good = [job for job, fault in zip(jobs, faults, strict=True) if not fault]
    print(f"{len(good)} of {len(jobs)} plans checked against float64")
    return good


def _time(
    cells: Sequence[Cell],
    jobs: Sequence[tuple[Cell, AnyPlan]],
    bytes_per_second: float,
    sm_count: int,
    path: Path | None,
) -> None:
    found = []
    print("| layer | O x K | form | tokens | us | of the floor | best other | its plan |")
    print("|---|---|---|---|---|---|---|---|")
    for cell in cells:
        name, form, num_tokens = cell
        plans = [plan for other, plan in jobs if other == cell]
        if not plans:
            continue
        one = FourBitTiles.empty(FORMS[form], SHAPES[name], torch.device("meta")).nbytes
        work = Work(name, form, num_tokens, SHAPES[name], max(3, round(ROTATED_BYTES / one)))
        times = {plan: work.microseconds(plan) for plan in plans}
        chosen = chosen_plan(cell, sm_count)
        floor = one / bytes_per_second * 1e6
        best = min(times, key=times.__getitem__)
        ours = times.get(chosen, float("nan"))
        outputs, depth = SHAPES[name]
        print(
            f"| {name} | {outputs} x {depth} | {form} | {num_tokens} | {ours:.1f} | {floor / ours:.0%} | "
            f"{times[best]:.1f} | {best if best != chosen else '–'} |",
            flush=True,
        )
        found += [{"cell": cell, "plan": asdict(plan), "us": us} for plan, us in times.items()]
        if path is not None:
            path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
