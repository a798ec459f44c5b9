"""The gated delta rule over state rows (arXiv 2412.06464), token by token for verify and in blocks for prefill.

Per value head, with decay a = exp(g), in this order:

    S <- a S;   d = beta (v - S k);   S <- S + d k^T;   o = S q

S is [D, K], value dim first. q and k are L2-normalised per head, and q is scaled by K ** -0.5, in this module. Value
head j reads key head j // (value heads / key heads): heads are repeated, never tiled. State and gates are float32
throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.reference.spans import read_spans
from agentspec.kernels.traffic import state_traffic, touches_pools

_L2_EPS = 1e-6


def _l2_normalize(x: Tensor) -> Tensor:
    """x / |x| in float32, with eps added to the sum of squares."""
    x32 = x.float()
    return x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + _L2_EPS)


def gates(a: Tensor, b: Tensor, a_log_V: Tensor, dt_bias_V: Tensor) -> tuple[Tensor, Tensor]:
    """(log decay g, write strength beta), both float32 [..., V]."""
    return -a_log_V.exp() * softplus(a.float() + dt_bias_V), torch.sigmoid(b.float())


def split_heads(qkv: Tensor, num_value_heads: int, value_dim: int, key_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [..., V, K] (normalised, repeated to the value heads, q scaled) and v [..., V, D], float32."""
    num_keys = (qkv.shape[-1] - num_value_heads * value_dim) // 2
    q, k, v = torch.split(qkv, [num_keys, num_keys, num_value_heads * value_dim], -1)
    repeats = num_value_heads * key_dim // num_keys
    q = _l2_normalize(torch.unflatten(q, -1, (-1, key_dim))) * key_dim**-0.5
    k = _l2_normalize(torch.unflatten(k, -1, (-1, key_dim)))
    v = torch.unflatten(v, -1, (num_value_heads, value_dim)).float()
    return q.repeat_interleave(repeats, -2), k.repeat_interleave(repeats, -2), v


def apply_state(state_BVDK: Tensor, x_BVK: Tensor) -> Tensor:
    """S x of every head: [B, V, D]."""
    return (state_BVDK @ x_BVK[..., None]).squeeze(-1)


@touches_pools
def gated_delta(
    qkv_BTC: Tensor,
    a_BTV: Tensor,
    b_BTV: Tensor,
    a_log_V: Tensor,
    dt_bias_V: Tensor,
    ssm_RVDK: Tensor,
    read_row_B: Tensor,
    write_rows_BT: Tensor,
) -> Tensor:
    """Run the recurrence over every slot's window, from its read row. The state after column t is stored to
    write_rows_BT[:, t].

    Args:
        qkv_BTC: [B, T, C], after convolution and SiLU: all query heads, all key heads, all value heads.
        a_BTV, b_BTV: [B, T, V], raw projections of decay and write strength.
        a_log_V, dt_bias_V: float32 [V].
        ssm_RVDK: pool of one layer, float32 [R, V, D, K]; modified. A row may be read and written in one call.
        read_row_B: int64 [B]. write_rows_BT: int64 [B, T].
    Returns: o_BTVD, float32.
    """
    _, num_value_heads, value_dim, key_dim = ssm_RVDK.shape
    q_BTVK, k_BTVK, v_BTVD = split_heads(qkv_BTC, num_value_heads, value_dim, key_dim)
    g_BTV, beta_BTV = gates(a_BTV, b_BTV, a_log_V, dt_bias_V)
    decay_BTV = g_BTV.exp()
    state = ssm_RVDK[read_row_B]
    num_slots, num_tokens = write_rows_BT.shape
    o_BTVD = torch.empty_like(v_BTVD)
    for t in range(num_tokens):
        state *= decay_BTV[:, t, :, None, None]
        delta_BVD = (v_BTVD[:, t] - apply_state(state, k_BTVK[:, t])) * beta_BTV[:, t, :, None]
        state += delta_BVD[..., None] * k_BTVK[:, t, :, None, :]
        o_BTVD[:, t] = apply_state(state, q_BTVK[:, t])
        ssm_RVDK[write_rows_BT[:, t]] = state
    state_traffic.rows_read += num_slots
    state_traffic.rows_written += num_slots * num_tokens
    return o_BTVD


@touches_pools
def gated_delta_blocks(
    qkv_NC: Tensor,
    a_NV: Tensor,
    b_NV: Tensor,
    a_log_V: Tensor,
    dt_bias_V: Tensor,
    ssm_RVDK: Tensor,
    batch: PrefillBatch,
) -> Tensor:
    """`gated_delta` over the spans of a prefill. The state is stored only to the save rows of their blocks.

    Args:
        qkv_NC, a_NV, b_NV: in the order of the batch; otherwise as in `gated_delta`.
        a_log_V, dt_bias_V, ssm_RVDK: as in `gated_delta`; the pool is modified.
    Returns: o_NVD, float32.
    """
    _, num_value_heads, value_dim, key_dim = ssm_RVDK.shape
    q, k, v = (x.transpose(0, 1) for x in split_heads(qkv_NC, num_value_heads, value_dim, key_dim))
    g, beta = (x.transpose(0, 1) for x in gates(a_NV, b_NV, a_log_V, dt_bias_V))
    o_VND = torch.empty_like(v)
    for span in read_spans(batch):
        state_VDK = ssm_RVDK[span.read_row].clone()
        for block in span.blocks:
            tokens = slice(block.begin, block.end)
            o_VND[:, tokens], state_VDK = _fold_block(
                state_VDK, q[:, tokens], k[:, tokens], v[:, tokens], g[:, tokens], beta[:, tokens]
            )
            for row in block.save_rows:
                ssm_RVDK[row] = state_VDK
            state_traffic.rows_written += len(block.save_rows)
        state_traffic.rows_read += 1
    return o_VND.transpose(0, 1)


def _fold_block(state_VDK: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of one block and the state after it; q, k [V, n, K], v [V, n, D], g, beta [V, n].

    With G the running sum of g, unrolling the recurrence gives S_t = e^{G_t} S_0 + sum_{j<=t} e^{G_t - G_j} d_j k_j^T.
    So the d_t are the solution of one unit lower triangular system, instead of n dependent steps."""
    # Differences of long sums nearly cancel below: float64 keeps every bit of float32.
    log_decay = g.double().cumsum(-1)
    num_tokens = g.shape[-1]
    future = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=g.device).triu(1)
    ratio = (log_decay[:, :, None] - log_decay[:, None, :]).masked_fill(future, -torch.inf).exp().float()
    from_start = log_decay.exp().float()[..., None]
    to_end = (log_decay[:, -1:] - log_decay).exp().float()[..., None]
    coupling = (beta[..., None] * ratio * (k @ k.transpose(-1, -2))).tril(-1)
    wanted = beta[..., None] * (v - from_start * (k @ state_VDK.transpose(-1, -2)))
    delta = torch.linalg.solve_triangular(coupling, wanted, upper=False, unitriangular=True)
    o = from_start * (q @ state_VDK.transpose(-1, -2)) + (ratio * (q @ k.transpose(-1, -2))) @ delta
    state_VDK = from_start[:, -1:] * state_VDK + delta.transpose(-1, -2) @ (to_end * k)
    return o, state_VDK
