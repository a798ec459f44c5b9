"""Carries out the cache's copy orders: rows and pages between the model's pools and their twins in the host's memory.

On CUDA the copies run on two streams of their own, one for each direction, beside the steps: the copy engines do them,
no kernel. What is to be copied is complete when it is ordered, and what a copy overwrites is in nobody's use then but
that of steps launched before; so each order waits for what had been launched before it, and steps never wait for an
order. Copies to the host wait for those to the device (cache/host_tier.py says why).

A call enqueues a bounded number of copies, so that no step is late for a long order; the rest follows with the next
calls. Knows nothing of requests, and decides nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from agentspec.cache.host_tier import CopyOrder, CopyOrders, HostMemory
from agentspec.errors import ConfigError
from agentspec.models.protocol import StepModel

COPIES_AT_ONCE = 128
"""Copies that one call enqueues at most: about a millisecond of the host's time. A copy is a run of neighbouring pages,
or one row, in one layer."""

_ALIGNMENT = 4096

STAGE = "locking host memory"


class CopyProgress(NamedTuple):
    """Orders that have been carried out, in each direction: all up to these numbers."""

    to_host: int
    to_device: int


class _Twins(NamedTuple):
    """The parts of the model's pools, and as many like them in the host's memory: element i of each is a part of row,
    or page, i."""

    on_device: Sequence[Tensor]
    on_host: Sequence[Tensor]


class HostCopies:
    """Twins of a model's pools, and the copies between them."""

    def __init__(self, model: StepModel, memory: HostMemory, device: torch.device) -> None:
        """Allocates the host's memory. Where the device is a GPU a thread begins to lock it: see `await_memory`. Call
        after model.allocate."""
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
        self._rows = _Twins(rows, twins[: len(rows)])
        self._pages = _Twins(pages, twins[len(rows) :])
        self._device = device
        self._to_host, self._to_device = _Lane(device), _Lane(device)

    def await_memory(self) -> None:
        """Until the memory is locked, which takes seconds; `launch` does so too. Raises ConfigError if that is
        refused."""
        if self._locking is not None:
            self._locking.result()

    @torch.inference_mode()
    def launch(self, orders: CopyOrders) -> None:
        """Start the orders, in their order. Never waits for the device."""
        self.await_memory()
        launched = _moment(self._device)
        for order in orders.to_device:
            parts = (
                _parts(self._pages.on_host, self._pages.on_device, order.pages),
                _parts(self._rows.on_host, self._rows.on_device, order.rows),
            )
            self._to_device.add(order, parts, launched)
        for order in orders.to_host:
            parts = (
                _parts(self._pages.on_device, self._pages.on_host, order.pages),
                _parts(self._rows.on_device, self._rows.on_host, order.rows),
            )
            self._to_host.add(order, parts, launched)
        self._enqueue()

    @torch.inference_mode()
    def poll(self) -> CopyProgress:
        """Go on with what was started; says what is done. Never waits for the device."""
        self._enqueue()
        return CopyProgress(to_host=self._to_host.num_done(), to_device=self._to_device.num_done())

    def close(self) -> None:
        """Wait for the copies that run."""
        self._to_device.wait()
        self._to_host.wait()

    def _enqueue(self) -> None:
        left = self._to_device.enqueue(COPIES_AT_ONCE)
        if left and self._to_host.has_work:
            self._to_host.follow(self._to_device)
            self._to_host.enqueue(left)


class _Lane:
    """Copies in one direction, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: deque[tuple[CopyOrder, Iterator[tuple[Tensor, Tensor]], torch.cuda.Event | None]] = deque()
        self._enqueued: deque[tuple[int, torch.cuda.Event | None]] = deque()
        self._num_done = 0

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(
        self, order: CopyOrder, parts: Iterable[Iterator[tuple[Tensor, Tensor]]], after: torch.cuda.Event | None
    ) -> None:
        self._waiting.append((order, (pair for some in parts for pair in some), after))

    def enqueue(self, limit: int) -> int:
        """Enqueue up to `limit` copies. Returns how many more it might have been."""
        with torch.cuda.stream(self._stream):  # no stream: no-op
            while self._waiting and limit:
                order, pairs, after = self._waiting[0]
                if after is not None and self._stream is not None:
                    self._stream.wait_event(after)
                num_copies = 0
                for target, source in islice(pairs, limit):
                    target.copy_(source, non_blocking=True)
                    num_copies += 1
                if num_copies == limit:
                    return 0  # perhaps there is nothing left of it: the next call will see
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
    """(target, source) of each copy: runs of ids that are neighbours on both sides are copied at once."""
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
    """Now, in the order of steps."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _allocate(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]) -> tuple[Tensor, list[Tensor]]:
    """Tensors in one piece of memory, and that piece, uint8: torch's own locked memory comes in powers of two only."""
    sizes = [
        -(-torch.Size(shape).numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    memory = torch.empty(sum(sizes) + _ALIGNMENT, dtype=torch.uint8)
    memory_B = memory[-memory.data_ptr() % _ALIGNMENT :][: sum(sizes)]
    tensors = []
    for shape, dtype, part_B in zip(shapes, dtypes, torch.split(memory_B, sizes), strict=True):
        tensors.append(part_B[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape))
    return memory_B, tensors


def _lock(memory_B: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        memory_B.zero_()  # by all cores: locking would ask for the pages one after the other
        status = int(torch.cuda.cudart().cudaHostRegister(memory_B.data_ptr(), memory_B.nbytes, 0))
    if status:
        reason = f"the system doesn't lock so much memory for the device (CUDA error {status}); 0 does without"
        raise ConfigError("host_memory", f"{memory_B.nbytes / 2**30:.4g} GiB", reason)


def _unlock(locking: Future[None], memory_B: Tensor) -> None:
    """`memory_B` comes along so that it lives until now."""
    if locking.exception() is None:
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(memory_B.data_ptr())
