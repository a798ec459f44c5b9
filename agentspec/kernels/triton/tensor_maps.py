"""TMA copies of weights that memory reads 256 bytes at a time.

A copy of 128 bytes of each row leaves memory with as many short reads. With the tensor map's "L2 promotion" of 256
bytes, a miss brings the next step's half of the row into the L2 cache too. That takes 2 to 3 % off products of 32 and
64 tokens (benchmarks/RESULTS.md). Triton always writes 128 into the maps that it makes and has no option for it, so the
field is changed in the map behind it. Where a map is not as expected, it stays as it is: only speed depends on it.

Knows nothing of kernels.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_MAP_BYTES = 128
"""Size and alignment of a CUtensorMap."""
_PROMOTION_128, _PROMOTION_256 = 2, 3
"""CUtensorMapL2promotion."""
_FILLS = ("fill_tma_descriptor", "fill_tma_descriptor_tiled")
"""Triton's function that makes a map, in 3.6 and in later versions."""


class _Address(int):
    """Of memory that is to be read 256 bytes at a time."""


class _Base:
    """A tensor as a TensorDescriptor's base."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.dtype, self.device = tensor.dtype, tensor.device

    def data_ptr(self) -> int:
        return _Address(self._tensor.data_ptr())


class _Field(NamedTuple):
    """The bits of a map that hold its promotion."""

    at: int
    """Byte."""
    bits: int
    """All that differ between promotions of 128 and 256 bytes."""
    value: int
    """Of these, those of 128."""
    address_at: int
    """Byte at which the map has the address of the memory."""


def reads_256_bytes(descriptor: TensorDescriptor) -> TensorDescriptor:
    """The same descriptor, for copies that memory reads 256 bytes at a time; it must be of a tensor on a GPU."""
    if _install() and _field() is not None:
        descriptor.base = _Base(descriptor.base)
    return descriptor


def promotion_of(tensor_map: object, address: int) -> int:
    """Bytes that a map made by Triton reads at a time: 128 or 256, or 0 if it is not as expected."""
    field = _field()
    memory = _memory(tensor_map)
    if field is None or bytes(memory[field.address_at : field.address_at + 8]) != address.to_bytes(8, "little"):
        return 0
    return {field.value: 128, field.value ^ field.bits: 256}.get(memory[field.at] & field.bits, 0)


@functools.cache
def _install() -> bool:
    """Have Triton's maps of an `_Address` changed. Returns whether it can be."""
    # A process that compiles for a GPU that it doesn't see has a driver without utils.
    utils = getattr(triton.runtime.driver.active, "utils", None)
    name = next((name for name in _FILLS if hasattr(utils, name)), None)
    if name is None:
        return False
    setattr(utils, name, _promoting(getattr(utils, name)))
    return True


def _promoting(fill: Callable[..., object]) -> Callable[..., object]:
    def filled(address: int, *arguments: Any) -> object:
        tensor_map = fill(address, *arguments)
        field = _field()
        if isinstance(address, _Address) and field is not None and promotion_of(tensor_map, address) == 128:
            _memory(tensor_map)[field.at] ^= field.bits
        return tensor_map

    return filled


def _memory(tensor_map: object) -> ctypes.Array[ctypes.c_uint8]:
    """The map within Triton's object: behind its header, at a multiple of a map's size."""
    begin = id(tensor_map) + object.__basicsize__
    return (ctypes.c_uint8 * _MAP_BYTES).from_address(-(-begin // _MAP_BYTES) * _MAP_BYTES)


@functools.cache
def _field() -> _Field | None:
    """Found in two maps of the driver's that differ in nothing else. None: the driver does not make them, or they
    differ in more than one byte."""
    try:
        encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError):
        return None
    memory = torch.empty(1 << 16, dtype=torch.uint8, device="cuda")
    maps = [_encoded(encode, memory.data_ptr(), promotion) for promotion in (_PROMOTION_128, _PROMOTION_256)]
    differing = [i for i, (a, b) in enumerate(zip(*maps, strict=True)) if a != b]
    address_at = maps[0].find(memory.data_ptr().to_bytes(8, "little"))
    if len(differing) != 1 or address_at < 0:
        return None
    at = differing[0]
    bits = maps[0][at] ^ maps[1][at]
    return _Field(at, bits, maps[0][at] & bits, address_at)


def _encoded(encode: Callable[..., int], address: int, promotion: int) -> bytes:
    """A map of bytes [64, 1,024] in blocks of [64, 128]; empty if the driver refuses."""
    raw = (ctypes.c_uint8 * (2 * _MAP_BYTES))()
    begin = -(-ctypes.addressof(raw) // _MAP_BYTES) * _MAP_BYTES
    sizes, strides = (ctypes.c_uint64 * 2)(1024, 64), (ctypes.c_uint64 * 1)(1024)
    block, steps = (ctypes.c_uint32 * 2)(128, 64), (ctypes.c_uint32 * 2)(1, 1)
    # Bytes, two dimensions, no interleaving, swizzled by 128 bytes, zeros past the end.
    failed = encode(
        ctypes.c_void_p(begin), 0, 2, ctypes.c_void_p(address), sizes, strides, block, steps, 0, 3, promotion, 0
    )
    return b"" if failed else bytes((ctypes.c_uint8 * _MAP_BYTES).from_address(begin))
