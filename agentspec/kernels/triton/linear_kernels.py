"""The kernels of linear layers: a tile of a product by the loops of `linear_tiles`, and its epilogue.

Owns the arithmetic of one launch; `linear_layers` has the launches. Weights are tensors of the activation dtype
(scales_ptr None) or the bytes of 8-bit floats (uint8, or uint16 for pairs) with float32 scales [ceil(rows /
BLOCK_ROWS), ceil(depth / 128)]. ONE_BLOCK: adjacent weight rows of a tile share a scale. Where there is a
row_scales_ptr, 8-bit floats may have float32 scales [rows] instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from agentspec.kernels.triton.launch import await_previous, release_next
from agentspec.kernels.triton.linear_tiles import (
    SCALE_COLUMNS,
    norm_factor,
    prefetch_first_steps,
    sum_parts,
    walk,
    walk_either,
    weight_rows_at,
)
from agentspec.kernels.triton.ranking import rank


@triton.jit
def _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (tokens, which of them are real, pointers to their rows) of this program's block of tokens."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    return m, m < num_tokens, x_ptr + m.to(tl.int64) * x_stride


@triton.jit
def _weight_rows(weight_ptr, rows, num_rows, depth, begin):  # type: ignore[no-untyped-def]
    """Pointers into rows of W. Rows past the end read the last row, which avoids a mask on every load; their results
    are not stored."""
    return weight_rows_at(weight_ptr, tl.minimum(rows, num_rows - 1), depth, begin)


@triton.jit
def _scale_rows(scales_ptr, first_row, rows, depth, BLOCK_ROWS: tl.constexpr, ONE_BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to the scales of a tile's rows, as `walk_scaled` takes them: one pointer, or one per row."""
    columns = tl.cdiv(depth, SCALE_COLUMNS)
    block = first_row // BLOCK_ROWS if ONE_BLOCK else rows // BLOCK_ROWS
    return scales_ptr + block * columns


@triton.jit
def _load_row_scales(row_scales_ptr, rows, num_rows):  # type: ignore[no-untyped-def]
    """The scale of each row of a tile, [BLOCK_O]; None if there are none. They are no result of the previous kernel, so
    nothing waits for them."""
    scale = None
    if row_scales_ptr is not None:
        scale = tl.load(row_scales_ptr + tl.minimum(rows, num_rows - 1))
    return scale


@triton.jit
def _extra_tile(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_stride,
    extra_ptr,
    norm_ptr,
    squares_ptr,
    num_parts,
    eps,
    num_tokens,
    num_outputs,
    num_extra,
    depth,
    PARTS: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute rows of a plain weight; their outputs follow the num_outputs others. They are few: all of them are
    prefetched to L2 at once, and the other programs release the next kernel."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    weight_rows = _weight_rows(extra_ptr, o, num_extra, depth, 0)
    num_steps = tl.cdiv(depth, BLOCK_K)
    prefetch_first_steps(weight_rows, num_steps, num_steps, depth, BLOCK_O, BLOCK_K)
    await_previous(PDL)
    m, token_is_real, x_rows = _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M)
    factor = norm_factor(squares_ptr, num_parts, eps, m, token_is_real, num_tokens, depth, PARTS)
    NORM: tl.constexpr = norm_ptr is not None
    acc, squares = walk(
        x_rows,
        token_is_real,
        weight_rows,
        norm_ptr,
        num_steps,
        depth,
        0,
        num_steps,
        NORM,
        BLOCK_O,
        BLOCK_M,
        BLOCK_K,
        EVEN,
        False,
        PDL,
    )
    if NORM:
        acc *= tl.rsqrt(squares / depth + eps)[None, :]
    if squares_ptr is not None:
        acc *= factor
    to = out_ptr + m.to(tl.int64)[None, :] * (num_outputs + num_extra) + num_outputs + o[:, None]
    tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=(o < num_extra)[:, None] & token_is_real[None, :])


