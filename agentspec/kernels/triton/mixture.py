"""The mixture of experts: routing, experts, sum; and where the shared expert runs. See backend.Backend.add_experts.

Up to MOST_TOKENS tokens loading the weights determines the time, and `experts` has the kernels; above,
`expert_prefill`. Owns the choice between them, the choice of their tiles, and whether the sum before a mixture is left
to its router (routing.py).
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
from torch import Tensor

from agentspec.kernels.backend import MixtureWeights, Norm, OpenSum, ProductInput
from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.triton import experts, four_bit_experts, side_stream
from agentspec.kernels.triton.expert_groups import group_pairs
from agentspec.kernels.triton.expert_prefill import add_experts_prefill, takes_scaled
from agentspec.kernels.triton.experts import FEW_TOKENS, Tiles, Visits
from agentspec.kernels.triton.linear_layers import add_linear, linear, norm_swiglu, product_apart
from agentspec.kernels.triton.routing import Routing, route, takes_open_sum
from agentspec.kernels.weights import SCALE_BLOCK, BlockScaled, Weight

MOST_TOKENS = 256
"""Above this, products are bound by arithmetic rather than by weights."""

Placement = Literal["among", "beside", "behind"]
"""Where the shared expert runs. among: as one more visit of every token; beside: in parallel on a second stream;
behind: after the routing, on the same stream."""

forced_placement: Placement | None = None
"""For benchmarks: overrides `placement_for`. Set it before a step is captured."""

_FASTEST: tuple[tuple[int, Placement], ...] = ((4, "among"), (16, "beside"), (MOST_TOKENS, "among"))
"""(most tokens, placement) if the shared expert can run among the routed ones. Measured on whole steps of 35B-A3B in
FP8 on an H100."""
_MOST_TOKENS_BESIDE = 32
"""Otherwise: the second stream pays while a step is short compared with its launches."""

_MOST_TOKENS_BY_EIGHTS = 64
"""Of 35B-A3B's experts hardly any is then visited by more than eight tokens."""


def add_linear_before_experts(
    residual_NH: Tensor, x_NO: Tensor | ProductInput, weight_HO: Weight, norm: Norm, weights: MixtureWeights
) -> Tensor | OpenSum:
    if len(residual_NH) > MOST_TOKENS and takes_open_sum(residual_NH, norm, weights):
        product_NH = product_apart(x_NO, weight_HO)
        if product_NH is not None:
            return OpenSum(residual_NH, product_NH)
    return add_linear(residual_NH, x_NO, weight_HO)


def add_experts(
    residual_NH: Tensor | OpenSum, norm: Norm, weights: MixtureWeights, next_norm: Norm | None = None
) -> Tensor:
    if isinstance(residual_NH, OpenSum):
        return _add_to_prompt(None, residual_NH, norm, weights, next_norm)
    return _add_to(residual_NH, residual_NH, norm, weights, next_norm)


def expert_sum(x_NH: Tensor, norm: Norm, weights: MixtureWeights) -> Tensor:
    return _add_to(None, x_NH, norm, weights)


def _add_to(
    base_NH: Tensor | None, x_NH: Tensor, norm: Norm, weights: MixtureWeights, next_norm: Norm | None = None
) -> Tensor:
    """base, if there is one, + the mixture of experts of the normed x. The base may be overwritten. next_norm: a
    prompt's sum may leave it (fp8_sums.py)."""
    num_tokens = x_NH.shape[0]
    if num_tokens == 0:
        return torch.empty_like(x_NH) if base_NH is None else base_NH
    if num_tokens > MOST_TOKENS:
        return _add_to_prompt(torch.zeros_like(x_NH) if base_NH is None else base_NH, x_NH, norm, weights, next_norm)
    placement = placement_for(num_tokens, weights)
    shared_NH: Tensor | None = None
    visit_shared = placement == "among"
    assert not visit_shared or shared_matches_routed(weights), (
        "a shared expert of another form cannot run among the routed ones"
    )
    if placement == "beside":
        with side_stream.fork(x_NH.device):
            shared_NH = _shared_expert(x_NH, norm, weights)
    absent = -1 if num_tokens <= FEW_TOKENS else weights.gate_up_X2IH.shape[0] + int(visit_shared)
    routing = route(
        x_NH, norm, weights, visit_shared=visit_shared, absent=None if weights.first_expert is None else absent
    )
    if placement == "behind":
        shared_NH = _shared_expert(x_NH, norm, weights)
    parts_PH = _parts(routing, weights, visit_shared=visit_shared)
    if placement == "beside":
        side_stream.join(x_NH.device)
    num_visits = routing.ids_NC.shape[1]
    return experts.add_visits(base_NH, parts_PH, num_visits, routing.gate_N, shared_NH, dtype=x_NH.dtype)


