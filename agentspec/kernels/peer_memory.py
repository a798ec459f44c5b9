"""Memory through which the ranks of a group exchange tensors: one buffer a rank, which every rank can write.

Owns what lies where in a buffer (`ExchangeLayout`), and how the ranks learn each other's addresses (`PeerMemory`): from
the CUDA driver's handles on GPUs, from torch's symmetric memory (whose own sums a benchmark compares), from files that
processes map, or from plain tensors where one process holds all ranks. The exchange kernels know only addresses. Shape
letters: R ranks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from agentspec.errors import ConfigError
from agentspec.kernels import shared_device_memory
from agentspec.kernels.shared_device_memory import HANDLE_BYTES, DriverError

FLAG_LINE = 128
"""Bytes of the flags of one program: a cache line, so that no program polls what another program's peers write."""
MAX_RANKS = FLAG_LINE // 8
ALIGNMENT = 128
ABORTED_BYTES = ALIGNMENT
"""The buffer begins with the `aborted` word."""
NUM_HALVES = 2
_RELEASE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """One kind of exchange. Each of its programs has a counter, flags and slots of its own, and waits only for the same
    program of other ranks. So every launch must have exactly `programs` programs, whatever its size: then consecutive
    exchanges of a program alternate between the halves of its slots, and two halves suffice (triton/exchange.py)."""

    ranks: int
    programs: int
    phases: int
    """1, or 2 where each rank first receives what it reduces, then what the others reduced."""
    region: int
    """Bytes of one program's region in a slot."""
    block: int
    """Elements that a program handles at a time."""
    begin: int
    """Offset in the buffer, in bytes."""

    @property
    def flags(self) -> int:
        """Offset of int64 [phase, program, sender], with FLAG_LINE bytes a program. The epochs, int64 [program], lie
        before them."""
        return self.begin + _aligned(8 * self.programs)

    @property
    def slots(self) -> int:
        """Offset of the regions [phase, half, sender, program]."""
        return self.flags + self.phases * self.programs * FLAG_LINE

    @property
    def end(self) -> int:
        return self.slots + self.phases * NUM_HALVES * self.ranks * self.programs * self.region

    def places(self) -> dict[str, int]:
        """Constants of a kernel that has epochs and slots."""
        return {
            "RANKS": self.ranks,
            "PROGRAMS": self.programs,
            "EPOCHS": self.begin,
            "SLOTS": self.slots,
            "REGION": self.region,
        }

    def constants(self) -> dict[str, int]:
        """Constants of a kernel that has flags and blocks too."""
        return self.places() | {"FLAGS": self.flags, "BLOCK": self.block}


