"""The linear layers of a forward in Triton, each one launch: with the norm before, SwiGLU or the residual after, or the choice of a token.

A step has few tokens, so that a layer takes as long as its weights take to arrive; `linear_tiles` has the walk over them, `linear_plans` how a layer
is cut into programs. Where a plan says so, and for prompts, the product is torch's own. See backend.Backend for the operations.

The kernels that split K count their arrivals in memory that they share, so they must run one after the other: on one stream of a device.
Shape letters: N tokens, H and K input features, O output features, I FFN width, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from agentspec.kernels.backend import Norm
from agentspec.kernels.triton.launch import NUM_COUNTERS, OVERLAPPED, arrival_counters, await_previous, release_next
from agentspec.kernels.triton.linear_plans import Kind, Plan, plan_for
from agentspec.kernels.triton.linear_tiles import prefetch_first_steps, sum_parts, walk
from agentspec.kernels.triton.norms import rms_norm

_ELEMENTWISE_BLOCK = 1024
_CHOICE_BLOCK = 1024


def linear(x_NH: Tensor, weight_OH: Tensor) -> Tensor:
    plan = _plan("linear", x_NH, weight_OH)
    return torch_linear(x_NH, weight_OH) if plan is None else launch_linear(plan, x_NH, weight_OH, None, None)


def norm_linear(x_NH: Tensor, norm: Norm, weight_OH: Tensor) -> Tensor:
    plan = _plan("norm_linear", x_NH, weight_OH)
    return torch_linear(rms_norm(x_NH, norm), weight_OH) if plan is None else launch_linear(plan, x_NH, weight_OH, norm, None)


def add_linear(residual_NH: Tensor, x_NO: Tensor, weight_HO: Tensor) -> Tensor:
    plan = _plan("add_linear", x_NO, weight_HO)
    if plan is None:
        return residual_NH.addmm_(x_NO, weight_HO.t())  # a new result would begin as a copy of the residual
    return launch_linear(plan, x_NO, weight_HO, None, residual_NH)


def norm_swiglu(x_NH: Tensor, norm: Norm, gate_up_2IH: Tensor) -> Tensor:
    plan = _plan("norm_swiglu", x_NH, gate_up_2IH)
    if plan is None:
        return swiglu(torch_linear(rms_norm(x_NH, norm), gate_up_2IH))
    return launch_swiglu(plan, x_NH, norm, gate_up_2IH)


def logits(x_NH: Tensor, weight_VH: Tensor, num_real: int) -> Tensor:
    plan = _plan("logits", x_NH, weight_VH)
    assert plan is not None, "no torch product returns float32 scores of 16-bit operands on every device"
    return launch_logits(plan, x_NH, weight_VH, num_real)


def nearest_token(x_NH: Tensor, head_OH: Tensor, ids_O: Tensor | None) -> Tensor:
    plan = _plan("nearest_token", x_NH, head_OH)
    assert plan is not None, "scores that are not stored have no torch product"
    return launch_nearest(plan, x_NH, head_OH, ids_O)


def _plan(kind: Kind, x_NH: Tensor, weight_OH: Tensor) -> Plan | None:
    assert (x_NH.shape[1], x_NH.dtype) == (weight_OH.shape[1], weight_OH.dtype), f"{x_NH.shape} {x_NH.dtype} {weight_OH.shape} {weight_OH.dtype}"
    assert x_NH.stride(1) == 1
    assert weight_OH.is_contiguous()
    return plan_for(kind, *weight_OH.shape, x_NH.shape[0], x_NH.element_size())


def launch_linear(plan: Plan, x_NH: Tensor, weight_OH: Tensor, norm: Norm | None, residual_NO: Tensor | None) -> Tensor:
    """One launch by a given plan: (residual +) x W^T, of the normed x if there is a norm. [N, O] in x's dtype."""
    (num_tokens, depth), num_outputs = x_NH.shape, weight_OH.shape[0]
    assert residual_NO is None or residual_NO.is_contiguous()
    assert norm is None or plan.split == 1, "a part of K does not know the whole norm"
    out = torch.empty(num_tokens, num_outputs, dtype=x_NH.dtype, device=x_NH.device)
    if num_tokens == 0:
        return out
    tiles, blocks = triton.cdiv(num_outputs, plan.block_o), triton.cdiv(num_tokens, plan.block_m)
    partial = arrivals = None
    if plan.split > 1:
        assert tiles * blocks <= NUM_COUNTERS, f"{tiles * blocks} tiles"
        arrivals = arrival_counters(x_NH.device)
        partial = torch.empty(tiles * blocks * plan.split * plan.block_o * plan.block_m, dtype=torch.float32, device=x_NH.device)
    _linear_kernel[(tiles * plan.split, blocks)](
        out,
        x_NH,
        x_NH.stride(0),
        weight_OH,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        residual_NO,
        partial,
        arrivals,
        num_tokens,
        num_outputs,
        depth,
        SPLIT=plan.split,
        **_blocks(plan, depth),
        **OVERLAPPED,
    )
    return out


