"""The sum over ranks of few tokens, with the norm behind it, in one shot and without flags: see exchange.py.

A word of a slot is 8 bytes: 4 of data, and as a tag the lower 4 of the epoch. Stores and loads of 8 bytes are whole, so
a word that has its epoch's tag has its data, in whatever order words arrive; the protocol LL of NCCL does the same.
This saves what a flag costs: a release, which waits until all pushes have arrived, the flag's own way, and the loads
behind it. Twice the bytes travel, which are few.

A program has whole rows, n = p, p + PROGRAMS, …, so that it can norm what it has added up. 8 bytes of a row are a
*quad*: two words, one in each plane of the slot, so that quads of all tensors have one layout in registers. There are
no more programs than rows, so that nothing else holds a multiprocessor; each counts the epochs of its own. Two halves
of its slots suffice as in exchange.py: a peer pushes the words of epoch e + 1 once its kernels before have ended, so
that of e too; and e + 2 is pushed here once the kernel that awaited e + 1 has ended.

Tags repeat after 2^32 epochs, and a place may keep a word for long, if few sums have so many rows. So every 2^30 epochs
a program sets all words of a half that it has read, to a tag that is not due before they are set again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from agentspec.kernels.triton.exchange_slots import begin_exchange, end_exchange, look_for_abort, slot_at, wide
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.linear_tiles import HAS_PTX

EPOCHS_A_RENEWAL = 4 if INTERPRETED else 1 << 30
_EPOCHS_A_RENEWAL: tl.constexpr = tl.constexpr(EPOCHS_A_RENEWAL)
_DATA: tl.constexpr = tl.constexpr(0xFFFFFFFF)
_FAR: tl.constexpr = tl.constexpr(-(1 << 63))
"""What makes a tag that of 2^31 epochs later."""


@triton.jit
def _push(address, words, mask):  # type: ignore[no-untyped-def]
    """Store words [B] at addresses [B], each as a whole, where other devices see them."""
    if HAS_PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l,r",
            [address, words, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(address.to(tl.pointer_type(tl.int64)), words, mask=mask)


@triton.jit
def _await_quads(slot, i, mask, tag, table, aborted, RANKS: tl.constexpr, PLANE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(quads i of a slot once all their words have the tag, other than 0 if the abort word freed this program instead,
    or had done so before)."""
    before = aborted
    low, high = wide(slot, tl.int64) + i, wide(slot + PLANE, tl.int64) + i
    first = tl.load(low, mask=mask, other=tag, volatile=True)
    second = tl.load(high, mask=mask, other=tag, volatile=True)
    is_missing = tl.max((((first ^ tag) | (second ^ tag)) >> 32 != 0).to(tl.int32))
    polls = 0
    while (is_missing != 0) & (aborted == 0):
        polls += 1
        aborted = look_for_abort(table, polls, aborted, RANKS)
        first = tl.load(low, mask=mask, other=tag, volatile=True)
        second = tl.load(high, mask=mask, other=tag, volatile=True)
        is_missing = tl.max((((first ^ tag) | (second ^ tag)) >> 32 != 0).to(tl.int32))
    return (first & _DATA) | (second << 32), tl.where(is_missing != 0, aborted, before)


