"""W8A8 products of many tokens: rounding of activations, ragged sizes, and the fallback without rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentspec.kernels.backend import Norm
from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import fp8_prefill as ours
from agentspec.kernels.triton import linear_layers
from agentspec.kernels.triton.fp8_activations import ScaledTokens, quantize_tokens
from agentspec.kernels.triton.fp8_ffn import gate_tokens, norm_tokens
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.norms import rms_norm
from agentspec.kernels.weights import BlockScaled, quantize_blocks
from tests.fakes.compare import relative_error

SUM_LOSS = 1e-5 if INTERPRETED else 2**-10
"""Precision of a sum of 128 products of 8-bit floats. Hopper's matrix units keep about 14 bits of it: 3.4e-4 was
measured."""


def randn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def tokens(num_tokens: int, depth: int, seed: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random activations whose groups differ in size by 100; one group is zeros and one has an outlier."""
    x = randn(num_tokens, depth, seed=seed, device=device)
    x *= 10 ** (2 * randn(num_tokens, depth // 128, seed=seed + 1, device=device).clamp(-1, 1)).repeat_interleave(
        128, 1
    )
    x[0, :128] = 0
    x[-1, 5] = 300
    return x.to(dtype)


def block_scaled(num_outputs: int, depth: int, seed: int, device: torch.device) -> BlockScaled:
    weight = randn(num_outputs, depth, seed=seed, device=device) * depth**-0.5
    return quantize_blocks(weight * 4 ** randn(num_outputs, 1, seed=seed + 1, device=device))


def from_scaled(x: ScaledTokens) -> Tensor:
    return x.values_RK.float() * x.scales_GR.t().repeat_interleave(128, 1)


def check_tokens(num_tokens: int, depth: int, device: torch.device, dtype: torch.dtype) -> None:
    x = tokens(num_tokens, depth, 7, device, dtype)
    scaled, text = quantize_tokens(x), f"{num_tokens} x {depth}, {dtype}"
    assert len(scaled.values_RK) == -(-num_tokens // 16) * 16
    assert (scaled.values_RK[num_tokens:].float() == 0).all(), text
    assert (scaled.scales_GR[:, num_tokens:] == 1).all(), text
    scales, largest = scaled.scales_GR[:, :num_tokens], x.float().unflatten(1, (-1, 128)).abs().amax(-1).t()
    torch.testing.assert_close(scales, torch.where(largest == 0, 448.0, largest) / 448, rtol=1e-6, atol=0.0, msg=text)
    # Half a step of 3 bits of mantissa, or of the smallest numbers; plus the rounding of the scale itself.
    bound = torch.maximum(x.float().abs() / 16, scales.t().repeat_interleave(128, 1) / 1024) * (1 + 1e-5)
    assert ((from_scaled(scaled)[:num_tokens] - x.float()).abs() <= bound).all(), text


@pytest.mark.parametrize("size", [(1, 128), (33, 256), (40, 384)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_activations_round_to_nearest(size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check_tokens(*size, device, dtype)


def test_activations_match_torch_rounding(device: torch.device) -> None:
    """Scales are powers of two, so that the quotient is exact; includes ties and subnormals."""
    x = torch.arange(256, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = x[x.isfinite()]
    halves = torch.cat([(x[1:] + x[:-1]) / 2, x * 1.01, x[:-2] * 0.1]).sort().values
    x = torch.cat([halves, halves.new_zeros(-len(halves) % 127)]).view(-1, 127)
    x = torch.cat([torch.full_like(x[:, :1], 448.0), x.clamp(-448, 448)], 1) / 4
    scaled = quantize_tokens(x)
    assert (scaled.scales_GR[:, : len(x)] == 0.25).all()
    assert torch.equal(scaled.values_RK[: len(x)].float(), (x * 4).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("num_extra", [0, 24, 3])
@pytest.mark.parametrize("size", [(96, 256, 512), (70, 128, 1024), (801, 640, 512)], ids=str)
def test_w8a8_products_match_float64(size: tuple[int, int, int], num_extra: int, device: torch.device) -> None:
    """Against float64 of the same 8-bit values, stored to a slice of wider rows."""
    num_tokens, num_outputs, depth = size
    seed = sum(size)
    x, weight = tokens(num_tokens, depth, seed, device), block_scaled(num_outputs, depth, seed + 10, device)
    assert ours.takes_fp8(x.dtype, weight)
    wide = torch.full((num_tokens, num_outputs + num_extra), torch.nan, device=device, dtype=x.dtype)
    ours.prefill_linear(x, weight, wide[:, :num_outputs])
    assert wide[:, num_outputs:].isnan().all()
    expected = from_scaled(quantize_tokens(x))[:num_tokens].double() @ weight.dequantize().double().t()
    error = relative_error(wide[:, :num_outputs], expected)
    # 2^-9 (the final bfloat16 rounding is at most half a unit) and 2^-10, both relative to the largest value.
    assert error < 2**-9 + 2**-10, f"seed {seed}: {size}, {num_extra}: {error}"


@pytest.mark.parametrize(
    ("dtype", "size", "block_rows"),
    [
        (torch.float32, (256, 512), 128),
        (torch.bfloat16, (256, 256), 128),
        (torch.bfloat16, (192, 512), 128),
        (torch.bfloat16, (160, 512), 32),
    ],
    ids=str,
)
def test_unsupported_shapes_multiply_dequantized_weights(
    dtype: torch.dtype, size: tuple[int, int], block_rows: int, device: torch.device
) -> None:
    num_outputs, depth = size
    weight = block_scaled(block_rows, depth, 8, device).stack(
        [block_scaled(num_outputs - block_rows, depth, 9, device)]
    )
    assert weight.block_rows == block_rows
    assert not ours.takes_fp8(dtype, weight)
    x = randn(70, depth, seed=11, device=device, dtype=dtype)
    out = x.new_empty(70, num_outputs + 3)[:, 3:]
    ours.prefill_linear(x, weight, out)
    assert (
        relative_error(out, x.double() @ weight.dequantize().double().t())
        < {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    )


@pytest.mark.parametrize("num_tokens", [1, 33, 48])
def test_an_ffn_has_its_inputs_in_8_bits_as_by_separate_launches(num_tokens: int, device: torch.device) -> None:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    x, norm = tokens(num_tokens, 384, 3, device, dtype), Norm(weight=randn(384, seed=4, device=device) * 0.1, eps=1e-6)
    normed = torch.empty_like(x)
    scaled, apart = norm_tokens(x, norm, normed), quantize_tokens(rms_norm(x, norm))
    torch.testing.assert_close(normed, rms_norm(x, norm), rtol=2**-7, atol=0)
    assert torch.equal(quantize_tokens(normed).values_RK.view(torch.uint8), scaled.values_RK.view(torch.uint8))
    # The sum of a row has another order, so a value may be rounded to another neighbour.
    difference = (from_scaled(scaled) - from_scaled(apart)).abs()
    assert (difference <= from_scaled(apart).abs() / 7 + 1e-6).all()
    assert (difference > 0).float().mean() < 0.01
    assert (scaled.values_RK[num_tokens:].float() == 0).all()
    gate_up = randn(num_tokens, 512, seed=5, device=device, dtype=dtype) * 4
    gate_up[0, :128] = 0
    scaled, apart = gate_tokens(gate_up), quantize_tokens(linear_layers.swiglu(gate_up))
    assert torch.equal(scaled.values_RK.view(torch.uint8), apart.values_RK.view(torch.uint8))
    assert torch.equal(scaled.scales_GR, apart.scales_GR)


def test_an_ffn_in_8_bits_matches_its_parts(device: torch.device) -> None:
    """Of so many tokens that the library multiplies them."""
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    x, norm = (
        randn(300, 512, seed=3, device=device, dtype=dtype),
        Norm(weight=randn(512, seed=4, device=device) * 0.02 - 0.9, eps=1e-6),
    )
    gate_up, down = block_scaled(1024, 512, 5, device), block_scaled(512, 512, 6, device)
    expected = linear_layers.add_linear(x.clone(), linear_layers.norm_swiglu(x, norm, gate_up), down)
    assert relative_error(linear_layers.add_ffn(x.clone(), norm, gate_up, down), expected) < 2e-2
    exact = reference.add_ffn(x.float(), norm, gate_up, down)
    assert relative_error(linear_layers.add_ffn(x.clone(), norm, gate_up, down), exact) < 6e-2
