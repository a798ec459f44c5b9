"""Results of `benchmarks.linear`: its tables, and the choice of plans.

Times are plain numbers here; the measurement is elsewhere. Needs no GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from agentspec.kernels.triton.linear_plans import NO_TORCH_PRODUCT, Kind, Plan
from agentspec.kernels.weights import SCALE_BLOCK

DRAFT_VOCABULARY, VOCABULARY, NUM_REAL = 32768, 248320, 248077
CLOSE, AS_GOOD = 1.02, 1.01
"""Maximum times relative to the best: for one plan for several token counts, and for a simpler plan."""
GROUPINGS = (((1, 2, 4, 8, 16),), ((1, 2, 4, 8), (16,)), ((1, 2, 4), (8, 16)), ((1, 2, 4), (8,), (16,)))
"""Groups of small token counts that share a plan, and so an accumulation order; the first grouping with little extra
cost is chosen. A stream's 1 token without drafts and 4 with drafts are always in one group."""
ALONE = ((32,), (64,), (128,))
COUNTS = (4, 8, 16, 32, 64, 128)
"""Token counts that may have plans of their own."""

Times = Mapping[Plan | None, float]
"""Plan -> time, None: torch's product."""


@dataclass(frozen=True, slots=True)
class Shape:
    kind: Kind
    num_outputs: int
    depth: int
    fp8: bool = False
    """Weights in 8 bits: block-scaled, unless by_row."""
    num_extra: int = 0
    """16-bit rows whose outputs come after the others."""
    by_row: bool = False
    """Of weights in 8 bits: with a scale for each row."""

    @property
    def element_bytes(self) -> int:
        return 1 if self.fp8 else 2

    @property
    def weight_bytes(self) -> int:
        num_scales = -(-self.num_outputs // SCALE_BLOCK) * -(-self.depth // SCALE_BLOCK) if self.fp8 else 0
        if self.by_row:
            num_scales = self.num_outputs
        return self.element_bytes * self.num_outputs * self.depth + 4 * num_scales + 2 * self.num_extra * self.depth

    @property
    def weight(self) -> str | None:
        """The form of the weight, as `linear_plans.json` has it; None: 16-bit."""
        return "fp8 rows" if self.by_row else "fp8" if self.fp8 else None


@dataclass(frozen=True, slots=True)
class Model:
    """The sizes of a model that determine its linear layers. Heads: query, key/value, recurrent value; recurrent keys
    have 16 heads of 128."""

    hidden: int
    ffn: int
    """Width of the shared expert of a mixture; 0: not measured, as up to 4 tokens it runs among the routed ones."""
    heads: tuple[int, int, int]
    fp8: bool = False
    """Mixers, FFN and draft head are in 8 bits."""
    mixture: bool = False
    only_head: bool = False
    """In 8 bits with a scale for each row. All other layers are those of other entries, or of benchmarks.four_bit."""
    has_rest: bool = False
    """Of a model in 8 bits: with its other products of a step, the MTP layer's fc and the head. Else those are of the
    entry of the same model in 16 bits."""
    head_by_row: bool = False
    """Both heads are in 8 bits with a scale for each row."""
    ranks: int = 1
    """Of a group that shares the model (models/shards.py); the sizes above are the whole model's."""

    def shapes(self) -> dict[str, Shape]:
        """Of one rank. Where there are several, a product that ends in the residual is a partial sum."""
        return self._heads() if self.only_head else self._layers() | self._heads()

    def _layers(self) -> dict[str, Shape]:
        queries, keys, values = (heads // self.ranks for heads in self.heads)
        gates, ffn, recurrent_keys = 2 * values, self.ffn // self.ranks, 16 // self.ranks
        out: Kind = "add_linear" if self.ranks == 1 else "linear"
        sizes: dict[str, tuple[Kind, int, int]] = {
            "delta in": (
                "norm_linear",
                2 * recurrent_keys * 128 + 2 * values * 128 + gates * (not self.fp8),
                self.hidden,
            ),
            "delta out": (out, self.hidden, values * 128),
            "attention in": ("norm_linear", 2 * queries * 256 + 2 * keys * 256, self.hidden),
            "attention out": (out, self.hidden, queries * 256),
        }
        if ffn:
            sizes["ffn in"] = "norm_swiglu", 2 * ffn, self.hidden
            sizes["ffn out"] = "linear" if self.mixture else out, self.hidden, ffn
        found = {
            name: Shape(*size, self.fp8, gates if self.fp8 and name == "delta in" else 0)
            for name, size in sizes.items()
        }
        if not self.fp8 or self.has_rest:
            found["mtp fc"] = Shape("linear", self.hidden, 2 * self.hidden // self.ranks)
        return found

    def _heads(self) -> dict[str, Shape]:
        by_row = self.only_head or self.head_by_row
        draft_rows, rows = DRAFT_VOCABULARY // self.ranks, VOCABULARY // self.ranks
        found = {"draft head": Shape("draft_argmax", draft_rows, self.hidden, self.fp8 or by_row, by_row=by_row)}
        if not self.fp8 or self.has_rest:
            found["logits"] = Shape("logits", rows, self.hidden, by_row, by_row=by_row)
        return found


MODELS = {
    "4B": Model(2560, 9216, (16, 4, 32)),
    "27B": Model(5120, 17408, (24, 4, 48)),
    "9B": Model(4096, 12288, (16, 4, 32)),
    "0.8B": Model(1024, 3584, (8, 2, 16)),
    "35B-A3B": Model(2048, 512, (16, 2, 32), mixture=True),
    "27B-FP8": Model(5120, 17408, (24, 4, 48), fp8=True),
    "35B-A3B-FP8": Model(2048, 512, (16, 2, 32), fp8=True, mixture=True),
    "27B-mixed4": Model(5120, 17408, (24, 4, 48), only_head=True),
    "35B-A3B-mixed4": Model(2048, 512, (16, 2, 32), mixture=True, only_head=True),
}
MODELS |= {
    f"{name}, 2 ranks": replace(MODELS[name], ranks=2) for name in ("27B", "27B-FP8", "35B-A3B-FP8", "27B-mixed4")
}
MODELS |= {
    "122B-A10B-FP8, 2 ranks": Model(3072, 0, (32, 2, 64), fp8=True, mixture=True, has_rest=True, ranks=2),
    "397B-A17B-mixed4, 2 ranks": Model(
        4096, 0, (32, 2, 64), fp8=True, mixture=True, has_rest=True, head_by_row=True, ranks=2
    ),
}
"""Layers of FP8 models with block-scaled weights, and of mixed4 the mixers; the MTP layer's have the same shapes. Other
layers equal those of the same model in 16 bits, or are measured elsewhere: experts by benchmarks.fp8_experts and
benchmarks.four_bit_experts."""


@dataclass(slots=True)
class Cell:
    """One shape at one token count, and its measurements."""

    shape: Shape
    num_tokens: int
    seconds: dict[Plan | None, float]

    @property
    def best(self) -> Plan | None:
        return min(self.seconds, key=self.seconds.__getitem__)

    def ranked(self) -> list[Plan]:
        plans = [plan for plan in self.seconds if plan is not None]
        return sorted(plans, key=self.seconds.__getitem__)


Cells = Mapping[tuple[Shape, int], Cell]


def _one_plan(times: Mapping[int, Times], token_counts: Iterable[int]) -> tuple[float, Plan | None] | None:
    """(its worst time, of each count's best, and the plan) to use for all of these counts; nothing if no plan was
    measured at all of them.

    Close to equal times, a plan is preferred that keeps no running prefetch, then one that prefetches before it awaits
    the previous kernel: in a real step that is often a small kernel, which leaves the memory idle, and the chain
    measured here has no such gaps.
    """
    measured = [times[count] for count in token_counts]
    least = [min(at.values()) for at in measured]
    worst = {
        plan: max(at[plan] / low for at, low in zip(measured, least, strict=True))
        for plan in set(measured[0]).intersection(*measured[1:])
    }
    ours = {plan: cost for plan, cost in worst.items() if plan is not None}
    if not ours:
        return (worst[None], None) if worst else None
    best = min(ours.values())
    if None in worst and worst[None] * AS_GOOD < best:
        return worst[None], None
    near = {plan: cost for plan, cost in ours.items() if cost <= best * AS_GOOD}
    plan = min(near, key=lambda plan: (plan.running, plan.ahead == 0, near[plan], repr(plan)))
    return near[plan], plan


def chosen_plans(shape: Shape, cells: Cells) -> list[tuple[int, Plan | None]]:
    """(most tokens, plan) in rising order, as `linear_plans.MEASURED` has them; token counts that were not measured are
    left out."""
    times = {count: cell.seconds for (at, count), cell in cells.items() if at == shape and cell.seconds}
    if shape.kind in NO_TORCH_PRODUCT:
        times = {
            count: {plan: time for plan, time in seconds.items() if plan is not None}
            for count, seconds in times.items()
        }
    rows: list[tuple[int, Plan | None]] = []
    for grouping in GROUPINGS:
        groups = [
            group for group in (tuple(count for count in group if times.get(count)) for group in grouping) if group
        ]
        found = [_one_plan(times, group) for group in groups]
        if grouping == GROUPINGS[-1] or all(one is not None and one[0] <= CLOSE for one in found):
            rows += [(group[-1], one[1]) for group, one in zip(groups, found, strict=True) if one is not None]
            break
    for group in ALONE:
        if times.get(group[0]) and (one := _one_plan(times, group)):
            rows.append((group[0], one[1]))
    return _without_repeats(rows)


def plan_file(device: str, cells: Cells, recorded: str) -> str:
    """The text of `linear_plans.json`: one line per shape, with the non-default fields of each plan. Shapes and token
    counts without a measurement keep what the recorded text says, as does what is behind a semicolon of `measured`."""
    layers = {_key(layer): layer for layer in json.loads(recorded)["layers"]}
    for shape in dict.fromkeys(shape for (shape, _), cell in cells.items() if cell.seconds):
        layer = _layer(shape)
        measured = sorted(count for (at, count), cell in cells.items() if at == shape and cell.seconds)
        chosen = [(most, None if plan is None else _fields(plan)) for most, plan in chosen_plans(shape, cells)]
        plans = {count: _at(count, chosen) for count in measured}
        if (recorded_layer := layers.get(_key(layer))) is not None:
            rows = recorded_layer["plans"]
            plans = {count: _at(count, rows) for count in COUNTS if count <= rows[-1][0]} | plans
        layers[_key(layer)] = layer | {"plans": _without_repeats(sorted(plans.items()))}
    lines = map(json.dumps, layers.values())
    remark = "".join(json.loads(recorded).get("measured", "").partition(";")[1:])
    return (
        f'{{"measured": "on one {device} by benchmarks/linear.py{remark}",\n"layers": [\n'
        + ",\n".join(lines)
        + "\n]}\n"
    )


def without_plan(cells: Iterable[tuple[Shape, int]], recorded: str) -> list[tuple[Shape, int]]:
    """The token counts of shapes for which the text of `linear_plans.json` has no plan."""
    most = {_key(layer): layer["plans"][-1][0] for layer in json.loads(recorded)["layers"]}
    return [(shape, count) for shape, count in cells if count > most.get(_key(_layer(shape)), 0)]


def _layer(shape: Shape) -> dict[str, Any]:
    """A layer of `linear_plans.json` without its plans."""
    form = {} if shape.weight is None else {"weight": shape.weight}
    return {"kind": shape.kind, **form, "num_outputs": shape.num_outputs, "depth": shape.depth}


def _at(count: int, rows: Sequence[tuple[int, Any]]) -> Any:
    return next(plan for most, plan in rows if count <= most)


def _without_repeats(rows: Sequence[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Without rows that say the same as the next one."""
    return [row for index, row in enumerate(rows) if index + 1 == len(rows) or rows[index + 1][1] != row[1]]


def _key(layer: Mapping[str, Any]) -> tuple[Any, ...]:
    return layer["kind"], layer.get("weight"), layer["num_outputs"], layer["depth"]


def _fields(plan: Plan) -> dict[str, int]:
    return {field.name: value for field in fields(plan) if (value := getattr(plan, field.name)) != field.default}


def describe(plan: Plan | None) -> str:
    if plan is None:
        return "torch"
    if plan.programs:
        tiling = f"{plan.programs} of {plan.block_o}x{plan.block_m} s{plan.stages} r{plan.release}"
        return ("norm + " if plan.norm_apart else "") + tiling
    far = f" r{plan.release}" + (f" a{plan.ahead}{'r' if plan.running else ''}" if plan.ahead else "")
    return (
        ("norm + " if plan.norm_apart else "")
        + f"{plan.block_o}x{plan.block_m}x{plan.block_k} s{plan.stages} w{plan.warps}"
        + (f" /{plan.split}" if plan.split > 1 else "")
        + far
    )


def cell_lines(cells: Cells, models: Iterable[str], bandwidth: float) -> Iterator[str]:
    """Markdown: a row a cell, with its best plan, the runners-up and the best without prefetch."""
    yield "| model | layer | O x K | tokens | us | of read | torch us | best | next | without prefetch |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, layer, shape, cell in _by_layer(cells, models):
        best = cell.seconds[cell.best]
        ranked = cell.ranked()
        runners_up = "; ".join(f"{describe(plan)} {cell.seconds[plan] * 1e6:.2f}" for plan in ranked[1:4])
        plain = next((f"{describe(plan)} {cell.seconds[plan] * 1e6:.2f}" for plan in ranked if not plan.ahead), "")
        torch_us = f"{cell.seconds[None] * 1e6:.2f}" if None in cell.seconds else ""
        yield (
            f"| {name} | {layer} | {shape.num_outputs} x {shape.depth} | {cell.num_tokens} | {best * 1e6:.2f} | "
            f"{shape.weight_bytes / bandwidth / best:.0%} | {torch_us} | {describe(cell.best)} | {runners_up} | "
            f"{plain} |"
        )


def chosen_lines(cells: Cells, models: Iterable[str], bandwidth: float) -> Iterator[str]:
    """Markdown: a row a layer; at each token count us by the chosen plan, its share of the read bandwidth, and torch's
    us."""
    counts = sorted({count for _, count in cells})
    yield "| model | layer | O x K | " + " | ".join(map(str, counts)) + " |"
    yield "|---" * (3 + len(counts)) + "|"
    plans = {shape: chosen_plans(shape, cells) for shape in dict.fromkeys(shape for shape, _ in cells)}
    rows: dict[tuple[str, str, Shape], dict[int, str]] = {}
    for name, layer, shape, cell in _by_layer(cells, models):
        plan = next((plan for most, plan in plans[shape] if cell.num_tokens <= most), None)
        seconds = cell.seconds[plan]
        torch_us = f", {cell.seconds[None] * 1e6:.1f}" if None in cell.seconds else ""
        rows.setdefault((name, layer, shape), {})[cell.num_tokens] = (
            f"{seconds * 1e6:.1f} {shape.weight_bytes / bandwidth / seconds:.0%}{torch_us}"
        )
    for (name, layer, shape), texts in rows.items():
        yield (
            f"| {name} | {layer} | {shape.num_outputs} x {shape.depth} | "
            + " | ".join(texts.get(count, "") for count in counts)
            + " |"
        )


def form_lines(cells: Cells, models: Iterable[str], bandwidth: float) -> Iterator[str]:
    """Markdown: a row a cell that both kernels were measured for; us of the best plan of each."""
    yield "| model | layer | O x K | tokens | linear_kernels | linear_hopper | its share of read | its plan |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, layer, shape, cell in _by_layer(cells, models):
        ranked = cell.ranked()
        best = {form: next((plan for plan in ranked if bool(plan.programs) == form), None) for form in (False, True)}
        if (ours := best[True]) is not None:
            old = "" if best[False] is None else f"{cell.seconds[best[False]] * 1e6:.1f}"
            seconds = cell.seconds[ours]
            yield (
                f"| {name} | {layer} | {shape.num_outputs} x {shape.depth} | {cell.num_tokens} | {old} | "
                f"{seconds * 1e6:.1f} | {shape.weight_bytes / bandwidth / seconds:.0%} | {describe(ours)} |"
            )


def _by_layer(cells: Cells, models: Iterable[str]) -> Iterator[tuple[str, str, Shape, Cell]]:
    for name in models:
        for layer, shape in MODELS[name].shapes().items():
            for (at, _), cell in sorted(cells.items(), key=lambda item: item[0][1]):
                if at == shape and cell.seconds:
                    yield name, layer, shape, cell
