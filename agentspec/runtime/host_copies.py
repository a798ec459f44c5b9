"""Carries out the cache's copy orders: state rows and KV pages, between the model's pools and their copies in host
memory.

On CUDA the copies run beside the steps, on two streams, one for each direction. They use the copy engines and no
kernel. When a copy is ordered its source is complete, and its target is used by no step but those launched before. So
each order waits for the work launched before it, and no step waits for an order. Copies to the host wait for copies to
the device (cache/host_tier.py explains why).

A call enqueues a bounded number of copies, so a long order delays no step; later calls enqueue the rest. Knows nothing
of requests, and decides nothing.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from agentspec.cache.host_tier import CopyOrder, CopyOrders, HostMemory
from agentspec.errors import ConfigError
from agentspec.models.protocol import StepModel

COPIES_AT_ONCE = 128
"""Most copies that one call enqueues: about a millisecond of host time. A copy is one row, or a run of neighbouring
pages, in one layer."""

_ALIGNMENT = 4096
_HUGE_PAGE = 2**21

_Pools: TypeAlias = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The tensors of a pool, and tensors of the same shape elsewhere: element i of each is a part of row (or page) i."""

STAGE = "locking host memory"


class CopyProgress(NamedTuple):
    """Completed orders in each direction: all up to these numbers."""

    to_host: int
    to_device: int


class HostCopies:
    """Host copies of a model's pools, and the transfers between them."""

    def __init__(self, model: StepModel, memory: HostMemory, device: torch.device) -> None:
        """Allocate the host memory. On a GPU, a thread begins to page-lock it: see `await_memory`. Call after
        model.allocate."""
        rows, pages = model.row_tensors(), model.page_tensors()
        shapes = [(memory.num_rows, tensor) for tensor in rows] + [(memory.num_pages, tensor) for tensor in pages]
        memory_B, twins = _allocate(
            [(count, *tensor.shape[1:]) for count, tensor in shapes], [tensor.dtype for _, tensor in shapes]
        )
        self._locking: Future[None] | None = None
        if device.type == "cuda":
            beside = ThreadPoolExecutor(1, thread_name_prefix="agentspec-locking")
            self._locking = beside.submit(_lock, memory_B, device)
            beside.shutdown(wait=False)
            weakref.finalize(self, _unlock, self._locking, memory_B)
        rows_on_host, pages_on_host = twins[: len(rows)], twins[len(rows) :]
        self._device = device
        self._to_host = _Lane(device, (pages, pages_on_host), (rows, rows_on_host))
        self._to_device = _Lane(device, (pages_on_host, pages), (rows_on_host, rows))

    def await_memory(self) -> None:
        """Wait until the memory is page-locked, which takes seconds; `launch` waits too. Raises ConfigError if the
        system refuses."""
        if self._locking is not None:
            self._locking.result()

    @torch.inference_mode()
    def launch(self, orders: CopyOrders) -> None:
        """Start the orders, in the given order. Never waits for the device, once the memory is locked."""
        self.await_memory()
        launched = _moment(self._device)
        for order in orders.to_device:
            self._to_device.add_order(order, launched)
        for order in orders.to_host:
            self._to_host.add_order(order, launched)
        self._enqueue()

    @torch.inference_mode()
    def poll(self) -> CopyProgress:
        """Enqueue more of the started orders; returns which are complete. Never waits for the device."""
        self._enqueue()
        return CopyProgress(to_host=self._to_host.num_done(), to_device=self._to_device.num_done())

    def close(self) -> None:
        """Wait for the copies that are running."""
        self._to_device.wait()
        self._to_host.wait()

    def _enqueue(self) -> None:
        left = self._to_device.enqueue(COPIES_AT_ONCE)
        if left and self._to_host.has_work:
            self._to_host.follow(self._to_device)
            self._to_host.enqueue(left)


class _Lane:
    """Copies in one direction, one after another."""

    def __init__(self, device: torch.device, pages: _Pools, rows: _Pools) -> None:
        """pages, rows: the tensors to copy from and to."""
        self._pages, self._rows = pages, rows
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: deque[tuple[CopyOrder, Iterator[tuple[Tensor, Tensor]], torch.cuda.Event | None]] = deque()
        self._enqueued: deque[tuple[int, torch.cuda.Event | None]] = deque()
        self._num_done = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add_order(self, order: CopyOrder, after: torch.cuda.Event | None) -> None:
        pairs = chain(_parts(*self._pages, order.pages), _parts(*self._rows, order.rows))
        self._waiting.append((order, pairs, after))

    def enqueue(self, limit: int) -> int:
        """Enqueue up to `limit` copies. Returns how much of the limit is left."""
        with torch.cuda.stream(self._stream):  # None (no CUDA): does nothing
            while self._waiting and limit:
                order, pairs, after = self._waiting[0]
                if after is not None and self._stream is not None:
                    self._stream.wait_event(after)
                num_copies = 0
                for target, source in islice(pairs, limit):
                    target.copy_(source, non_blocking=True)
                    num_copies += 1
                if num_copies == limit:
                    return 0  # it may be complete; the next call finds out
                limit -= num_copies
                self._waiting.popleft()
                self._enqueued.append((order.number, None if self._stream is None else self._stream.record_event()))
        return limit

    def follow(self, other: _Lane) -> None:
        """What is enqueued from now on comes after all that the other has enqueued."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)

    def num_done(self) -> int:
        while self._enqueued and (self._enqueued[0][1] is None or self._enqueued[0][1].query()):
            self._num_done, _ = self._enqueued.popleft()
        return self._num_done

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _parts(
    sources: Sequence[Tensor], targets: Sequence[Tensor], ids: list[tuple[int, int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(target, source) of each copy. Runs of ids that are neighbours on both sides become one copy."""
    runs: list[list[int]] = []
    for source, target in ids:
        if runs and source == runs[-1][0] + runs[-1][2] and target == runs[-1][1] + runs[-1][2]:
            runs[-1][2] += 1
        else:
            runs.append([source, target, 1])
    for source_N, target_M in zip(sources, targets, strict=True):
        for source, target, count in runs:
            yield target_M[target : target + count], source_N[source : source + count]


def _moment(device: torch.device) -> torch.cuda.Event | None:
    """An event at this point of the stream on which steps run; None without CUDA."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _allocate(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, list[Tensor]]:
    """Allocate tensors in one block of memory; also returns the block, uint8. torch's own pinned memory rounds each
    block up to a power of two. In huge pages, where the system has them: 15.7 GiB are touched and locked in 1.2 s
    instead of 2.0."""
    sizes = [
        -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    mapped = mmap.mmap(-1, sum(sizes) + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    memory_B = memory[-memory.data_ptr() % _HUGE_PAGE :][: sum(sizes)]
    tensors = []
    for shape, dtype, part_B in zip(shapes, dtypes, torch.split(memory_B, sizes), strict=True):
        tensors.append(part_B[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape))
    return memory_B, tensors


def _lock(memory_B: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        memory_B.zero_()  # touches the pages on all cores; locking would fault them in one by one
        status = int(torch.cuda.cudart().cudaHostRegister(memory_B.data_ptr(), memory_B.nbytes, 0))
    if status:
        reason = f"the system doesn't lock so much memory for the device (CUDA error {status}); 0 does without"
        raise ConfigError("host_memory", f"{memory_B.nbytes / 2**30:.4g} GiB", reason)


def _unlock(locking: Future[None], memory_B: Tensor) -> None:
    """`memory_B` is an argument so that it stays alive until now."""
    if locking.exception() is None:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(memory_B.data_ptr())
