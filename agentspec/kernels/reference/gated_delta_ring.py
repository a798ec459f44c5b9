"""The gated delta rule over a state and the entries that follow it: verify for slots with rings.

A token's entry holds what it added to the state, S <- a S + d k^T: its key k, its delta d and its decay a, beside its
input of the convolution. Replaying the entries after a stored state gives the same bits as keeping every state: the
operations are the same, in the same order (kernels/reference/gated_delta.py).

Shape letters as in backend.py; C entries of a ring, X conv channels, G key heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.kernels.backend import DeltaRing, DeltaWeights
from agentspec.kernels.reference.causal_conv import convolve
from agentspec.kernels.reference.gated_delta import apply_state, gates, split_heads
from agentspec.kernels.reference.live import live_rows
from agentspec.kernels.reference.norms import gated_rms_norm
from agentspec.kernels.slots import LiveColumns, RingWindow
from agentspec.kernels.traffic import state_traffic, touches_pools

_CONV_ROWS = 3


@touches_pools
def gated_delta_ring_step(
    projected_NP: Tensor,
    weights: DeltaWeights,
    ssm_RVDK: Tensor,
    conv_R3C: Tensor,
    ring: DeltaRing,
    read_row_B: Tensor,
    window: RingWindow,
    live: LiveColumns | None = None,
    *,
    reads_early: bool = False,
) -> Tensor:
    """See backend.Backend. Reads lengths on the host."""
    if live is not None:
        out_NX = projected_NP.new_zeros(projected_NP.shape[0], ssm_RVDK.shape[1] * ssm_RVDK.shape[2])
        for slot, rows in live_rows(live):
            one = slice(slot, slot + 1)
            alone = RingWindow(
                slot_B=window.slot_B[one],
                start_B=window.start_B[one],
                read_length_B=window.read_length_B[one],
                fold_length_B=window.fold_length_B[one],
                fold_row_B=window.fold_row_B[one],
                entries_BT=window.entries_BT[one, : rows.stop - rows.start],
            )
            out_NX[rows] = gated_delta_ring_step(
                projected_NP[rows], weights, ssm_RVDK, conv_R3C, ring, read_row_B[one], alone
            )
        return out_NX
    num_heads, value_dim, key_dim = ssm_RVDK.shape[1:]
    shape = window.entries_BT.shape
    qkv, z, b, a = torch.split(projected_NP, [conv_R3C.shape[2], num_heads * value_dim, num_heads, num_heads], -1)
    qkv_BTX = _convolve_window(torch.unflatten(qkv, 0, shape), weights.conv_C4, conv_R3C, ring, read_row_B, window)
    q_BTVK, k_BTVK, v_BTVD = split_heads(qkv_BTX, num_heads, value_dim, key_dim)
    g_BTV, beta_BTV = gates(
        torch.unflatten(a, 0, shape), torch.unflatten(b, 0, shape), weights.a_log_V, weights.dt_bias_V
    )
    decay_BTV = g_BTV.exp()
    state = _replay(ssm_RVDK, ring, read_row_B, window)
    delta_BTVD, o_BTVD = torch.empty_like(v_BTVD), torch.empty_like(v_BTVD)
    for t in range(shape[1]):
        state *= decay_BTV[:, t, :, None, None]
        delta_BTVD[:, t] = (v_BTVD[:, t] - apply_state(state, k_BTVK[:, t])) * beta_BTV[:, t, :, None]
        state += delta_BTVD[:, t, ..., None] * k_BTVK[:, t, :, None, :]
        o_BTVD[:, t] = apply_state(state, q_BTVK[:, t])
    repeats = num_heads // ring.key_SCGK.shape[2]
    for entries, values in (
        (ring.key_SCGK, k_BTVK[:, :, ::repeats]),
        (ring.delta_SCVD, delta_BTVD),
        (ring.decay_SCV, decay_BTV),
        (ring.conv_SCX, torch.unflatten(qkv, 0, shape)),
    ):
        entries.flatten(0, 1)[window.entries_BT] = values
    z_NVD = torch.unflatten(z, -1, (num_heads, value_dim))
    return gated_rms_norm(o_BTVD.flatten(0, 1), z_NVD, weights.norm_D, weights.eps, weights.gate).flatten(1)


def _replay(ssm_RVDK: Tensor, ring: DeltaRing, read_row_B: Tensor, window: RingWindow) -> Tensor:
    """The state at the start of every slot's window: [B, V, D, K]. Stores the state at the fold length on the way."""
    state = ssm_RVDK[read_row_B]
    capacity, num_key_heads = ring.key_SCGK.shape[1:3]
    repeats = state.shape[1] // num_key_heads
    is_folding_B = window.fold_length_B > window.read_length_B
    for i in range(int((window.start_B - window.read_length_B).max())):
        position_B = window.read_length_B + i
        is_live_B = position_B < window.start_B
        entry_B = position_B % capacity
        decay_BV = torch.where(is_live_B[:, None], ring.decay_SCV[window.slot_B, entry_B], 1.0)
        delta_BVD = torch.where(is_live_B[:, None, None], ring.delta_SCVD[window.slot_B, entry_B], 0.0)
        k_BGK = torch.where(is_live_B[:, None, None], ring.key_SCGK[window.slot_B, entry_B], 0.0)
        state *= decay_BV[..., None, None]
        state += delta_BVD[..., None] * k_BGK.repeat_interleave(repeats, 1)[:, :, None, :]
        is_fold_B = is_folding_B & (position_B + 1 == window.fold_length_B)
        ssm_RVDK[window.fold_row_B[is_fold_B]] = state[is_fold_B]
        state_traffic.rows_written += int(is_fold_B.sum())
    state_traffic.rows_read += len(state)
    return state


def _convolve_window(
    x_BTX: Tensor, conv_C4: Tensor, conv_R3X: Tensor, ring: DeltaRing, read_row_B: Tensor, window: RingWindow
) -> Tensor:
    """The convolution over every slot's window, [B, T, X]; stores the inputs before the fold length to the fold row.

    Inputs before the read length are in the read row, later ones in the ring."""
    capacity, rows = ring.conv_SCX.shape[1], torch.arange(-_CONV_ROWS, 0, device=x_BTX.device)

    def inputs_before(length_B: Tensor) -> Tensor:
        position_B3 = length_B[:, None] + rows
        past_B3 = position_B3 - window.read_length_B[:, None]
        from_row = conv_R3X[read_row_B[:, None], (past_B3 + _CONV_ROWS).clamp(0, _CONV_ROWS - 1)]
        from_ring = ring.conv_SCX[window.slot_B[:, None], position_B3 % capacity]
        return torch.where((past_B3 < 0)[..., None], from_row, from_ring)

    past_B3X, folded_B3X = inputs_before(window.start_B), inputs_before(window.fold_length_B)
    conv_R3X[window.fold_row_B] = folded_B3X
    return convolve(torch.cat((past_B3X, x_BTX), 1), conv_C4)


@touches_pools
def fold_hidden(hidden_RH: Tensor, hidden_SCH: Tensor, window: RingWindow) -> None:
    """See backend.Backend."""
    entry_B = (window.fold_length_B - 1) % hidden_SCH.shape[1]
    hidden_RH[window.fold_row_B] = hidden_SCH[window.slot_B, entry_B]
