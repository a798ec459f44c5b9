"""The Triton router against the reference: scores in float32, order of choice, ties, the shared expert's gate, strided
tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentspec.kernels.backend import MixtureWeights, Norm
from agentspec.kernels.reference.moe import route_top_k
from agentspec.kernels.reference.norms import rms_norm
from agentspec.kernels.triton import routing
from agentspec.kernels.triton.fp8_activations import ScaledTokens, quantize_tokens, scales_by_token
from agentspec.kernels.weights import Plain
from tests.fakes.compare import relative_error

TOLERANCE = 1e-5
"""Scores are float32 sums of products that are exact, or lose 2^-17 of the normed input if 16-bit tiles are multiplied
as two halves."""
SIZES = [(1, 64, 8, 2), (4, 100, 17, 8), (9, 600, 12, 2), (17, 64, 8, 2), (34, 100, 33, 3)]
"""Tokens, hidden size, experts, chosen. 600 features of 16 bits are split into four parts, of which the last is
shorter."""


def router(
    num_experts: int, width: int, top_k: int, normalize: bool, seed: int, device: torch.device, dtype: torch.dtype
) -> MixtureWeights:
    """A mixture with dummy expert weights: only the router and the shared gate are used."""
    generator = torch.Generator(device).manual_seed(seed)
    # Scores of about 8: probabilities differ, but none that is chosen is zero.
    rows = (torch.randn(num_experts + 1, width, generator=generator, device=device) * 8 * width**-0.5).to(dtype)
    nothing = torch.empty(0, device=device)
    return MixtureWeights(
        router_XH=rows[:-1].contiguous(),
        top_k=top_k,
        normalize=normalize,
        gate_up_X2IH=Plain(nothing),
        down_XHI=Plain(nothing),
        shared_gate_1H=rows[-1:].contiguous(),
        shared_gate_up_2IH=Plain(nothing),
        shared_down_HI=Plain(nothing),
    )


def inputs(num_tokens: int, width: int, seed: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Norm]:
    generator = torch.Generator(device).manual_seed(seed + 1)
    x = torch.randn(num_tokens, width, generator=generator, device=device).to(dtype)
    return x, Norm(weight=(torch.randn(width, generator=generator, device=device) * 0.1).to(dtype), eps=1e-3)


def expected_scores(x_NH: Tensor, norm: Norm, weights: MixtureWeights) -> tuple[Tensor, Tensor]:
    """(router scores, shared gate scores) from unrounded inputs."""
    normed = rms_norm(x_NH.double(), norm.weight.double(), norm.eps)
    return (normed @ weights.router_XH.double().T).float(), (normed @ weights.shared_gate_1H.double().T)[:, 0].float()


def check_routing(
    num_tokens: int,
    width: int,
    num_experts: int,
    top_k: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    normalize: bool = True,
) -> None:
    seed = 100 * num_tokens + width + num_experts
    text = (
        f"seed {seed}: {num_tokens} tokens of {width}, {top_k} of {num_experts} experts, {dtype}, normalize {normalize}"
    )
    weights = router(num_experts, width, top_k, normalize, seed, device, dtype)
    x, norm = inputs(num_tokens, width, seed, device, dtype)
    scores, gate = expected_scores(x, norm, weights)
    expected_weights, expected_ids = route_top_k(scores, top_k, normalize)
    apart = routing.route(x, norm, weights, visit_shared=False)
    assert torch.equal(apart.ids_NC.long(), expected_ids), text
    assert relative_error(apart.weights_NC, expected_weights) < 10 * TOLERANCE, text
    assert apart.gate_N is not None
    assert relative_error(apart.gate_N, gate) < TOLERANCE, text
    assert isinstance(apart.normed, Tensor)
    assert relative_error(apart.normed, rms_norm(x, norm.weight, norm.eps)) < (
        1e-6 if dtype == torch.float32 else 1e-2
    ), text
    among = routing.route(x, norm, weights, visit_shared=True)
    assert among.gate_N is None
    assert torch.equal(among.ids_NC[:, :-1], apart.ids_NC), text
    assert (among.ids_NC[:, -1] == num_experts).all(), text
    assert torch.equal(among.weights_NC[:, :-1], apart.weights_NC), text
    assert relative_error(among.weights_NC[:, -1], gate.sigmoid()) < TOLERANCE, text


def test_score_tiles_split_hidden_dim_up_to_program_limit() -> None:
    splits = {num_tokens: routing.score_tiles(num_tokens, 256, 2048, 2).split for num_tokens in (9, 256, 1024, 8192)}
    assert splits == {9: 16, 256: 16, 1024: 8, 8192: 1}
    assert routing.score_tiles(9, 256, 2048, 4).split == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_routing_matches_reference(size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    check_routing(*size, device, dtype)


def test_unnormalized_weights_match_reference(device: torch.device) -> None:
    check_routing(4, 64, 12, 4, device, torch.float32, normalize=False)


@pytest.mark.parametrize("blocks", [(32, 32), (32, 128), (128, 32)], ids=str)
def test_hidden_size_above_one_block_matches_reference(
    blocks: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of the programs that score and of those that norm a row."""
    monkeypatch.setattr(routing, "_BLOCK_H", blocks[0])
    monkeypatch.setattr(routing, "_ROW_BLOCK", blocks[1])
    check_routing(3, 100, 9, 2, device, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [3072, 4200])