@triton.jit
def _store_norm(y, norm_ptr, o, num_outputs, gained_at, is_real, squares_at, token_is_real):  # type: ignore[no-untyped-def]
    """Store what the next norm needs of a tile of results, rounded, float32 [BLOCK_O, BLOCK_M] (norm_ahead.py)."""
    gain = 1.0 + tl.load(norm_ptr + o, mask=o < num_outputs, other=0.0).to(tl.float32)
    tl.store(gained_at, (y * gain[:, None]).to(gained_at.dtype.element_ty), mask=is_real)
    tl.store(squares_at, tl.sum(y * y, axis=0), mask=token_is_real)


@triton.jit(do_not_specialize=["num_parts", "num_tokens", "ahead", "release"])
def linear_kernel(  # type: ignore[no-untyped-def]
    out_ptr, x_ptr, x_stride, weight_ptr, scales_ptr, extra_ptr, norm_ptr, squares_ptr, num_parts, eps, residual_ptr,
    next_norm_ptr, next_gained_ptr, next_squares_ptr, partial_ptr, arrivals_ptr, num_tokens, num_outputs, num_extra,
    depth, ahead, release, PARTS: tl.constexpr, BLOCK_ROWS: tl.constexpr, ONE_BLOCK: tl.constexpr, SPLIT: tl.constexpr,
    EXTRA_O: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr,
    RUNNING: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A norm before the product: by norm_ptr within the loop, or by the squares and their num_parts of a sum that has
    computed it (norm_ahead.py); the next one's are computed where there is a next_norm_ptr."""
    program, row_size = tl.program_id(0), num_outputs
    if extra_ptr is not None:
        # These programs come first: each of them takes longest.
        extra_tiles = tl.cdiv(num_extra, EXTRA_O)
        if program < extra_tiles:
            _extra_tile(
                out_ptr, x_ptr, x_stride, extra_ptr, norm_ptr, squares_ptr, num_parts, eps, num_tokens, num_outputs,
                num_extra, depth, PARTS, EXTRA_O, BLOCK_M, BLOCK_K, EVEN, PDL
            )  # fmt: skip
            return
        program, row_size = program - extra_tiles, num_outputs + num_extra
    tile, part = program // SPLIT, program % SPLIT
    o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    all_steps = tl.cdiv(depth, BLOCK_K)
    first = all_steps * part // SPLIT
    num_steps = all_steps * (part + 1) // SPLIT - first
    begin = first * BLOCK_K
    weight_rows = _weight_rows(weight_ptr, o, num_outputs, depth, begin)
    prefetch_first_steps(weight_rows, ahead, num_steps, depth - begin, BLOCK_O, BLOCK_K)
    await_previous(PDL)
    m, token_is_real, x_rows = _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M)
    factor = norm_factor(squares_ptr, num_parts, eps, m, token_is_real, num_tokens, depth, PARTS)
    offsets = m.to(tl.int64)[None, :] * row_size + o[:, None]
    is_real = (o < num_outputs)[:, None] & token_is_real[None, :]
    NORM: tl.constexpr = norm_ptr is not None
    scales = None
    if scales_ptr is not None:
        scales = _scale_rows(scales_ptr, tile * BLOCK_O, tl.minimum(o, num_outputs - 1), depth, BLOCK_ROWS, ONE_BLOCK)
    acc, squares = walk_either(
        x_rows,
        token_is_real,
        weight_rows,
        scales,
        begin,
        norm_ptr,
        num_steps,
        depth,
        ahead,
        release,
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
        place = tile + tl.program_id(1) * tl.cdiv(num_outputs, BLOCK_O)
        acc, stores = sum_parts(acc, part, place, partial_ptr, arrivals_ptr, SPLIT, BLOCK_O, BLOCK_M)
    if stores:
        if squares_ptr is not None:
            acc *= factor
        if residual_ptr is not None:
            acc += tl.load(residual_ptr + offsets, mask=is_real, other=0.0).to(tl.float32)
        y = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offsets, y, mask=is_real)
        if next_norm_ptr is not None:
            y32 = tl.where(is_real, y.to(tl.float32), 0.0)
            squares_at = next_squares_ptr + tile * num_tokens + m
            _store_norm(
                y32, next_norm_ptr, o, num_outputs, next_gained_ptr + offsets, is_real, squares_at, token_is_real
            )


