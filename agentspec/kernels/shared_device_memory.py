"""Device memory that other processes on this machine map, by the CUDA driver's inter-process handles.

Uses the driver itself: memory of torch's allocator can't be exported in all its configurations, and its symmetric
memory needs a process group that torch knows by name, which would be the embedding program's. All calls are for the
thread's current device.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class DriverError(Exception):
    """A call of the driver failed. The message names it and the driver's reason."""


class _Handle(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * (HANDLE_BYTES // 8)),)


class _Bytes:
    """An address, in a form that torch accepts as a tensor without taking ownership."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """uint8 [num_bytes], zero, at the beginning of an allocation of its own. It lives until `free`."""
    address = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
    memory_B = torch.as_tensor(_Bytes(address.value, num_bytes), device=device)
    assert memory_B.data_ptr() == address.value, "torch has copied the memory"
    memory_B.zero_()
    torch.cuda.synchronize(device)
    return memory_B


def free(memory_B: Tensor) -> None:
    """Give back what `allocate` returned. No process may use it any more."""
    _call("cuMemFree_v2", ctypes.c_uint64(memory_B.data_ptr()))


def export(memory_B: Tensor) -> bytes:
    """HANDLE_BYTES, with which another process can map what `allocate` returned."""
    handle = _Handle()
    _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(memory_B.data_ptr()))
    return bytes(handle)


def map_exported(handle: bytes) -> int:
    """The address at which the current device reads and writes memory that another process has exported; access between
    the two devices is enabled."""
    address = ctypes.c_uint64()
    _call(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
    )
    return int(address.value)


def unmap(address: int) -> None:
    _call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _call(name: str, *arguments: Any) -> None:
    status: int = getattr(_driver(), name)(*arguments)
    if status:
        reason = ctypes.c_char_p()
        _driver().cuGetErrorString(ctypes.c_int(status), ctypes.byref(reason))
        words = b"unknown" if reason.value is None else reason.value
        raise DriverError(f"{name}: {words.decode()} (CUDA error {status})")


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the driver's library: {error}") from error
