"""Processes that share device memory, on a CPU: the driver's calls of kernels/shared_device_memory.py on files, and the
main function of a rank that exchanges through them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentspec.engine.ranks import meet
from agentspec.kernels import peer_memory, shared_device_memory
from agentspec.kernels.peer_memory import ExchangeLayout, PeerMemory
from agentspec.kernels.shared_device_memory import HANDLE_BYTES
from agentspec.models.shards import Rank


class FilesForDevice:
    """One device's memory: a file, whose name is the handle. Calls are made while the device is the current one."""

    def __init__(self, directory: Path, index: int) -> None:
        self.directory = directory
        self.index = index
        self.current: int | None = None
        self.mapped: dict[int, Tensor] = {}
        self.freed: list[int] = []

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        assert self.current == self.index == device.index
        path = self.directory / f"device-{self.index}"
        path.write_bytes(bytes(num_bytes))
        self.own = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        self.name = path.name
        return self.own

    def export(self, memory_B: Tensor) -> bytes:
        assert memory_B is self.own
        return f"{self.name} {memory_B.nbytes}".encode().ljust(HANDLE_BYTES, b"\0")

    def map_exported(self, handle: bytes) -> int:
        assert self.current == self.index
        name, size = handle.rstrip(b"\0").decode().split()
        found = torch.from_file(str(self.directory / name), shared=True, size=int(size), dtype=torch.uint8)
        self.mapped[found.data_ptr()] = found
        return found.data_ptr()

    def unmap(self, address: int) -> None:
        assert self.current == self.index
        self.freed.append(address)

    def free(self, memory_B: Tensor) -> None:
        assert self.current == self.index
        self.freed.append(memory_B.data_ptr())

    @contextmanager
    def as_current(self, device: torch.device) -> Iterator[None]:
        # A tensor on the CPU has no index.
        self.current = self.index if device.index is None else device.index
        yield
        self.current = None

    def use(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("allocate", "export", "map_exported", "unmap", "free"):
            patch.setattr(shared_device_memory, name, getattr(self, name))
        patch.setattr(torch.cuda, "device", self.as_current)
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: own.index != peer)
        patch.setattr(peer_memory, "_is_idle", lambda device: True)
        patch.setattr(peer_memory, "_abort_word", lambda device: torch.zeros(1, dtype=torch.int64))


def main(index: int, count: int, directory: Path) -> None:
    """Map every rank's buffer, write a line of each, and check what the others have written into the own one."""
    torch.set_num_threads(1)
    layout = ExchangeLayout(ranks=count)
    process_group = meet(str(directory / "meeting"), Rank(index, count))
    device = FilesForDevice(directory, index)
    with pytest.MonkeyPatch.context() as patch:
        device.use(patch)
        memory = PeerMemory.of_processes(layout, process_group, torch.device("cpu", index))
        addresses = memory.table_R.tolist()
        assert (memory.rank, memory.ranks) == (index, count)
        assert addresses[index] == memory.buffer.data_ptr()
        assert addresses[-1] == memory.abort.data_ptr()
        assert not memory.buffer.any()
        peer_memory._gathered(process_group, torch.zeros(1))
        for peer, address in enumerate(addresses[:-1]):
            buffer = memory.buffer if peer == index else device.mapped[address]
            buffer[index] = 10 * peer + index + 1
        peer_memory._gathered(process_group, torch.zeros(1))
        assert memory.buffer[:count].tolist() == [10 * index + other + 1 for other in range(count)]
        memory.close()
        assert memory.abort.item() == 1
        assert sorted(device.freed) == sorted(addresses[:-1])
        peer_memory._gathered(process_group, torch.zeros(1))
