"""The linear layers of a forward in Triton. One launch each, fused with the norm before, the SwiGLU or residual after,
or an argmax. (Two launches if a plan has a separate norm.)

A step has few tokens, so a layer takes as long as loading its weights. `linear_kernels` has the kernels,
`linear_plans` the tilings. For prompts, and where a plan says so, the product is torch's, or that of `fp8_prefill`.
See backend.Backend for the operations.

The kernels that split K count their arrivals in shared counters, so they must run one after the other: see
launch.arrival_counters. Shape letters: N tokens, H and K input features, O output features, E extra outputs, I FFN
width, V vocabulary.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from agentspec.kernels.backend import Norm, ProductInput
from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.triton import side_stream, swiglu_hopper
from agentspec.kernels.triton.four_bit_layers import decoded_product, expanded, four_bit_logits, takes_decoded
from agentspec.kernels.triton.fp8_activations import ScaledTokens
from agentspec.kernels.triton.fp8_ffn import gate_tokens
from agentspec.kernels.triton.fp8_prefill import RoundedTokens, multiply_scaled, prefill_linear, takes_fp8
from agentspec.kernels.triton.fp8_sums import add_product, normed_tokens
from agentspec.kernels.triton.launch import NUM_COUNTERS, arrival_counters, overlapped
from agentspec.kernels.triton.linear_hopper import ROWS as HOPPER_ROWS
from agentspec.kernels.triton.linear_hopper import launch_product as launch_on_hopper
from agentspec.kernels.triton.linear_hopper import supports
from agentspec.kernels.triton.linear_kernels import (
    choose_kernel,
    gate_kernel,
    linear_kernel,
    logits_kernel,
    nearest_kernel,
    swiglu_kernel,
)
from agentspec.kernels.triton.linear_plans import NO_TORCH_PRODUCT, Kind, Plan, plan_for
from agentspec.kernels.triton.machine import shared_bytes
from agentspec.kernels.triton.norm_ahead import LEAST_AHEAD, NormAhead, ahead_of, attach, norm_operands, to_fill
from agentspec.kernels.triton.norms import rms_norm
from agentspec.kernels.weights import BlockScaled, Plain, RowScaled, Weight

_ELEMENTWISE_BLOCK = 1024
_CHOICE_BLOCK = 1024
_ADDING: tuple[Kind, ...] = ("add_linear", "linear")
"""The products of `add_linear`: with a residual, and without."""


def linear(x_NH: Tensor, weight_OH: Weight) -> Tensor:
    if takes_decoded(weight_OH, x_NH):
        return decoded_product(x_NH, weight_OH)
    plan = _plan("linear", x_NH, weight_OH)
    return library_product(x_NH, weight_OH) if plan is None else launch_linear(plan, x_NH, weight_OH, None, None)


def norm_linear(x_NH: Tensor, norm: Norm | None, weight_OH: Weight, extra_EH: Tensor | None = None) -> Tensor:
    if takes_decoded(weight_OH, x_NH):
        return decoded_product(_normed(x_NH, norm), weight_OH, extra_EK=extra_EH)
    plan = _plan("norm_linear", x_NH, weight_OH, extra_EH)
    if plan is not None:
        return launch_linear(plan, x_NH, weight_OH, norm, None, extra_EH)
    if norm is None or not is_scaled(weight_OH, x_NH):
        return library_product(_normed(x_NH, norm), weight_OH, extra_EH)
    num_outputs, num_extra = weight_OH.shape[0], 0 if extra_EH is None else len(extra_EH)
    out = torch.empty(len(x_NH), num_outputs + num_extra, dtype=x_NH.dtype, device=x_NH.device)
    scaled, normed_NH = normed_tokens(x_NH, norm, in_full=extra_EH is not None)
    if extra_EH is None:
        multiply_scaled(scaled, weight_OH, out)
        return out
    assert normed_NH is not None
    multiply_with_extra(scaled, weight_OH, out[:, :num_outputs], normed_NH, extra_EH, out[:, num_outputs:])
    return out


def multiply_with_extra(
    scaled: ScaledTokens,
    weight_OH: BlockScaled,
    out_NO: Tensor,
    normed_NH: Tensor,
    extra_EH: Tensor,
    out_NE: Tensor,
) -> None:
    """`multiply_scaled`, and the product of the same tokens with rows that are not rounded to 8 bits."""
    # The library's large products begin with a memset, beside which there is room.
    with side_stream.fork(normed_NH.device):
        torch.mm(normed_NH, extra_EH.t(), out=out_NE)
    multiply_scaled(scaled, weight_OH, out_NO)
    side_stream.join(normed_NH.device)


def add_linear(
    residual_NH: Tensor | None, x_NO: Tensor | ProductInput, weight_HO: Weight, next_norm: Norm | None = None
) -> Tensor:
    if residual_NH is None and isinstance(x_NO, Tensor):
        return linear(x_NO, weight_HO)
    product_NH = product_apart(x_NO, weight_HO)
    if product_NH is not None:
        return product_NH if residual_NH is None else add_product(residual_NH, product_NH, next_norm)
    assert isinstance(x_NO, Tensor), "its product is apart"
    assert residual_NH is not None
    if takes_decoded(weight_HO, x_NO):
        return decoded_product(x_NO, weight_HO, residual_NO=residual_NH)
    plan = _plan("add_linear", x_NO, weight_HO)
    if plan is not None:
        return launch_linear(plan, x_NO, weight_HO, None, residual_NH, next_norm=next_norm)
    assert isinstance(weight_HO, Plain | FourBitTiles)
    # A new result would start as a copy of the residual.
    return attach(residual_NH.addmm_(x_NO, _in_dtype(weight_HO, x_NO.dtype).t()), None)


def product_apart(x_NO: Tensor | ProductInput, weight_HO: Weight) -> Tensor | None:
    """The product of `add_linear`, if a residual is added to it in a launch of its own; None if in the product's."""
    if not isinstance(x_NO, Tensor):
        assert isinstance(x_NO, RoundedTokens)
        assert takes_rounded(weight_HO, x_NO.num_tokens, x_NO.dtype)
        return _scaled_product(x_NO.scaled, weight_HO, x_NO.num_tokens, x_NO.dtype)
    if isinstance(weight_HO, Plain | FourBitTiles) or _plan("add_linear", x_NO, weight_HO) is not None:
        return None
    return library_product(x_NO, weight_HO)


