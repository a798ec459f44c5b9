"""The parts that the linear kernels are made of: weight prefetch, the walk along K, the sum over split programs.

Weights stay still and tokens are few: a program owns BLOCK_O rows of W and forms acc[o, m] = sum_k W[o, k] x[m, k], so that every byte of W is read
once, and the tensor cores' long side is the one that has many rows. Knows nothing of layers or of what is done with a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from agentspec.kernels.triton.launch import INTERPRETED

CAN_PREFETCH: tl.constexpr = tl.constexpr(not INTERPRETED)
LINE_BYTES: tl.constexpr = tl.constexpr(128)


@triton.jit
def prefetch_step(weight_rows, step, num_steps, depth, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for the lines of one step's weights into L2; nothing past the last step. weight_rows: pointers [BLOCK_O] to the first step."""
    ELEMENTS: tl.constexpr = LINE_BYTES // (weight_rows.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (BLOCK_K + ELEMENTS - 1) // ELEMENTS
    k = step * BLOCK_K + tl.arange(0, LINES) * ELEMENTS
    addresses = (weight_rows[:, None] + k[None, :]).to(tl.int64, bitcast=True)
    wanted = ((step < num_steps) & (k < depth)).to(tl.int32)[None, :] + tl.zeros((BLOCK_O, LINES), tl.int32)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, wanted],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_first_steps(weight_rows, ahead, num_steps, depth, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Before the previous kernel is awaited: memory works on while that one ends."""
    if CAN_PREFETCH:
        for step in range(ahead):
            prefetch_step(weight_rows, step, num_steps, depth, BLOCK_O, BLOCK_K)


@triton.jit
def release_next_if(condition, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """`release_next` for the middle of a loop, without a branch."""
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
    """acc[o, m] = sum over k of W[o, k] x[m, k] (1 + norm[k]), and squares[m] = sum of x[m, k]^2 (both float32).

    x_rows [BLOCK_M], weight_rows [BLOCK_O], norm_ptr: pointers to k = 0 of this program's share; depth: what is left of K from there. Dividing by the
    root mean square is left to the caller: it is one factor a token, so the walk needs no pass over x before it. EVEN: BLOCK_K divides depth.

    The next kernel is released `release` steps before the end and not at the start: the weights that it asks into L2 would be gone by the time it
    can use them, since more than the L2 holds passes through in between.
    """
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
            # One step early: too few bytes a thread for an asynchronous copy, too long a way to wait for.
            next_gain = tl.load(norm_ptr + k + BLOCK_K, mask=k + BLOCK_K < depth, other=0.0)
            x32 = x.to(tl.float32)
            squares += x32 * x32
            x = (x32 * gain[None, :]).to(w.dtype)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")
    return acc, tl.sum(squares, axis=1)


@triton.jit
def sum_parts(acc, part, tile, partial_ptr, arrivals_ptr, SPLIT: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """(sum over the SPLIT programs of a tile, whether this program is the one that has it: the last to arrive).

    The order of the sum is that of the parts, whoever adds, so the bits do not depend on timing.
    partial_ptr: float32 [tiles, SPLIT, BLOCK_O, BLOCK_M]. arrivals_ptr: int32 [tiles], all zero before and, by the last program, after.
    """
    offsets = tl.arange(0, BLOCK_O)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    parts = partial_ptr + tile * (SPLIT * BLOCK_O * BLOCK_M) + offsets
    tl.store(parts + part * (BLOCK_O * BLOCK_M), acc)
    # The barrier puts every thread's store before the one thread's release.
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    total = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    if is_last:
        for other in tl.static_range(SPLIT):
            # .cg: L1 is not coherent with what other SMs stored.
            total += tl.load(parts + other * (BLOCK_O * BLOCK_M), cache_modifier=".cg")
        tl.store(arrivals_ptr + tile, 0)
    return total, is_last