@triton.jit
def _element(quads, k: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Element k of each quad, float32."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth
    whole: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    return (quads >> (k * BITS)).to(whole).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _as_element(x, k: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quads whose element k is x, and the others zero."""
    BITS: tl.constexpr = x.dtype.primitive_bitwidth
    whole: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    return (x.to(whole, bitcast=True).to(tl.int64) & ((1 << BITS) - 1)) << (k * BITS)


@triton.jit
def _store_sum(  # type: ignore[no-untyped-def]
    residual, normed, i, is_real, x, parts, gains, eps, DTYPE: tl.constexpr, H: tl.constexpr, RANKS: tl.constexpr
):
    """Store residual + the parts in the order of ranks, and its norm. All in quads [B]; quads past a row are zero."""
    ELEMENTS: tl.constexpr = 64 // DTYPE.primitive_bitwidth
    sums = tl.zeros_like(x)
    squares = tl.zeros(x.shape, tl.float32)
    for k in tl.static_range(ELEMENTS):
        total = _element(parts[0], k, DTYPE)
        for sender in tl.static_range(1, RANKS):
            total += _element(parts[sender], k, DTYPE)
        y = (_element(x, k, DTYPE) + total).to(DTYPE)
        sums |= _as_element(y, k)
        y = y.to(tl.float32)
        squares += y * y
    tl.store(residual + i, sums, mask=is_real)
    if normed is not None:
        scale = tl.rsqrt(tl.sum(squares) / H + eps)
        out = tl.zeros_like(x)
        for k in tl.static_range(ELEMENTS):
            y = _element(sums, k, DTYPE) * scale * (1.0 + _element(gains, k, DTYPE))
            out |= _as_element(y.to(DTYPE), k)
        tl.store(normed + i, out, mask=is_real)


@triton.jit
def _renew(  # type: ignore[no-untyped-def]
    home, half, p, tag, RANKS: tl.constexpr, PROGRAMS: tl.constexpr, SLOTS: tl.constexpr, REGION: tl.constexpr
):
    """Set all words of a half that this program has read. Peers write it again once they have seen the next epoch's
    words, of which none is pushed before this kernel has ended."""
    BLOCK: tl.constexpr = 1024
    for sender in range(RANKS):
        slot = slot_at(home, half, sender, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
        for start in range(0, REGION // 8, BLOCK):
            i = start + tl.arange(0, BLOCK)
            tl.store(wide(slot, tl.int64) + i, tl.zeros_like(i).to(tl.int64) + (tag ^ _FAR), mask=i < REGION // 8)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def one_shot_kernel(  # type: ignore[no-untyped-def]
    residual,
    partial,
    normed,
    gain,
    eps,
    table,
    rank,
    num_rows,
    DTYPE: tl.constexpr,
    FRESH: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EPOCHS: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
    PDL: tl.constexpr,
):
    """residual [N, H] += the sum of all ranks' partial [N, H]; normed [N, H]: its norm with `gain` [H], if not None.
    All of DTYPE. FRESH: the residual is zeros, whatever is there. BLOCK: quads, at least a row's."""
    QUADS: tl.constexpr = H * DTYPE.primitive_bitwidth // 64
    PLANE: tl.constexpr = REGION // 2
    i = tl.arange(0, BLOCK)
    is_real = i < QUADS
    gains = None
    if normed is not None:
        gains = tl.load(wide(gain.to(tl.int64), tl.int64) + i, mask=is_real, other=0)
        normed = wide(normed.to(tl.int64), tl.int64)
    residual, partial = wide(residual.to(tl.int64), tl.int64), wide(partial.to(tl.int64), tl.int64)
    home, bases, _, p, epoch, healthy = begin_exchange(table, rank, RANKS, EPOCHS, PDL)
    epoch += 1
    half, tag = epoch % 2, epoch << 32
    mine = tl.maximum(num_rows - p + PROGRAMS - 1, 0) // PROGRAMS
    for turn in range(mine):
        n = p + turn * PROGRAMS
        quads = tl.load(partial + n * QUADS + i, mask=is_real, other=0)
        is_pushed = i < tl.where(healthy, QUADS, 0)
        for step in tl.static_range(1, RANKS):
            slot = slot_at(bases[step - 1], half, rank, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
            to = slot + (turn * QUADS + i) * 8
            _push(to, (quads & _DATA) | tag, is_pushed)
            _push(to + PLANE, ((quads >> 32) & _DATA) | tag, is_pushed)
    aborted = tl.zeros_like(epoch)
    for turn in range(mine):
        n = p + turn * PROGRAMS
        x = tl.zeros_like(i).to(tl.int64)
        if not FRESH:
            x = tl.load(residual + n * QUADS + i, mask=is_real, other=0)
        own = tl.load(partial + n * QUADS + i, mask=is_real, other=0)
        parts = ()
        for sender in tl.static_range(RANKS):
            part = own
            if rank != sender:
                slot = slot_at(home, half, sender, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
                at = turn * QUADS + i
                part, aborted = _await_quads(slot, at, is_real, tag, table, aborted, RANKS, PLANE)
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
        if aborted == 0:
            _store_sum(residual, normed, n * QUADS + i, is_real, x, parts, gains, eps, DTYPE, H, RANKS)
    tl.debug_barrier()
    if epoch % _EPOCHS_A_RENEWAL < 2:
        _renew(home, half, p, tag, RANKS, PROGRAMS, SLOTS, REGION)
    end_exchange(home, p, epoch, aborted, EPOCHS)