def norm_swiglu(x_NH: Tensor, norm: Norm | None, gate_up_2IH: Weight) -> Tensor:
    if takes_decoded(gate_up_2IH, x_NH):
        return decoded_product(_normed(x_NH, norm), gate_up_2IH, is_swiglu=True)
    plan = _plan("norm_swiglu", x_NH, gate_up_2IH)
    if plan is not None:
        return launch_swiglu(plan, x_NH, norm, gate_up_2IH)
    return _gated_product(_normed(x_NH, norm), gate_up_2IH)


def _gated_product(x_NH: Tensor, gate_up_2IH: Weight) -> Tensor:
    """silu(gate) * up of many tokens, [N, I]: one launch where that takes less time."""
    (num_tokens, depth), width = x_NH.shape, gate_up_2IH.shape[0] // 2
    if isinstance(gate_up_2IH, Plain | FourBitTiles) and swiglu_hopper.is_faster(
        num_tokens, width, depth, x_NH.dtype, x_NH.device
    ):
        return swiglu_hopper.product(x_NH.contiguous(), _in_dtype(gate_up_2IH, x_NH.dtype))
    return swiglu(library_product(x_NH, gate_up_2IH))


def _normed(x_NH: Tensor, norm: Norm | None) -> Tensor:
    return x_NH if norm is None else rms_norm(x_NH, norm)


