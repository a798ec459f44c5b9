"""How fast the linear layers of a decode step are, and which plan is best for each: `python -m benchmarks.linear` on a CUDA device.

For every layer shape of the published models and several token counts: our kernels under many plans, and torch's product (with separate kernels for
what ours fuse). Each is timed as the step runs it: a CUDA graph of many launches one behind the other, over weights that together exceed the L2. All
plans are compiled and checked against float64 first, in parallel processes; the winners are checked again at their real shapes.

Writes $OUT/linear_plans.json, which is the package's own file of that name, and $OUT/linear.md (every cell with its best plan and the runners-up);
prints what the chosen plans take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from agentspec.kernels.backend import Norm
from agentspec.kernels.triton import linear_layers as ours
from agentspec.kernels.triton.linear_plans import Kind, Plan
from agentspec.kernels.triton.norms import rms_norm
from benchmarks.bandwidth import measure_bandwidth
from benchmarks.linear_results import MODELS, NUM_REAL, Cell, Model, Shape, cell_lines, chosen_lines, chosen_plans, describe, plan_file

EPS = 1e-6
ROTATED_BYTES = 256 << 20
GRAPH_SECONDS = 1e-3
NUM_REPLAYS = 5
TOLERANCE = 6e-3
"""Of the norm of the difference over the norm: what operands and results in bf16 leave."""
TOKENS = (4, 1, 16, 32, 8, 64, 128, 2)
MOST_SHARED_TOKENS, NUM_SHARED = 16, 3
"""Of each count up to that many tokens, so many best plans are measured at all of those counts, which had best share one."""


@dataclass(frozen=True, slots=True)
class Operands:
    x: Tensor
    norm: Norm
    weights: tuple[Tensor, ...]
    residual: Tensor

    @classmethod
    def random(cls, shape: Shape, num_tokens: int, num_weights: int) -> Operands:
        generator = torch.Generator("cuda").manual_seed(shape.num_outputs * 131 + shape.depth + num_tokens)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)

        x, residual = randn(num_tokens, shape.depth), randn(num_tokens, shape.num_outputs)
        weights = tuple(randn(shape.num_outputs, shape.depth).mul_(shape.depth**-0.5) for _ in range(num_weights))
        return cls(x, Norm(weight=randn(shape.depth).mul_(0.1), eps=EPS), weights, residual)


def run(kind: Kind, plan: Plan | None, operands: Operands, weight: Tensor) -> Tensor:
    """One layer, by our kernel under the plan or by torch."""
    x, norm, residual = operands.x, operands.norm, operands.residual
    num_real = min(NUM_REAL, weight.shape[0])
    if plan is not None:
        match kind:
            case "linear":
                return ours.launch_linear(plan, x, weight, None, None)
            case "norm_linear":
                return ours.launch_linear(plan, x, weight, norm, None)
            case "add_linear":
                return ours.launch_linear(plan, x, weight, None, residual)
            case "norm_swiglu":
                return ours.launch_swiglu(plan, x, norm, weight)
            case "logits":
                return ours.launch_logits(plan, x, weight, num_real)
            case "nearest_token":
                return ours.launch_nearest(plan, x, weight, None)
    match kind:
        case "linear":
            return torch_linear(x, weight)
        case "norm_linear":
            return torch_linear(rms_norm(x, norm), weight)
        case "add_linear":
            return torch.addmm(residual, x, weight.t())
        case "norm_swiglu":
            return ours.swiglu(torch_linear(rms_norm(x, norm), weight))
        case "logits":
            scores = torch.mm(x, weight.t(), out_dtype=torch.float32)
            scores[:, num_real:] = -torch.inf
            return scores
        case "nearest_token":
            return torch_linear(x, weight).argmax(-1)


def fault(kind: Kind, got: Tensor, operands: Operands, weight: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with a result; nothing if it is right. The formula in float64 or, for large weights, float32."""
    x = operands.x.to(dtype)
    if kind.startswith("norm"):
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + operands.norm.weight.to(dtype))
    y = x @ weight.to(dtype).t()
    if kind == "nearest_token":
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


