"""Runs linear_hopper.py, a Gluon kernel whose warp groups have programs of their own, in Triton's interpreter.

Each group is a thread, of which one runs at a time: a seeded choice wherever a group waits or arrives. Barriers count
arrivals and bytes as on a GPU. A copy lands when its barrier is waited for; until then its buffer can't be read. A
buffer that a product in flight reads can't be overwritten. Programs run in any given order, which decides who arrives
last.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import TensorHandle

from agentspec.kernels.triton import linear_hopper
from tests.kernels.triton.gluon_in_interpreter import _interpreted, _Kernel, _number, _Ring


class WarpGroups:
    """linear_hopper.py under the interpreter. seed: of the order in which groups run; order: of programs, by place."""

    def __init__(self, seed: int = 0, order: Callable[[int, int], int] | None = None) -> None:
        self._random = random.Random(seed)
        self._order = order
        self._groups: dict[int, _Group] = {}
        self.prefetched: list[tuple[int, int]] = []
        """(address, bytes)."""
        names = _interpreted(
            linear_hopper,
            self._allocate,
            mbarrier=SimpleNamespace(
                init=self._init,
                expect=self._expect,
                wait=self._wait,
                arrive=self._arrive,
                MBarrierLayout=lambda: "barrier",
            ),
            tma=SimpleNamespace(async_load=self._copy),
            warpgroup_mma=self._product,
            warpgroup_mma_wait=self._wait_products,
            TensorDescriptor=None,
        )
        language = names["gl"]
        language.warp_specialize = self._run_groups
        language.program_id = self._program_id
        language.uint16, language.bfloat16 = tl.uint16, tl.bfloat16
        names["_barrier"] = lambda: None
        names["_prefetch"] = self._prefetch
        names["_decoded"] = lambda pairs, _: _float(pairs.handle.data)
        names["_view"] = lambda buffer, *_: _View(buffer)
        names["_blocks_of"] = _Blocks
        names["product_kernel"] = _Kernel(names["product_kernel"])
        names["_decoded_words"] = _words
        self.launch_product = names["launch_product"]
        self.launch_four_bit = names["launch_four_bit"]

    def _program_id(self, axis: int) -> Any:
        place = tl.program_id(axis)
        if axis or self._order is None:
            return place
        count = int(_number(tl.num_programs(0)))
        return place * 0 + self._order(int(_number(place)), count)

    def _allocate(self, dtype: Any, shape: list[int], layout: object) -> _Ring:
        return _Buffers([_Barrier() if layout == "barrier" else _Buffer() for _ in range(shape[0])])

    def _run_groups(self, groups: list[Any], num_warps: list[int], registers: list[int]) -> None:
        assert len(num_warps) == len(registers) == len(groups) - 1
        self._groups.clear()
        members = [_Group(function, arguments) for function, arguments in groups]
        for member in members:
            member.start(self)
        self._switch(None)
        for member in members:
            member.thread.join()
        for member in members:
            if member.error is not None:
                raise member.error

    def _current(self) -> _Group:
        return self._groups[threading.get_ident()]

    def _switch(self, current: _Group | None) -> None:
        """Let a group run that can. None: none is running yet, or the last one has ended."""
        able = [group for group in self._groups_all() if not group.is_done and group.is_able()]
        if not able:
            stuck = [group for group in self._groups_all() if not group.is_done]
            if stuck:
                for group in stuck:
                    group.error = group.error or AssertionError("all groups wait: a deadlock")
                    group.is_stopped = True
                    group.turn.release()
            return
        chosen = self._random.choice(able)
        if chosen is not current:
            chosen.turn.release()
            if current is not None:
                current.sleep()

    def _groups_all(self) -> list[_Group]:
        return list(self._groups.values())

    def _init(self, barrier: _Barrier, count: int) -> None:
        barrier.count = barrier.left = count

    def _expect(self, barrier: _Barrier, num_bytes: int) -> None:
        barrier.bytes += num_bytes
        barrier.arrive()

    def _arrive(self, barrier: _Barrier, count: int) -> None:
        group = self._current()
        for _ in range(count):
            barrier.arrive()
        self._switch(group)

    def _wait(self, barrier: _Barrier, phase: Any) -> None:
        group, parity = self._current(), int(_number(phase))

        def has_passed() -> bool:
            barrier.land()
            return barrier.phase % 2 != parity

        group.is_able = has_passed
        self._switch(group)
        assert has_passed()
        group.is_able = lambda: True

    def _prefetch(self, addresses: Any, sizes: Any) -> None:
        for address, size in zip(addresses.handle.data.ravel(), sizes.handle.data.ravel(), strict=True):
            assert size > 0
            assert not address % 16
            assert not size % 16
            self.prefetched.append((int(address), int(size)))

    def _copy(self, blocks: _Blocks, place: list[Any], barrier: _Barrier, buffer: _Buffer) -> None:
        assert buffer.num_readers == 0, "a copy to a buffer that still has readers"
        buffer.data = None
        barrier.copies.append((buffer, *blocks.block(*(int(_number(x)) for x in place))))

    def _product(self, a: Any, b: Any, sums: Any, *, use_acc: bool = True, is_async: bool = False) -> _Product:
        assert is_async
        left = a.values() if isinstance(a, _View) else a.handle.data
        buffer = b.whole()
        right = b.values()
        value = left.astype(np.float64) @ right.astype(np.float64)
        before = sums.value if isinstance(sums, _Product) else sums.handle.data
        product = _Product((value + before if use_acc else value).astype(np.float32), buffer)
        buffer.num_readers += 1
        self._current().under_way.append(product)
        return product

    def _wait_products(self, num_outstanding: int, deps: list[_Product]) -> Any:
        under_way = self._current().under_way
        while len(under_way) > num_outstanding:
            under_way.pop(0).end()
        (product,) = deps
        assert product.is_done, "use of a product before it was waited for"
        return _tensor(product.value)


class _Group:
    def __init__(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments
        self.turn = threading.Semaphore(0)
        self.is_able: Callable[[], bool] = lambda: True
        self.is_done = self.is_stopped = False
        self.error: BaseException | None = None
        self.under_way: list[_Product] = []

    def start(self, machine: WarpGroups) -> None:
        is_registered = threading.Event()

        def run() -> None:
            machine._groups[threading.get_ident()] = self
            is_registered.set()
            try:
                self.sleep()
                self.function(*self.arguments)
            except BaseException as error:
                self.error = self.error or error
            self.is_done = True
            machine._switch(None)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        is_registered.wait()

    def sleep(self) -> None:
        self.turn.acquire()
        if self.is_stopped:
            raise AssertionError("all groups wait: a deadlock")


class _Barrier:
    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0
        self.copies: list[tuple[_Buffer, Any, int]] = []

    def arrive(self) -> None:
        assert self.left > 0, "more arrivals than a phase has"
        self.left -= 1
        self._advance()

    def land(self) -> None:
        for buffer, block, size in self.copies:
            buffer.data = block
            self.bytes -= size
        self.copies.clear()
        self._advance()

    def _advance(self) -> None:
        if self.left == 0 and self.bytes == 0 and not self.copies:
            self.left = self.count
            self.phase += 1


class _Buffers(_Ring):
    layout = "tile"


class _Buffer:
    def __init__(self) -> None:
        self.data: Any = None
        self.num_readers = 0

    def whole(self) -> _Buffer:
        return self

    def values(self) -> Any:
        assert self.data is not None, "a read of a buffer before its copy has landed"
        return self.data

    def load(self, layout: object) -> Any:
        return _tensor(self.values().copy())

    def slice(self, first: int, count: int, axis: int) -> _Part:
        return _Part(
            self, lambda x: x[tuple(slice(first, first + count) if i == axis else slice(None) for i in (0, 1))]
        )

    def permute(self, order: tuple[int, int]) -> _Part:
        return _Part(self, lambda x: x.transpose(order))


class _Part:
    """A view of a buffer."""

    def __init__(self, buffer: Any, view: Callable[[Any], Any]) -> None:
        self._buffer, self._view = buffer, view

    def whole(self) -> _Buffer:
        whole: _Buffer = self._buffer.whole()
        return whole

    def values(self) -> Any:
        return self._view(self._buffer.values())

    def permute(self, order: tuple[int, int]) -> _Part:
        return _Part(self, lambda x: x.transpose(order))


class _View(_Part):
    """16-bit floats, of which the buffer has the bits."""

    def __init__(self, buffer: _Buffer) -> None:
        super().__init__(buffer, lambda bits: (bits.astype(np.uint32) << 16).view(np.float32))


class _Product:
    """An asynchronous product in flight."""

    def __init__(self, value: Any, buffer: _Buffer) -> None:
        self.value, self.buffer, self.is_done = value, buffer, False

    def end(self) -> None:
        self.is_done = True
        self.buffer.num_readers -= 1


class _Blocks:
    """A matrix as TMA sees it: linear_hopper._blocks_of. Rows past the end are zero."""

    layout = "tile"

    def __init__(self, values: Tensor, rows: int, dtype: Any) -> None:
        self._is_tokens = dtype == tl.bfloat16
        self._values = (values.float() if self._is_tokens else values).numpy()
        self._size = (rows, 4, 32) if dtype == tl.int32 else (rows, 128 if self._is_tokens else 64)

    def block(self, *place: int) -> tuple[Any, int]:
        """(values, bytes)."""
        assert len(place) == len(self._size)
        assert min(place) >= 0
        for first, size, most in list(zip(place, self._size, self._values.shape, strict=True))[1:]:
            assert first + size <= most
        part = self._values[tuple(slice(first, first + size) for first, size in zip(place, self._size, strict=True))]
        block = np.zeros(self._size, part.dtype)
        block[: len(part)] = part
        return block, block.size * (2 if self._is_tokens else block.itemsize)


def _float(pairs: Any) -> Any:
    codes = torch.from_numpy(np.ascontiguousarray(pairs)).view(torch.float8_e4m3fn)
    return _tensor(codes.float().numpy())


def _words(words: Any) -> list[Any]:
    """Eight integers of each word, which is of a symmetric form: four pairs."""
    bits = words.handle.data.view(np.uint32)
    return [
        _tensor((bits >> (4 * pair + 16 * half) & 15).astype(np.float32) - 8) for pair in range(4) for half in range(2)
    ]


_TYPES = {np.dtype(np.float32): tl.float32, np.dtype(np.uint16): tl.uint16, np.dtype(np.int32): tl.int32}


def _tensor(data: Any) -> Any:
    dtype = _TYPES[data.dtype]
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))
