"""Exchanges between the ranks of a group: sums in the order of ranks, winners, and the gather of logits.

Every rank pushes into slots of its peers' buffers (peer_memory.py), then sets a flag at each with release order; it
waits for the flags of all peers with acquire order and reads its own slots. All three ways to sum give the same bits,
because every element is added in float32 in the order of ranks, then to the residual, and rounded once:

    one-shot   every rank pushes its whole partial sum to all, and adds up everything; for few tokens, and without
               flags (exchange_one_shot.py)
    two-shot   part q goes to rank q, which adds it up and pushes the result to all; in rounds if it is large
    paired     what two ranks do instead, for whom one shot moves no more bytes: each pushes all it has, in rounds

Why two halves of a slot suffice. Epoch e of program p uses half e % 2. A rank pushes for epoch e + 2 only after its own
epoch e + 1 ended, so it has seen every peer's flag of e + 1, which that peer set after all its reads of e. This needs:

- Nothing is read or pushed before `await_previous`, the epoch included.
- All exchanges of a rank run on one stream, all ranks in the same sequence.
- Program p always has the same place, whatever the size: so a channel with flags has one fixed grid, and idle programs
  exchange flags too. Epochs are device memory and advance in the kernel, so graphs and eager launches mix freely.

Paired rounds have four quarters, because round e + 1 is pushed before round e is awaited. A rank that pushes it has
seen the flag of e - 1, which its peer set after all its reads of e - 3.

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
from agentspec.kernels.triton.exchange_one_shot import one_shot_kernel
from agentspec.kernels.triton.exchange_slots import (
    begin_exchange,
    end_exchange,
    look_for_abort,
    pointer,
    slot_at,
    wide,
)
from agentspec.kernels.triton.launch import LaunchOptions, await_previous, release_next
from agentspec.kernels.triton.ranking import LOWEST_RANK, order_key, token_of_rank

PAIRED_BLOCKS = 8
"""Blocks that a program of paired rounds handles at a time: with fewer loads in flight the link has nothing to do."""
PART_BLOCK = 4096
"""Logits of one program of `_part_best`."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_FLAG_LINE: tl.constexpr = tl.constexpr(FLAG_LINE)
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

    def add_partial(
        self, residual_NH: Tensor | None, partial_NH: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        """See kernels.Group. Both contiguous and 16-byte aligned; dtypes may differ: partial sums travel in theirs. The
        norm comes with sums in one shot only."""
        is_fresh = residual_NH is None
        dtype = partial_NH.dtype if residual_NH is None else residual_NH.dtype
        in_one_shot = self.layout.in_one_shot(partial_NH.shape, dtype, partial_NH.dtype)
        if residual_NH is None:
            residual_NH = torch.empty_like(partial_NH) if in_one_shot else torch.zeros_like(partial_NH)
        assert residual_NH.shape == partial_NH.shape
        assert residual_NH.is_contiguous()
        assert partial_NH.is_contiguous()
        assert residual_NH.data_ptr() % 16 == partial_NH.data_ptr() % 16 == 0
        if in_one_shot:
            return residual_NH, self._one_shot(residual_NH, partial_NH, next_norm, is_fresh=is_fresh)
        if self.size == 2:
            self._paired(residual_NH, partial_NH)
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

    def _one_shot(self, residual_NH: Tensor, partial_NH: Tensor, norm: Norm | None, *, is_fresh: bool) -> Tensor | None:
        """The normed sum, if there is a norm. is_fresh: the residual is zeros, whatever the tensor has."""
        num_rows, width = residual_NH.shape
        assert norm is None or norm.weight.dtype == residual_NH.dtype
        channel = self.layout.one_shot
        normed_NH = None if norm is None else torch.empty_like(residual_NH)
        if num_rows == 0:
            return normed_NH
        block = triton.next_power_of_2(width * residual_NH.element_size() // 8)
        one_shot_kernel[(min(num_rows, channel.programs),)](
            residual_NH,
            partial_NH,
            normed_NH,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            self.memory.table_R,
            self.rank,
            num_rows,
            DTYPE=DTYPES[partial_NH.dtype],
            FRESH=is_fresh,
            H=width,
            BLOCK=block,
            **channel.places(),
            num_warps=one_shot_warps(block, self.size),
            **self._options,
        )
        return normed_NH

    def _two_shot(self, residual_NH: Tensor, partial_NH: Tensor) -> None:
        channel, num_elements = self.layout.two_shot, partial_NH.numel()
        size = max(partial_NH.element_size(), residual_NH.element_size())
        share = _share(num_elements, channel, channel.programs * self.size, size)
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

    def _paired(self, residual_NH: Tensor, partial_NH: Tensor) -> None:
        channel, num_elements = self.layout.two_shot, partial_NH.numel()
        share = _share(num_elements, channel, channel.programs, partial_NH.element_size())
        _paired[(channel.programs,)](
            residual_NH,
            partial_NH,
            self.memory.table_R,
            self.rank,
            num_elements,
            share,
            triton.cdiv(num_elements, channel.programs * share),
            DTYPE=DTYPES[partial_NH.dtype],
            **channel.constants() | {"BLOCK": PAIRED_BLOCKS * channel.block},
            num_warps=16,
            **self._options,
        )


def one_shot_warps(num_quads: int, ranks: int) -> int:
    """More than two ranks' parts of a row leave fewer registers for each quad."""
    return min(max(num_quads // (128 if ranks == 2 else 64), 1), 16)


def _share(num_elements: int, channel: Channel, num_shares: int, element_size: int) -> int:
    """Elements of a share that fits a slot; several rounds may be needed."""
    return min(whole_share(max(num_elements, 1), num_shares), channel.region // (16 * element_size) * 16)


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
    flags = pointer(everyone + FLAGS + (PHASE * PROGRAMS + p) * _FLAG_LINE + rank.to(tl.int64) * 8, tl.int64)
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
    """Wait until all peers have set this program's flags to the epoch. Return other than 0 if the abort word freed this
    program instead, or had done so before. All polls are atomics, whose result is the same in all threads of a program:
    a load need not be."""
    flags = pointer(home + FLAGS + (PHASE * PROGRAMS + p) * _FLAG_LINE, tl.int64)
    before = aborted
    polls = 0
    least = _least_flag(flags, rank, epoch, RANKS)
    while (least < epoch) & (aborted == 0):
        polls += 1
        aborted = look_for_abort(table, polls, aborted, RANKS)
        least = _least_flag(flags, rank, epoch, RANKS)
    tl.debug_barrier()
    return tl.where(least < epoch, aborted, before)


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
        slot = slot_at(home, half, sender, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
        source = wide(tl.where(rank == sender, own, slot), DTYPE)
        part = tl.load(source + i, mask=mask, other=0.0, volatile=True).to(tl.float32)
        if sender == 0:
            total = part
        else:
            total += part
    return total


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
    home, bases, everyone, p, epoch, healthy = begin_exchange(table, rank, RANKS, EPOCHS, PDL)
    aborted = tl.zeros_like(epoch)
    for turn in range(num_rounds):
        epoch += 1
        half = epoch % 2
        first = (turn * PROGRAMS + p) * RANKS * share
        for step in tl.static_range(1, RANKS):
            peer = (rank + step) % RANKS
            slot = slot_at(bases[step - 1], half, rank, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
            theirs = first + peer * share
            _copy(partial + theirs, wide(slot, DTYPE), share, num_elements - theirs, BLOCK, False)
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
                    slot = slot_at(bases[step - 1], half, rank, p, 1, RANKS, PROGRAMS, SLOTS, REGION)
                    tl.store(wide(slot, OUT_DTYPE) + i, y, mask=mask)
        healthy &= aborted == 0
        aborted = _meet(table, home, everyone, rank, p, epoch, healthy, aborted, 1, RANKS, PROGRAMS, FLAGS)
        if aborted == 0:
            for step in tl.static_range(1, RANKS):
                peer = (rank + step) % RANKS
                slot = slot_at(home, half, peer, p, 1, RANKS, PROGRAMS, SLOTS, REGION)
                theirs = first + peer * share
                _copy(wide(slot, OUT_DTYPE), residual + theirs, share, num_elements - theirs, BLOCK, True)
        healthy &= aborted == 0
    end_exchange(home, p, epoch, aborted, EPOCHS)


@triton.jit(do_not_specialize=["rank", "num_rounds"])
def _paired(  # type: ignore[no-untyped-def]
    residual,
    partial,
    table,
    rank,
    num_elements,
    share,
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
    """In each round program p of both ranks adds up one share. A round is an epoch, and has a quarter of the slots. The
    next round is pushed before this one is awaited, so that the link has work meanwhile."""
    home, bases, everyone, p, epoch, healthy = begin_exchange(table, rank, RANKS, EPOCHS, PDL)
    aborted = tl.zeros_like(epoch)
    ahead = epoch
    for turn in range(num_rounds + 1):
        if turn < num_rounds:
            ahead += 1
            first = (turn * PROGRAMS + p) * share
            slot = _quarter(bases[0], ahead, rank, p, RANKS, PROGRAMS, SLOTS, REGION)
            _copy(partial + first, wide(slot, DTYPE), share, num_elements - first, BLOCK, False)
            _set_flags(everyone, rank, p, ahead, healthy, 0, RANKS, PROGRAMS, FLAGS)
        if turn > 0:
            epoch += 1
            first = ((turn - 1) * PROGRAMS + p) * share
            aborted = _await_flags(table, home, rank, p, epoch, aborted, 0, RANKS, PROGRAMS, FLAGS)
            if aborted == 0:
                slot = wide(_quarter(home, epoch, 1 - rank, p, RANKS, PROGRAMS, SLOTS, REGION), DTYPE)
                for start in range(0, share, BLOCK):
                    i = start + tl.arange(0, BLOCK)
                    mask = (i < share) & (first + i < num_elements)
                    x = tl.load(residual + first + i, mask=mask).to(tl.float32)
                    own = tl.load(partial + first + i, mask=mask).to(tl.float32)
                    other = tl.load(slot + i, mask=mask, volatile=True).to(tl.float32)
                    # Of two terms the order changes no bit.
                    tl.store(residual + first + i, (x + (own + other)).to(residual.dtype.element_ty), mask=mask)
            healthy &= aborted == 0
    end_exchange(home, p, epoch, aborted, EPOCHS)


@triton.jit
def _quarter(  # type: ignore[no-untyped-def]
    base,
    epoch,
    sender,
    p,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SLOTS: tl.constexpr,
    REGION: tl.constexpr,
):
    """The address of a program's region for an epoch of paired rounds."""
    return slot_at(base, epoch % 4, sender, p, 0, RANKS, PROGRAMS, SLOTS, REGION)


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
    home, bases, everyone, p, epoch, healthy = begin_exchange(table, rank, RANKS, EPOCHS, PDL)
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
                slot = slot_at(bases[step - 1], half, rank, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
                tl.store(wide(slot, DTYPE) + (tile - first) * BLOCK + i, x)
        aborted = _meet(table, home, everyone, rank, p, epoch, healthy, aborted, 0, RANKS, PROGRAMS, FLAGS)
        healthy &= aborted == 0
        for step in tl.static_range(1, RANKS):
            peer = (rank + step) % RANKS
            begin, end = tl.load(bounds + peer), tl.load(bounds + peer + 1)
            slot = slot_at(home, half, peer, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
            for tile in range(first, last):
                n, w = (tile // tiles_a_row).to(tl.int64), (tile % tiles_a_row) * BLOCK + i
                x = tl.load(wide(slot, DTYPE) + (tile - first) * BLOCK + i, volatile=True)
                tl.store(out + n * vocab_size + begin + w, x, mask=begin + w < tl.minimum(end, vocab_size))
    end_exchange(home, p, epoch, aborted, EPOCHS)


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
    home, bases, everyone, p, epoch, healthy = begin_exchange(table, rank, RANKS, EPOCHS, PDL)
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
        slot = slot_at(bases[step - 1], half, rank, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
        tl.store(wide(slot, tl.int64) + i, winner, mask=is_row)
    aborted = _meet(table, home, everyone, rank, p, epoch, healthy, tl.zeros_like(epoch), 0, RANKS, PROGRAMS, FLAGS)
    for step in tl.static_range(1, RANKS):
        slot = slot_at(home, half, (rank + step) % RANKS, p, 0, RANKS, PROGRAMS, SLOTS, REGION)
        other = tl.load(wide(slot, tl.int64) + i, mask=is_row, other=LOWEST_RANK, volatile=True)
        winner = tl.where(aborted == 0, tl.maximum(winner, other), winner)
    tl.store(out + n, token_of_rank(winner), mask=is_row)
    end_exchange(home, p, epoch, aborted, EPOCHS)
