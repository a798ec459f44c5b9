"""Exchanges between the ranks of a group: sums in the order of ranks, winners, and the gather of logits.

Every rank pushes into slots of its peers' buffers (peer_memory.py), then sets a flag at each with release order; it
waits for the flags of all peers with acquire order and reads its own slots. Two ways to sum give the same bits, because
every element is added in float32 in the order of ranks, then to the residual, and rounded once:

    one-shot   every rank pushes its whole partial sum to all, and adds up everything
    two-shot   part q goes to rank q, which adds it up and pushes the result to all; in rounds if it is large

Why two halves of a slot suffice. Epoch e of program p uses half e % 2. A rank pushes for epoch e + 2 only after its own
epoch e + 1 ended, so it has seen every peer's flag of e + 1, which that peer set after all its reads of e. This needs:

- Nothing is read or pushed before `await_previous`, the epoch included.
- All exchanges of a rank run on one stream, all ranks in the same sequence.
- Program p always has the same place, whatever the size: so a channel has one fixed grid, and idle programs exchange
  flags too. Epochs are device memory and advance in the kernel, so graphs and eager launches mix freely.

Program p waits only for program p of other ranks, so not all programs need to be resident at once.

A CTA barrier before the release makes it cover the stores of all threads; one after the acquire orders their loads.
Spins look at the abort word every POLLS_A_LOOK polls, because it lies in host memory. A program that it frees sets the
`aborted` word of its rank. From then on the rank's results are wrong, so it never sets a flag again: a peer that does
not know yet must not read them. Sums are left out, winners are those of this rank alone.

Shape letters: N tokens, H hidden size, R ranks, W ids of this rank's part of the head, V of the whole, C blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, distributed

from agentspec.kernels.backend import Norm
from agentspec.kernels.peer_memory import FLAG_LINE, Channel, ExchangeLayout, PeerMemory, whole_share
from agentspec.kernels.triton import launch
from agentspec.kernels.triton.launch import INTERPRETED, LaunchOptions, await_previous, release_next
from agentspec.kernels.triton.ranking import LOWEST_RANK, order_key, token_of_rank

POLLS_A_LOOK = 16 if INTERPRETED else 1024
PART_BLOCK = 4096
"""Logits of one program of `_part_best`."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_FLAG_LINE: tl.constexpr = tl.constexpr(FLAG_LINE)
_POLLS_A_LOOK: tl.constexpr = tl.constexpr(POLLS_A_LOOK)
_KEY_OF_NAN: tl.constexpr = tl.constexpr(0x7FFFFFFF)
"""Above the order key of every number."""


