"""How tests measure the distance between tensors."""

from __future__ import annotations

from torch import Tensor

TOLERANCE = 1e-4
"""Largest difference over largest value, float32 against float32."""


def relative_error(got: Tensor, expected: Tensor) -> float:
    """max |got - expected| / max |expected|; NaN anywhere makes it NaN, which no comparison accepts."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
