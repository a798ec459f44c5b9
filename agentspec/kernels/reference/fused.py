"""Dense blocks and mixers of a forward, composed of the plain operations of this package. See backend.Backend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu
from torch.nn.functional import linear as torch_linear

from agentspec.kernels.backend import (
    AttentionWeights,
    DeltaWeights,
    MixtureWeights,
    Norm,
    OpenProduct,
    OpenSum,
    ProductInput,
    RopeTable,
)
from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.reference import norms
from agentspec.kernels.reference.attention import paged_attention, paged_attention_prefill, write_kv, write_kv_prefill
from agentspec.kernels.reference.causal_conv import causal_conv, causal_conv_prefill
from agentspec.kernels.reference.gated_delta import gated_delta, gated_delta_blocks
from agentspec.kernels.reference.hidden import write_hidden
from agentspec.kernels.reference.live import live_rows
from agentspec.kernels.reference.moe import mix_experts, route_top_k
from agentspec.kernels.reference.ranking import pack_best
from agentspec.kernels.reference.rope import apply_rope
from agentspec.kernels.slots import LiveColumns
from agentspec.kernels.weights import SCALE_BLOCK, Weight

_EXPANDED = 2**25
"""Most values of a quantised weight that a product expands at once, if that is no less than SCALE_BLOCK rows."""


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    return norms.rms_norm(x, norm.weight, norm.eps)


def linear(x_NH: Tensor, weight_OH: Weight) -> Tensor:
    if not weight_OH.is_quantized or weight_OH.shape.numel() <= _EXPANDED:
        return torch_linear(x_NH, weight_OH.dequantize(x_NH.dtype))
    num_rows, depth = weight_OH.shape
    size = max(1, _EXPANDED // depth // SCALE_BLOCK) * SCALE_BLOCK
    pieces = (weight_OH.cut((slice(first, min(first + size, num_rows)),)) for first in range(0, num_rows, size))
    return torch.cat([torch_linear(x_NH, piece.dequantize(x_NH.dtype)) for piece in pieces], -1)


def norm_linear(x_NH: Tensor, norm: Norm | None, weight_OH: Weight, extra_EH: Tensor | None = None) -> Tensor:
    normed_NH = x_NH if norm is None else rms_norm(x_NH, norm)
    out_NO = linear(normed_NH, weight_OH)
    return out_NO if extra_EH is None else torch.cat([out_NO, torch_linear(normed_NH, extra_EH)], -1)


def norm_linear_before_delta(
    x_NH: Tensor, norm: Norm | None, weight_OH: Weight, extra_EH: Tensor | None, gates: slice
) -> Tensor:
    return norm_linear(x_NH, norm, weight_OH, extra_EH)


def norm_swiglu(x_NH: Tensor, norm: Norm | None, gate_up_2IH: Weight) -> Tensor:
    gate_NI, up_NI = norm_linear(x_NH, norm, gate_up_2IH).chunk(2, -1)
    return silu(gate_NI) * up_NI


def add_linear(
    residual_NH: Tensor | None, x_NO: Tensor | ProductInput, weight_HO: Weight, next_norm: Norm | None = None
) -> Tensor:
    assert isinstance(x_NO, Tensor), "no operation here makes another form"
    product_NH = linear(x_NO, weight_HO)
    return product_NH if residual_NH is None else residual_NH + product_NH


def add_linear_before_experts(
    residual_NH: Tensor, x_NO: Tensor | ProductInput, weight_HO: Weight, norm: Norm, weights: MixtureWeights
) -> Tensor:
    return add_linear(residual_NH, x_NO, weight_HO)


def add_ffn(
    residual_NH: Tensor, norm: Norm, gate_up_2IH: Weight, down_HI: Weight, next_norm: Norm | None = None
) -> Tensor:
    return add_linear(residual_NH, norm_swiglu(residual_NH, norm, gate_up_2IH), down_HI)


def add_experts(
    residual_NH: Tensor | OpenSum, norm: Norm, weights: MixtureWeights, next_norm: Norm | None = None
) -> Tensor:
    assert isinstance(residual_NH, Tensor), "no operation here leaves a sum open"
    return residual_NH + expert_sum(residual_NH, norm, weights)


def expert_sum(x_NH: Tensor, norm: Norm, weights: MixtureWeights) -> Tensor:
    """Reads the chosen experts on the host."""
    normed_NH = rms_norm(x_NH, norm)
    weights_NJ, expert_ids_NJ = route_top_k(
        torch_linear(normed_NH, weights.router_XH), weights.top_k, weights.normalize
    )
    held_ids_NJ = expert_ids_NJ - (weights.first_expert or 0)
    routed_NH = mix_experts(normed_NH, weights_NJ, held_ids_NJ, weights.gate_up_X2IH, weights.down_XHI)
    shared_NH = linear(norm_swiglu(x_NH, norm, weights.shared_gate_up_2IH), weights.shared_down_HI)
    return routed_NH + torch.sigmoid(torch_linear(normed_NH, weights.shared_gate_1H)) * shared_NH


def norm_to_rows(x_NH: Tensor, norm: Norm, hidden_RH: Tensor, write_rows_N: Tensor) -> Tensor:
    hidden_NH = rms_norm(x_NH, norm)
    write_hidden(hidden_RH, hidden_NH, write_rows_N)
    return hidden_NH


def logits(x_NH: Tensor, weight_VH: Weight, num_real: int) -> Tensor:
    scores_NV = linear(x_NH, weight_VH).float()
    scores_NV[:, num_real:] = -torch.inf
    return scores_NV


def argmax(logits_NV: Tensor) -> Tensor:
    return logits_NV.argmax(-1)


def pair_norms(
    tokens_N: Tensor, embedding_VH: Tensor, hidden_NH: Tensor, embedding_norm: Norm, hidden_norm: Norm
) -> Tensor:
    return torch.cat(
        [rms_norm(embedding(tokens_N, embedding_VH), embedding_norm), rms_norm(hidden_NH, hidden_norm)], -1
    )


def take_columns(x_NH: Tensor, y_NX: Tensor, column_B: Tensor) -> tuple[Tensor, Tensor]:
    num_slots = len(column_B)
    row_B = torch.arange(num_slots, device=column_B.device) * (len(x_NH) // num_slots) + column_B
    return x_NH[row_B], y_NX[row_B]


def draft_argmax(x_NH: Tensor, head_OH: Weight, ids_O: Tensor | None) -> Tensor:
    nearest_N = linear(x_NH, head_OH).argmax(-1)
    return nearest_N if ids_O is None else ids_O[nearest_N]


def draft_best(x_NH: Tensor, head_OH: Weight, ids_O: Tensor) -> Tensor:
    return pack_best(linear(x_NH, head_OH).float(), ids_O).amax(-1, keepdim=True)


def gated_delta_step(
    projected_NP: Tensor,
    weights: DeltaWeights,
    ssm_RVDK: Tensor,
    conv_R3C: Tensor,
    read_row_B: Tensor,
    write_rows_BT: Tensor,
) -> Tensor:
    window = write_rows_BT.shape
    num_heads, value_dim = ssm_RVDK.shape[1:3]
    qkv, z, b, a = torch.split(projected_NP, [conv_R3C.shape[2], num_heads * value_dim, num_heads, num_heads], -1)
    qkv_BTC = causal_conv(torch.unflatten(qkv, 0, window), weights.conv_C4, conv_R3C, read_row_B, write_rows_BT)
    a_BTV, b_BTV = torch.unflatten(a, 0, window), torch.unflatten(b, 0, window)
    o_BTVD = gated_delta(qkv_BTC, a_BTV, b_BTV, weights.a_log_V, weights.dt_bias_V, ssm_RVDK, read_row_B, write_rows_BT)
    z_NVD = torch.unflatten(z, -1, (num_heads, value_dim))
    return norms.gated_rms_norm(o_BTVD.flatten(0, 1), z_NVD, weights.norm_D, weights.eps, weights.gate).flatten(1)


def gated_delta_prefill(
    projected: Tensor | OpenProduct,
    weights: DeltaWeights,
    ssm_RVDK: Tensor,
    conv_R3C: Tensor,
    batch: PrefillBatch,
    *,
    out_weight: Weight | None = None,
) -> Tensor:
    assert isinstance(projected, Tensor), "no operation here leaves columns open"
    num_heads, value_dim = ssm_RVDK.shape[1:3]
    qkv, z, b, a = torch.split(projected, [conv_R3C.shape[2], num_heads * value_dim, num_heads, num_heads], -1)
    qkv_NC = causal_conv_prefill(qkv, weights.conv_C4, conv_R3C, batch)
    o_NVD = gated_delta_blocks(qkv_NC, a, b, weights.a_log_V, weights.dt_bias_V, ssm_RVDK, batch)
    z_NVD = torch.unflatten(z, -1, (num_heads, value_dim))
    return norms.gated_rms_norm(o_NVD, z_NVD, weights.norm_D, weights.eps, weights.gate).flatten(1)


def attention_step(
    projected_NP: Tensor,
    weights: AttentionWeights,
    rope: RopeTable,
    kv_P2SGD: Tensor,
    page_table_BP: Tensor,
    start_B: Tensor,
    *,
    first_position: int,
    exponent_P2GS: Tensor | None = None,
    live: LiveColumns | None = None,
) -> Tensor:
    if live is not None:
        out_NX = projected_NP.new_zeros(projected_NP.shape[0], weights.num_heads * weights.head_dim)
        for slot, rows in live_rows(live):
            pool = kv_P2SGD, page_table_BP[slot : slot + 1], start_B[slot : slot + 1]
            out_NX[rows] = attention_step(
                projected_NP[rows],
                weights,
                rope,
                *pool,
                first_position=first_position,
                exponent_P2GS=exponent_P2GS,
            )
        return out_NX
    window = (start_B.shape[0], projected_NP.shape[0] // start_B.shape[0])
    position_N = (start_B[:, None] + torch.arange(window[1], device=start_B.device)).flatten()
    q_NQD, gate_ND, k_NGD, v_NGD = split_heads(projected_NP, weights, rope.cos_LA[position_N], rope.sin_LA[position_N])
    q_BTQD, k_BTGD, v_BTGD = (torch.unflatten(x, 0, window) for x in (q_NQD, k_NGD, v_NGD))
    write_kv(kv_P2SGD, k_BTGD, v_BTGD, page_table_BP, start_B, exponent_P2GS)
    o_BTQD = paged_attention(
        q_BTQD,
        kv_P2SGD,
        page_table_BP,
        start_B,
        scale=weights.scale,
        first_position=first_position,
        exponent_P2GS=exponent_P2GS,
    )
    return o_BTQD.flatten(0, 1).flatten(1) * torch.sigmoid(gate_ND)


def attention_prefill(
    projected_NP: Tensor,
    weights: AttentionWeights,
    rope: RopeTable,
    kv_P2SGD: Tensor,
    batch: PrefillBatch,
    *,
    exponent_P2GS: Tensor | None = None,
) -> Tensor:
    cos_NA, sin_NA = rope.cos_LA[batch.position_N], rope.sin_LA[batch.position_N]
    q_NQD, gate_ND, k_NGD, v_NGD = split_heads(projected_NP, weights, cos_NA, sin_NA)
    write_kv_prefill(kv_P2SGD, k_NGD, v_NGD, batch, exponent_P2GS)
    o_NQD = paged_attention_prefill(q_NQD, kv_P2SGD, batch, scale=weights.scale, exponent_P2GS=exponent_P2GS)
    return o_NQD.flatten(1) * torch.sigmoid(gate_ND)


def store_keys_values(
    projected_NK: Tensor,
    weights: AttentionWeights,
    rope: RopeTable,
    kv_P2SGD: Tensor,
    batch: PrefillBatch,
    *,
    exponent_P2GS: Tensor | None = None,
) -> None:
    k_NGD, v_NGD = split_keys_values(
        projected_NK, weights, rope.cos_LA[batch.position_N], rope.sin_LA[batch.position_N]
    )
    write_kv_prefill(kv_P2SGD, k_NGD, v_NGD, batch, exponent_P2GS)


def split_heads(
    projected_NP: Tensor, weights: AttentionWeights, cos_NA: Tensor, sin_NA: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q_NQD, gate_ND, k_NGD, v_NGD) of a projection laid out as in Backend.attention_step; q and k after norm and
    RoPE."""
    queries_gates, keys_values = projected_NP.tensor_split([2 * weights.num_heads * weights.head_dim], -1)
    # q_proj's rows hold q and its gate head by head, not all of q before all gates.
    q_NQD, gate_NQD = torch.unflatten(queries_gates, -1, (weights.num_heads, 2 * weights.head_dim)).chunk(2, -1)
    q_NQD = apply_rope(rms_norm(q_NQD, weights.q_norm), cos_NA, sin_NA)
    return q_NQD, gate_NQD.flatten(1), *split_keys_values(keys_values, weights, cos_NA, sin_NA)


def split_keys_values(
    projected_NP: Tensor, weights: AttentionWeights, cos_NA: Tensor, sin_NA: Tensor
) -> tuple[Tensor, Tensor]:
    """(k_NGD after norm and RoPE, v_NGD) of the part of a projection that follows the queries."""
    k_NGD, v_NGD = torch.unflatten(projected_NP, -1, (2 * weights.num_kv_heads, weights.head_dim)).chunk(2, 1)
    return apply_rope(rms_norm(k_NGD, weights.k_norm), cos_NA, sin_NA), v_NGD