def _add_to_prompt(
    base_NH: Tensor | None, x: Tensor | OpenSum, norm: Norm, weights: MixtureWeights, next_norm: Norm | None
) -> Tensor:
    """`_add_to` of many tokens. base: None for the sum x itself, which is open."""
    dtype = x.dtype if isinstance(x, Tensor) else x.residual_NH.dtype
    absent = None if weights.first_expert is None else weights.gate_up_X2IH.shape[0]
    routing = route(x, norm, weights, visit_shared=False, in_fp8=takes_scaled(dtype, weights), absent=absent)
    out_NH = routing.summed_NH if base_NH is None else base_NH
    assert out_NH is not None
    assert routing.gate_N is not None
    return add_experts_prefill(
        out_NH, routing.normed, routing.weights_NC, routing.ids_NC, routing.gate_N, weights, next_norm
    )


def placement_for(num_tokens: int, weights: MixtureWeights) -> Placement:
    if forced_placement is not None:
        return forced_placement
    if shared_matches_routed(weights):
        return next(placement for most, placement in _FASTEST if num_tokens <= most)
    return "beside" if num_tokens <= _MOST_TOKENS_BESIDE else "behind"


def shared_matches_routed(weights: MixtureWeights) -> bool:
    """Whether the shared expert has the width and weight form of the routed ones, so that it can run among them."""
    pairs = ((weights.shared_gate_up_2IH, weights.gate_up_X2IH), (weights.shared_down_HI, weights.down_XHI))
    return all(shared.shape == routed.shape[1:] and _form(shared) == _form(routed) for shared, routed in pairs)


def _form(weight: Weight) -> object:
    if isinstance(weight, FourBitTiles):
        return weight.form
    return (
        (weight.values.dtype, weight.block_rows)
        if isinstance(weight, BlockScaled)
        else (weight.tensor.dtype, SCALE_BLOCK)
    )


def _parts(routing: Routing, weights: MixtureWeights, *, visit_shared: bool) -> Tensor:
    """float32 [P, H]: the weighted output of each visit."""
    assert isinstance(routing.normed, Tensor)
    x_NH, num_tokens = routing.normed, len(routing.normed)
    num_experts = weights.gate_up_X2IH.shape[0] + int(visit_shared)
    block_m = visits_per_program(num_tokens, weights.gate_up_X2IH)
    visits = visits_of(routing, num_experts, block_m, all_held=weights.first_expert is None)
    shared_2IH, shared_HI = (weights.shared_gate_up_2IH, weights.shared_down_HI) if visit_shared else (None, None)
    return _down(_gate_up(x_NH, weights.gate_up_X2IH, shared_2IH, visits), weights.down_XHI, shared_HI, visits)


def _gate_up(x_NH: Tensor, weight_X2IH: Weight, shared_2IH: Weight | None, visits: Visits) -> Tensor:
    if four_bit_experts.takes_decoded(weight_X2IH, x_NH.dtype):
        plan = four_bit_experts.gate_up_plan(
            weight_X2IH.shape[1] // 2, weight_X2IH.shape[2], visits.block_m, weight_X2IH.form.format
        )
        return four_bit_experts.gate_up(plan, x_NH, weight_X2IH, shared_2IH, visits)
    weight_X2IH = four_bit_experts.in_plain(weight_X2IH, x_NH.dtype)
    shared_2IH = None if shared_2IH is None else four_bit_experts.in_plain(shared_2IH, x_NH.dtype)
    tiles = gate_up_tiles(weight_X2IH, x_NH.dtype, len(visits.ids_NC))
    return experts.gate_up(tiles, x_NH, weight_X2IH, shared_2IH, visits)


