"""Building blocks of the linear kernels: weight prefetch, the loops along K, the sum over split-K programs.

Weights are stationary and tokens are few: a program owns BLOCK_O rows of W and computes acc[o, m] = sum_k W[o, k] x[m,
k]. So every byte of W is read once, and the long side of the tensor cores' tile is the one with many rows. Knows
nothing of layers or of what is done with a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.prefetch import CAN_PREFETCH, LINE_BYTES, prefetch
from agentspec.kernels.weights import SCALE_BLOCK

HAS_PTX: tl.constexpr = tl.constexpr(not INTERPRETED)
SCALE_COLUMNS: tl.constexpr = tl.constexpr(SCALE_BLOCK)


@triton.constexpr_function
def _weights_per_element(element_type):  # type: ignore[no-untyped-def]
    """Number of weights per pointer element: 8-bit weights may come in pairs."""
    return 2 if element_type == tl.uint16 else 1


@triton.constexpr_function
def _is_8_bit(element_type):  # type: ignore[no-untyped-def]
    """Whether pointer elements are bytes of 8-bit floats, or pairs of them."""
    return element_type == tl.uint8 or element_type == tl.uint16


@triton.jit
def weight_rows_at(weight_ptr, rows, depth, begin):  # type: ignore[no-untyped-def]
    """Pointers to column `begin` of rows of W."""
    PER_ELEMENT: tl.constexpr = _weights_per_element(weight_ptr.dtype.element_ty)
    return weight_ptr + rows.to(tl.int64) * (depth // PER_ELEMENT) + begin // PER_ELEMENT


@triton.jit
def prefetch_step(weight_rows, step, num_steps, depth, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch the cache lines of one step's weights to L2; nothing past the last step. weight_rows: pointers
    [BLOCK_O] to the first step."""
    PER_ELEMENT: tl.constexpr = _weights_per_element(weight_rows.dtype.element_ty)
    ELEMENTS: tl.constexpr = LINE_BYTES // (weight_rows.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (BLOCK_K // PER_ELEMENT + ELEMENTS - 1) // ELEMENTS
    k = step * (BLOCK_K // PER_ELEMENT) + tl.arange(0, LINES) * ELEMENTS
    prefetch(weight_rows[:, None] + k[None, :], ((step < num_steps) & (k < depth // PER_ELEMENT))[None, :])


@triton.jit
def prefetch_first_steps(weight_rows, ahead, num_steps, depth, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Prefetch before waiting for the previous kernel, so that memory stays busy while that one ends."""
    if CAN_PREFETCH:
        for step in range(ahead):
            prefetch_step(weight_rows, step, num_steps, depth, BLOCK_O, BLOCK_K)


@triton.jit
def release_next_if(condition, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """`release_next` inside a loop, without a branch."""
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $1, 0; @p griddepcontrol.launch_dependents; mov.u32 $0, 0; }",
            "=r,r",
            [condition.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def walk(  # type: ignore[no-untyped-def]
    x_rows,
    token_is_real,
    weight_rows,
    norm_ptr,
    num_steps,
    depth,
    ahead,
    release,
    NORM: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    RUNNING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return acc[o, m] = sum over k of W[o, k] x[m, k] (1 + norm[k]), and squares[m] = sum of x[m, k]^2 (both
    float32).

    x_rows [BLOCK_M], weight_rows [BLOCK_O], norm_ptr: pointers to k = 0 of this program's share; depth: the rest of K
    from there. The caller divides by the root mean square: it is one factor per token, so no pass over x is needed
    before the loop. EVEN: BLOCK_K divides depth.

    The next kernel is released `release` steps before the end, not at the start: more than the L2's size passes
    through in between, so weights that it prefetched at the start would be evicted before it can use them."""
    acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    releasing_step = tl.maximum(num_steps - release, 0)
    first_k = tl.arange(0, BLOCK_K)
    if NORM:
        next_gain = tl.load(norm_ptr + first_k, mask=(first_k < depth) | EVEN, other=0.0)
    for step in range(num_steps):
        k = step * BLOCK_K + first_k
        if EVEN:
            w = tl.load(weight_rows[:, None] + k[None, :])
            x = tl.load(x_rows[:, None] + k[None, :], mask=token_is_real[:, None], other=0.0)
        else:
            w = tl.load(weight_rows[:, None] + k[None, :], mask=(k < depth)[None, :], other=0.0)
            x = tl.load(x_rows[:, None] + k[None, :], mask=token_is_real[:, None] & (k < depth)[None, :], other=0.0)
        if RUNNING and CAN_PREFETCH:
            prefetch_step(weight_rows, step + ahead, num_steps, depth, BLOCK_O, BLOCK_K)
        release_next_if(step == releasing_step, PDL)
        if NORM:
            gain = 1.0 + next_gain.to(tl.float32)
            # Loaded one step ahead: too few bytes per thread for an asynchronous copy, and too slow to wait for.
            next_gain = tl.load(norm_ptr + k + BLOCK_K, mask=k + BLOCK_K < depth, other=0.0)
            x32 = x.to(tl.float32)
            squares += x32 * x32
            x = (x32 * gain[None, :]).to(w.dtype)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    return acc, tl.sum(squares, axis=1)


@triton.jit
def decode_e4m3(bits, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decode 8-bit floats, given as uint8, exactly. (The code of NaN, which no loaded checkpoint has, gives 480.)

    Their exponent and mantissa bits, shifted to the position of a wider float's, are the value times 2^(7 - 127),
    subnormals included. Triton's own conversion to bfloat16 uses an instruction with a sixteenth of the usual rate.
    Here four values take two byte permutations, which double each byte's sign, two shifts, two masks and two
    products. These are written as sums with -0, which leaves every bit as it is: devices before Hopper have no product
    of 16-bit pairs alone."""
    if HAS_PTX and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high, rebase, zero;
            mov.b32 rebase, 0x7B807B80;
            mov.b32 zero, 0x80008000;
            prmt.b32 low, $2, 0, 0x9180;
            prmt.b32 high, $2, 0, 0xB3A2;
            shl.b32 low, low, 4;
            shl.b32 high, high, 4;
            and.b32 low, low, 0x87F087F0;
            and.b32 high, high, 0x87F087F0;
            fma.rn.bf16x2 $0, low, rebase, zero;
            fma.rn.bf16x2 $1, high, rebase, zero; }""",
            "=r,=r,r",
            [bits],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    wide = bits.to(tl.int32)
    placed = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    return (placed.to(tl.float32, bitcast=True) * 2.0**120).to(dtype)


E4M3_PAIR: tl.constexpr = tl.constexpr(
    """{ .reg .b32 pair, rebase, zero;
    mov.b32 rebase, 0x7B807B80;
    mov.b32 zero, 0x80008000;
    cvt.u32.u16 pair, $2;
    prmt.b32 pair, pair, 0, 0x9180;
    shl.b32 pair, pair, 4;
    and.b32 pair, pair, 0x87F087F0;
    fma.rn.bf16x2 pair, pair, rebase, zero;
    mov.b32 {$0, $1}, pair; }"""
)
"""PTX that decodes two 8-bit floats to bfloat16, as `decode_e4m3` does."""


@triton.jit
def decode_e4m3_pairs(bits, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """`decode_e4m3` of [R, C / 2] pairs, given as uint16: [R, C]."""
    if HAS_PTX and dtype == tl.bfloat16:
        first, second = tl.inline_asm_elementwise(
            E4M3_PAIR, "=h,=h,h", [bits], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=1
        )
    else:
        first, second = decode_e4m3(bits & 0xFF, dtype), decode_e4m3(bits >> 8, dtype)
    return tl.join(first, second).reshape(bits.shape[0], 2 * bits.shape[1])


@triton.jit
def walk_scaled(  # type: ignore[no-untyped-def]
    x_rows,
    token_is_real,
    weight_rows,
    scale_rows,
    up_scale_rows,
    is_up,
    begin,
    norm_ptr,
    num_steps,
    depth,
    ahead,
    release,
    NORM: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    RUNNING: tl.constexpr,
    PDL: tl.constexpr,
):
    """`walk` over 8-bit weights with scales. weight_rows are pointers to bytes of 8-bit floats, or to pairs of them
    (uint16) for matrix instructions that take 16-bit operands in pairs.

    Both factors of a product are exact, and each group of columns with one scale is summed in float32 and then
    multiplied by it: no scaled weight is ever rounded. BLOCK_K divides SCALE_COLUMNS or is a multiple of it.

    scale_rows: None if the caller multiplies each row's sum by a scale; else a pointer to the first scale of the tile's
    rows, or pointers [BLOCK_O] if the rows of the tile have different scales; not advanced by `begin`, the column of K
    where this program begins. up_scale_rows: None, or the pointer to use instead for the rows of is_up [BLOCK_O]."""
    GROUP: tl.constexpr = min(BLOCK_K, SCALE_COLUMNS)
    acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M, GROUP), tl.float32)
    releasing_step = tl.maximum(num_steps - release, 0)
    group_k = tl.arange(0, GROUP)
    PER_ELEMENT: tl.constexpr = _weights_per_element(weight_rows.dtype.element_ty)
    group_w = tl.arange(0, GROUP // PER_ELEMENT)
    if scale_rows is not None:
        last_column = (begin + depth - 1) // SCALE_COLUMNS
        next_scale = _scales(scale_rows, up_scale_rows, is_up, begin // SCALE_COLUMNS)
    if NORM:
        next_gain = tl.load(norm_ptr + group_k, mask=(group_k < depth) | EVEN, other=0.0)
    for step in range(num_steps):
        for group in tl.static_range(BLOCK_K // GROUP):
            first_k = step * BLOCK_K + group * GROUP
            k = first_k + group_k
            at_w = first_k // PER_ELEMENT + group_w
            if EVEN:
                w = tl.load(weight_rows[:, None] + at_w[None, :])
                x = tl.load(x_rows[:, None] + k[None, :], mask=token_is_real[:, None], other=0.0)
            else:
                w = tl.load(weight_rows[:, None] + at_w[None, :], mask=(at_w < depth // PER_ELEMENT)[None, :], other=0)
                x = tl.load(x_rows[:, None] + k[None, :], mask=token_is_real[:, None] & (k < depth)[None, :], other=0.0)
            if group == 0:
                if RUNNING and CAN_PREFETCH:
                    prefetch_step(weight_rows, step + ahead, num_steps, depth, BLOCK_O, BLOCK_K)
                release_next_if(step == releasing_step, PDL)
            if scale_rows is not None:
                scale = next_scale
                next_column = tl.minimum((begin + first_k + GROUP) // SCALE_COLUMNS, last_column)
                next_scale = _scales(scale_rows, up_scale_rows, is_up, next_column)
            if NORM:
                gain = next_gain.to(tl.float32)
                next_gain = tl.load(norm_ptr + k + GROUP, mask=k + GROUP < depth, other=0.0)
                x32 = x.to(tl.float32)
                squares += x32 * x32
                x = (x32 + x32 * gain[None, :]).to(x.dtype)
            exact = decode_e4m3_pairs(w, x.dtype) if PER_ELEMENT == 2 else decode_e4m3(w, x.dtype)
            if scale_rows is not None:
                acc += tl.dot(exact, x.T, input_precision="ieee") * scale
            else:
                acc = tl.dot(exact, x.T, acc, input_precision="ieee")
    return acc, tl.sum(squares, axis=1)


@triton.jit
def _scales(scale_rows, up_scale_rows, is_up, column):  # type: ignore[no-untyped-def]
    """Load the scales of one column of blocks: a scalar, or [BLOCK_O, 1]."""
    if scale_rows.type.is_block():
        scale = tl.load(scale_rows + column)[:, None]
    else:
        scale = tl.load(scale_rows + column)
    if up_scale_rows is not None:
        scale = tl.where((is_up != 0)[:, None], tl.load(up_scale_rows + column), scale)
    return scale


@triton.jit
def walk_either(  # type: ignore[no-untyped-def]
    x_rows,
    token_is_real,
    weight_rows,
    scale_rows,
    begin,
    norm_ptr,
    num_steps,
    depth,
    ahead,
    release,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    RUNNING: tl.constexpr,
    PDL: tl.constexpr,
    up_scale_rows=None,
    is_up=None,
):
    """`walk_scaled` if the weights are in 8 bits, else `walk`. x_rows, depth: of all of K; weight_rows: from `begin`,
    where this program begins."""
    NORM: tl.constexpr = norm_ptr is not None
    x_rows += begin
    depth -= begin
    if not _is_8_bit(weight_rows.dtype.element_ty):
        acc, squares = walk(
            x_rows,
            token_is_real,
            weight_rows,
            norm_ptr,
            num_steps,
            depth,
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
    else:
        acc, squares = walk_scaled(
            x_rows,
            token_is_real,
            weight_rows,
            scale_rows,
            up_scale_rows,
            is_up,
            begin,
            norm_ptr,
            num_steps,
            depth,
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
    return acc, squares


@triton.jit
def norm_factor(squares_ptr, num_parts, eps, m, token_is_real, num_tokens, depth, PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / rms of each token, float32 [1, BLOCK_M], from the sums of squares of its parts, at most PARTS
    (norm_ahead.py); None if there are none. To keep the sums until a loop has ended takes the registers of the
    loop."""
    factor = None
    if squares_ptr is not None:
        part = tl.arange(0, PARTS)
        is_real = (part < num_parts)[:, None] & token_is_real[None, :]
        squares = tl.load(squares_ptr + part[:, None] * num_tokens + m[None, :], mask=is_real, other=0.0)
        factor = tl.rsqrt(tl.sum(squares, axis=0) / depth + eps)[None, :]
    return factor


@triton.jit
def sum_parts(  # type: ignore[no-untyped-def]
    acc, part, tile, partial_ptr, arrivals_ptr, SPLIT: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return (sum over the SPLIT programs of a tile, whether this program is the last to arrive and has the sum).

    The parts are summed in order whichever program adds them, so the bits do not depend on timing. partial_ptr:
    float32 [tiles, SPLIT, BLOCK_O, BLOCK_M]. arrivals_ptr: int32 [tiles], all zero before; the last program resets
    it."""
    offsets = tl.arange(0, BLOCK_O)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    parts = partial_ptr + tile * (SPLIT * BLOCK_O * BLOCK_M) + offsets
    tl.store(parts + part * (BLOCK_O * BLOCK_M), acc)
    # The barrier orders every thread's store before the one thread's release.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    total = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    if is_last:
        for other in tl.static_range(SPLIT):
            # .cg: L1 is not coherent with other SMs' stores.
            total += tl.load(parts + other * (BLOCK_O * BLOCK_M), cache_modifier=".cg")
        tl.store(arrivals_ptr + tile, 0)
    return total, is_last
