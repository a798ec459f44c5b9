"""Tune the linear layers of a decode step: `python -m benchmarks.linear` on a CUDA device.

For every layer shape of the published models and several token counts, it measures our kernels under many plans, and
torch's matmul with separate kernels for the fused parts (torch has no matmul of scaled weights without rounding).
Each is timed as in a step: a CUDA graph of many launches in sequence, over weights that together exceed the L2. All
plans are compiled and checked against float64 first, in parallel processes; the best ones are checked again at their
real shapes.

Writes $OUT/linear_plans.json, the package's file of that name with the new measurements, and $OUT/linear.md (every cell
with its best plan and the runners-up). Prints the times of the chosen plans.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from agentspec.kernels.backend import Norm
from agentspec.kernels.triton import linear_layers as ours
from agentspec.kernels.triton import linear_plans
from agentspec.kernels.triton.linear_hopper import ROWS
from agentspec.kernels.triton.linear_plans import NO_TORCH_PRODUCT, Kind, Plan
from agentspec.kernels.triton.machine import HOPPER_SHARED_BYTES
from agentspec.kernels.triton.norm_ahead import LEAST_AHEAD, NormAhead, attach
from agentspec.kernels.triton.norms import rms_norm
from agentspec.kernels.weights import FP8, SCALE_BLOCK, BlockScaled, Plain, RowScaled, Weight
from benchmarks.bandwidth import measure_bandwidth
from benchmarks.linear_results import (
    MODELS,
    NUM_REAL,
    Cell,
    Model,
    Shape,
    cell_lines,
    chosen_lines,
    chosen_plans,
    describe,
    form_lines,
    plan_file,
    without_plan,
)

EPS = 1e-6
ROTATED_BYTES = 256 << 20
GRAPH_SECONDS = 1e-3
NUM_REPLAYS = 5
TOLERANCE = 6e-3
"""Maximum relative difference by norms, for operands and results in bf16."""
TOKENS = (4, 1, 16, 32, 8, 64, 128, 2)
MOST_SHARED_TOKENS, NUM_SHARED = 16, 3
"""(token count, number of plans): up to that count, the best plans of each count are measured at all of these counts,
because one plan for all is preferred."""


@dataclass(frozen=True, slots=True)
class Operands:
    x: Tensor
    norm: Norm
    weights: tuple[Weight, ...]
    residual: Tensor
    extra: Tensor | None
    next_norm: Norm | None = None
    """Of the sum with the residual; computed with it where steps do that."""

    @classmethod
    def random(cls, shape: Shape, num_tokens: int, num_weights: int) -> Operands:
        generator = torch.Generator("cuda").manual_seed(shape.num_outputs * 131 + shape.depth + num_tokens)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

        x, residual = randn(num_tokens, shape.depth), randn(num_tokens, shape.num_outputs)

        def weight() -> Weight:
            if not shape.fp8:
                return Plain(randn(shape.num_outputs, shape.depth).mul_(shape.depth**-0.5))
            # Any code except NaN, of either sign: small and large values are equally frequent. Their root mean square
            # is about 120.
            size = (shape.num_outputs, shape.depth)
            values = torch.randint(0, 0x7F, size, generator=generator, device="cuda", dtype=torch.uint8)
            values |= torch.randint(0, 2, size, generator=generator, device="cuda", dtype=torch.uint8) << 7
            if shape.by_row:
                of_rows = torch.rand(shape.num_outputs, generator=generator, device="cuda") + 0.5
                return RowScaled(values=values.view(FP8), scales=of_rows * (shape.depth**-0.5 / 120))
            scales = torch.rand([-(-side // SCALE_BLOCK) for side in size], generator=generator, device="cuda") + 0.5
            return BlockScaled(values=values.view(FP8), scales=scales * (shape.depth**-0.5 / 120))

        weights = tuple(weight() for _ in range(num_weights))
        extra = randn(shape.num_extra, shape.depth).mul_(shape.depth**-0.5) if shape.num_extra else None
        norm, next_norm = (Norm(weight=randn(size).mul_(0.1), eps=EPS) for size in (shape.depth, shape.num_outputs))
        if shape.fp8 and shape.kind.startswith("norm") and num_tokens >= LEAST_AHEAD:
            attach(x, norm_of_sum(x, norm))
        return cls(x, norm, weights, residual, extra, next_norm if shape.kind == "add_linear" else None)


def norm_of_sum(x_NH: Tensor, norm: Norm) -> NormAhead:
    """As the sum before a product leaves it, in parts of 64 features."""
    x = x_NH.float()
    squares_PN = x.square().unflatten(-1, (-1, ROWS)).sum(-1).t().contiguous()
    return NormAhead(norm, (x * (1 + norm.weight.float())).to(x_NH.dtype), squares_PN)


def run(kind: Kind, plan: Plan | None, operands: Operands, weight: Weight) -> Tensor:
    """Run one layer with our kernel under the plan, or with torch."""
    x, norm, residual = operands.x, operands.norm, operands.residual
    num_real = min(NUM_REAL, weight.shape[0])
    if plan is not None:
        match kind:
            case "linear":
                return ours.launch_linear(plan, x, weight, None, None)
            case "norm_linear":
                return ours.launch_linear(plan, x, weight, norm, None, operands.extra)
            case "add_linear":
                return ours.launch_linear(plan, x, weight, None, residual, next_norm=operands.next_norm)
            case "norm_swiglu":
                return ours.launch_swiglu(plan, x, norm, weight)
            case "logits":
                return ours.launch_logits(plan, x, weight, num_real)
            case "draft_argmax":
                return ours.launch_draft_argmax(plan, x, weight, None)
    values = weight.tensor
    match kind:
        case "linear":
            return torch_linear(x, values)
        case "norm_linear":
            return torch_linear(rms_norm(x, norm), values)
        case "add_linear":
            return torch.addmm(residual, x, values.t())
        case "norm_swiglu":
            return ours.swiglu(torch_linear(rms_norm(x, norm), values))
        case "logits":
            scores = torch.mm(x, values.t(), out_dtype=torch.float32)
            scores[:, num_real:] = -torch.inf
            return scores
        case "draft_argmax":
            return torch_linear(x, values).argmax(-1)


def fault(kind: Kind, got: Tensor, operands: Operands, weight: Weight, dtype: torch.dtype) -> str:
    """The fault of a result, or an empty text. The reference uses float64 or, for large weights, float32."""
    x = operands.x.to(dtype)
    if kind.startswith("norm"):
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + operands.norm.weight.to(dtype))
    y = x @ weight.dequantize(dtype).t()
    if operands.extra is not None:
        y = torch.cat([y, x @ operands.extra.to(dtype).t()], -1)
    if kind == "draft_argmax":
        short = (y.amax(-1) - y.gather(1, got[:, None])[:, 0]).max().item()
        return "" if short <= 1e-3 * y.abs().max().item() else f"a choice lies {short} below the best"
    if kind == "norm_swiglu":
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    if kind == "add_linear":
        y = y + operands.residual.to(dtype)
    if kind == "logits":
        num_real = min(NUM_REAL, weight.shape[0])
        if not (got[:, num_real:] == -torch.inf).all():
            return "padding is not minus infinity"
        got, y = got[:, :num_real], y[:, :num_real]
    error = ((got.to(dtype) - y).norm() / y.norm()).item()
    return "" if error < TOLERANCE else f"relative error {error}"


Form = tuple[Kind, bool, bool, bool]
"""Of a layer, what its code depends on besides the plan: kind, whether its weight is in 8 bits, whether that has scales
of rows, whether there are extra rows."""


def form_of(shape: Shape) -> Form:
    return shape.kind, shape.fp8, shape.by_row, shape.num_extra > 0


def prepare(form: Form, plan: Plan) -> str:
    """In a worker: compile one candidate and run it twice on a small problem with ragged edges. Return its fault."""
    kind, fp8, by_row, has_extra = form
    # Gate and up rows of a block-scaled weight have tiles of their own, as at real shapes.
    is_whole = plan.programs or (fp8 and kind == "norm_swiglu")
    num_outputs = 4 * plan.block_o if is_whole else 2 * plan.block_o + 32
    try:
        shape = Shape(kind, num_outputs, 6 * plan.block_k * plan.split, fp8, 48 * has_extra, by_row)
        for num_tokens in (plan.block_m // 2 + 1, plan.block_m):
            operands = Operands.random(shape, num_tokens, 1)
            (weight,) = operands.weights
            stale = run(kind, plan, operands, weight)
            once = stale.clone()
            # The second run reuses the memory of the first one, so that values that it doesn't write are detected.
            stale.fill_(torch.nan if stale.is_floating_point() else -1)
            del stale
            if not torch.equal(once, run(kind, plan, operands, weight)):
                return "two runs differ"
            if wrong := fault(kind, once, operands, weight, torch.float64):
                return wrong
    except Exception as error:  # a failing candidate is only dropped
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def prepare_pair(pair: tuple[Form, Plan]) -> str:
    return prepare(*pair)


SHARED_BYTES = 220 << 10
AHEAD_BYTES, RELEASE_BYTES = 8e6, 6e6
"""Of all programs together: what first candidates ask for before they wait, and have left to read when they release the
next kernel."""
FP8_AHEAD_BYTES, FP8_RELEASE_BYTES, APART_BYTES = 8e6, 9e6, 6e6
"""Steps of 8-bit weights end sooner. What memory reads while a norm of its own runs is asked for besides."""


def compiled(plan: Plan) -> Plan:
    """The plan without its run-time arguments: plans with the same key share compiled code."""
    return replace(plan, ahead=2, release=2)


def shared_bytes(shape: Shape, plan: Plan) -> int:
    return plan.stages * plan.block_k * (shape.element_bytes * plan.block_o + 2 * plan.block_m)


def resident_bytes(shape: Shape, plan: Plan, sm_count: int) -> float:
    """Weights on the way from all programs that fit the device at once, if each keeps all stages but one filled."""
    programs = -(-shape.num_outputs // plan.block_o) * plan.split
    at_once = min(programs, sm_count * (SHARED_BYTES // shared_bytes(shape, plan)))
    return at_once * (plan.stages - 1) * plan.block_k * float(shape.element_bytes) * plan.block_o


SPLITS: dict[Kind, tuple[int, ...]] = {"add_linear": (1, 2, 3, 4, 6, 8), "linear": (1, 2, 4), "norm_linear": (1, 2, 3)}
"""Of programs that do not norm."""


def candidates(shape: Shape, num_tokens: int, sm_count: int) -> Iterator[Plan]:
    """Candidate tilings: enough programs, and enough bytes in flight."""
    block_ms = (
        (8, 16)
        if num_tokens <= 8
        else (16,)
        if num_tokens <= 16
        else (32,)
        if num_tokens <= 32
        else (64,)
        if num_tokens <= 64
        else (64, 128)
    )
    for block_m in block_ms[:1] if shape.fp8 else block_ms:
        for norm_apart in (False, True) if shape.fp8 and shape.kind in ("norm_linear", "norm_swiglu") else (False,):
            is_fused = shape.kind.startswith("norm") and not norm_apart
            for tiling in fp8_tilings(block_m, is_fused) if shape.fp8 else tilings(block_m):
                for split in (1,) if is_fused else SPLITS.get(shape.kind, (1,)):
                    plan = first_plan(shape, block_m, tiling, split, norm_apart, sm_count)
                    if is_promising(shape, plan, sm_count):
                        yield plan
    if shape.fp8 and num_tokens > 8:
        yield from hopper_plans(shape, num_tokens, sm_count)


def hopper_plans(shape: Shape, num_tokens: int, sm_count: int) -> Iterator[Plan]:
    """Plans of linear_hopper.py."""
    block_m = next((size for size in (16, 32, 64) if size >= num_tokens), 0)
    if not block_m or shape.num_extra or shape.kind not in ("linear", "norm_linear", "add_linear", "norm_swiglu"):
        return
    for block_o in (256,) if shape.kind == "norm_swiglu" else (256, 128):
        if shape.num_outputs % block_o or shape.depth % SCALE_BLOCK:
            continue
        tiles = shape.num_outputs // block_o
        stages = hopper_stages(block_m, SCALE_BLOCK * block_o, has_residual=shape.kind == "add_linear")
        for programs in hopper_programs(tiles, sm_count):
            yield Plan(
                block_o=block_o,
                block_m=block_m,
                block_k=SCALE_BLOCK,
                stages=stages,
                warps=8,
                programs=programs,
                norm_apart=shape.kind.startswith("norm"),
            )


def hopper_programs(tiles: int, sm_count: int) -> list[int]:
    """For all multiprocessors, and for as many as have whole parts of tiles if few are left over."""
    counts = {sm_count, max(1, sm_count // tiles) * tiles}
    return sorted(count for count in counts if sm_count * 0.85 <= count <= sm_count)


def hopper_stages(block_m: int, weight_bytes: int, *, has_residual: bool) -> int:
    """Steps that fit into shared memory, beside barriers and a block of sums that is rearranged to be stored: in
    float32 if there is a residual. weight_bytes: of a step."""
    stored_bytes = 2 * ROWS * block_m * (4 if has_residual else 2)
    return (HOPPER_SHARED_BYTES - 1024 - stored_bytes) // (weight_bytes + 2 * SCALE_BLOCK * block_m)


def first_plan(
    shape: Shape, block_m: int, tiling: tuple[int, int, int, int], split: int, norm_apart: bool, sm_count: int
) -> Plan:
    """A tiling with what it asks for ahead, and the time of the next kernel's start, by numbers of bytes."""
    block_o, block_k, stages, warps = tiling
    programs = -(-shape.num_outputs // block_o) * split
    steps_of = shape.element_bytes * block_o * block_k * min(programs, 3 * sm_count)
    ahead_bytes, release_bytes = (FP8_AHEAD_BYTES, FP8_RELEASE_BYTES) if shape.fp8 else (AHEAD_BYTES, RELEASE_BYTES)
    return Plan(
        block_o=block_o,
        block_m=block_m,
        block_k=block_k,
        split=split,
        stages=stages,
        warps=warps,
        ahead=max(1, min(16, round((ahead_bytes + norm_apart * APART_BYTES) / steps_of))),
        running=True,
        release=max(1, min(16, round(release_bytes / steps_of))),
        norm_apart=norm_apart,
    )


def is_promising(shape: Shape, plan: Plan, sm_count: int) -> bool:
    if shape.depth % plan.block_k or shape.depth // (plan.block_k * plan.split) < min(
        4, shape.depth // SCALE_BLOCK // 2
    ):
        return False
    programs = -(-shape.num_outputs // plan.block_o) * plan.split
    most = (
        (4 if shape.fp8 else 3)
        if plan.split > 1
        else 9
        if plan.norm_apart
        else math.inf
        if shape.kind in NO_TORCH_PRODUCT
        else 6
    )
    if shared_bytes(shape, plan) > SHARED_BYTES or not min(80, shape.num_outputs // 64) <= programs <= most * sm_count:
        return False
    return resident_bytes(shape, plan, sm_count) >= min(sm_count * 20e3, shape.weight_bytes / 6)


def tilings(block_m: int) -> Iterable[tuple[int, int, int, int]]:
    """(block_o, block_k, stages, warps)."""
    if block_m == 8:
        return (
            (16, 256, 4, 1),
            (16, 256, 3, 1),
            (32, 128, 4, 2),
            (32, 256, 3, 2),
            (32, 256, 4, 2),
            (64, 64, 5, 4),
            (64, 128, 3, 4),
            (64, 128, 4, 4),
            (64, 256, 3, 4),
            (128, 64, 4, 8),
            (128, 128, 3, 8),
            (128, 64, 4, 4),
        )
    if block_m == 16:
        return (
            (16, 256, 4, 2),
            (32, 128, 4, 4),
            (32, 256, 3, 4),
            (64, 64, 5, 4),
            (64, 128, 3, 4),
            (64, 128, 4, 4),
            (128, 64, 4, 4),
            (128, 128, 3, 4),
        )
    if block_m == 32:
        return (
            (32, 128, 4, 4),
            (64, 64, 5, 4),
            (64, 128, 3, 4),
            (64, 128, 4, 4),
            (128, 64, 4, 4),
            (128, 64, 4, 8),
            (128, 128, 3, 4),
            (128, 128, 3, 8),
        )
    return (
        (64, 64, 4, 4),
        (64, 128, 3, 4),
        (128, 64, 3, 4),
        (128, 64, 4, 4),
        (128, 64, 3, 8),
        (128, 64, 4, 8),
        (128, 128, 3, 8),
    )


def fp8_tilings(block_m: int, is_fused: bool) -> Iterable[tuple[int, int, int, int]]:
    """As `tilings`. With two warps on 64 rows weights come out of shared memory by fours, with four by twos, but there
    each is decoded once for more tokens. A warp takes 16 rows at least, and an SM needs about 16 warps to hide how long
    decoding takes: by tall tiles of many warps whose K several programs share. is_fused: with the norm in every
    step."""
    if is_fused:
        if block_m <= 16:
            return (
                (32, 256, 3, 2),
                (64, 128, 3, 2),
                (64, 128, 4, 2),
                (64, 256, 3, 2),
                (64, 128, 4, 4),
                (64, 256, 3, 4),
            )
        return ((64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 3, 8), (128, 128, 4, 8), (256, 64, 3, 8))
    if block_m == 8:
        return (
            (16, 256, 4, 1),
            (32, 128, 4, 2),
            (32, 256, 3, 2),
            (32, 256, 4, 2),
            (32, 512, 3, 2),
            (64, 128, 4, 2),
            (64, 256, 3, 2),
            (64, 128, 4, 4),
            (64, 256, 3, 4),
            (128, 128, 4, 4),
            (128, 128, 4, 8),
            (128, 256, 3, 8),
        )
    if block_m == 16:
        return (
            (32, 128, 4, 2),
            (32, 256, 3, 2),
            (64, 128, 4, 2),
            (64, 256, 3, 2),
            (64, 128, 4, 4),
            (64, 256, 3, 4),
            (128, 128, 3, 4),
            (128, 128, 4, 4),
            (128, 128, 4, 8),
        )
    if block_m == 32:
        return (
            (32, 128, 4, 2),
            (64, 128, 4, 2),
            (64, 128, 3, 4),
            (64, 128, 4, 4),
            (64, 256, 3, 4),
            (128, 64, 4, 4),
            (128, 128, 3, 4),
            (128, 128, 4, 4),
            (128, 128, 3, 8),
            (128, 128, 4, 8),
            (256, 64, 4, 8),
        )
    # Tall tiles: a program reads the tokens once for each of them, and 64 tokens are as many bytes as 128 rows.
    return (
        (64, 64, 4, 4),
        (64, 128, 3, 4),
        (64, 128, 4, 4),
        (128, 64, 4, 4),
        (128, 64, 4, 8),
        (128, 64, 6, 8),
        (128, 128, 3, 4),
        (128, 128, 3, 8),
        (128, 128, 4, 8),
        (256, 64, 3, 8),
        (256, 64, 4, 8),
    )


def refinements(shape: Shape, plan: Plan) -> Iterator[Plan]:
    """Variants of a good tiling in what does not change the arithmetic: depth of the pipeline and of the prefetch.

    None releases the next kernel at its start. In a chain of equal kernels that is as fast, in one of different layers
    it is not: the next one's programs take the room that there is at once and crowd on the SMs where this one has
    fewest.
    """
    if plan.programs:
        yield from (replace(plan, release=release) for release in (0, 1, 4, 8, 1000))
        yield replace(plan, stages=plan.stages - 1)
        return
    yield replace(plan, ahead=0, running=False)
    yield replace(plan, running=False)
    yield replace(plan, ahead=2 * plan.ahead)
    yield replace(plan, ahead=2 * plan.ahead, running=False)
    yield replace(plan, ahead=4 * plan.ahead, release=2 * plan.release)
    for release in (0, plan.release // 2, 2 * plan.release):
        yield replace(plan, release=release)
    for stages in (plan.stages - 1, plan.stages + 1):
        if stages >= 2 and shared_bytes(shape, replace(plan, stages=stages)) <= SHARED_BYTES:
            yield replace(plan, stages=stages)


def seconds_a_launch(launch: Callable[[int], Tensor], expected: float) -> float:
    """Median time over replays of a graph of many launches in sequence; `launch` gets their index."""
    count = max(12, min(200, int(GRAPH_SECONDS / expected)))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(count):
                launch(index)
        times: list[float] = []
        for replay in range(NUM_REPLAYS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if replay >= 2:
                times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times) / count


class Tuner:
    def __init__(self, deadline: float, num_processes: int) -> None:
        self.deadline = deadline
        self.sm_count = torch.cuda.get_device_properties(0).multi_processor_count
        self.bandwidth = measure_bandwidth(torch.device("cuda")).read
        self.cells: dict[tuple[Shape, int], Cell] = {}
        self.faults: dict[tuple[Form, Plan], str] = {}
        self.pool = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))

    def prepare(self, wanted: Iterable[tuple[Form, Plan]]) -> None:
        new = sorted({(form, compiled(plan)) for form, plan in wanted} - self.faults.keys(), key=repr)
        for (form, plan), wrong in zip(new, self.pool.map(prepare_pair, new, chunksize=4), strict=True):
            self.faults[form, plan] = wrong
            if wrong:
                print(f"out: {form} {plan}: {wrong}", flush=True)

    def measure(self, shape: Shape, num_tokens: int, plans: Iterable[Plan | None]) -> None:
        cell = self.cells.setdefault((shape, num_tokens), Cell(shape, num_tokens, {}))
        form = form_of(shape)
        todo = [
            plan
            for plan in dict.fromkeys(plans)
            if plan not in cell.seconds and (plan is None or not self.faults[form, compiled(plan)])
        ]
        if not todo or time.monotonic() > self.deadline:
            return
        num_weights = 1 if shape.kind == "logits" else max(2, min(32, -(-ROTATED_BYTES // shape.weight_bytes)))
        operands = Operands.random(shape, num_tokens, num_weights)
        expected = shape.weight_bytes / self.bandwidth
        for plan in todo:

            def launch(index: int, plan: Plan | None = plan) -> Tensor:
                return run(shape.kind, plan, operands, operands.weights[index % len(operands.weights)])

            try:
                cell.seconds[plan] = seconds_a_launch(launch, expected)
            except (RuntimeError, TypeError) as error:
                print(f"out: {shape} {num_tokens} tokens, {describe(plan)}: {error}", flush=True)

    def chosen(self, cell: Cell) -> Plan | None:
        return next((plan for most, plan in chosen_plans(cell.shape, self.cells) if cell.num_tokens <= most), None)

    def verify(self, cell: Cell) -> str:
        operands = Operands.random(cell.shape, cell.num_tokens, 1)
        (weight,) = operands.weights
        return fault(
            cell.shape.kind, run(cell.shape.kind, self.chosen(cell), operands, weight), operands, weight, torch.float32
        )


def recurrent_layer(model: Model) -> list[Shape]:
    """What is measured of a recurrent layer."""
    shapes = model.shapes()
    return [shapes[name] for name in ("delta in", "delta out", "ffn in", "ffn out") if name in shapes]


def layer_times(tuner: Tuner, model: Model, num_tokens: int) -> tuple[float, float, int]:
    """(ours, torch's, bytes): seconds of one recurrent layer's matmuls in sequence with the chosen plans, over
    rotating layers."""
    shapes = recurrent_layer(model)
    num_bytes = sum(shape.weight_bytes for shape in shapes)
    copies = max(2, -(-ROTATED_BYTES // num_bytes))
    operands = [Operands.random(shape, num_tokens, copies) for shape in shapes]
    best = [tuner.chosen(tuner.cells[shape, num_tokens]) for shape in shapes]

    def seconds(plans: list[Plan | None]) -> float:
        def launch(index: int) -> Tensor:
            out = operands[0].x
            for shape, plan, operand in zip(shapes, plans, operands, strict=True):
                out = run(shape.kind, plan, operand, operand.weights[index % copies])
            return out

        return seconds_a_launch(launch, num_bytes / tuner.bandwidth)

    return seconds(best), math.nan if model.fp8 else seconds([None] * len(shapes)), num_bytes


def to_refine(ranked: Sequence[Plan], count: int) -> list[Plan]:
    """The best plans, and the best one of linear_hopper.py."""
    hopper = [plan for plan in ranked if plan.programs][:1]
    return list(dict.fromkeys([*ranked[:count], *hopper]))


def tune(tuner: Tuner, cells: list[tuple[Shape, int]], began: float) -> None:
    """Measure every cell's candidates, then variants of the best ones, then the best plans of each small token count at
    the other ones."""

    def measure_all(wanted: dict[tuple[Shape, int], list[Plan]]) -> None:
        tuner.prepare((form_of(shape), plan) for (shape, _), plans in wanted.items() for plan in plans)
        print(f"{len(tuner.faults)} candidates compiled and checked at {time.monotonic() - began:.0f} s", flush=True)
        for (shape, tokens), plans in wanted.items():
            tuner.measure(shape, tokens, plans if shape.fp8 else [None, *plans])
        print(f"measured at {time.monotonic() - began:.0f} s", flush=True)

    measure_all({(shape, tokens): list(candidates(shape, tokens, tuner.sm_count)) for shape, tokens in cells})
    measure_all(
        {
            at: [
                fine
                for plan in to_refine(tuner.cells[at].ranked(), 3 if at[1] in (1, 4) else 1)
                for fine in refinements(at[0], plan)
            ]
            for at in cells
        }
    )
    shared: dict[Shape, list[Plan]] = {}
    small = [at for at in cells if at[1] <= MOST_SHARED_TOKENS]
    for shape, tokens in small:
        ranked = tuner.cells[shape, tokens].ranked()
        shared.setdefault(shape, []).extend(ranked[:NUM_SHARED])
    measure_all(
        {(shape, tokens): [plan for plan in shared[shape] if plan.block_m >= tokens] for shape, tokens in small}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--missing", action="store_true", help="only what has no plan yet")
    parser.add_argument("--seconds", type=float, default=420.0, help="stop measuring new candidates after this long")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = parser.parse_args()
    began = time.monotonic()
    tuner = Tuner(began + args.seconds, args.processes)
    print(f"{torch.cuda.get_device_name()}, read {tuner.bandwidth / 1e12:.3f} TB/s", flush=True)
    shapes = [shape for model in args.models for shape in MODELS[model].shapes().values()]
    most = {
        shape: linear_plans.SMALL_TOKENS if shape.fp8 and shape.kind not in NO_TORCH_PRODUCT else max(TOKENS)
        for shape in shapes
    }
    cells = list(dict.fromkeys((shape, tokens) for tokens in args.tokens for shape in shapes if tokens <= most[shape]))
    if args.missing:
        cells = without_plan(cells, linear_plans.FILE.read_text())
    tune(tuner, cells, began)
    tuner.pool.shutdown()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "linear_plans.json").write_text(
        plan_file(torch.cuda.get_device_name(), tuner.cells, linear_plans.FILE.read_text())
    )
    (args.out / "linear.md").write_text("\n".join(cell_lines(tuner.cells, args.models, tuner.bandwidth)) + "\n")
    for cell in tuner.cells.values():
        if cell.seconds and (wrong := tuner.verify(cell)):
            print(f"WRONG at its real shape: {cell.shape} {cell.num_tokens} {describe(tuner.chosen(cell))}: {wrong}")
    for line in chosen_lines(tuner.cells, args.models, tuner.bandwidth):
        print(line)
    for line in form_lines(tuner.cells, args.models, tuner.bandwidth):
        print(line)
    for name in args.models:
        for tokens in sorted(args.tokens):
            if not MODELS[name].only_head and all(
                at in tuner.cells and tuner.cells[at].seconds
                for at in ((shape, tokens) for shape in recurrent_layer(MODELS[name]))
            ):
                mine, torchs, num_bytes = layer_times(tuner, MODELS[name], tokens)
                share = num_bytes / tuner.bandwidth / mine
                print(
                    f"{name} recurrent layer, {tokens} tokens: {mine * 1e6:.1f} us, {share:.0%} of read; torch "
                    f"{torchs * 1e6:.1f} us"
                )
    print(f"done after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
