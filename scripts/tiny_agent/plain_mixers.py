"""The two mixers over packed sequences in plain differentiable PyTorch, for tests and as reference of the fast
kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from scripts.tiny_agent.packing import CHUNK, Packed


def causal_attention(
    q_TND: Tensor, k_TND: Tensor, v_TND: Tensor, packed: Packed, scale: float
) -> tuple[Tensor, Tensor]:
    """(output [T, N, D], float32 log-sum-exp of the scores [T, N]); every token sees its own sequence up to itself."""
    outputs, sums = [], []
    for q, k, v in zip(*(x.split(packed.lengths) for x in (q_TND, k_TND, v_TND)), strict=True):
        scores = torch.einsum("qnd,knd->nqk", q.float(), k.float()) * scale
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        log_sum = scores.logsumexp(-1)
        outputs.append(torch.einsum("nqk,knd->qnd", (scores - log_sum[..., None]).exp(), v.float()).to(v.dtype))
        sums.append(log_sum.t())
    return torch.cat(outputs), torch.cat(sums)


def gated_delta(q_TVK: Tensor, k_TVK: Tensor, v_TVD: Tensor, g_TV: Tensor, beta_TV: Tensor, packed: Packed) -> Tensor:
    """Output [T, V, D] of the gated delta rule from a zero state, chunk by chunk (arXiv 2412.06464); q and k are
    normalised, q is scaled in here.

    All chunks are solved at once; then the state passes through the chunks of all sequences in parallel, the longest
    sequence first."""
    index_NC, counts = _chunks(packed.lengths)
    device = q_TVK.device
    is_token = (index_NC >= 0).to(device)
    index_NC = index_NC.clamp(min=0).to(device)
    keep = is_token[:, None, :, None]
    q, k, v = (x.float()[index_NC].transpose(1, 2) * keep for x in (q_TVK, k_TVK, v_TVD))
    q = q * q_TVK.shape[-1] ** -0.5
    g, beta = (x.float()[index_NC].transpose(1, 2) * is_token[:, None] for x in (g_TV, beta_TV))
    decay = g.cumsum(-1)
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu(1)
    ratio = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, -torch.inf).exp()
    from_start, to_end = decay.exp()[..., None], (decay[..., -1:] - decay).exp()[..., None]
    coupling = (beta[..., None] * ratio * (k @ k.mT)).tril(-1)
    right = torch.cat([beta[..., None] * v, beta[..., None] * from_start * k], -1)
    solved = torch.linalg.solve_triangular(coupling, right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], -1)
    states = _scan(values, keys, to_end * k, decay[..., -1].exp(), counts)
    delta = values - keys @ states
    o = from_start * (q @ states) + (ratio * (q @ k.mT)) @ delta
    return o.transpose(1, 2)[is_token].to(v_TVD.dtype)


def _chunks(lengths: list[int]) -> tuple[Tensor, list[int]]:
    """(token of each place in each chunk or -1, int64 [N, chunk]; number of chunks of each sequence)."""
    rows, counts, start = [], [], 0
    for length in lengths:
        count = -(-length // CHUNK)
        row = torch.full((count * CHUNK,), -1)
        row[:length] = torch.arange(start, start + length)
        rows.append(row.view(count, CHUNK))
        counts.append(count)
        start += length
    return torch.cat(rows), counts


def _scan(values: Tensor, keys: Tensor, late_k: Tensor, decay: Tensor, counts: list[int]) -> Tensor:
    """The state [N, V, K, D] before every chunk."""
    firsts = torch.tensor([0, *counts[:-1]]).cumsum(0)
    order = torch.tensor(counts).argsort(descending=True, stable=True)
    steps = [firsts[order[: sum(count > step for count in counts)]] + step for step in range(max(counts))]
    device = values.device
    state = values.new_zeros(len(counts), values.shape[1], keys.shape[-1], values.shape[-1])
    before = []
    for chunks in (step.to(device) for step in steps):
        state = state[: len(chunks)]
        before.append(state)
        delta = values[chunks] - keys[chunks] @ state
        state = decay[chunks][..., None, None] * state + late_k[chunks].mT @ delta
    place = torch.cat(steps).argsort().to(device)
    return torch.cat(before)[place]