@triton.jit(do_not_specialize=["num_parts", "num_tokens", "ahead", "release"])
def swiglu_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_stride,
    weight_ptr,
    scales_ptr,
    norm_ptr,
    squares_ptr,
    num_parts,
    eps,
    num_tokens,
    width,
    depth,
    ahead,
    release,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    RUNNING: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile holds the gate and up rows of BLOCK_O / 2 outputs, alternating in groups of 8: a thread of a 16-row
    matrix fragment has rows r and r + 8, so a gate and its up are in one thread."""
    HALF: tl.constexpr = BLOCK_O // 2
    r = tl.arange(0, BLOCK_O)
    i = tl.program_id(0) * HALF + r // 16 * 8 + r % 8
    is_up = r // 8 % 2
    rows = tl.minimum(i, width - 1) + is_up * width
    weight_rows = weight_rows_at(weight_ptr, rows, depth, 0)
    num_steps = tl.cdiv(depth, BLOCK_K)
    prefetch_first_steps(weight_rows, ahead, num_steps, depth, BLOCK_O, BLOCK_K)
    await_previous(PDL)
    m, token_is_real, x_rows = _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M)
    factor = norm_factor(squares_ptr, num_parts, eps, m, token_is_real, num_tokens, depth, PARTS)
    gate_scale_rows, up_scale_rows = None, None
    if scales_ptr is not None:
        gate_scale_rows = _scale_rows(scales_ptr, tl.program_id(0) * HALF, rows, depth, BLOCK_ROWS, ONE_BLOCK)
        if ONE_BLOCK:
            up_scale_rows = _scale_rows(scales_ptr, tl.program_id(0) * HALF + width, rows, depth, BLOCK_ROWS, ONE_BLOCK)
    acc, squares = walk_either(
        x_rows,
        token_is_real,
        weight_rows,
        gate_scale_rows,
        0,
        norm_ptr,
        num_steps,
        depth,
        ahead,
        release,
        BLOCK_O,
        BLOCK_M,
        BLOCK_K,
        EVEN,
        RUNNING,
        PDL,
        up_scale_rows,
        is_up,
    )
    if norm_ptr is not None:
        acc *= tl.rsqrt(squares / depth + eps)[None, :]
    if squares_ptr is not None:
        acc *= factor
    gate, up = acc.reshape(BLOCK_O // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1).split()
    y = (gate / (1.0 + tl.exp(-gate)) * up).reshape(HALF, BLOCK_M)
    o = tl.program_id(0) * HALF + tl.arange(0, HALF)
    is_real = (o < width)[:, None] & token_is_real[None, :]
    tl.store(out_ptr + m.to(tl.int64)[None, :] * width + o[:, None], y.to(out_ptr.dtype.element_ty), mask=is_real)


@triton.jit(do_not_specialize=["num_tokens", "num_real", "ahead", "release"])
def logits_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    x_stride,
    weight_ptr,
    row_scales_ptr,
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
    weight_rows = _weight_rows(weight_ptr, o, num_outputs, depth, 0)
    num_steps = tl.cdiv(depth, BLOCK_K)
    prefetch_first_steps(weight_rows, ahead, num_steps, depth, BLOCK_O, BLOCK_K)
    row_scale = _load_row_scales(row_scales_ptr, o, num_outputs)
    await_previous(PDL)
    m, token_is_real, x_rows = _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M)
    acc, _ = walk_either(
        x_rows,
        token_is_real,
        weight_rows,
        None,
        0,
        None,
        num_steps,
        depth,
        ahead,
        release,
        BLOCK_O,
        BLOCK_M,
        BLOCK_K,
        EVEN,
        RUNNING,
        PDL,
    )
    if row_scales_ptr is not None:
        acc *= row_scale[:, None]
    acc = tl.where((o < num_real)[:, None], acc, float("-inf"))
    is_real = (o < num_outputs)[:, None] & token_is_real[None, :]
    tl.store(out_ptr + m.to(tl.int64)[None, :] * num_outputs + o[:, None], acc, mask=is_real)


@triton.jit(do_not_specialize=["num_tokens", "ahead", "release"])
def nearest_kernel(  # type: ignore[no-untyped-def]
    score_ptr,
    row_ptr,
    x_ptr,
    x_stride,
    weight_ptr,
    scales_ptr,
    row_scales_ptr,
    num_tokens,
    num_outputs,
    depth,
    ahead,
    release,
    BLOCK_ROWS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    RUNNING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the best score and row of each tile, lowest row on ties: score_ptr float32, row_ptr int32 [N, tiles]."""
    tile = tl.program_id(0)
    o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    weight_rows = _weight_rows(weight_ptr, o, num_outputs, depth, 0)
    num_steps = tl.cdiv(depth, BLOCK_K)
    prefetch_first_steps(weight_rows, ahead, num_steps, depth, BLOCK_O, BLOCK_K)
    row_scale = _load_row_scales(row_scales_ptr, o, num_outputs)
    await_previous(PDL)
    m, token_is_real, x_rows = _token_rows(x_ptr, x_stride, num_tokens, BLOCK_M)
    scales = None
    if scales_ptr is not None:
        scales = _scale_rows(scales_ptr, tile * BLOCK_O, tl.minimum(o, num_outputs - 1), depth, BLOCK_ROWS, ONE_BLOCK)
    acc, _ = walk_either(
        x_rows,
        token_is_real,
        weight_rows,
        scales,
        0,
        None,
        num_steps,
        depth,
        ahead,
        release,
        BLOCK_O,
        BLOCK_M,
        BLOCK_K,
        EVEN,
        RUNNING,
        PDL,
    )
    if row_scales_ptr is not None:
        acc *= row_scale[:, None]
    acc = tl.where((o < num_outputs)[:, None], acc, float("-inf"))
    score, place = tl.max(acc, axis=0, return_indices=True, return_indices_tie_break_left=True)
    to = m.to(tl.int64) * tl.num_programs(0) + tile
    tl.store(score_ptr + to, score, mask=token_is_real)
    tl.store(row_ptr + to, tile * BLOCK_O + place, mask=token_is_real)


