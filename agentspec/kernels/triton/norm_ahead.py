"""What a sum leaves for the norm behind it, so that the norm is no launch of its own.

In decode windows a norm is one factor per token on a product: with g the gain, (x / rms(x) * g) W^T = (x * g) W^T /
rms(x). A product that ends in the residual stream writes x * g beside x, and each tile the squares of its features; the
product behind it adds up the squares while its first weights arrive, and multiplies its results with the factor. x * g
is rounded to x's dtype like a normed x, so the error is of the same size. In prompts a sum has whole rows, and leaves
the normed x itself, in 8 bits.

Owns these forms and whose they are; linear_layers.py has the launches of windows, fp8_sums.py those of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels.backend import Norm
from agentspec.kernels.triton.fp8_activations import ScaledTokens

LEAST_AHEAD = 17
"""Tokens. With fewer, products are by small programs of which many fit on a multiprocessor, and which would have more
parts to add up than registers for them."""
_NAME = "_norm_ahead"


@dataclass(frozen=True, slots=True, eq=False)
class NormAhead:
    """Of x [N, H]."""

    norm: Norm
    gained_NH: Tensor
    """x * (1 + weight), in x's dtype."""
    squares_PN: Tensor
    """float32: the sums of squares of P parts of x's features."""

    @classmethod
    def empty(cls, norm: Norm, like_NH: Tensor, num_parts: int) -> NormAhead:
        """For a kernel to fill."""
        squares = torch.empty(num_parts, len(like_NH), dtype=torch.float32, device=like_NH.device)
        return cls(norm, torch.empty_like(like_NH), squares)

    @property
    def padded_parts(self) -> int:
        """A power of two."""
        return 1 << (len(self.squares_PN) - 1).bit_length()


@dataclass(frozen=True, slots=True, eq=False)
class TokensAhead:
    """Of x [N, H], many tokens."""

    norm: Norm
    scaled: ScaledTokens
    """The normed x in 8 bits."""
    normed_NH: Tensor | None
    """The normed x in x's dtype; None where no product takes it."""

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, float]:
        """(values, scales, normed x, weight, eps) for a sum's kernel."""
        return self.scaled.values_RK, self.scaled.scales_GR, self.normed_NH, self.norm.weight, self.norm.eps


def norm_operands(norm: Norm | None, ahead: NormAhead | None) -> tuple[Tensor | None, Tensor | None, int | None, float]:
    """(weight, sums of squares, their parts, eps) for a product's kernel: it applies the norm itself, or the factor of
    one that a sum has left, or neither."""
    if ahead is not None:
        return None, ahead.squares_PN, len(ahead.squares_PN), ahead.norm.eps
    return (None, None, None, 0.0) if norm is None else (norm.weight, None, None, norm.eps)


def to_fill(following: NormAhead | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(weight, x * gain, sums of squares) for a sum's kernel."""
    if following is None:
        return None, None, None
    return following.norm.weight, following.gained_NH, following.squares_PN


def attach(x_NH: Tensor, ahead: NormAhead | TokensAhead | None) -> Tensor:
    """Keep with x what was computed with it; None: nothing, and nothing that is old."""
    setattr(x_NH, _NAME, ahead)
    return x_NH


def ahead_of(x_NH: Tensor, norm: Norm) -> NormAhead | None:
    """What was computed with x of this norm."""
    ahead = getattr(x_NH, _NAME, None)
    return ahead if isinstance(ahead, NormAhead) and ahead.norm is norm else None


def take_tokens(x_NH: Tensor, norm: Norm) -> TokensAhead | None:
    """What a prompt's sum has left of this norm, and keep it no longer: it is as large as x, and one product takes
    it."""
    ahead = getattr(x_NH, _NAME, None)
    if not isinstance(ahead, TokensAhead) or ahead.norm is not norm:
        return None
    attach(x_NH, None)
    return ahead