def test_hidden_sizes_of_few_tokens_match_reference(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """One block of the programs that norm a row, partly filled; and more than one."""
    check_routing(3, width, 13, 3, device, dtype)


@pytest.mark.parametrize("visit_shared", [False, True])
@pytest.mark.parametrize("width", [100, 1300])
def test_few_tokens_are_normed_and_routed_as_many(
    width: int, visit_shared: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are normed by another kernel. A row is rounded once, so that it differs by one unit at most."""
    weights = router(11, width, 3, True, width, device, torch.float16)
    x, norm = inputs(16, width, width, device, torch.float16)
    few = routing.route(x, norm, weights, visit_shared=visit_shared)
    monkeypatch.setattr(routing, "FEW_SCORES", 0)
    many = routing.route(x, norm, weights, visit_shared=visit_shared)
    assert isinstance(few.normed, Tensor)
    assert isinstance(many.normed, Tensor)
    once = (rms_norm(x.double(), norm.weight.double(), norm.eps)).to(x.dtype)
    for normed in (few.normed, many.normed):
        torch.testing.assert_close(normed, once, rtol=2**-10, atol=0.0)
    assert torch.equal(few.ids_NC, many.ids_NC)
    torch.testing.assert_close(few.weights_NC, many.weights_NC, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(few.gate_N, many.gate_N)


@pytest.mark.parametrize("num_tokens", [2, 18])
def test_equal_scores_choose_lower_expert_first(num_tokens: int, device: torch.device) -> None:
    weights = router(16, 32, 4, True, 5, device, torch.float32)
    weights.router_XH[:] = 0.0  # one nonzero term: no order of summation can make two scores differ
    weights.router_XH[:, 0] = 1.0
    x, norm = inputs(num_tokens, 32, 5, device, torch.float32)
    got = routing.route(x, norm, weights, visit_shared=False)
    assert got.ids_NC.tolist() == [[0, 1, 2, 3]] * num_tokens
    assert torch.allclose(got.weights_NC, torch.full_like(got.weights_NC, 0.25))


@pytest.mark.parametrize("num_tokens", [2, 18])
def test_nan_scores_choose_valid_experts(num_tokens: int, device: torch.device) -> None:
    weights = router(11, 32, 3, True, 5, device, torch.float32)
    x, norm = inputs(num_tokens, 32, 5, device, torch.float32)
    x[1] = torch.nan
    ids = routing.route(x, norm, weights, visit_shared=False).ids_NC
    assert ((ids >= 0) & (ids < 11)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())


def test_strided_tokens_are_routed_independently(device: torch.device) -> None:
    weights = router(7, 64, 3, True, 9, device, torch.float32)
    x, norm = inputs(3, 64, 9, device, torch.float32)
    wide = torch.full((3, 200), torch.nan, device=device)
    wide[:, 100:164] = x
    together = routing.route(x, norm, weights, visit_shared=True)
    sliced = routing.route(wide[:, 100:164], norm, weights, visit_shared=True)
    assert torch.equal(sliced.weights_NC, together.weights_NC)
    for n in range(3):
        alone = routing.route(x[n : n + 1], norm, weights, visit_shared=True)
        assert torch.equal(alone.weights_NC[0], together.weights_NC[n])
        assert torch.equal(alone.ids_NC[0], together.ids_NC[n])


@pytest.mark.parametrize("size", [(18, 256), (5, 384), (16, 1280)], ids=str)
def test_normed_input_in_8_bits_equals_later_quantization(size: tuple[int, int], device: torch.device) -> None:
    """Equal to rounding it afterwards, bit for bit; padding rows are zeros."""
    num_tokens, width = size
    weights = router(16, width, 4, True, 5, device, torch.float16)
    x, norm = inputs(num_tokens, width, 5, device, torch.float16)
    plain, scaled = (routing.route(x, norm, weights, visit_shared=False, in_fp8=in_fp8) for in_fp8 in (False, True))
    assert isinstance(plain.normed, torch.Tensor)
    assert isinstance(scaled.normed, ScaledTokens)
    expected = quantize_tokens(plain.normed)
    assert torch.equal(scaled.normed.values_RK.view(torch.uint8), expected.values_RK.view(torch.uint8))
    assert torch.equal(scaled.normed.scales_GR, expected.scales_GR)
    assert scaled.normed.scales_RG is not None
    assert torch.equal(scaled.normed.scales_RG, scales_by_token(expected))
    assert torch.equal(scaled.ids_NC, plain.ids_NC)
    assert torch.equal(scaled.weights_NC, plain.weights_NC)
    torch.testing.assert_close(scaled.gate_N, plain.gate_N)
