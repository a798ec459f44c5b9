"""Time products of a step's tokens with 4-bit experts: `python -m benchmarks.four_bit_experts` on a CUDA device.

Tokens choose experts at random, other ones in each launch, so that weights come from memory. The floor is the bytes of
the chosen experts over the bandwidth measured in the same run; FP8 is timed beside, by its own kernels. Every plan is
checked against float64 first. With --sweep, candidates are compiled and checked in parallel processes, and all are
timed; else only what `four_bit_experts` says.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.triton import experts, four_bit_experts, mixture
from agentspec.kernels.triton.experts import Visits
from agentspec.kernels.triton.four_bit_layers import FourBitPlan
from agentspec.kernels.triton.routing import Routing
from agentspec.kernels.weights import BlockScaled
from benchmarks.bandwidth import measure_bandwidth
from benchmarks.four_bit import EXPECTED_BYTES_PER_SECOND, FORMS, TOLERANCE, checked, random_tiles
from benchmarks.linear import seconds_a_launch
from benchmarks.published import CONFIGS

PRODUCTS = ("gate_up", "down")
NUM_CHOICES = 24
"""Sets of chosen experts, one after the other."""
CHECKED_EXPERTS = 4
Cell = tuple[str, str, str, int]
"""Model, product, form, tokens."""


def shape_of(model: str, product: str) -> tuple[int, int, int]:
    """(experts, rows, columns)"""
    config = CONFIGS[model]
    assert config.moe is not None
    width = config.moe.intermediate_size
    rows = (2 * width, config.hidden_size) if product == "gate_up" else (config.hidden_size, width)
    return config.moe.num_experts, *rows


def chosen_plan(model: str, product: str, block_m: int) -> FourBitPlan:
    _, rows, depth = shape_of(model, product)
    if product == "gate_up":
        return four_bit_experts.gate_up_plan(rows // 2, depth, block_m)
    return four_bit_experts.down_plan(rows, depth, block_m)


class Work:
    """A product of some tokens with experts of one stack."""

    def __init__(self, cell: Cell, num_experts: int | None = None) -> None:
        model, self.product, form, num_tokens = cell
        all_experts, rows, depth = shape_of(model, self.product)
        moe, num_experts = CONFIGS[model].moe, num_experts or all_experts
        assert moe is not None
        generator = torch.Generator("cuda").manual_seed(num_tokens)
        shape = (num_experts, rows, depth)
        self.weight = None if form == "fp8" else random_tiles(FORMS[form], shape, 1)
        self.fp8 = random_blocks(shape, generator) if form == "fp8" else None
        top_k = min(moe.top_k, num_experts // 2)
        num_inputs = num_tokens if self.product == "gate_up" else num_tokens * top_k
        self.x = torch.randn(num_inputs, depth, generator=generator, device="cuda", dtype=torch.bfloat16)
        self.choices, self.num_chosen = [], 0.0
        block_m = mixture.visits_per_program(num_tokens, self.weight or self.fp8)  # type: ignore[arg-type]
        for _ in range(NUM_CHOICES):
            ids = torch.rand(num_tokens, num_experts, generator=generator, device="cuda").topk(top_k).indices.int()
            weights = torch.rand(ids.shape, generator=generator, device="cuda") + 0.5
            routing = Routing(ids_NC=ids.contiguous(), weights_NC=weights, gate_N=None, normed=self.x)
            self.choices.append(mixture.visits_of(routing, num_experts, block_m))
            self.num_chosen += ids.unique().numel() / NUM_CHOICES
        self.block_m = block_m

    def run(self, plan: FourBitPlan | None, visits: Visits) -> Tensor:
        if self.weight is not None and plan is not None:
            product = four_bit_experts.gate_up if self.product == "gate_up" else four_bit_experts.down
            return product(plan, self.x, self.weight, None, visits)
        assert self.fp8 is not None
        num_tokens = len(visits.ids_NC)
        if self.product == "gate_up":
            tiles = mixture.gate_up_tiles(self.fp8, self.x.dtype, num_tokens)
            return experts.gate_up(tiles, self.x, self.fp8, None, visits)
        return experts.down(mixture.down_tiles(self.fp8, self.x.dtype, num_tokens), self.x, self.fp8, None, visits)

    def error(self, plan: FourBitPlan) -> float:
        """Relative to float64; infinite if a second run differs."""
        assert self.weight is not None
        visits, exact = self.choices[0], self.weight.dequantize(torch.float64)
        first = self.run(plan, visits)
        if not torch.equal(first, self.run(plan, visits)):
            return torch.inf
        ids_P, top_k = visits.ids_NC.flatten(), visits.ids_NC.shape[1]
        x = self.x.repeat_interleave(top_k, 0) if self.product == "gate_up" else self.x
        y = torch.einsum("pk,pok->po", x.double(), exact[ids_P])
        if self.product == "gate_up":
            gate, up = y.chunk(2, -1)
            y = silu(gate) * up
        else:
            y *= visits.weights_NC.flatten()[:, None]
        return float((first.double() - y).norm() / y.norm())

    @property
    def bytes_read(self) -> float:
        weight = self.weight or self.fp8
        assert weight is not None
        return weight.nbytes / weight.shape[0] * self.num_chosen

    def microseconds(self, plan: FourBitPlan | None) -> float:
        run: Callable[[int], Tensor] = lambda index: self.run(plan, self.choices[index % NUM_CHOICES])  # noqa: E731
        return 1e6 * seconds_a_launch(run, self.bytes_read / EXPECTED_BYTES_PER_SECOND)


def random_blocks(shape: tuple[int, int, int], generator: torch.Generator) -> BlockScaled:
    weight = BlockScaled.empty(shape, device=torch.device("cuda"))
    codes = weight.values.view(torch.uint8)
    codes.random_(0, 256, generator=generator).bitwise_and_(0xBF)  # below 2
    weight.scales.fill_(shape[-1] ** -0.5)
    return weight


def check(cell: Cell, plan: FourBitPlan) -> str:
    """In a worker: compile a plan, and run it on a few experts. Return its fault."""
    try:
        error = Work(cell, CHECKED_EXPERTS).error(plan)
    except Exception as error_of_compiler:  # a failing candidate is only dropped
        return f"{type(error_of_compiler).__name__}: {str(error_of_compiler)[:200]}"
    return "" if error < TOLERANCE else f"relative error {error}"


def candidates(chosen: FourBitPlan, rows: int, depth: int) -> Iterator[FourBitPlan]:
    """Plans with the same tokens in a block."""
    groups = depth // 128
    for block_o, shares, of_rows, ahead in itertools.product((16, 32, 64), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        warps = shares * of_rows
        if not 1 <= warps <= 8 or 16 * of_rows > block_o or ahead * block_o > 128 * of_rows:
            continue
        if rows % block_o == 0 and groups % (shares * ahead) == 0:
            yield replace(chosen, block_o=block_o, ahead=ahead, warps=warps, shares=shares)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time products with 4-bit experts.")
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=["35B-A3B"])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["int4", "nvfp4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4, 16, 32])
    parser.add_argument("--sweep", action="store_true", help="time other plans as well")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write all times here")
    options = parser.parse_args()
    cells: list[Cell] = list(itertools.product(options.models, PRODUCTS, options.forms, options.tokens))
    jobs: list[tuple[Cell, FourBitPlan]] = []
    for cell in cells:
        model, product, form, num_tokens = cell
        shape = _, rows, depth = shape_of(model, product)
        weight = FourBitTiles.empty(FORMS[form], shape, torch.device("meta"))
        chosen = chosen_plan(model, product, mixture.visits_per_program(num_tokens, weight))
        others = candidates(chosen, rows, depth) if options.sweep else ()
        jobs += [(cell, plan) for plan in dict.fromkeys([chosen, *others])]
    good = checked(jobs, check, options.processes)
    _time(cells, good, measure_bandwidth(torch.device("cuda")).read, options.json)


def _time(
    cells: Sequence[Cell], jobs: Sequence[tuple[Cell, FourBitPlan]], bytes_per_second: float, path: Path | None
) -> None:
    found = []
    print("| model | product | form | tokens | experts | us | of the floor | FP8, us | best other | its plan |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for cell in cells:
        model, product, form, num_tokens = cell
        plans = [plan for other, plan in jobs if other == cell]
        if not plans:
            continue
        in_fp8 = Work((model, product, "fp8", num_tokens)).microseconds(None)
        work = Work(cell)
        times = {plan: work.microseconds(plan) for plan in plans}
        chosen = chosen_plan(model, product, work.block_m)
        ours, floor = times.get(chosen, float("nan")), work.bytes_read / bytes_per_second * 1e6
        best = min(times, key=times.__getitem__)
        print(
            f"| {model} | {product} | {form} | {num_tokens} | {work.num_chosen:.1f} | {ours:.1f} "
            f"| {floor / ours:.0%} | {in_fp8:.1f} | {times[best]:.1f} | {best if best != chosen else '–'} |",
            flush=True,
        )
        found += [{"cell": cell, "plan": asdict(plan), "us": us} for plan, us in times.items()]
        if path is not None:
            path.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
