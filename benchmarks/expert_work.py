"""Products of a step's tokens with the experts of one stack: what `four_bit_experts` and `fp8_experts` time.

Tokens choose experts at random, other ones in each launch, so that weights come from memory. The floor is the bytes of
the chosen experts over the bandwidth measured in the same run. The shared expert is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.kernels.four_bit_tiles import TILE_COLUMNS, FourBitTiles
from agentspec.kernels.triton import experts, four_bit_experts, mixture
from agentspec.kernels.triton.experts import Tiles, Visits
from agentspec.kernels.triton.four_bit_layers import FourBitPlan
from agentspec.kernels.triton.routing import Routing
from agentspec.kernels.weights import SCALE_BLOCK, BlockScaled
from benchmarks.bandwidth import measure_bandwidth
from benchmarks.four_bit import EXPECTED_BYTES_PER_SECOND, FORMS, TOLERANCE, random_tiles
from benchmarks.linear import seconds_a_launch
from benchmarks.published import CONFIGS

DEVICE = torch.device("cuda")
PRODUCTS = ("gate_up", "down")
FP8 = "fp8"
"""The form of block-scaled weights; the others are those of benchmarks.four_bit."""
NUM_CHOICES = 24
"""Sets of chosen experts, one after the other."""
CHECKED_EXPERTS = 4
NUM_SHOWN = 4
"""Of the fastest plans."""

AnyPlan = FourBitPlan | Tiles
"""A tiling: of weights in 4 bits, and of block-scaled ones."""


class Cell(NamedTuple):
    model: str
    product: str
    form: str
    num_tokens: int
    num_ranks: int = 1
    """That share the model: each has a part of every expert's width."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """A rank's stack: (experts, rows, columns)."""
        config = CONFIGS[self.model]
        assert config.moe is not None
        width, hidden = config.moe.intermediate_size // self.num_ranks, config.hidden_size
        rows = (2 * width, hidden) if self.product == "gate_up" else (hidden, width)
        return config.moe.num_experts, *rows

    @property
    def chosen(self) -> AnyPlan:
        """The plan that a step uses."""
        is_gate_up, (_, rows, depth), meta = self.product == "gate_up", self.shape, torch.device("meta")
        if self.form == FP8:
            tiles = mixture.gate_up_tiles if is_gate_up else mixture.down_tiles
            return tiles(BlockScaled.empty(self.shape, device=meta), torch.bfloat16, self.num_tokens)
        weight = FourBitTiles.empty(FORMS[self.form], self.shape, meta)
        block_m = mixture.visits_per_program(self.num_tokens, weight)
        if is_gate_up:
            return four_bit_experts.gate_up_plan(rows // 2, depth, block_m, weight.form.format)
        return four_bit_experts.down_plan(rows, depth, block_m, weight.form.format)


class Work:
    """A product of some tokens with experts of one stack."""

    def __init__(self, cell: Cell, num_experts: int | None = None) -> None:
        """num_experts: None: all."""
        all_experts, *matrix = cell.shape
        moe, num_experts = CONFIGS[cell.model].moe, num_experts or all_experts
        assert moe is not None
        generator = torch.Generator(DEVICE).manual_seed(cell.num_tokens)
        self.is_gate_up = cell.product == "gate_up"
        shape = (num_experts, *matrix)
        self.weight: FourBitTiles | BlockScaled = (
            random_blocks(shape, generator) if cell.form == FP8 else random_tiles(FORMS[cell.form], shape, 1, DEVICE)
        )
        top_k = min(moe.top_k, num_experts // 2)
        num_inputs = cell.num_tokens * (1 if self.is_gate_up else top_k)
        self.x = torch.randn(num_inputs, shape[-1], generator=generator, device=DEVICE, dtype=torch.bfloat16)
        self.choices: list[Visits] = []
        self.num_chosen = 0.0
        block_m = mixture.visits_per_program(cell.num_tokens, self.weight)
        for _ in range(NUM_CHOICES):
            ids = torch.rand(cell.num_tokens, num_experts, generator=generator, device=DEVICE).topk(top_k).indices.int()
            weights = torch.rand(ids.shape, generator=generator, device=DEVICE) + 0.5
            routing = Routing(ids_NC=ids.contiguous(), weights_NC=weights, gate_N=None, normed=self.x)
            self.choices.append(mixture.visits_of(routing, num_experts, block_m))
            self.num_chosen += ids.unique().numel() / NUM_CHOICES

    def run(self, plan: AnyPlan, visits: Visits) -> Tensor:
        if isinstance(plan, Tiles):
            product = experts.gate_up if self.is_gate_up else experts.down
            return product(plan, self.x, self.weight, None, visits)
        assert isinstance(self.weight, FourBitTiles)
        of_four_bits = four_bit_experts.gate_up if self.is_gate_up else four_bit_experts.down
        return of_four_bits(plan, self.x, self.weight, None, visits)

    def error(self, plan: AnyPlan) -> float:
        """Relative to float64; infinite if a second run differs."""
        visits, exact = self.choices[0], self.weight.dequantize(torch.float64)
        first = self.run(plan, visits)
        if not torch.equal(first, self.run(plan, visits)):
            return torch.inf
        ids_P, top_k = visits.ids_NC.flatten(), visits.ids_NC.shape[1]
        x = self.x.repeat_interleave(top_k, 0) if self.is_gate_up else self.x
        y = torch.einsum("pk,pok->po", x.double(), exact[ids_P])
        if self.is_gate_up:
            gate, up = y.chunk(2, -1)
            y = silu(gate) * up
        else:
            y *= visits.weights_NC.flatten()[:, None]
        return float((first.double() - y).norm() / y.norm())

    @property
    def bytes_read(self) -> float:
        return self.weight.nbytes / self.weight.shape[0] * self.num_chosen

    def microseconds(self, plan: AnyPlan) -> float:
        run: Callable[[int], Tensor] = lambda index: self.run(plan, self.choices[index % NUM_CHOICES])  # noqa: E731
        return 1e6 * seconds_a_launch(run, self.bytes_read / EXPECTED_BYTES_PER_SECOND)


def random_blocks(shape: tuple[int, ...], generator: torch.Generator) -> BlockScaled:
    weight = BlockScaled.empty(shape, device=DEVICE)
    codes = weight.values.view(torch.uint8)
    codes.random_(0, 256, generator=generator).bitwise_and_(0xBF)  # below 2
    weight.scales.uniform_(0.5, 1.5, generator=generator).mul_(shape[-1] ** -0.5)
    return weight


def check(cell: Cell, plan: AnyPlan) -> str:
    """In a worker: compile a plan, and run it on a few experts. Return its fault."""
    try:
        error = Work(cell, CHECKED_EXPERTS).error(plan)
    except Exception as error_of_compiler:  # a failing candidate is only dropped
        return f"{type(error_of_compiler).__name__}: {str(error_of_compiler)[:200]}"
    return "" if error < TOLERANCE else f"relative error {error}"


def add_flags(parser: argparse.ArgumentParser, *, tokens: Sequence[int]) -> None:
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=["35B-A3B"])
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, help="GPUs that share each model; one's part is timed"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=list(tokens))
    parser.add_argument("--sweep", action="store_true", help="time other plans as well")
    parser.add_argument("--processes", type=int, default=8, help="that compile")
    parser.add_argument("--json", type=Path, help="write all times here")


def cells_of(options: argparse.Namespace, forms: Sequence[str]) -> list[Cell]:
    """Exits if a model has no experts, or if ranks would hold whole ones."""
    num_ranks = options.tensor_parallel
    for model in options.models:
        if (moe := CONFIGS[model].moe) is None:
            raise SystemExit(f"{model} has no experts")
        if moe.intermediate_size % (num_ranks * max(TILE_COLUMNS, SCALE_BLOCK)):
            raise SystemExit(f"experts of {model} are too narrow to be cut between {num_ranks} ranks")
    product = itertools.product(options.models, options.products, forms, options.tokens)
    return [Cell(*at, num_ranks) for at in product]


def time_plans(jobs: Sequence[tuple[Cell, AnyPlan]], path: Path | None, *, beside_fp8: bool = False) -> None:
    """Time all plans of each cell, and print a row of a table for each. beside_fp8: also the time of block-scaled
    experts of the same shape, with the plan that a step uses."""
    bytes_per_second = measure_bandwidth(DEVICE).read
    found = []
    print("| model | ranks | product | O x K | form | tokens | experts | us | of the floor | FP8, us | fastest |")
    print("|---" * 11 + "|")
    for cell in dict.fromkeys(cell for cell, _ in jobs):
        in_fp8 = ""
        if beside_fp8:
            fp8 = cell._replace(form=FP8)
            in_fp8 = f"{Work(fp8).microseconds(fp8.chosen):.1f}"
        work = Work(cell)
        times = {plan: work.microseconds(plan) for other, plan in jobs if other == cell}
        ours, floor = times.get(cell.chosen, float("nan")), work.bytes_read / bytes_per_second * 1e6
        fastest = sorted(times, key=times.__getitem__)[:NUM_SHOWN]
        shown = "; ".join(f"{times[plan]:.1f} {describe(plan)}{' *' * (plan == cell.chosen)}" for plan in fastest)
        model, product, form, num_tokens, num_ranks = cell
        _, rows, depth = cell.shape
        print(
            f"| {model} | {num_ranks} | {product} | {rows} x {depth} | {form} | {num_tokens} | {work.num_chosen:.1f} "
            f"| {ours:.1f} | {floor / ours:.0%} | {in_fp8} | {shown} |",
            flush=True,
        )
        found += [{"cell": cell._asdict(), "plan": asdict(plan), "us": us} for plan, us in times.items()]
        if path is not None:
            path.write_text(json.dumps(found))
    print("*: what a step uses")


def describe(plan: AnyPlan) -> str:
    if isinstance(plan, Tiles):
        return f"{plan.block_o}x{plan.block_k} w{plan.warps} s{plan.stages} a{plan.ahead} r{plan.release}"
    return f"{plan.block_o}x{plan.block_m} w{plan.warps} /{plan.shares} a{plan.ahead}"