def prepare(kind: Kind, plan: Plan) -> str:
    """In a worker: compile one candidate, run it twice on a small problem with ragged edges. Returns what is wrong."""
    try:
        shape = Shape(kind, 2 * plan.block_o + 32, 6 * plan.block_k * plan.split)
        for num_tokens in (plan.block_m // 2 + 1, plan.block_m):
            operands = Operands.random(shape, num_tokens, 1)
            (weight,) = operands.weights
            stale = run(kind, plan, operands, weight)
            once = stale.clone()
            # The second run gets the memory of the first one: what it leaves out shows.
            stale.fill_(torch.nan if stale.is_floating_point() else -1)
            del stale
            if not torch.equal(once, run(kind, plan, operands, weight)):
                return "two runs differ"
            if wrong := fault(kind, once, operands, weight, torch.float64):
                return wrong
    except Exception as error:  # any failure of a candidate only takes that candidate out
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def prepare_pair(pair: tuple[Kind, Plan]) -> str:
    return prepare(*pair)


SHARED_BYTES = 220 << 10
AHEAD_BYTES, RELEASE_BYTES = 8e6, 6e6
"""Of all programs together: what first candidates ask for before they wait, and have left to read when they release the next kernel."""


def compiled(plan: Plan) -> Plan:
    """The plan, less what is only an argument: plans that share this share their code."""
    return replace(plan, ahead=2, release=2)


def shared_bytes(plan: Plan) -> int:
    return plan.stages * plan.block_k * 2 * (plan.block_o + plan.block_m)


def resident_bytes(shape: Shape, plan: Plan, sm_count: int) -> float:
    """Weights on the way from all programs that fit the device at once, if each keeps all stages but one filled."""
    programs = -(-shape.num_outputs // plan.block_o) * plan.split
    at_once = min(programs, sm_count * (SHARED_BYTES // shared_bytes(plan)))
    return at_once * (plan.stages - 1) * plan.block_k * 2.0 * plan.block_o


def candidates(shape: Shape, num_tokens: int, sm_count: int) -> Iterator[Plan]:
    """Tilings worth a try: enough programs, and enough bytes on the way."""
    splits = {"add_linear": (1, 2, 3, 4, 6, 8), "linear": (1, 2, 4)}.get(shape.kind, (1,))
    block_ms = (8, 16) if num_tokens <= 8 else (16,) if num_tokens <= 16 else (32,) if num_tokens <= 32 else (64,) if num_tokens <= 64 else (64, 128)
    for block_m in block_ms:
        for block_o, block_k, stages, warps in tilings(block_m):
            for split in splits:
                programs = -(-shape.num_outputs // block_o) * split
                steps_of = 2 * block_o * block_k * min(programs, 3 * sm_count)
                plan = Plan(
                    block_o=block_o,
                    block_m=block_m,
                    block_k=block_k,
                    split=split,
                    stages=stages,
                    warps=warps,
                    ahead=max(1, min(16, round(AHEAD_BYTES / steps_of))),
                    running=True,
                    release=max(1, min(16, round(RELEASE_BYTES / steps_of))),
                )
                steps = shape.depth // (block_k * split)
                is_head = shape.kind in ("logits", "nearest_token")
                if shape.depth % block_k or steps < 4 or shared_bytes(plan) > SHARED_BYTES:
                    continue
                if programs < 80 or (programs > 6 * sm_count and not is_head) or (split > 1 and programs > 3 * sm_count):
                    continue
                if resident_bytes(shape, plan, sm_count) < sm_count * 20e3:
                    continue
                yield plan


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
    return ((64, 64, 4, 4), (64, 128, 3, 4), (128, 64, 3, 4), (128, 64, 4, 4), (128, 64, 3, 8), (128, 64, 4, 8), (128, 128, 3, 8))


def refinements(plan: Plan) -> Iterator[Plan]:
    """Variants of a good tiling in what does not change the arithmetic: depth of the pipeline and of the prefetch.

    None releases the next kernel at its start. In a chain of equal kernels that is as fast, in one of different layers it is not: the next one's
    programs take the room that there is at once and crowd on the SMs where this one has fewest.
    """
    yield replace(plan, ahead=0, running=False)
    yield replace(plan, running=False)
    yield replace(plan, ahead=2 * plan.ahead)
    yield replace(plan, ahead=2 * plan.ahead, running=False)
    yield replace(plan, ahead=4 * plan.ahead, release=2 * plan.release)
    for release in (0, plan.release // 2, 2 * plan.release):
        yield replace(plan, release=release)
    for stages in (plan.stages - 1, plan.stages + 1):
        if stages >= 2 and shared_bytes(replace(plan, stages=stages)) <= SHARED_BYTES:
            yield replace(plan, stages=stages)


def seconds_a_launch(launch: Callable[[int], Tensor], expected: float) -> float:
    """Median over replays of a graph of many launches one behind the other; `launch` gets a running number."""
    count = max(12, min(200, int(GRAPH_SECONDS / expected)))
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        launch(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(count):
                launch(index)
        times: list[float] = []
        for replay in range(NUM_REPLAYS + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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
        self.faults: dict[tuple[Kind, Plan], str] = {}
        self.pool = ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))

    def prepare(self, wanted: Iterable[tuple[Kind, Plan]]) -> None:
        new = sorted({(kind, compiled(plan)) for kind, plan in wanted} - self.faults.keys(), key=repr)
        for (kind, plan), wrong in zip(new, self.pool.map(prepare_pair, new, chunksize=4), strict=True):
            self.faults[kind, plan] = wrong
            if wrong:
                print(f"out: {kind} {plan}: {wrong}", flush=True)

    def measure(self, shape: Shape, num_tokens: int, plans: Iterable[Plan | None]) -> None:
        cell = self.cells.setdefault((shape, num_tokens), Cell(shape, num_tokens, {}))
        todo = [plan for plan in dict.fromkeys(plans) if plan not in cell.seconds and (plan is None or not self.faults[shape.kind, compiled(plan)])]
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
        return fault(cell.shape.kind, run(cell.shape.kind, self.chosen(cell), operands, weight), operands, weight, torch.float32)


def layer_times(tuner: Tuner, model: Model, num_tokens: int) -> tuple[float, float, int]:
    """(ours, torch's, bytes): seconds of one recurrent layer's four products in a row, by the chosen plans, over rotating layers."""
    names = ("delta in", "delta out", "ffn in", "ffn out")
    shapes = [model.shapes()[name] for name in names]
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

    return seconds(best), seconds([None] * len(shapes)), num_bytes


def tune(tuner: Tuner, cells: list[tuple[Shape, int]], began: float) -> None:
    """Every cell's candidates, then variants of the best ones, then what is good at one small token count at the others."""

    def measure_all(wanted: dict[tuple[Shape, int], list[Plan]]) -> None:
        tuner.prepare((shape.kind, plan) for (shape, _), plans in wanted.items() for plan in plans)
        print(f"{len(tuner.faults)} candidates compiled and checked at {time.monotonic() - began:.0f} s", flush=True)
        for (shape, tokens), plans in wanted.items():
            tuner.measure(shape, tokens, [None, *plans])
        print(f"measured at {time.monotonic() - began:.0f} s", flush=True)

    measure_all({(shape, tokens): list(candidates(shape, tokens, tuner.sm_count)) for shape, tokens in cells})
    measure_all({at: [fine for plan in tuner.cells[at].ranked()[: 3 if at[1] in (1, 4) else 1] for fine in refinements(plan)] for at in cells})
    shared: dict[Shape, list[Plan]] = {}
    small = [at for at in cells if at[1] <= MOST_SHARED_TOKENS]
    for shape, tokens in small:
        ranked = tuner.cells[shape, tokens].ranked()
        shared.setdefault(shape, []).extend(ranked[:NUM_SHARED])
    measure_all({(shape, tokens): [plan for plan in shared[shape] if plan.block_m >= tokens] for shape, tokens in small})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=420.0, help="stop measuring new candidates after this long")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    args = parser.parse_args()
    began = time.monotonic()
    tuner = Tuner(began + args.seconds, args.processes)
    print(f"{torch.cuda.get_device_name()}, read {tuner.bandwidth / 1e12:.3f} TB/s", flush=True)
    cells = list(dict.fromkeys((shape, tokens) for tokens in args.tokens for model in args.models for shape in MODELS[model].shapes().values()))
    tune(tuner, cells, began)
    tuner.pool.shutdown()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "linear_plans.json").write_text(plan_file(torch.cuda.get_device_name(), tuner.cells))
    (args.out / "linear.md").write_text("\n".join(cell_lines(tuner.cells, args.models, tuner.bandwidth)) + "\n")
    for cell in tuner.cells.values():
        if cell.seconds and (wrong := tuner.verify(cell)):
            print(f"WRONG at its real shape: {cell.shape} {cell.num_tokens} {describe(tuner.chosen(cell))}: {wrong}")
    for line in chosen_lines(tuner.cells, args.models, tuner.bandwidth):
        print(line)
    for name in args.models:
        for tokens in sorted(args.tokens):
            if all(tuner.cells[MODELS[name].shapes()[layer], tokens].seconds for layer in ("delta in", "delta out", "ffn in", "ffn out")):
                mine, torchs, num_bytes = layer_times(tuner, MODELS[name], tokens)
                share = num_bytes / tuner.bandwidth / mine
                print(f"{name} recurrent layer, {tokens} tokens: {mine * 1e6:.1f} us, {share:.0%} of read; torch {torchs * 1e6:.1f} us")
    print(f"done after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
