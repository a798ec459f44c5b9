"""A prompt's sums that end in the residual, and the norm behind them: where the product behind that norm is W8A8, the
launch that adds also norms and rounds to 8 bits. So the residual is not read again.

Every bit is that of separate launches: the sum is rounded to the activation dtype before the norm. Owns the rule which
sums do so; norm_ahead.py has what they leave, expert_prefill.py the sum of a mixture's parts. The sum before a mixture
comes here only where the router's scores don't add it (mixture.add_linear_before_experts). Shape letters: N tokens, R
rows (the tokens and the padding after them), H hidden width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.backend import Norm
from agentspec.kernels.triton.fp8_activations import GROUP, ScaledTokens, empty_scaled
from agentspec.kernels.triton.fp8_ffn import norm_tokens, row_gain, row_tile, store_normed
from agentspec.kernels.triton.fp8_prefill import takes_fp8
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next
from agentspec.kernels.triton.norm_ahead import TokensAhead, attach, take_tokens
from agentspec.kernels.weights import BlockScaled


def add_product(residual_NH: Tensor, product_NH: Tensor, next_norm: Norm | None) -> Tensor:
    """residual + product, rounded once and written over the residual. What `room_for_tokens` allows is left with it."""
    ahead = room_for_tokens(next_norm, residual_NH)
    if ahead is None:
        return attach(residual_NH.add_(product_NH), None)
    num_tokens, width = residual_NH.shape
    num_rows = len(ahead.scaled.values_RK)
    assert product_NH.shape == residual_NH.shape, f"{product_NH.shape} {residual_NH.shape}"
    assert residual_NH.is_contiguous()
    assert product_NH.is_contiguous()
    if num_tokens:
        add_norm_kernel[(num_rows,)](
            residual_NH,
            product_NH,
            *ahead.operands,
            num_tokens,
            num_rows,
            **row_tile(width),
            **overlapped(),
        )
    return attach(residual_NH, ahead)


def room_for_tokens(next_norm: Norm | None, x_NH: Tensor) -> TokensAhead | None:
    """What the sum x leaves of the norm behind it, for its kernel to fill; None: nothing, since the product behind that
    norm isn't W8A8.

    Called for so many tokens that this sum's product has no plan. The product behind then has none either, since the
    plans of 8-bit weights end at one number of tokens (linear_plans.py); if it had, it would norm x itself."""
    weight = None if next_norm is None else next_norm.product_OH
    if next_norm is None or not isinstance(weight, BlockScaled) or not takes_fp8(x_NH.dtype, weight):
        return None
    normed_NH = None if next_norm.extra_EH is None else torch.empty_like(x_NH)
    return TokensAhead(next_norm, empty_scaled(len(x_NH), x_NH.shape[1], x_NH.device), normed_NH)


def normed_tokens(x_NH: Tensor, norm: Norm, *, in_full: bool = False) -> tuple[ScaledTokens, Tensor | None]:
    """(`norm_tokens` of x, and, if `in_full`, the normed x in its dtype, [N, H]): what the sum x has left, or in a
    launch."""
    ahead = take_tokens(x_NH, norm)
    if ahead is not None and not (in_full and ahead.normed_NH is None):
        return ahead.scaled, ahead.normed_NH
    normed_NH = torch.empty(x_NH.shape, dtype=x_NH.dtype, device=x_NH.device) if in_full else None
    return norm_tokens(x_NH, norm, normed_NH), normed_NH


@triton.jit(do_not_specialize=["num_tokens"])
def add_norm_kernel(  # type: ignore[no-untyped-def]
    residual_ptr, product_ptr, values_ptr, scales_ptr, normed_ptr, weight_ptr, eps, num_tokens, num_rows,
    GROUPS: tl.constexpr, BLOCK_G: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One program per row: the residual's new value, rounded, and fp8_ffn.py's `norm_tokens_kernel` of it."""
    release_next(PDL)
    g, h, gain = row_gain(weight_ptr, GROUPS, BLOCK_G)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_token = (g < tl.where(row < num_tokens, GROUPS, 0))[:, None]
    place = residual_ptr + row * (GROUPS * GROUP) + h
    residual = tl.load(place, mask=is_token, other=0.0)
    product = tl.load(product_ptr + row * (GROUPS * GROUP) + h, mask=is_token, other=0.0)
    x = (residual.to(tl.float32) + product.to(tl.float32)).to(residual.dtype)
    tl.store(place, x, mask=is_token)
    store_normed(values_ptr, scales_ptr, normed_ptr, x, gain, eps, row, num_rows, g, h, is_token, GROUPS)