def launch_swiglu(plan: Plan, x_NH: Tensor, norm: Norm, gate_up_2IH: Tensor) -> Tensor:
    """One launch by a given plan: silu(gate) * up of the normed x. [N, I] in x's dtype."""
    (num_tokens, depth), width = x_NH.shape, gate_up_2IH.shape[0] // 2
    out = torch.empty(num_tokens, width, dtype=x_NH.dtype, device=x_NH.device)
    if num_tokens:
        grid = (triton.cdiv(width, plan.block_o // 2), triton.cdiv(num_tokens, plan.block_m))
        blocks = _blocks(plan, depth)
        _swiglu_kernel[grid](out, x_NH, x_NH.stride(0), gate_up_2IH, norm.weight, norm.eps, num_tokens, width, depth, **blocks, **OVERLAPPED)
    return out


def launch_logits(plan: Plan, x_NH: Tensor, weight_VH: Tensor, num_real: int) -> Tensor:
    """One launch by a given plan: float32 [N, V], minus infinity from num_real on."""
    (num_tokens, depth), vocab_size = x_NH.shape, weight_VH.shape[0]
    out = torch.empty(num_tokens, vocab_size, dtype=torch.float32, device=x_NH.device)
    if num_tokens:
        grid = (triton.cdiv(vocab_size, plan.block_o), triton.cdiv(num_tokens, plan.block_m))
        _logits_kernel[grid](out, x_NH, x_NH.stride(0), weight_VH, num_real, num_tokens, vocab_size, depth, **_blocks(plan, depth), **OVERLAPPED)
    return out


def launch_nearest(plan: Plan, x_NH: Tensor, head_OH: Tensor, ids_O: Tensor | None) -> Tensor:
    """Two launches: the best row of every tile, then of those. The scores stay float32 and are never stored."""
    (num_tokens, depth), num_outputs = x_NH.shape, head_OH.shape[0]
    token_N = torch.empty(num_tokens, dtype=torch.int64, device=x_NH.device)
    if num_tokens:
        tiles = triton.cdiv(num_outputs, plan.block_o)
        score = torch.empty(num_tokens, tiles, dtype=torch.float32, device=x_NH.device)
        row = torch.empty(num_tokens, tiles, dtype=torch.int32, device=x_NH.device)
        grid = (tiles, triton.cdiv(num_tokens, plan.block_m))
        _nearest_kernel[grid](score, row, x_NH, x_NH.stride(0), head_OH, num_tokens, num_outputs, depth, **_blocks(plan, depth), **OVERLAPPED)
        block = min(triton.next_power_of_2(tiles), _CHOICE_BLOCK)
        _choose_kernel[(num_tokens,)](token_N, score, row, ids_O, tiles, BLOCK=block, num_warps=4, **OVERLAPPED)
    return token_N


def swiglu(gate_up_N2I: Tensor) -> Tensor:
    """silu(gate) * up of [gate | up], one launch: [N, I]. For products that come from torch."""
    num_tokens, width = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    assert gate_up_N2I.is_contiguous()
    out = torch.empty(num_tokens, width, dtype=gate_up_N2I.dtype, device=gate_up_N2I.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(width, _ELEMENTWISE_BLOCK))
        _gate_kernel[grid](out, gate_up_N2I, width, BLOCK=_ELEMENTWISE_BLOCK, num_warps=4, **OVERLAPPED)
    return out


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


@triton.jit
def _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(tokens, which of them are real, pointers to their rows) of this program's block of tokens."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    return m, m < num_tokens, x_ptr + m.to(tl.int64) * x_stride


@triton.jit
def _weight_rows(weight_ptr, rows, num_rows, depth):  # type: ignore[no-untyped-def]
    """Pointers to rows of W. Those past the end read the last row instead of needing a mask on every load; nothing of them is stored."""
    return weight_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64) * depth


@triton.jit(do_not_specialize=["num_tokens", "ahead", "release"])
def _linear_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_stride,
    weight_ptr,
    norm_ptr,
    eps,
    residual_ptr,
    partial_ptr,
    arrivals_ptr,
    num_tokens,
    num_outputs,
    depth,
    ahead,
    release,
    SPLIT: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    RUNNING: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    all_steps = tl.cdiv(depth, BLOCK_K)
    first = all_steps * part // SPLIT
    num_steps = all_steps * (part + 1) // SPLIT - first
    begin = first * BLOCK_K
    weight_rows = _weight_rows(weight_ptr, o, num_outputs, depth) + begin
    prefetch_first_steps(weight_rows, ahead, num_steps, depth - begin, BLOCK_O, BLOCK_K)
    await_previous(PDL)
    m, token_is_real, x_rows = _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M)
    offsets = m.to(tl.int64)[None, :] * num_outputs + o[:, None]
    is_real = (o < num_outputs)[:, None] & token_is_real[None, :]
    NORM: tl.constexpr = norm_ptr is not None
    acc, squares = walk(
        x_rows + begin,
        token_is_real,
        weight_rows,
        norm_ptr,
        num_steps,
        depth - begin,
        ahead,
        release,
        NORM,
        BLOCK_O,
        BLOCK_M,
        BLOCK_K,
        EVEN,
        RUNNING,
        PDL,
    )
    if NORM:
        acc *= tl.rsqrt(squares / depth + eps)[None, :]
    stores = True
    if SPLIT > 1:
        acc, stores = sum_parts(
            acc, part, tile + tl.program_id(1) * (tl.num_programs(0) // SPLIT), partial_ptr, arrivals_ptr, SPLIT, BLOCK_O, BLOCK_M
        )
    if stores:
        if residual_ptr is not None:
            acc += tl.load(residual_ptr + offsets, mask=is_real, other=0.0).to(tl.float32)
        tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["num_tokens", "ahead", "release"])