def _down(h_PI: Tensor, weight_XHI: Weight, shared_HI: Weight | None, visits: Visits) -> Tensor:
    if four_bit_experts.takes_decoded(weight_XHI, h_PI.dtype):
        plan = four_bit_experts.down_plan(
            weight_XHI.shape[1], weight_XHI.shape[2], visits.block_m, weight_XHI.form.format
        )
        return four_bit_experts.down(plan, h_PI, weight_XHI, shared_HI, visits)
    weight_XHI = four_bit_experts.in_plain(weight_XHI, h_PI.dtype)
    shared_HI = None if shared_HI is None else four_bit_experts.in_plain(shared_HI, h_PI.dtype)
    tiles = down_tiles(weight_XHI, h_PI.dtype, len(visits.ids_NC))
    return experts.down(tiles, h_PI, weight_XHI, shared_HI, visits)


def _shared_expert(x_NH: Tensor, norm: Norm, weights: MixtureWeights) -> Tensor:
    return linear(norm_swiglu(x_NH, norm, weights.shared_gate_up_2IH), weights.shared_down_HI)


def visits_per_program(num_tokens: int, weight_X2IH: Weight) -> int:
    """Among few tokens, any of which may visit an expert, as many as there are. Products with 4-bit weights have little
    to do but decode them, and several programs may decode the same."""
    most = _MOST_TOKENS_BY_EIGHTS if isinstance(weight_X2IH, FourBitTiles) and num_tokens > FEW_TOKENS else 8
    return 8 if num_tokens <= most else 16


def visits_of(routing: Routing, num_experts: int, block_m: int, *, all_held: bool = True) -> Visits:
    """Group the visits by expert where the kernels need it. num_experts: includes the shared one if it is visited.
    block_m, all_held: as in Visits."""
    num_tokens = routing.ids_NC.shape[0]
    groups = None
    if num_tokens > FEW_TOKENS:
        groups = group_pairs(routing.ids_NC, num_experts, block_m, all_held=all_held)
    return Visits(
        ids_NC=routing.ids_NC, weights_NC=routing.weights_NC, groups=groups, block_m=block_m, all_held=all_held
    )


# Fastest on an H100 at the shapes of 35B-A3B: separate launches with 8, 16, 32 and 128 tokens, whole steps with up to
# 4; with more outputs, in whole steps of 122B-A10B on two H200.


def gate_up_tiles(weight: Weight, dtype: torch.dtype, num_tokens: int) -> Tiles:
    depth = weight.shape[-1]
    if dtype == torch.float32:
        return Tiles(block_o=32, block_k=_block_k(depth, 32), warps=4, stages=2)
    if isinstance(weight, BlockScaled) and num_tokens <= 4:
        return Tiles(block_o=64, block_k=_block_k(depth, SCALE_BLOCK), warps=4, stages=3, release=5)
    if isinstance(weight, BlockScaled) and num_tokens > 8:
        return Tiles(block_o=64, block_k=_block_k(depth, 256), warps=2, stages=3, release=3)
    if num_tokens <= 8:
        return Tiles(block_o=32, block_k=_block_k(depth, 256), warps=2, stages=3, release=3)
    return Tiles(block_o=64, block_k=_block_k(depth, 128), warps=4, stages=3, release=3)


def down_tiles(weight: Weight, dtype: torch.dtype, num_tokens: int) -> Tiles:
    depth = weight.shape[-1]
    if dtype == torch.float32:
        return Tiles(block_o=32, block_k=_block_k(depth, 32), warps=4, stages=2)
    if not isinstance(weight, BlockScaled):
        return Tiles(block_o=64, block_k=_block_k(depth, 128), warps=4, stages=3, ahead=1, release=3)
    if num_tokens <= 4 and weight.shape[-2] > 2048:
        return Tiles(block_o=128, block_k=_block_k(depth, SCALE_BLOCK), warps=4, stages=3, ahead=1, release=3)
    if num_tokens <= 8:
        return Tiles(
            block_o=64, block_k=_block_k(depth, 256), warps=4 if num_tokens <= 4 else 2, stages=3, ahead=1, release=3
        )
    return Tiles(block_o=64, block_k=_block_k(depth, SCALE_BLOCK), warps=2, stages=4, ahead=2, release=3)


def _block_k(depth: int, most: int) -> int:
    return min(most, max(16, int(triton.next_power_of_2(depth))))
