"""Tilings of the linear layers: measured on an H100, and a rule for all other shapes.

Owns the choice only, not the kernels. `benchmarks/linear.py` measures the candidates and writes `linear_plans.json`:
entries for 16-bit weights, and with 16-bit activations for 8-bit ones: block-scaled (`"weight": "fp8"`), and with a
scale for each row (`"weight": "fp8 rows"`), which heads have.

Shape letters: O output features (for SwiGLU those of gate and up together), K input features, N tokens.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from agentspec.kernels.triton.machine import HOPPER_SHARED_BYTES, fitting_stages

Kind = Literal["linear", "norm_linear", "norm_swiglu", "add_linear", "logits", "draft_argmax"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Tiling of one product: a program owns block_o outputs of block_m tokens and loops over its share of K in steps
    of block_k."""

    block_o: int
    block_m: int
    block_k: int
    split: int = 1
    """Programs that share a tile's K (split-K); the last one to arrive adds the parts in order."""
    stages: int
    """Pipeline stages: steps in shared memory."""
    warps: int
    ahead: int = 0
    """Steps whose weights are prefetched to L2 before waiting for the previous kernel."""
    running: bool = False
    """Keep prefetching at that distance during the loop."""
    release: int = 2
    """Steps before the end at which the next kernel may start."""
    norm_apart: bool = False
    """Run a norm before the product as a separate launch, while the first weights arrive, instead of within every
    step. For steps that are short compared with the norm's work in them, and to allow split-K. No effect without a
    norm."""
    programs: int = 0
    """If not 0, the product is that of linear_hopper.py, by so many programs: of tiles of 128 or 256 rows, steps of 128
    columns, eight warps and one, and nothing of `split`, `ahead` and `running`."""

    @property
    def takes_pairs(self) -> bool:
        """Whether 8-bit weights are read in pairs: Triton compiles such a plan to Hopper's matrix instructions of four
        warps."""
        return self.warps % 4 == 0 and self.block_o % 64 == 0 and self.block_m >= 16


NO_TORCH_PRODUCT: tuple[Kind, ...] = ("logits", "draft_argmax")
"""Torch has no product with these results, so they have a plan for any number of tokens, processed in blocks."""
SMALL_TOKENS = 64
"""Largest number of tokens for which a shape without a measurement uses our kernels. Above, the library's product is
used: weights no longer dominate the traffic."""

Key = tuple[Kind, int, int]
"""Kind, O, K."""


def _read(
    path: Path, weight: Literal["16-bit", "fp8", "fp8 rows"] = "16-bit"
) -> dict[Key, tuple[tuple[int, Plan | None], ...]]:
    layers = json.loads(path.read_text())["layers"]
    return {
        (layer["kind"], layer["num_outputs"], layer["depth"]): tuple(
            (most, None if plan is None else Plan(**plan)) for most, plan in layer["plans"]
        )
        for layer in layers
        if layer.get("weight", "16-bit") == weight
    }


FILE = Path(__file__).with_name("linear_plans.json")
MEASURED = _read(FILE)
"""(most tokens, plan) in rising order for each key, for 16-bit weights. None: torch's product."""
MEASURED_FP8 = _read(FILE, "fp8")
"""The same for block-scaled weights and 16-bit activations. None: the product of `fp8_prefill`."""
MEASURED_FP8_ROWS = {key: plans for key, plans in MEASURED_FP8.items() if key[0] in NO_TORCH_PRODUCT} | _read(
    FILE, "fp8 rows"
)
"""The same for weights with a scale for each row. Where there is no measurement, that of a block-scaled weight counts:
the same bytes are read and decoded, and each tile is scaled once instead of in every step."""
_MEASURED = {"plain": MEASURED, "fp8": MEASURED_FP8, "fp8 rows": MEASURED_FP8_ROWS}
"""By plan key of the weight."""
_8_BIT = ("fp8", "fp8 rows")
"""Plan keys."""

