"""What all exchange kernels share: where a program's slots are, and how it begins and ends. See exchange.py."""

from __future__ import annotations

import triton
import triton.language as tl

from agentspec.kernels.triton.launch import INTERPRETED, await_previous, release_next

POLLS_A_LOOK = 16 if INTERPRETED else 1024
_POLLS_A_LOOK: tl.constexpr = tl.constexpr(POLLS_A_LOOK)


@triton.jit
def slot_at(  # type: ignore[no-untyped-def]
    base,
    half,
    sender,
    p,
    PHASE: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
):
    """The address of a program's region in the buffer at `base`."""
    return base + SLOTS + (((PHASE * 2 + half) * RANKS + sender) * PROGRAMS + p) * REGION


@triton.jit
def pointer(address, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return address.to(tl.pointer_type(dtype))


@triton.jit
def wide(address, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to what may be moved 16 bytes at a time. The hint counts only on the pointer, not on the address."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _addresses(table, rank, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The addresses of this rank's buffer and of those of the ranks behind it, one by one, and where flags are set at
    several peers all of them in one tensor. They never change, so they are read before the wait for the previous
    kernel."""
    bases = (tl.load(table + (rank + 1) % RANKS),)
    for step in tl.static_range(2, RANKS):
        bases = bases + (tl.load(table + (rank + step) % RANKS),)  # type: ignore[assignment]  # noqa: RUF005
    everyone = bases[0]
    if RANKS > 2:
        peer = tl.arange(0, triton.next_power_of_2(RANKS))
        everyone = tl.load(table + peer, mask=peer < RANKS, other=0)
    return tl.load(table + rank), bases, everyone


@triton.jit
def begin_exchange(table, rank, RANKS: tl.constexpr, EPOCHS: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """How every exchange begins, `await_previous` included. Return `_addresses`, the program, its last epoch, and
    whether no earlier exchange of this rank was aborted."""
    release_next(PDL)
    home, bases, everyone = _addresses(table, rank, RANKS)
    await_previous(PDL)
    p = tl.program_id(0).to(tl.int64)
    epoch = tl.load(pointer(home + EPOCHS, tl.int64) + p)
    healthy = tl.load(pointer(home, tl.int64), volatile=True) == 0
    return home, bases, everyone, p, epoch, healthy


@triton.jit
def look_for_abort(table, polls, aborted, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The abort word, of which a program that polls looks at each POLLS_A_LOOK polls; else `aborted` as it is. The
    result is the same in all threads, since it comes of an atomic."""
    if polls % _POLLS_A_LOOK == 0:
        aborted = tl.atomic_add(pointer(tl.load(table + RANKS), tl.int64), 0, sem="acquire", scope="sys")
    return aborted


@triton.jit
def end_exchange(home, p, epoch, aborted, EPOCHS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the program's epoch, behind a barrier that follows every thread's load of it."""
    tl.store(pointer(home + EPOCHS, tl.int64) + p, epoch)
    if aborted != 0:
        tl.store(pointer(home, tl.int64), 1)