def add_ffn(
    residual_NH: Tensor, norm: Norm, gate_up_2IH: Weight, down_HI: Weight, next_norm: Norm | None = None
) -> Tensor:
    if not is_scaled(gate_up_2IH, residual_NH) or _plan("norm_swiglu", residual_NH, gate_up_2IH) is not None:
        return add_linear(residual_NH, norm_swiglu(residual_NH, norm, gate_up_2IH), down_HI, next_norm)
    num_tokens, dtype = len(residual_NH), residual_NH.dtype
    gate_up_N2I = _scaled_product(normed_tokens(residual_NH, norm)[0], gate_up_2IH, num_tokens, dtype)
    return add_linear(residual_NH, swiglu_for(gate_up_N2I, down_HI), down_HI, next_norm)


def swiglu_for(gate_up_N2I: Tensor, down_HI: Weight) -> Tensor | RoundedTokens:
    """`swiglu` as `add_linear` with down takes it: in 8 bits where it would round it."""
    num_tokens, dtype = len(gate_up_N2I), gate_up_N2I.dtype
    if not takes_rounded(down_HI, num_tokens, dtype):
        return swiglu(gate_up_N2I)
    return RoundedTokens(scaled=gate_tokens(gate_up_N2I), num_tokens=num_tokens, dtype=dtype)


def takes_rounded(weight_HO: Weight, num_tokens: int, dtype: torch.dtype) -> TypeGuard[BlockScaled]:
    """Whether `add_linear` rounds so many tokens of this dtype to 8 bits, with a residual or without. It then takes
    them as RoundedTokens too, with the same result."""
    if not isinstance(weight_HO, BlockScaled) or not takes_fp8(dtype, weight_HO):
        return False
    return all(_plan_of(kind, weight_HO, num_tokens, dtype) is None for kind in _ADDING)


def is_scaled(weight_OH: Weight, x_NH: Tensor) -> TypeGuard[BlockScaled]:
    """Whether products of many tokens with this weight are W8A8."""
    return isinstance(weight_OH, BlockScaled) and takes_fp8(x_NH.dtype, weight_OH)