class ExchangeGroup:
    """A kernels.Group on these kernels, with the exchanges that choose tokens. All calls belong on one stream, and
    every rank must make the same calls with the same shapes: the path depends on shape and layout alone."""

    def __init__(self, memory: PeerMemory, layout: ExchangeLayout, *, overlapped: bool = True) -> None:
        """overlapped: whether the next kernel may start early; False where two ranks share a device."""
        if memory.ranks != layout.ranks:
            raise ValueError(f"memory of {memory.ranks} ranks, layout of {layout.ranks}")
        self.size = memory.ranks
        self.rank = memory.rank
        self.memory = memory
        self.layout = layout
        self._options: LaunchOptions = launch.overlapped() if overlapped else launch.ONE_BY_ONE

    @classmethod
    def of_processes(
        cls, process_group: distributed.ProcessGroup, device: torch.device, *, overlapped: bool = True
    ) -> ExchangeGroup:
        """See PeerMemory.of_processes."""
        layout = ExchangeLayout(ranks=process_group.size())
        return cls(PeerMemory.of_processes(layout, process_group, device), layout, overlapped=overlapped)

    @classmethod
    def of_launches(cls, rank: int, count: int) -> ExchangeGroup:
        """See PeerMemory.of_launches."""
        layout = ExchangeLayout(ranks=count)
        return cls(PeerMemory.of_launches(layout, rank, torch.device("meta")), layout)

    @property
    def aborted(self) -> Tensor:
        """int64 [1] on the device: 1 since an exchange was aborted."""
        return self.memory.aborted

    def abort(self) -> None:
        """See kernels.RankGroup."""
        self.memory.abort.fill_(1)

    def close(self) -> None:
        """See kernels.RankGroup."""
        self.memory.close()

    def add_partial(self, residual_NH: Tensor, partial_NH: Tensor, next_norm: Norm | None) -> tuple[Tensor, None]:
        """See kernels.Group. Both contiguous and 16-byte aligned; dtypes may differ: partial sums travel in theirs."""
        assert residual_NH.shape == partial_NH.shape
        assert residual_NH.is_contiguous()
        assert partial_NH.is_contiguous()
        assert residual_NH.data_ptr() % 16 == partial_NH.data_ptr() % 16 == 0
        if residual_NH.numel() <= self.layout.one_shot_limit:
            self._one_shot(residual_NH, partial_NH)
        else:
            self._two_shot(residual_NH, partial_NH)
        return residual_NH, None

    def winners(self, logits_NW: Tensor, ids: Tensor | int, vocab_size: int) -> Tensor:
        """int64 [N]: the id of the largest logit over all ranks; of equal ones the smallest id. A NaN is larger than
        any number, and equal to any other NaN.

        logits_NW: float32, inner stride 1. ids: int64 [W], those of the columns, or the first of consecutive ones. A
        column whose id is `vocab_size` or larger is padding."""
        num_rows, width = logits_NW.shape
        assert logits_NW.stride(1) == 1
        num_blocks = triton.cdiv(width, PART_BLOCK)
        best_NC = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits_NW.device)
        ids_W, first_id = (ids, 0) if isinstance(ids, Tensor) else (None, ids)
        if num_rows > 0:
            _part_best[(num_rows, num_blocks)](
                logits_NW,
                logits_NW.stride(0),
                width,
                ids_W,
                first_id,
                vocab_size,
                best_NC,
                BLOCK=PART_BLOCK,
                num_warps=8,
                **self._options,
            )
        return self.best(best_NC)

    def best(self, best_NC: Tensor) -> Tensor:
        """int64 [N]: the token of the highest rank (ranking.py) in each row of all ranks' best_NC, int64 contiguous."""
        num_rows, num_blocks = best_NC.shape
        assert best_NC.is_contiguous()
        tokens_N = torch.empty(num_rows, dtype=torch.int64, device=best_NC.device)
        channel = self.layout.winners
        at_once = channel.programs * channel.block
        for begin in range(0, num_rows, at_once):
            _winners[(channel.programs,)](
                best_NC[begin : begin + at_once],
                num_blocks,
                tokens_N[begin:],
                self.memory.table_R,
                self.rank,
                min(num_rows - begin, at_once),
                BLOCK_C=triton.next_power_of_2(num_blocks),
                **channel.constants(),
                num_warps=4,
                **self._options,
            )
        return tokens_N

    def gather_columns(self, part_NC: Tensor) -> Tensor:
        """See kernels.Group."""
        width = part_NC.shape[1]
        bounds_R = torch.arange(self.size + 1, dtype=torch.int64, device=part_NC.device) * width
        return self.gather(part_NC, bounds_R, width, self.size * width)

    def gather(self, part_NW: Tensor, bounds_R: Tensor, widest: int, vocab_size: int) -> Tensor:
        """[N, V], the parts of all ranks side by side. All ranks get the same bits.

        part_NW: inner stride 1. bounds_R: int64 [R + 1], where the part of each rank begins and the last one ends; W is
        the difference, `widest` at most. Columns from `vocab_size` on are dropped."""
        num_rows, width = part_NW.shape
        assert part_NW.stride(1) == 1
        assert width <= widest
        assert bounds_R.shape == (self.size + 1,)
        out_NV = torch.empty(num_rows, vocab_size, dtype=part_NW.dtype, device=part_NW.device)
        channel = self.layout.gather
        tiles_a_row = triton.cdiv(widest, channel.block)
        num_tiles = num_rows * tiles_a_row
        tiles = max(1, min(triton.cdiv(num_tiles, channel.programs), channel.region // (4 * channel.block)))
        _gather[(channel.programs,)](
            part_NW,
            part_NW.stride(0),
            width,
            out_NV,
            vocab_size,
            bounds_R,
            self.memory.table_R,
            self.rank,
            num_tiles,
            tiles_a_row,
            tiles,
            triton.cdiv(num_tiles, channel.programs * tiles),
            DTYPE=DTYPES[part_NW.dtype],
            **channel.constants(),
            num_warps=8,
            **self._options,
        )
        return out_NV

    def _one_shot(self, residual_NH: Tensor, partial_NH: Tensor) -> None:
        channel = self.layout.one_shot
        _one_shot[(channel.programs,)](
            residual_NH,
            partial_NH,
            self.memory.table_R,
            self.rank,
            partial_NH.numel(),
            _share(partial_NH.numel(), channel, channel.programs),
            DTYPE=DTYPES[partial_NH.dtype],
            BYTES=partial_NH.element_size(),
            **channel.constants(),
            num_warps=4,
            **self._options,
        )

    def _two_shot(self, residual_NH: Tensor, partial_NH: Tensor) -> None:
        channel, num_elements = self.layout.two_shot, partial_NH.numel()
        share = _share(num_elements, channel, channel.programs * self.size)
        _two_shot[(channel.programs,)](
            residual_NH,
            partial_NH,
            self.memory.table_R,
            self.rank,
            num_elements,
            share,
            triton.cdiv(num_elements, channel.programs * self.size * share),
            DTYPE=DTYPES[partial_NH.dtype],
            BYTES=partial_NH.element_size(),
            OUT_DTYPE=DTYPES[residual_NH.dtype],
            **channel.constants(),
            num_warps=8,
            **self._options,
        )


def _share(num_elements: int, channel: Channel, num_shares: int) -> int:
    """Elements of a share that fits a slot of up to 4 bytes an element; several rounds may be needed."""
    return min(whole_share(max(num_elements, 1), num_shares), channel.region // 64 * 16)


@triton.jit
def _slot(  # type: ignore[no-untyped-def]
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
def _pointer(address, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    return address.to(tl.pointer_type(dtype))


@triton.jit
def _wide(address, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
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
def _begin(table, rank, RANKS: tl.constexpr, EPOCHS: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """How every exchange begins, `await_previous` included. Return `_addresses`, the program, its last epoch, and
    whether no earlier exchange of this rank was aborted."""
    release_next(PDL)
    home, bases, everyone = _addresses(table, rank, RANKS)
    await_previous(PDL)
    p = tl.program_id(0).to(tl.int64)
    epoch = tl.load(_pointer(home + EPOCHS, tl.int64) + p)
    healthy = tl.load(_pointer(home, tl.int64), volatile=True) == 0
    return home, bases, everyone, p, epoch, healthy


@triton.jit
def _set_flags(  # type: ignore[no-untyped-def]
    everyone,
    rank,
    p,
    epoch,
    healthy,
    PHASE: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Tell every peer that this program's pushes are complete, unless they are wrong. `healthy` need not be the same in
    all threads: those that set flags decide."""
    tl.debug_barrier()  # The release covers the stores of other threads only through a barrier.
    flags = _pointer(everyone + FLAGS + (PHASE * PROGRAMS + p) * _FLAG_LINE + rank.to(tl.int64) * 8, tl.int64)
    if RANKS == 2:
        tl.atomic_xchg(flags, epoch, mask=healthy, sem="release", scope="sys")
    else:
        # One thread a peer: one after the other, each release would wait until the one before it has arrived.
        peer = tl.arange(0, triton.next_power_of_2(RANKS))
        is_told = (peer < tl.where(healthy, RANKS, 0)) & (peer != rank)
        tl.atomic_xchg(flags, epoch, mask=is_told, sem="release", scope="sys")


@triton.jit
def _least_flag(flags, rank, epoch, RANKS: tl.constexpr):  # type: ignore[no-untyped-def]
    if RANKS == 2:
        return tl.atomic_add(flags + 1 - rank, 0, sem="acquire", scope="sys")
    sender = tl.arange(0, triton.next_power_of_2(RANKS))
    is_peer = (sender < RANKS) & (sender != rank)
    found = tl.atomic_add(flags + sender, 0, mask=is_peer, sem="acquire", scope="sys")
    return tl.min(tl.where(is_peer, found, epoch))


@triton.jit
def _await_flags(  # type: ignore[no-untyped-def]
    table,
    home,
    rank,
    p,
    epoch,
    aborted,
    PHASE: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Wait until all peers have set this program's flags to the epoch. Return other than 0 if the abort word is set, or
    was before. All polls are atomics, whose result is the same in all threads of a program: a load need not be."""
    flags = _pointer(home + FLAGS + (PHASE * PROGRAMS + p) * _FLAG_LINE, tl.int64)
    abort = _pointer(tl.load(table + RANKS), tl.int64)
    polls = 0
    least = _least_flag(flags, rank, epoch, RANKS)
    while (least < epoch) & (aborted == 0):
        polls += 1
        if polls % _POLLS_A_LOOK == 0:
            aborted = tl.atomic_add(abort, 0, sem="acquire", scope="sys")
        least = _least_flag(flags, rank, epoch, RANKS)
    tl.debug_barrier()
    return aborted


@triton.jit
def _meet(  # type: ignore[no-untyped-def]
    table,
    home,
    everyone,
    rank,
    p,
    epoch,
    healthy,
    aborted,
    PHASE: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Tell every peer that this program's pushes are complete, and wait until all have told it so. See `_await_flags`
    for what is returned."""
    _set_flags(everyone, rank, p, epoch, healthy, PHASE, RANKS, PROGRAMS, FLAGS)
    return _await_flags(table, home, rank, p, epoch, aborted, PHASE, RANKS, PROGRAMS, FLAGS)


@triton.jit
def _end(home, p, epoch, aborted, EPOCHS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the program's epoch, behind a barrier that follows every thread's load of it."""
    tl.store(_pointer(home + EPOCHS, tl.int64) + p, epoch)
    if aborted != 0:
        tl.store(_pointer(home, tl.int64), 1)


@triton.jit
def _sum_of_ranks(  # type: ignore[no-untyped-def]
    own,
    home,
    half,
    rank,
    p,
    i,
    mask,
    DTYPE: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
):
    """float32: elements i of all ranks' partial sums, added in the order of ranks. own: the address of this rank's."""
    for sender in tl.static_range(RANKS):
        slot = _slot(home, half, sender, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
        source = _wide(tl.where(rank == sender, own, slot), DTYPE)
        part = tl.load(source + i, mask=mask, other=0.0, volatile=True).to(tl.float32)
        if sender == 0:
            total = part
        else:
            total += part
    return total


@triton.jit(do_not_specialize=["rank"])
def _one_shot(  # type: ignore[no-untyped-def]
    residual,
    partial,
    table,
    rank,
    num_elements,
    share,
    DTYPE: tl.constexpr,
    BYTES: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EPOCHS: tl.constexpr,
    FLAGS: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p adds up elements p * share to (p + 1) * share."""
    home, bases, everyone, p, epoch, healthy = _begin(table, rank, RANKS, EPOCHS, PDL)
    first = p * share
    i = tl.arange(0, BLOCK)
    # Few tokens are a single block. Loaded here, it is in flight together with the epoch.
    part = tl.load(partial + first + i, mask=(i < share) & (first + i < num_elements))
    epoch += 1
    half = epoch % 2
    for start in range(0, share, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = (i < share) & (first + i < num_elements)
        if start > 0:
            part = tl.load(partial + first + i, mask=mask)
        for step in tl.static_range(1, RANKS):
            slot = _slot(bases[step - 1], half, rank, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
            tl.store(_wide(slot, DTYPE) + i, part, mask=mask)
    aborted = _meet(table, home, everyone, rank, p, epoch, healthy, tl.zeros_like(epoch), 0, RANKS, PROGRAMS, FLAGS)
    if aborted == 0:
        own = partial.to(tl.int64) + first * BYTES
        for start in range(0, share, BLOCK):
            i = start + tl.arange(0, BLOCK)
            mask = (i < share) & (first + i < num_elements)
            x = tl.load(residual + first + i, mask=mask).to(tl.float32)
            total = _sum_of_ranks(own, home, half, rank, p, i, mask, DTYPE, RANKS, PROGRAMS, SLOTS, REGION)
            tl.store(residual + first + i, (x + total).to(residual.dtype.element_ty), mask=mask)
    _end(home, p, epoch, aborted, EPOCHS)


@triton.jit(do_not_specialize=["rank", "num_rounds"])
def _two_shot(  # type: ignore[no-untyped-def]
    residual,
    partial,
    table,
    rank,
    num_elements,
    share,
    num_rounds,
    DTYPE: tl.constexpr,
    BYTES: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EPOCHS: tl.constexpr,
    FLAGS: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """In each round program p handles RANKS consecutive shares, one for each rank to add up. A round is an epoch."""
    home, bases, everyone, p, epoch, healthy = _begin(table, rank, RANKS, EPOCHS, PDL)
    aborted = tl.zeros_like(epoch)
    for turn in range(num_rounds):
        epoch += 1
        half = epoch % 2
        first = (turn * PROGRAMS + p) * RANKS * share
        for step in tl.static_range(1, RANKS):
            peer = (rank + step) % RANKS
            slot = _slot(bases[step - 1], half, rank, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
            theirs = first + peer * share
            _copy(partial + theirs, _wide(slot, DTYPE), share, num_elements - theirs, BLOCK, False)
        aborted = _meet(table, home, everyone, rank, p, epoch, healthy, aborted, 0, RANKS, PROGRAMS, FLAGS)
        if aborted == 0:
            mine = first + rank * share
            own = partial.to(tl.int64) + mine * BYTES
            for start in range(0, share, BLOCK):
                i = start + tl.arange(0, BLOCK)
                mask = (i < share) & (mine + i < num_elements)
                x = tl.load(residual + mine + i, mask=mask).to(tl.float32)
                total = _sum_of_ranks(own, home, half, rank, p, i, mask, DTYPE, RANKS, PROGRAMS, SLOTS, REGION)
                y = (x + total).to(OUT_DTYPE)
                tl.store(residual + mine + i, y, mask=mask)
                for step in tl.static_range(1, RANKS):
                    slot = _slot(bases[step - 1], half, rank, p, 1, RANKS, PROGRAMS, SLOTS, REGION)
                    tl.store(_wide(slot, OUT_DTYPE) + i, y, mask=mask)
        healthy &= aborted == 0
        aborted = _meet(table, home, everyone, rank, p, epoch, healthy, aborted, 1, RANKS, PROGRAMS, FLAGS)
        if aborted == 0:
            for step in tl.static_range(1, RANKS):
                peer = (rank + step) % RANKS
                slot = _slot(home, half, peer, p, 1, RANKS, PROGRAMS, SLOTS, REGION)
                theirs = first + peer * share
                _copy(_wide(slot, OUT_DTYPE), residual + theirs, share, num_elements - theirs, BLOCK, True)
        healthy &= aborted == 0
    _end(home, p, epoch, aborted, EPOCHS)


@triton.jit
def _copy(source, target, share, limit, BLOCK: tl.constexpr, VOLATILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy `share` elements, but no more than `limit`."""
    for start in range(0, share, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = (i < share) & (i < limit)
        tl.store(target + i, tl.load(source + i, mask=mask, volatile=VOLATILE), mask=mask)


@triton.jit(do_not_specialize=["rank", "num_tiles", "tiles_a_row", "tiles", "num_rounds"])
def _gather(  # type: ignore[no-untyped-def]
    part,
    part_stride,
    width,
    out,
    vocab_size,
    bounds,
    table,
    rank,
    num_tiles,
    tiles_a_row,
    tiles,
    num_rounds,
    DTYPE: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EPOCHS: tl.constexpr,
    FLAGS: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile is BLOCK columns of a row of a part, each part as if it were as wide as the widest. In each round program
    p handles `tiles` consecutive ones. A round is an epoch."""
    home, bases, everyone, p, epoch, healthy = _begin(table, rank, RANKS, EPOCHS, PDL)
    aborted = tl.zeros_like(epoch)
    i = tl.arange(0, BLOCK)
    for turn in range(num_rounds):
        epoch += 1
        half = epoch % 2
        first = (turn * PROGRAMS + tl.program_id(0)) * tiles
        last = tl.minimum(first + tiles, num_tiles)
        for tile in range(first, last):
            n, w = (tile // tiles_a_row).to(tl.int64), (tile % tiles_a_row) * BLOCK + i
            x = tl.load(part + n * part_stride + w, mask=w < width, other=0.0)
            v = tl.load(bounds + rank) + w
            tl.store(out + n * vocab_size + v, x, mask=(w < width) & (v < vocab_size))
            for step in tl.static_range(1, RANKS):
                slot = _slot(bases[step - 1], half, rank, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
                tl.store(_wide(slot, DTYPE) + (tile - first) * BLOCK + i, x)
        aborted = _meet(table, home, everyone, rank, p, epoch, healthy, aborted, 0, RANKS, PROGRAMS, FLAGS)
        healthy &= aborted == 0
        for step in tl.static_range(1, RANKS):
            peer = (rank + step) % RANKS
            begin, end = tl.load(bounds + peer), tl.load(bounds + peer + 1)
            slot = _slot(home, half, peer, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
            for tile in range(first, last):
                n, w = (tile // tiles_a_row).to(tl.int64), (tile % tiles_a_row) * BLOCK + i
                x = tl.load(_wide(slot, DTYPE) + (tile - first) * BLOCK + i, volatile=True)
                tl.store(out + n * vocab_size + begin + w, x, mask=begin + w < tl.minimum(end, vocab_size))
    _end(home, p, epoch, aborted, EPOCHS)


@triton.jit(do_not_specialize=["first_id"])
def _part_best(  # type: ignore[no-untyped-def]
    logits, stride, width, ids, first_id, vocab_size, best, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """The rank of the best logit of a block: see ranking.py. A NaN ranks first."""
    release_next(PDL)
    await_previous(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    w = block * BLOCK + tl.arange(0, BLOCK)
    score = tl.load(logits + row * stride + w, mask=w < width, other=0.0)
    token = tl.load(ids + w, mask=w < width, other=0) if ids is not None else first_id + w
    key = tl.where(score == score, order_key(score), _KEY_OF_NAN).to(tl.int64)
    ranks = (key << 32) | (0x7FFFFFFF - token).to(tl.int64)
    ranks = tl.where((w < width) & (token < vocab_size), ranks, LOWEST_RANK)
    tl.store(best + row * tl.num_programs(1) + block, tl.max(ranks))


@triton.jit(do_not_specialize=["rank", "num_rows"])
def _winners(  # type: ignore[no-untyped-def]
    best,
    num_blocks,
    out,
    table,
    rank,
    num_rows,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EPOCHS: tl.constexpr,
    FLAGS: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p finds the winners of rows p, p + PROGRAMS, …"""
    home, bases, everyone, p, epoch, healthy = _begin(table, rank, RANKS, EPOCHS, PDL)
    epoch += 1
    half = epoch % 2
    i, c = tl.arange(0, BLOCK), tl.arange(0, BLOCK_C)
    n = p + i * PROGRAMS
    is_row = n < num_rows
    tile = tl.load(
        best + n[:, None] * num_blocks + c[None, :],
        mask=is_row[:, None] & (c < num_blocks)[None, :],
        other=LOWEST_RANK,
    )
    winner = tl.max(tile, 1)
    for step in tl.static_range(1, RANKS):
        slot = _slot(bases[step - 1], half, rank, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
        tl.store(_wide(slot, tl.int64) + i, winner, mask=is_row)
    aborted = _meet(table, home, everyone, rank, p, epoch, healthy, tl.zeros_like(epoch), 0, RANKS, PROGRAMS, FLAGS)
    for step in tl.static_range(1, RANKS):
        slot = _slot(home, half, (rank + step) % RANKS, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
        other = tl.load(_wide(slot, tl.int64) + i, mask=is_row, other=LOWEST_RANK, volatile=True)
        winner = tl.where(aborted == 0, tl.maximum(winner, other), winner)
    tl.store(out + n, token_of_rank(winner), mask=is_row)
    _end(home, p, epoch, aborted, EPOCHS)
