"""How each linear layer is cut into programs: what was measured on an H100, and a rule for every other shape.

Owns the choice alone: knows nothing of what the kernels compute with it. `benchmarks/linear.py` measures the candidates
and writes `linear_plans.json`: entries for 16-bit weights, and for 8-bit block-scaled ones (`"weight": "fp8"`) with
16-bit activations.

Shape letters: O output features (for SwiGLU those of gate and up together), K input features, N tokens.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["linear", "norm_linear", "norm_swiglu", "add_linear", "logits", "nearest_token"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One way to cut a product: a program owns block_o outputs of block_m tokens and walks over its share of K in steps
    of block_k."""

    block_o: int
    block_m: int
    block_k: int
    split: int = 1
    """Programs that share a tile's K; the last one to arrive adds the parts up in order."""
    stages: int
    """Steps in shared memory."""
    warps: int
    ahead: int = 0
    """Steps whose weights are asked into L2 before the previous kernel is awaited."""
    running: bool = False
    """Keep that distance all along."""
    release: int = 2
    """Steps before the end at which the next kernel may start."""
    norm_apart: bool = False
    """A norm before the product is a launch of its own, while the first weights arrive, instead of a part of every
    step: for steps that are short against what the norm adds to them, and so that programs may share a tile's K.
    Nothing where there is no norm."""

    @property
    def takes_pairs(self) -> bool:
        """Whether 8-bit weights are read by twos: Triton computes such a plan with Hopper's matrix instructions of four
        warps."""
        return self.warps % 4 == 0 and self.block_o % 64 == 0 and self.block_m >= 16


OURS_ALONE: tuple[Kind, ...] = ("logits", "nearest_token")
"""No product of torch gives these results, so they have a plan for any number of tokens: it takes them a block at a
time."""
SMALL_TOKENS = 64
"""Up to here a shape without a measurement gets our kernels; above, the library's product, whose weights are then not
all the traffic."""

Key = tuple[Kind, int, int]
"""Kind, O, K."""


def _read(path: Path, weight: Literal["16-bit", "fp8"] = "16-bit") -> dict[Key, tuple[tuple[int, Plan | None], ...]]:
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
"""For each key (most tokens, plan) in rising order, for 16-bit weights. None: torch's own product."""
MEASURED_FP8 = _read(FILE, "fp8")
"""For block-scaled weights and 16-bit activations. None: the product of `fp8_prefill`."""
_MEASURED = {"plain": MEASURED, "fp8": MEASURED_FP8}
"""By the weight's plan key."""

_SM_COUNT = 132


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _rule(kind: Kind, num_outputs: int, depth: int, num_tokens: int, element_bytes: int) -> Plan | None:
    """Enough programs for every SM, all resident at once, each with about 48 KB of weights on the way."""
    if num_tokens > SMALL_TOKENS and kind not in OURS_ALONE:
        return None
    block_m = min(max(_power_of_two(num_tokens), 8), 64)
    if element_bytes == 4:
        return Plan(
            block_o=32, block_m=min(block_m, 32), block_k=min(32, max(16, _power_of_two(depth))), stages=2, warps=8
        )
    block_k = min(128, max(16, _power_of_two(depth)))
    block_o = 128 if num_outputs >= 128 * _SM_COUNT and block_m <= 16 else 64
    if num_outputs < 32 * _SM_COUNT and kind == "norm_linear" and block_m <= 16:
        block_o = 32  # with two warps, which have no registers for the norm of more tokens
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
    """The same aim with half the bytes, and with decoding, which every warp does for its own rows. A step is then too
    short to hold a norm.

    Up to 32 tokens by plans whose weights come out of shared memory by fours; for more by those that have registers
    enough (Plan.takes_pairs)."""
    if num_tokens > SMALL_TOKENS and kind not in OURS_ALONE:
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
    kind: Kind, num_outputs: int, depth: int, num_tokens: int, element_bytes: int, plan_key: str = "plain"
) -> Plan | None:
    """The plan of a product of num_tokens rows with a weight [num_outputs, depth]; None: use a product that is made for
    many tokens.

    element_bytes: of activations. plan_key: the weight's (weights.Weight); a plain one has the activations' dtype."""
    measured = _MEASURED[plan_key].get((kind, num_outputs, depth), ()) if element_bytes == 2 else ()
    for most_tokens, plan in measured:
        if num_tokens <= most_tokens:
            return plan
    if measured and kind in OURS_ALONE:
        return measured[-1][1]
    if plan_key == "fp8" and element_bytes == 2:
        return _fp8_rule(kind, num_outputs, depth, num_tokens)
    return _rule(kind, num_outputs, depth, num_tokens, element_bytes)