def _scaled_product(x: ScaledTokens, weight_OH: BlockScaled, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """[N, O] in dtype."""
    out_NO = torch.empty(num_tokens, weight_OH.shape[0], dtype=dtype, device=weight_OH.device)
    multiply_scaled(x, weight_OH, out_NO)
    return out_NO


def logits(x_NH: Tensor, weight_VH: Weight, num_real: int) -> Tensor:
    if isinstance(weight_VH, FourBitTiles):
        return four_bit_logits(x_NH, weight_VH, num_real)
    plan = _plan("logits", x_NH, weight_VH)
    assert plan is not None, "logits need a plan: torch has no float32 product of 16-bit operands on every device"
    return launch_logits(plan, x_NH, weight_VH, num_real)


def draft_argmax(x_NH: Tensor, head_OH: Weight, ids_O: Tensor | None) -> Tensor:
    plan = _plan("draft_argmax", x_NH, head_OH)
    assert plan is not None, "draft_argmax needs a plan: torch has no product that does not store its scores"
    return launch_draft_argmax(plan, x_NH, head_OH, ids_O)


def draft_best(x_NH: Tensor, head_OH: Weight, ids_O: Tensor) -> Tensor:
    plan = _plan("draft_argmax", x_NH, head_OH)
    assert plan is not None, "draft_best needs a plan, as draft_argmax does"
    return launch_draft_argmax(plan, x_NH, head_OH, ids_O, ranked=True)[:, None]


def _plan(kind: Kind, x_NH: Tensor, weight_OH: Weight, extra_EH: Tensor | None = None) -> Plan | None:
    assert x_NH.shape[1] == weight_OH.shape[1], f"{x_NH.shape} {weight_OH.shape}"
    assert x_NH.stride(1) == 1
    if isinstance(weight_OH, FourBitTiles):
        return None
    if isinstance(weight_OH, Plain):
        assert x_NH.dtype == weight_OH.values.dtype, f"{x_NH.dtype} {weight_OH.values.dtype}"
        assert weight_OH.values.is_contiguous()
    if isinstance(weight_OH, RowScaled):
        assert kind in NO_TORCH_PRODUCT, f"{kind} with scales of rows"
        assert weight_OH.values.is_contiguous()
    plan = _plan_of(kind, weight_OH, len(x_NH), x_NH.dtype)
    if plan is not None and plan.programs and not (extra_EH is None and supports(plan, x_NH, weight_OH)):
        plan = _plan_of(kind, weight_OH, len(x_NH), x_NH.dtype, for_hopper=False)
    return plan


def _plan_of(
    kind: Kind, weight_OH: Weight, num_tokens: int, dtype: torch.dtype, *, for_hopper: bool = True
) -> Plan | None:
    """Whether or not the kernel of a plan with `programs` can compute this product."""
    key = kind, *weight_OH.shape, num_tokens, dtype.itemsize, weight_OH.plan_key, shared_bytes(weight_OH.device)
    return plan_for(*key, for_hopper=for_hopper)


def library_product(x_NH: Tensor, weight_OH: Weight, extra_EH: Tensor | None = None) -> Tensor:
    """x W^T of many tokens, [N, O + E]: by the matrix library, or by W8A8 if the weights are block-scaled. 4-bit
    weights are expanded first."""
    if isinstance(weight_OH, Plain | FourBitTiles) and extra_EH is None:
        return torch_linear(x_NH, _in_dtype(weight_OH, x_NH.dtype))
    num_outputs = weight_OH.shape[0]
    out = torch.empty(
        len(x_NH), num_outputs + (0 if extra_EH is None else len(extra_EH)), dtype=x_NH.dtype, device=x_NH.device
    )
    if isinstance(weight_OH, BlockScaled):
        prefill_linear(x_NH, weight_OH, out[:, :num_outputs])
    else:
        torch.mm(x_NH, _in_dtype(weight_OH, x_NH.dtype).t(), out=out[:, :num_outputs])
    if extra_EH is not None:
        out[:, num_outputs:] = torch_linear(x_NH, extra_EH)
    return out


def _in_dtype(weight_OH: Weight, dtype: torch.dtype) -> Tensor:
    return expanded(weight_OH, dtype) if isinstance(weight_OH, FourBitTiles) else weight_OH.tensor


def launch_linear(
    plan: Plan,
    x_NH: Tensor,
    weight_OH: Weight,
    norm: Norm | None,
    residual_NO: Tensor | None,
    extra_EH: Tensor | None = None,
    *,
    next_norm: Norm | None = None,
) -> Tensor:
    """(residual +) x W^T by a given plan, of the normed x if there is a norm. [N, O + E] in x's dtype. With a residual
    and 8-bit weights, whose plans have norms apart, the next norm is computed with it (norm_ahead.py)."""
    x_NH, norm, ahead = _norm_apart(plan, x_NH, norm)
    following = None
    if next_norm is not None and residual_NO is not None and _leaves_norm(weight_OH, len(x_NH)):
        rows = HOPPER_ROWS if plan.programs else plan.block_o
        following = NormAhead.empty(next_norm, residual_NO, triton.cdiv(weight_OH.shape[0], rows))
    if not plan.programs:
        out = _launch_linear(plan, x_NH, weight_OH, norm, residual_NO, extra_EH, ahead, following)
    else:
        assert norm is None
        assert extra_EH is None
        assert isinstance(weight_OH, BlockScaled)
        out = launch_on_hopper(plan, x_NH, weight_OH, residual_NO=residual_NO, ahead=ahead, following=following)
    return attach(out, following)


def _leaves_norm(weight_OH: Weight, num_tokens: int) -> bool:
    """Whether the sum of a product with this weight computes the norm behind it: the plans of 8-bit weights all have
    norms apart."""
    return isinstance(weight_OH, BlockScaled) and num_tokens >= LEAST_AHEAD


def _launch_linear(
    plan: Plan,
    x_NH: Tensor,
    weight_OH: Weight,
    norm: Norm | None,
    residual_NO: Tensor | None,
    extra_EH: Tensor | None,
    ahead: NormAhead | None,
    following: NormAhead | None,
) -> Tensor:
    """`launch_linear` by linear_kernel."""
    (num_tokens, depth), num_outputs = x_NH.shape, weight_OH.shape[0]
    num_extra = 0 if extra_EH is None else len(extra_EH)
    assert residual_NO is None or residual_NO.is_contiguous()
    assert norm is None or plan.split == 1, "split-K and a fused norm exclude each other"
    assert extra_EH is None or (residual_NO is None and extra_EH.is_contiguous() and extra_EH.dtype == x_NH.dtype)
    out = torch.empty(num_tokens, num_outputs + num_extra, dtype=x_NH.dtype, device=x_NH.device)
    if num_tokens == 0:
        return out
    tiles, blocks = triton.cdiv(num_outputs, plan.block_o), triton.cdiv(num_tokens, plan.block_m)
    extra_o = max(plan.block_o // (2 * plan.split), 16)  # about as many bytes as a program's 8-bit weights
    partial = arrivals = None
    if plan.split > 1:
        assert tiles * blocks <= NUM_COUNTERS, f"{tiles * blocks} tiles"
        arrivals = arrival_counters(x_NH.device)
        partial = torch.empty(
            tiles * blocks * plan.split * plan.block_o * plan.block_m, dtype=torch.float32, device=x_NH.device
        )
    linear_kernel[(triton.cdiv(num_extra, extra_o) + tiles * plan.split, blocks)](
        out,
        x_NH,
        x_NH.stride(0),
        *_operands(plan, weight_OH),
        extra_EH,
        *norm_operands(norm, ahead),
        residual_NO,
        *to_fill(following),
        partial,
        arrivals,
        num_tokens,
        num_outputs,
        num_extra or None,
        depth,
        PARTS=None if ahead is None else ahead.padded_parts,
        SPLIT=plan.split,
        EXTRA_O=extra_o,
        **_scaling(weight_OH, plan.block_o),
        **_blocks(plan, depth),
        **overlapped(),
    )
    return out


def launch_swiglu(plan: Plan, x_NH: Tensor, norm: Norm | None, gate_up_2IH: Weight) -> Tensor:
    """silu(gate) * up of the normed x by a given plan. [N, I] in x's dtype."""
    x_NH, norm, ahead = _norm_apart(plan, x_NH, norm)
    if plan.programs:
        assert norm is None
        assert isinstance(gate_up_2IH, BlockScaled)
        return launch_on_hopper(plan, x_NH, gate_up_2IH, is_swiglu=True, ahead=ahead)
    (num_tokens, depth), width = x_NH.shape, gate_up_2IH.shape[0] // 2
    out = torch.empty(num_tokens, width, dtype=x_NH.dtype, device=x_NH.device)
    if num_tokens == 0:
        return out
    grid = (triton.cdiv(width, plan.block_o // 2), triton.cdiv(num_tokens, plan.block_m))
    blocks = _scaling(gate_up_2IH, plan.block_o // 2, width) | _blocks(plan, depth)
    swiglu_kernel[grid](
        out,
        x_NH,
        x_NH.stride(0),
        *_operands(plan, gate_up_2IH),
        *norm_operands(norm, ahead),
        num_tokens,
        width,
        depth,
        PARTS=None if ahead is None else ahead.padded_parts,
        **blocks,
        **overlapped(),
    )
    return out


def _norm_apart(plan: Plan, x_NH: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None, NormAhead | None]:
    """Return (the product's input, the norm that the product must still apply, or of which it must apply the factor).
    The output of a separate norm is rounded to x's dtype."""
    if norm is None or not plan.norm_apart:
        return x_NH, norm, None
    ahead = ahead_of(x_NH, norm)
    return (rms_norm(x_NH, norm), None, None) if ahead is None else (ahead.gained_NH, None, ahead)


def launch_logits(plan: Plan, x_NH: Tensor, weight_VH: Weight, num_real: int) -> Tensor:
    """float32 [N, V] logits by a given plan, minus infinity from num_real on. One launch. weight_VH: Plain or
    RowScaled."""
    values, scales = _operands(plan, weight_VH)
    assert scales is None, "a head has no blocks here"
    (num_tokens, depth), vocab_size = x_NH.shape, weight_VH.shape[0]
    out = torch.empty(num_tokens, vocab_size, dtype=torch.float32, device=x_NH.device)
    if num_tokens:
        grid = (triton.cdiv(vocab_size, plan.block_o), triton.cdiv(num_tokens, plan.block_m))
        logits_kernel[grid](
            out,
            x_NH,
            x_NH.stride(0),
            values,
            _row_scales(weight_VH),
            num_real,
            num_tokens,
            vocab_size,
            depth,
            **_blocks(plan, depth),
            **overlapped(),
        )
    return out


def launch_draft_argmax(
    plan: Plan, x_NH: Tensor, head_OH: Weight, ids_O: Tensor | None, *, ranked: bool = False
) -> Tensor:
    """Argmax of x head^T by a given plan: int64 [N], mapped by `ids_O` if given. Two launches: the best row of every
    tile, then the best of those. Scores stay float32 and are never stored. ranked: each token's rank (ranking.py) in
    its place; equal scores must then have rising ids."""
    (num_tokens, depth), num_outputs = x_NH.shape, head_OH.shape[0]
    token_N = torch.empty(num_tokens, dtype=torch.int64, device=x_NH.device)
    if num_tokens:
        tiles = triton.cdiv(num_outputs, plan.block_o)
        score = torch.empty(num_tokens, tiles, dtype=torch.float32, device=x_NH.device)
        row = torch.empty(num_tokens, tiles, dtype=torch.int32, device=x_NH.device)
        grid = (tiles, triton.cdiv(num_tokens, plan.block_m))
        blocks = _scaling(head_OH, plan.block_o) | _blocks(plan, depth)
        nearest_kernel[grid](
            score,
            row,
            x_NH,
            x_NH.stride(0),
            *_operands(plan, head_OH),
            _row_scales(head_OH),
            num_tokens,
            num_outputs,
            depth,
            **blocks,
            **overlapped(),
        )
        block = min(triton.next_power_of_2(tiles), _CHOICE_BLOCK)
        choose_kernel[(num_tokens,)](
            token_N, score, row, ids_O, tiles, BLOCK=block, RANKED=ranked, num_warps=4, **overlapped()
        )
    return token_N


def swiglu(gate_up_N2I: Tensor) -> Tensor:
    """silu(gate) * up of [gate | up]: [N, I], one launch. For products computed by torch."""
    num_tokens, width = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    assert gate_up_N2I.is_contiguous()
    out = torch.empty(num_tokens, width, dtype=gate_up_N2I.dtype, device=gate_up_N2I.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, _ELEMENTWISE_BLOCK))
        gate_kernel[grid](out, gate_up_N2I, width, BLOCK=_ELEMENTWISE_BLOCK, num_warps=4, **overlapped())
    return out


def _operands(plan: Plan, weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Return (values, scales of blocks or None) as the kernels take them: 8-bit floats as bytes, or as pairs of bytes,
    which they decode."""
    if not isinstance(weight, BlockScaled | RowScaled):
        return weight.tensor, None
    by_twos = plan.takes_pairs and weight.shape[1] % 2 == 0
    values = weight.values.view(torch.uint16 if by_twos else torch.uint8)
    return values, weight.scales if isinstance(weight, BlockScaled) else None


def _row_scales(weight: Weight) -> Tensor | None:
    return weight.scales if isinstance(weight, RowScaled) else None


def _scaling(weight: Weight, rows: int, begin: int = 0) -> dict[str, int | bool]:
    """ONE_BLOCK: whether the rows of a tile share their scales. A tile has `rows` rows from a multiple of `rows`, plus
    `begin`."""
    if not isinstance(weight, BlockScaled):
        return {"BLOCK_ROWS": 1, "ONE_BLOCK": False}
    return {"BLOCK_ROWS": weight.block_rows, "ONE_BLOCK": weight.block_rows % rows == 0 and begin % rows == 0}


def _blocks(plan: Plan, depth: int) -> dict[str, int | bool]:
    return {
        "BLOCK_O": plan.block_o,
        "BLOCK_M": plan.block_m,
        "BLOCK_K": plan.block_k,
        "EVEN": depth % plan.block_k == 0,
        "ahead": plan.ahead,
        "release": plan.release,
        "RUNNING": plan.running,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }
