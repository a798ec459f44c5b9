"""Inputs of a prompt's products with block-scaled weights, as 8-bit floats: the normed residual, and silu(gate) * up of
an FFN, one launch each. So they are not written in 16 bits and read again. A sum before a norm may do the norm's part
in its own launch (fp8_sums.py): `row_tile`, `row_gain` and `store_normed` are for both.

Each is rounded to the activation dtype first, as by the launches that do it apart. Owns no rounding
(fp8_activations.py). Shape letters: N tokens, R rows (the tokens and the padding after them), H hidden width, I FFN
width, G groups of 128 features.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.backend import Norm
from agentspec.kernels.triton.fp8_activations import GROUP, ScaledTokens, empty_scaled, group_scale, to_fp8
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next
from agentspec.kernels.weights import SCALE_BLOCK

_BLOCK_ROWS = 32
"""Rows of a program that gates."""
_ELEMENTS_A_WARP = 256
"""Eight per lane, a load of 16 bytes in bf16: with more, neighbouring lanes load places that aren't adjacent."""


def row_tile(width: int) -> dict[str, int]:
    """How one program holds a row, as arguments of a launch: GROUPS, BLOCK_G, num_warps. The order of a row's sum of
    squares, and so its last bit, depends on the warps."""
    assert width % SCALE_BLOCK == 0, f"{width} features"
    groups = width // SCALE_BLOCK
    block = triton.next_power_of_2(groups)
    num_warps = min(16, max(1, block * SCALE_BLOCK // _ELEMENTS_A_WARP))
    return {"GROUPS": groups, "BLOCK_G": block, "num_warps": num_warps}


def norm_tokens(x_NH: Tensor, norm: Norm, normed_NH: Tensor | None = None) -> ScaledTokens:
    """`quantize_tokens` of the normed x. normed: contiguous; where the normed x is written too."""
    num_tokens, width = x_NH.shape
    assert x_NH.stride(1) == 1
    assert normed_NH is None or normed_NH.is_contiguous()
    scaled = empty_scaled(num_tokens, width, x_NH.device)
    num_rows = len(scaled.values_RK)
    if num_tokens:
        norm_tokens_kernel[(num_rows,)](
            scaled.values_RK,
            scaled.scales_GR,
            x_NH,
            x_NH.stride(0),
            normed_NH,
            norm.weight,
            norm.eps,
            num_tokens,
            num_rows,
            **row_tile(width),
            **overlapped(),
        )
    return scaled


def gate_tokens(gate_up_N2I: Tensor) -> ScaledTokens:
    """`quantize_tokens` of silu(gate) * up of [gate | up]."""
    num_tokens, width = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    assert gate_up_N2I.is_contiguous()
    assert width % SCALE_BLOCK == 0, f"{width} features"
    scaled = empty_scaled(num_tokens, width, gate_up_N2I.device)
    num_rows = len(scaled.values_RK)
    if num_tokens:
        gate_tokens_kernel[(width // SCALE_BLOCK, triton.cdiv(num_rows, _BLOCK_ROWS))](
            scaled.values_RK,
            scaled.scales_GR,
            gate_up_N2I,
            num_tokens,
            num_rows,
            width,
            BLOCK_R=_BLOCK_ROWS,
            num_warps=4,
            **overlapped(),
        )
    return scaled


@triton.jit(do_not_specialize=["num_tokens"])
def norm_tokens_kernel(  # type: ignore[no-untyped-def]
    values_ptr, scales_ptr, x_ptr, x_stride, normed_ptr, weight_ptr, eps, num_tokens, num_rows, GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    release_next(PDL)
    g, h, gain = row_gain(weight_ptr, GROUPS, BLOCK_G)
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    is_token = (g < tl.where(row < num_tokens, GROUPS, 0))[:, None]
    x = tl.load(x_ptr + row * x_stride + h, mask=is_token, other=0.0)
    store_normed(values_ptr, scales_ptr, normed_ptr, x, gain, eps, row, num_rows, g, h, is_token, GROUPS)


@triton.jit
def row_gain(weight_ptr, GROUPS: tl.constexpr, BLOCK_G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (groups, features, 1 + weight as float32) of a row's tile, [BLOCK_G], [BLOCK_G, GROUP] twice. It may be
    called before `await_previous`."""
    g = tl.arange(0, BLOCK_G)
    h = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return g, h, 1.0 + tl.load(weight_ptr + h, mask=(g < GROUPS)[:, None], other=0.0).to(tl.float32)


@triton.jit
def store_normed(  # type: ignore[no-untyped-def]
    values_ptr, scales_ptr, normed_ptr, x, gain, eps, row, num_rows, g, h, is_token, GROUPS: tl.constexpr
):  # fmt: skip
    """Norm a row, round it to its dtype, the activations', and store it in 8 bits; to `normed` too if that is there.

    x [BLOCK_G, GROUP]: zeros besides a token's features. is_token [BLOCK_G, 1]: false throughout for padding."""
    as_read = x.dtype
    x = x.to(tl.float32)
    mean = tl.sum(tl.sum(x * x, axis=1), axis=0) / (GROUPS * GROUP)
    y = (x * tl.rsqrt(mean + eps) * gain).to(as_read)
    if normed_ptr is not None:
        tl.store(normed_ptr + row * (GROUPS * GROUP) + h, y, mask=is_token)
    y = y.to(tl.float32)
    scale, inverse = group_scale(tl.max(tl.abs(y), axis=1))
    tl.store(values_ptr + row * (GROUPS * GROUP) + h, to_fp8(y * inverse[:, None]), mask=(g < GROUPS)[:, None])
    tl.store(scales_ptr + g.to(tl.int64) * num_rows + row, scale, mask=g < GROUPS)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_tokens_kernel(  # type: ignore[no-untyped-def]
    values_ptr, scales_ptr, gate_up_ptr, num_tokens, num_rows, width, BLOCK_R: tl.constexpr, PDL: tl.constexpr
):
    release_next(PDL)
    await_previous(PDL)
    group = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    i = group * GROUP + tl.arange(0, GROUP)
    is_token = (r < num_tokens)[:, None]
    place = gate_up_ptr + r[:, None] * (2 * width) + i[None, :]
    gate = tl.load(place, mask=is_token, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=is_token, other=0.0).to(tl.float32)
    y = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up_ptr.dtype.element_ty).to(tl.float32)
    scale, inverse = group_scale(tl.max(tl.abs(y), axis=1))
    is_row = r < num_rows
    tl.store(values_ptr + r[:, None] * width + i[None, :], to_fp8(y * inverse[:, None]), mask=is_row[:, None])
    tl.store(scales_ptr + group.to(tl.int64) * num_rows + r, scale, mask=is_row)