_SM_COUNT = 132


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _rule(kind: Kind, num_outputs: int, depth: int, num_tokens: int, element_bytes: int) -> Plan | None:
    """Aim: enough programs for every SM, all resident at once, each with about 48 KB of weights in flight."""
    if num_tokens > SMALL_TOKENS and kind not in NO_TORCH_PRODUCT:
        return None
    block_m = min(max(_power_of_two(num_tokens), 8), 64)
    if element_bytes == 4:
        return Plan(
            block_o=32, block_m=min(block_m, 32), block_k=min(32, max(16, _power_of_two(depth))), stages=2, warps=8
        )
    block_k = min(128, max(16, _power_of_two(depth)))
    block_o = 128 if num_outputs >= 128 * _SM_COUNT and block_m <= 16 else 64
    if num_outputs < 32 * _SM_COUNT and kind == "norm_linear" and block_m <= 16:
        block_o = 32  # with two warps, which lack registers for the norm of more tokens
    tiles = -(-num_outputs // block_o)
    split = 1
    if kind in ("linear", "add_linear"):
        while tiles * split < _SM_COUNT and depth // (2 * split) >= 4 * block_k:
            split *= 2
    return Plan(
        block_o=block_o,
        block_m=block_m,
        block_k=block_k,
        split=split,
        stages=4 if block_o <= 64 else 3,
        warps=max(block_o // 16, 2),
        ahead=4,
        running=True,
    )


def _fp8_rule(kind: Kind, num_outputs: int, depth: int, num_tokens: int) -> Plan | None:
    """The aim of `_rule` with half the bytes, plus decoding, which every warp does for its own rows. Steps are then
    too short to include a norm.

    Up to 32 tokens: plans that read weights from shared memory four at a time; above: plans with enough registers
    (Plan.takes_pairs)."""
    if num_tokens > SMALL_TOKENS and kind not in NO_TORCH_PRODUCT:
        return None
    has_norm = kind in ("norm_linear", "norm_swiglu")
    block_m = min(max(_power_of_two(num_tokens), 8), 64)
    block_k = min(128, max(16, _power_of_two(depth)))
    if block_m == 64:
        block_o, warps = 64, 4
    else:
        block_o, warps = (64 if num_outputs >= 64 * _SM_COUNT else 32), 2
    tiles = -(-num_outputs // block_o)
    split = 1
    if kind in ("linear", "add_linear", "norm_linear"):
        while tiles * split < 2 * _SM_COUNT and depth // (2 * split) >= 4 * block_k:
            split *= 2
    return Plan(
        block_o=block_o,
        block_m=block_m,
        block_k=block_k,
        split=split,
        stages=4,
        warps=warps,
        ahead=4,
        running=True,
        norm_apart=has_norm,
    )


@functools.cache
def plan_for(
    kind: Kind,
    num_outputs: int,
    depth: int,
    num_tokens: int,
    element_bytes: int,
    plan_key: str = "plain",
    shared_bytes: int = HOPPER_SHARED_BYTES,
    *,
    for_hopper: bool = True,
) -> Plan | None:
    """Return the plan of a product of num_tokens rows with a weight [num_outputs, depth]; None: use a product for many
    tokens.

    element_bytes: of activations. plan_key: the weight's (weights.Weight); a plain weight has the activations' dtype.
    shared_bytes: of a program, at most; with less than Hopper's the pipeline has fewer stages, which changes no bit.
    for_hopper: whether the kernel of plans with `programs` may be used; if not, the rule is in their place."""
    plan = _plan_for(kind, num_outputs, depth, num_tokens, element_bytes, plan_key, for_hopper)
    if plan is None or plan.programs:
        return plan
    weight_bytes = 1 if plan_key in _8_BIT else element_bytes
    stage_bytes = plan.block_k * (plan.block_o * weight_bytes + plan.block_m * element_bytes)
    return replace(plan, stages=fitting_stages(plan.stages, stage_bytes, shared_bytes))


def _plan_for(
    kind: Kind, num_outputs: int, depth: int, num_tokens: int, element_bytes: int, plan_key: str, for_hopper: bool
) -> Plan | None:
    measured = _MEASURED[plan_key].get((kind, num_outputs, depth), ()) if element_bytes == 2 else ()
    for most_tokens, plan in measured:
        if num_tokens <= most_tokens and (plan is None or for_hopper or not plan.programs):
            return plan
    if measured and kind in NO_TORCH_PRODUCT:
        return measured[-1][1]
    if plan_key in _8_BIT and element_bytes == 2:
        return _fp8_rule(kind, num_outputs, depth, num_tokens)
    return _rule(kind, num_outputs, depth, num_tokens, element_bytes)