@dataclass(frozen=True, kw_only=True)
class ExchangeLayout:
    """Sizes of a group's channels. All ranks must have the same layout: it decides which path an exchange takes."""

    ranks: int
    programs: int = 64
    """Of a two-shot and a gather. Well below the number of multiprocessors: a program spins on one."""
    one_shot_programs: int = 0
    """Each has whole rows. 0: 64 / ranks, but no fewer than 16."""
    one_shot_elements: int = 0
    """Larger sums take two shots. 0: 163,840 / ranks, which is 16 tokens of 5,120 for two ranks: in one shot a rank
    sends the whole tensor to each of its peers."""
    widest: int = 8192
    """Elements of the widest row that is summed in one shot."""
    two_shot_elements: int = 1 << 21
    """Elements of one round of a two-shot; larger sums take several rounds in one launch. A rank has slots of
    32 * this many bytes."""
    paired_programs: int = 256
    """Of the rounds that two ranks take instead of two shots. Two for each multiprocessor of an H100: while one adds up
    what has arrived, or waits until its pushes have, the link has the other's."""
    paired_elements: int = 1 << 22
    """Elements of one such round. A rank has slots of 16 * this many bytes."""
    gather_elements: int = 0
    """Elements of one rank's part in one round of a gather. 0: 2**20 / ranks."""
    winner_programs: int = 16
    winners_a_program: int = 16
    block: int = 2048
    """Elements that a program of a two-shot or a gather handles at a time."""

    def __post_init__(self) -> None:
        if not 2 <= self.ranks <= MAX_RANKS:
            raise ConfigError("ranks", self.ranks, f"an exchange needs 2 to {MAX_RANKS} ranks")

    @property
    def one_shot_limit(self) -> int:
        return self.one_shot_elements or 163_840 // self.ranks

    @cached_property
    def one_shot(self) -> Channel:
        """Without flags: each word of a slot has a tag. A region has two planes of words, of which each is half data.
        N rows of H elements are at most N / programs + 1 rows a program."""
        programs = self.one_shot_programs or max(64 // self.ranks, 16)
        region = 2 * 4 * (-(-self.one_shot_limit // programs) + self.widest)
        return self._channel(programs, 1, region, self.block, ABORTED_BYTES)

    def in_one_shot(self, shape: tuple[int, ...], dtype: torch.dtype, partial_dtype: torch.dtype) -> bool:
        """Whether a sum [N, H] takes one shot. Words are those of both tensors, so these have one dtype, and rows of
        whole pairs of words."""
        return (
            math.prod(shape) <= self.one_shot_limit
            and shape[1] <= self.widest
            and dtype == partial_dtype
            and shape[1] * dtype.itemsize % 8 == 0
        )

    @cached_property
    def two_shot(self) -> Channel:
        """That of paired rounds for two ranks."""
        is_paired = self.ranks == 2
        programs = self.paired_programs if is_paired else self.programs
        region = 4 * whole_share(self.paired_elements if is_paired else self.two_shot_elements, programs * self.ranks)
        return self._channel(programs, 2, region, self.block, self.one_shot.end)

    @cached_property
    def gather(self) -> Channel:
        elements, block = self.gather_elements or (1 << 20) // self.ranks, self.block
        region = 4 * block * max(1, elements // (self.programs * block))
        return self._channel(self.programs, 1, region, block, self.two_shot.end)

    @cached_property
    def winners(self) -> Channel:
        columns = self.winners_a_program
        return self._channel(self.winner_programs, 1, 8 * columns, columns, self.gather.end)

    @property
    def num_bytes(self) -> int:
        """Of one rank's buffer."""
        return _aligned(self.winners.end)

    def _channel(self, programs: int, phases: int, region: int, block: int, begin: int) -> Channel:
        return Channel(
            ranks=self.ranks,
            programs=programs,
            phases=phases,
            region=_aligned(region),
            block=block,
            begin=_aligned(begin),
        )


def whole_share(num_elements: int, num_shares: int) -> int:
    """Elements of one of equal shares, a multiple of 16, so that every share can be moved 16 bytes at a time."""
    return -(-num_elements // (16 * num_shares)) * 16


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerMemory:
    """One rank's view of all buffers. Every buffer must be zero before any rank exchanges: between construction and the
    first exchange, all ranks must meet at a barrier of the host (`of_symmetric_memory` does so)."""

    rank: int
    ranks: int
    buffer: Tensor
    """uint8 [bytes], this rank's own, on the device."""
    table_R: Tensor
    """int64 [R + 1] on the device: the address of every rank's buffer, and at last that of the abort word."""
    abort: Tensor
    """int64 [1] in host memory that the device can read. A value other than 0 frees every spin, now and later."""
    kept: tuple[object, ...] = ()
    """What the addresses belong to."""
    release: tuple[Callable[[], object], ...] = ()
    """What `close` does, on the buffer's GPU."""

    @property
    def aborted(self) -> Tensor:
        """int64 [1] on the device: 1 since an exchange of this rank was aborted. Results from then on are wrong."""
        return self.buffer[:8].view(torch.int64)

    def close(self) -> None:
        """Set the abort word, and give the memory back once no kernel of this rank runs; if one still does after some
        seconds, or the device has failed, it is kept until the process ends. Call once, when no other rank uses the
        memory any more."""
        self.abort.fill_(1)
        if not self.release:
            return
        with suppress(RuntimeError, DriverError), torch.cuda.device(self.buffer.device):
            if _is_idle(self.buffer.device):
                for step in self.release:
                    step()

    @staticmethod
    def _of(rank: int, buffer: Tensor, addresses: Sequence[int], abort: Tensor, kept: tuple[object, ...]) -> PeerMemory:
        assert abort.dtype == torch.int64
        assert all(address % ALIGNMENT == 0 for address in addresses)
        return PeerMemory(
            rank=rank,
            ranks=len(addresses),
            buffer=buffer,
            table_R=torch.tensor([*addresses, abort.data_ptr()], dtype=torch.int64, device=buffer.device),
            abort=abort,
            kept=kept,
        )

    @classmethod
    def of_one_process(cls, layout: ExchangeLayout, device: torch.device) -> list[PeerMemory]:
        """The views of all ranks, which this process holds on one device. They share one abort word."""
        buffers = [_zeros(layout.num_bytes, device) for _ in range(layout.ranks)]
        abort = _abort_word(device)
        addresses = [buffer.data_ptr() for buffer in buffers]
        return [cls._of(rank, buffer, addresses, abort, tuple(buffers)) for rank, buffer in enumerate(buffers)]

    @classmethod
    def of_files(cls, rank: int, layout: ExchangeLayout, directory: Path) -> PeerMemory:
        """Memory of processes on a CPU. Every rank's buffer is a file in `directory`, and one more is the abort word:
        `create_files` must have made them."""
        buffers = [_mapped(directory / f"buffer-{peer}", layout.num_bytes) for peer in range(layout.ranks)]
        abort = _mapped(directory / "abort", 8).view(torch.int64)
        return cls._of(rank, buffers[rank], [buffer.data_ptr() for buffer in buffers], abort, tuple(buffers))

    @classmethod
    def of_processes(
        cls, layout: ExchangeLayout, process_group: distributed.ProcessGroup, device: torch.device
    ) -> PeerMemory:
        """Memory of one process a GPU, or of processes that share one. Collective; must not run during a capture.

        process_group: of gloo; it need not be known to torch. device: with its index. Raises ConfigError if a rank
        can't reach another's memory."""
        rank, ranks = process_group.rank(), process_group.size()
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # the driver's calls need the device's context
            _check_access(process_group, device)
            opened: dict[int, int] = {}
            try:
                buffer = shared_device_memory.allocate(layout.num_bytes, device)
                mine = torch.frombuffer(bytearray(shared_device_memory.export(buffer)), dtype=torch.uint8)
                assert mine.shape == (HANDLE_BYTES,)
                for peer, handle in enumerate(_gathered(process_group, mine)):
                    if peer != rank:
                        opened[peer] = shared_device_memory.map_exported(bytes(handle.tolist()))
            except DriverError as error:
                reason = f"the ranks can't map each other's memory: {error}"
                raise ConfigError("tensor_parallel", ranks, reason) from error
            _gathered(process_group, torch.zeros(1))  # every buffer is zero, and mapped by all
            addresses = [opened.get(peer, buffer.data_ptr()) for peer in range(ranks)]
            memory = cls._of(rank, buffer, addresses, _abort_word(device), ())
        release = [partial(shared_device_memory.unmap, address) for address in opened.values()]
        return replace(memory, release=(*release, partial(shared_device_memory.free, buffer)))

    @classmethod
    def of_launches(cls, layout: ExchangeLayout, rank: int, device: torch.device) -> PeerMemory:
        """Of a rank whose kernels are listed, but not launched: on the device type "meta"."""
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        return cls._of(rank, buffer, [0] * layout.ranks, torch.zeros(1, dtype=torch.int64), ())

    @classmethod
    def of_symmetric_memory(
        cls, layout: ExchangeLayout, process_group: distributed.ProcessGroup, device: torch.device
    ) -> PeerMemory:
        """Memory of one process a GPU, mapped by torch. Collective; must not run during a capture. A gloo group is
        enough. Raises ConfigError if a rank can't reach another's memory.

        Never free it while a peer may spin: freeing synchronises the device. A rank ends by ending its process."""
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        # Loaded here: it registers kernels, and CPU builds of torch need not have it.
        from torch.distributed import _symmetric_memory as symmetric_memory

        _check_access(process_group, device)
        buffer = symmetric_memory.empty(layout.num_bytes, dtype=torch.uint8, device=device)
        handle: Any = symmetric_memory.rendezvous(buffer, process_group)
        buffer.zero_()
        torch.cuda.synchronize(device)
        distributed.barrier(process_group)
        # The handle's pointers are those of allocations, in which the tensor may begin later.
        addresses = [pointer + handle.offset for pointer in handle.buffer_ptrs]
        assert addresses[handle.rank] == buffer.data_ptr()
        return cls._of(handle.rank, buffer, addresses, _abort_word(device), (handle,))


def create_files(layout: ExchangeLayout, directory: Path) -> None:
    """Create the zeroed files of `PeerMemory.of_files`, before any rank maps them."""
    for name, size in [("abort", 8), *((f"buffer-{rank}", layout.num_bytes) for rank in range(layout.ranks))]:
        with (directory / name).open("wb") as file:
            file.truncate(size)


def _mapped(path: Path, num_bytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes] that starts at a multiple of ALIGNMENT, which CPU memory need not do."""
    whole = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)
    begin = -whole.data_ptr() % ALIGNMENT
    return whole[begin : begin + num_bytes]


def _abort_word(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")


def _is_idle(device: torch.device) -> bool:
    """Whether all that the default stream was given has ended, at the latest after _RELEASE_SECONDS. Exchanges are on
    it, or on streams that it waits for."""
    end = torch.cuda.Event()
    end.record(torch.cuda.default_stream(device))
    deadline = time.monotonic() + _RELEASE_SECONDS
    while not end.query():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _gathered(process_group: distributed.ProcessGroup, mine: Tensor) -> list[Tensor]:
    """Every rank's tensor, all of one shape. Only after all ranks have called it."""
    parts = [torch.empty_like(mine) for _ in range(process_group.size())]
    distributed.all_gather(parts, mine, group=process_group)
    return parts


def _check_access(process_group: distributed.ProcessGroup, device: torch.device) -> None:
    for rank, index in enumerate(_gathered(process_group, torch.tensor([device.index]))):
        peer = int(index)
        if peer != device.index and not torch.cuda.can_device_access_peer(device, peer):
            raise ConfigError(
                "tensor_parallel",
                process_group.size(),
                f"GPU {device.index} can't reach the memory of GPU {peer} (rank {rank})",
            )
