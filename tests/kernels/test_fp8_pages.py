"""Keys and values as 8-bit floats: their error, their range, and that a head depends on nothing but itself."""

from __future__ import annotations

import pytest
import torch

from agentspec.kernels import FP8_MAX
from agentspec.kernels.reference.fp8_pages import EXPONENTS, dequantize_heads, quantize_heads
from tests.fakes.fp8_pool import in_fp8

F32 = torch.float32


@pytest.mark.parametrize("seed", range(5))
def test_error_is_at_most_half_a_step(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 64, generator=rng) * 2.0 ** torch.randint(-40, 40, (200, 1), generator=rng)
    codes, exponents = quantize_heads(x)
    step = 2.0 ** exponents.double()[:, None]
    bound = torch.maximum(x.double().abs() * 2.0**-4, step * 2.0**-10)
    found = dequantize_heads(codes, exponents, F32).double()
    assert ((found - x.double()).abs() <= bound).all(), f"seed {seed}"
    assert (x.double().abs().amax(-1, keepdim=True) > step * FP8_MAX / 2).all(), "no smaller exponent would do"


@pytest.mark.parametrize("largest", [448.0, 449.0, 447.9, 1.75, 1.7500001, 2.0**-30 * 1.75])
def test_largest_value_of_a_head_is_never_clipped(largest: float) -> None:
    codes, exponents = quantize_heads(torch.tensor([[largest, -largest, largest / 3]]))
    found = dequantize_heads(codes, exponents, F32)
    assert found[0, 0] == -found[0, 1]
    assert abs(found[0, 0].item() / largest - 1) <= 2**-4


def test_zeros_and_the_ends_of_the_range() -> None:
    x = torch.tensor([[0.0, 0.0], [3e38, -1e38], [1e-45, 0.0], [2.0**-130, 0.0]])
    codes, exponents = quantize_heads(x)
    assert EXPONENTS[0] <= exponents.min()
    assert exponents.max() <= EXPONENTS[1]
    found = dequantize_heads(codes, exponents, F32)
    assert torch.isfinite(found).all()
    assert found[0].eq(0).all()
    assert torch.allclose(found[1], x[1], rtol=2**-4)
    assert found[3].eq(x[3]).all()


@pytest.mark.parametrize("seed", range(3))
def test_rounded_heads_are_exact_in_bfloat16_and_stay_what_they_are(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    codes, exponents = quantize_heads(torch.randn(300, 32, generator=rng).exp())
    exact = dequantize_heads(codes, exponents, F32)
    assert torch.equal(dequantize_heads(codes, exponents, torch.bfloat16).float(), exact), f"seed {seed}"
    assert torch.equal(dequantize_heads(*quantize_heads(exact), F32), exact), f"seed {seed}"


@pytest.mark.parametrize("seed", range(3))
def test_a_head_depends_on_itself_alone(seed: int) -> None:
    x = torch.randn(7, 3, 16, generator=torch.Generator().manual_seed(seed))
    codes, exponents = quantize_heads(x)
    for token in range(7):
        alone, exponent = quantize_heads(x[token, 1])
        assert torch.equal(alone.view(torch.uint8), codes[token, 1].view(torch.uint8)), f"seed {seed}"
        assert exponent == exponents[token, 1], f"seed {seed}"


def test_a_head_with_nan_stays_nan() -> None:
    codes, exponents = quantize_heads(torch.tensor([[1.0, torch.nan, 2.0]]))
    assert dequantize_heads(codes, exponents, F32)[0, 1].isnan()
    assert in_fp8(torch.full((1, 2, 1, 1, 2), torch.nan))[0].isnan().all()