def _swiglu_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_stride,
    weight_ptr,
    norm_ptr,
    eps,
    num_tokens,
    width,
    depth,
    ahead,
    release,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    RUNNING: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile holds gate and up rows of BLOCK_O / 2 outputs by turns of 8: a thread of a 16-row matrix fragment has rows r and r + 8, so a gate and
    its up meet in one thread."""
    HALF: tl.constexpr = BLOCK_O // 2
    r = tl.arange(0, BLOCK_O)
    i = tl.program_id(0) * HALF + r // 16 * 8 + r % 8
    rows = tl.minimum(i, width - 1) + r // 8 % 2 * width
    weight_rows = weight_ptr + rows.to(tl.int64) * depth
    num_steps = tl.cdiv(depth, BLOCK_K)
    prefetch_first_steps(weight_rows, ahead, num_steps, depth, BLOCK_O, BLOCK_K)
    await_previous(PDL)
    m, token_is_real, x_rows = _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M)
    acc, squares = walk(
        x_rows, token_is_real, weight_rows, norm_ptr, num_steps, depth, ahead, release, True, BLOCK_O, BLOCK_M, BLOCK_K, EVEN, RUNNING, PDL
    )
    acc *= tl.rsqrt(squares / depth + eps)[None, :]
    gate, up = acc.reshape(BLOCK_O // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1).split()
    y = (gate / (1.0 + tl.exp(-gate)) * up).reshape(HALF, BLOCK_M)
    o = tl.program_id(0) * HALF + tl.arange(0, HALF)
    is_real = (o < width)[:, None] & token_is_real[None, :]
    tl.store(out_ptr + m.to(tl.int64)[None, :] * width + o[:, None], y.to(out_ptr.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["num_tokens", "num_real", "ahead", "release"])
def _logits_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_stride,
    weight_ptr,
    num_real,
    num_tokens,
    num_outputs,
    depth,
    ahead,
    release,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    RUNNING: tl.constexpr,
    PDL: tl.constexpr,
):
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    weight_rows = _weight_rows(weight_ptr, o, num_outputs, depth)
    num_steps = tl.cdiv(depth, BLOCK_K)
    prefetch_first_steps(weight_rows, ahead, num_steps, depth, BLOCK_O, BLOCK_K)
    await_previous(PDL)
    m, token_is_real, x_rows = _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M)
    acc, _ = walk(x_rows, token_is_real, weight_rows, None, num_steps, depth, ahead, release, False, BLOCK_O, BLOCK_M, BLOCK_K, EVEN, RUNNING, PDL)
    acc = tl.where((o < num_real)[:, None], acc, float("-inf"))
    is_real = (o < num_outputs)[:, None] & token_is_real[None, :]
    tl.store(out_ptr + m.to(tl.int64)[None, :] * num_outputs + o[:, None], acc, mask=is_real)


@triton.jit(do_not_specialize=["num_tokens", "ahead", "release"])
def _nearest_kernel(  # type: ignore[no-untyped-def]
    score_ptr,
    row_ptr,
    x_ptr,
    x_stride,
    weight_ptr,
    num_tokens,
    num_outputs,
    depth,
    ahead,
    release,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    RUNNING: tl.constexpr,
    PDL: tl.constexpr,
):
    """score_ptr float32, row_ptr int32 [N, tiles]: the best row of each tile, the first of equals."""
    tile = tl.program_id(0)
    o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    weight_rows = _weight_rows(weight_ptr, o, num_outputs, depth)
    num_steps = tl.cdiv(depth, BLOCK_K)
    prefetch_first_steps(weight_rows, ahead, num_steps, depth, BLOCK_O, BLOCK_K)
    await_previous(PDL)
    m, token_is_real, x_rows = _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M)
    acc, _ = walk(x_rows, token_is_real, weight_rows, None, num_steps, depth, ahead, release, False, BLOCK_O, BLOCK_M, BLOCK_K, EVEN, RUNNING, PDL)
    acc = tl.where((o < num_outputs)[:, None], acc, float("-inf"))
    score, place = tl.max(acc, axis=0, return_indices=True, return_indices_tie_break_left=True)
    to = m.to(tl.int64) * tl.num_programs(0) + tile
    tl.store(score_ptr + to, score, mask=token_is_real)
    tl.store(row_ptr + to, tile * BLOCK_O + place, mask=token_is_real)


@triton.jit
def _choose_kernel(token_ptr, score_ptr, row_ptr, ids_ptr, tiles, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    release_next(PDL)
    await_previous(PDL)
    begin = tl.program_id(0).to(tl.int64) * tiles
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        score = tl.load(score_ptr + begin + tile, mask=tile < tiles, other=float("-inf"))
        row = tl.load(row_ptr + begin + tile, mask=tile < tiles, other=0)
        # Tiles come in rising order, so an equal one later never wins a lane.
        at = tl.where((score > best) | (first == 0), row, at)
        best = tl.maximum(best, score)
    highest = tl.max(best, axis=0)
    row = tl.min(tl.where(best == highest, at, 0x7FFFFFFF), axis=0)
    if ids_ptr is not None:
        tl.store(token_ptr + tl.program_id(0), tl.load(ids_ptr + row))
    else:
        tl.store(token_ptr + tl.program_id(0), row.to(tl.int64))


@triton.jit
def _gate_kernel(out_ptr, gate_up_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    release_next(PDL)
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + token * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (token * 2 + 1) * width + i, mask=i < width, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * width + i, y.to(out_ptr.dtype.element_ty), mask=i < width)
