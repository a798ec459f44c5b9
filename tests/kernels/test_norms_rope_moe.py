"""Norms, rotary embedding, routing, experts and the hidden column, each against its formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec import kernels
from agentspec.kernels.reference.hidden import save_hidden, write_hidden
from agentspec.kernels.reference.norms import gated_rms_norm, rms_norm
from agentspec.kernels.reference.rope import apply_rope
from tests.fakes.compare import relative_error
from tests.fakes.prompt_run import Run, batch_of


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_gain_is_one_plus_weight(dtype: torch.dtype) -> None:
    x, weight = randn(7, 63).to(dtype), randn(63, seed=1).to(dtype)
    y = rms_norm(x, weight, 1e-6)
    want = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + weight.double())
    assert y.dtype == dtype
    assert relative_error(y, want) < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_gated_norm_gain_is_weight_and_gate_is_last(gate: str) -> None:
    o, z, weight = randn(5, 6, 8), randn(5, 6, 8, seed=1), randn(8, seed=2)
    y = gated_rms_norm(o, z.bfloat16(), weight, 1e-6, gate)  # type: ignore[arg-type]
    z = z.bfloat16().double()
    want = (
        o.double()
        / (o.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        * weight.double()
        * (silu(z) if gate == "silu" else z.sigmoid())
    )
    assert y.dtype == torch.bfloat16
    assert relative_error(y, want) < 4e-3


def test_rope_rotates_half_pairs_and_keeps_other_dims() -> None:
    positions, inv_freq = torch.tensor([0, 1, 5000]), torch.tensor([1.0, 0.1, 0.001])
    x = randn(3, 2, 10)
    y = apply_rope(x, *kernels.rope_cos_sin(positions, inv_freq, 1.25))
    assert torch.equal(y[..., 6:], x[..., 6:])
    for n, position in enumerate(positions.tolist()):
        for j, frequency in enumerate(inv_freq.tolist()):
            cos, sin = 1.25 * math.cos(position * frequency), 1.25 * math.sin(position * frequency)
            torch.testing.assert_close(y[n, :, j], x[n, :, j] * cos - x[n, :, j + 3] * sin, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(y[n, :, j + 3], x[n, :, j + 3] * cos + x[n, :, j] * sin, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("normalize", [True, False])
def test_routing_softmax_is_over_all_experts(normalize: bool) -> None:
    logits = 3 * randn(20, 8)
    weights, experts = kernels.route_top_k(logits.bfloat16(), 3, normalize)
    probabilities = logits.bfloat16().float().softmax(-1)
    for n in range(20):
        best = probabilities[n].sort(descending=True)
        assert experts[n].tolist() == best.indices[:3].tolist()
        want = best.values[:3] / (best.values[:3].sum() if normalize else 1)
        torch.testing.assert_close(weights[n], want)
    assert weights.dtype == torch.float32


@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_mix_experts_is_weighted_sum(num_tokens: int) -> None:
    hidden, width, num_experts = 12, 7, 5
    x, gate_up, down = (
        randn(num_tokens, hidden),
        randn(num_experts, 2 * width, hidden, seed=1),
        randn(num_experts, hidden, width, seed=2),
    )
    weights, experts = kernels.route_top_k(randn(num_tokens, num_experts, seed=3), 2, True)
    y = kernels.mix_experts(x, weights, experts, kernels.Plain(gate_up), kernels.Plain(down))
    want = torch.zeros(num_tokens, hidden)
    for n in range(num_tokens):
        for weight, e in zip(weights[n], experts[n], strict=True):
            want[n] += weight * (down[e] @ (silu(gate_up[e, :width] @ x[n]) * (gate_up[e, width:] @ x[n])))
    assert relative_error(y, want) < 1e-5


def test_mix_experts_is_batch_invariant() -> None:
    x, gate_up, down = randn(9, 12), randn(5, 14, 12, seed=1), randn(5, 12, 7, seed=2)
    weights, experts = kernels.route_top_k(randn(9, 5, seed=3), 3, True)
    together = kernels.mix_experts(x, weights, experts, kernels.Plain(gate_up), kernels.Plain(down))
    for n in range(9):
        alone = kernels.mix_experts(
            x[n : n + 1], weights[n : n + 1], experts[n : n + 1], kernels.Plain(gate_up), kernels.Plain(down)
        )
        torch.testing.assert_close(alone[0], together[n])


def test_write_hidden_and_read_hidden_round_trip() -> None:
    pool = torch.full((10, 4), torch.nan)
    hidden = randn(2, 3, 4)
    write_hidden(pool, hidden, torch.tensor([[2, 5, 3], [9, 7, 8]]))
    assert torch.equal(
        kernels.read_hidden(pool, torch.tensor([7, 2, 3])), torch.stack([hidden[1, 1], hidden[0, 0], hidden[0, 2]])
    )
    assert pool[[0, 1, 4, 6]].isnan().all()
    runs = [
        Run(token_ids=range(2), state_writes=((1, 4), (2, 6)), page_ids=[1]),
        Run(token_ids=range(4), start=9, state_writes=((4, 1),), page_ids=[2]),
    ]
    tokens = randn(6, 4, seed=5)
    save_hidden(tokens, pool, batch_of(runs))
    assert torch.equal(pool[[4, 6, 1]], tokens[[0, 1, 5]])