@triton.jit
def choose_kernel(  # type: ignore[no-untyped-def]
    token_ptr, score_ptr, row_ptr, ids_ptr, tiles, BLOCK: tl.constexpr, RANKED: tl.constexpr, PDL: tl.constexpr
):
    """RANKED: store the token's rank (ranking.py) with its score instead of the token."""
    release_next(PDL)
    await_previous(PDL)
    begin = tl.program_id(0).to(tl.int64) * tiles
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        score = tl.load(score_ptr + begin + tile, mask=tile < tiles, other=float("-inf"))
        row = tl.load(row_ptr + begin + tile, mask=tile < tiles, other=0)
        # Tiles come in rising order, so a later equal score never replaces an earlier one of a lane.
        at = tl.where((score > best) | (first == 0), row, at)
        best = tl.maximum(best, score)
    highest = tl.max(best, axis=0)
    row = tl.min(tl.where(best == highest, at, 0x7FFFFFFF), axis=0)
    token = row.to(tl.int64)
    if ids_ptr is not None:
        token = tl.load(ids_ptr + row)
    tl.store(token_ptr + tl.program_id(0), rank(highest, token) if RANKED else token)


@triton.jit
def gate_kernel(out_ptr, gate_up_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    release_next(PDL)
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + token * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (token * 2 + 1) * width + i, mask=i < width, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + token * width + i, y.to(out_ptr.dtype.element_ty), mask=i < width)
