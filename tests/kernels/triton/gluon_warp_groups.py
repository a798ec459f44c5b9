"""Runs linear_hopper.py, swiglu_hopper.py, routing_hopper.py, prefill_attention_groups_hopper.py,
chunked_delta_hopper.py and the down-projection of grouped_gemm_hopper.py, Gluon kernels whose warp groups have programs
of their own, in Triton's interpreter.

Each group is a thread, of which one runs at a time: a seeded choice wherever a group waits or arrives. Barriers count
arrivals and bytes as on a GPU. A copy lands when its barrier is waited for, one to memory when its end is; until then
what it writes can't be read. A buffer that a product or a copy in flight reads can't be overwritten. What a group
stores to a buffer is visible to products and copies once it has passed a fence. Programs run in any given order, which
decides who arrives last.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import TensorHandle

from agentspec.kernels.triton import (
    chunked_delta_hopper,
    grouped_gemm_hopper,
    linear_hopper,
    prefill_attention_groups_hopper,
    routing_hopper,
    swiglu_hopper,
)
from agentspec.kernels.weights import SCALE_BLOCK
from agentspec.types import BLOCK_TOKENS
from tests.kernels.triton.gluon_in_interpreter import _interpreted, _Kernel, _number, _Pool, _Ring, prompt_pages


class WarpGroups:
    """A module under the interpreter. seed: of the order in which groups run; order: of programs, by place."""

    def __init__(
        self, module: ModuleType, kernel: str, seed: int = 0, order: Callable[[int, int], int] | None = None
    ) -> None:
        self._random = random.Random(seed)
        self._order = order
        self._groups: dict[int, _Group] = {}
        self.names = _interpreted(
            module,
            self._allocate,
            mbarrier=SimpleNamespace(
                init=self._init,
                expect=self._expect,
                wait=self._wait,
                arrive=self._arrive,
                MBarrierLayout=lambda: "barrier",
            ),
            tma=SimpleNamespace(async_load=self._copy, async_store=self._copy_out, store_wait=self._wait_stores),
            async_copy=SimpleNamespace(async_load=self._gather, mbarrier_arrive=self._arrive_with_copies),
            fence_async_shared=self._fence,
            warpgroup_mma=self._product,
            warpgroup_mma_wait=self._wait_products,
            TensorDescriptor=None,
        )
        language = self.names["gl"]
        language.warp_specialize = self._run_groups
        language.program_id = self._program_id
        language.uint16, language.bfloat16 = tl.uint16, tl.bfloat16
        self.names["warp_barrier"] = lambda: None
        self.names[kernel] = _Kernel(self.names[kernel])

    def _program_id(self, axis: int) -> Any:
        place = tl.program_id(axis)
        if axis or self._order is None:
            return place
        count = int(_number(tl.num_programs(0)))
        return place * 0 + self._order(int(_number(place)), count)

    def _allocate(self, dtype: Any, shape: list[int], layout: object) -> _Ring:
        sizes = [int(_number(size)) for size in shape]
        return _Buffers(
            [_Barrier() if layout == "barrier" else _Buffer(self, dtype, sizes[1:]) for _ in range(sizes[0])]
        )

    def _run_groups(self, groups: list[Any], num_warps: list[int], registers: list[int]) -> None:
        assert len(num_warps) == len(registers) == len(groups) - 1
        self._groups.clear()
        members = [
            _Group(function, arguments, warps)
            for (function, arguments), warps in zip(groups, [4, *num_warps], strict=True)
        ]
        for member in members:
            member.start(self)
        self._switch(None)
        for member in members:
            member.thread.join()
        # A group that has failed leaves the others waiting.
        for member in sorted(members, key=lambda member: member.is_stopped):
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

    def _arrive(self, barrier: _Barrier, count: int, pred: Any = True) -> None:
        group = self._current()
        for _ in range(count if bool(_number(pred)) else 0):
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

    def _copy(self, blocks: _Blocks, place: list[Any], barrier: _Barrier, buffer: _Buffer | _Slice) -> None:
        assert buffer.whole().num_readers == 0, "a copy to a buffer that still has readers"
        buffer.clear()
        barrier.copies.append((buffer, *blocks.block(*(int(_number(x)) for x in place))))

    def _gather(self, buffer: _Buffer, pointers: Any) -> None:
        """A copy by the threads."""
        assert buffer.num_readers == 0, "a copy to a buffer that still has readers"
        buffer.clear()
        self._current().gathered.append((buffer, tl.load(pointers).handle.data, 0))

    def _arrive_with_copies(self, barrier: _Barrier, increment_count: bool) -> None:
        """An arrival of each of the group's threads, with the copies that it has begun."""
        assert not increment_count
        group = self._current()
        barrier.copies += group.gathered
        group.gathered.clear()
        for _ in range(32 * group.num_warps):
            barrier.arrive()
        self._switch(group)

    def _fence(self) -> None:
        for buffer in self._current().written:
            buffer.is_visible = True
        self._current().written.clear()

    def _copy_out(self, blocks: _Blocks, place: list[Any], buffer: _Buffer) -> None:
        group = self._current()
        assert buffer.is_visible, "a copy of a buffer whose values are not yet visible to it"
        buffer.num_readers += 1
        group.stores.append((buffer, blocks, [int(_number(x)) for x in place]))

    def _wait_stores(self, num_outstanding: int) -> None:
        group = self._current()
        while len(group.stores) > num_outstanding:
            buffer, blocks, place = group.stores.pop(0)
            blocks.store(buffer.values(), *place)
            buffer.num_readers -= 1

    def _product(self, a: Any, b: Any, sums: Any, *, use_acc: bool = True, is_async: bool = False) -> _Product:
        assert is_async
        is_shared = isinstance(a, _Buffer | _Part)
        left = a.values() if is_shared else a.handle.data
        value = left.astype(np.float64) @ b.values().astype(np.float64)
        before = sums.value if isinstance(sums, _Product) else sums.handle.data
        buffers = [b.whole(), a.whole()] if is_shared else [b.whole()]
        assert all(buffer.is_visible for buffer in buffers), "a product of values that are not yet visible to it"
        product = _Product((value + before if use_acc else value).astype(np.float32), buffers)
        self._current().under_way.append(product)
        return product

    def _wait_products(self, num_outstanding: int, deps: list[_Product]) -> Any:
        under_way = self._current().under_way
        while len(under_way) > num_outstanding:
            under_way.pop(0).end()
        values = tuple(_tensor(x.value) if isinstance(x, _Product) and x.is_done else x for x in deps)
        return values if len(values) > 1 else values[0]


class LinearGroups(WarpGroups):
    """linear_hopper.py."""

    def __init__(self, seed: int = 0, order: Callable[[int, int], int] | None = None) -> None:
        super().__init__(linear_hopper, "product_kernel", seed, order)
        self.names.update(
            _decoded=lambda pairs, _: _float(pairs.handle.data),
            _blocks_of=_linear_blocks,
            reads_256_bytes=lambda blocks: blocks,
            _decoded_words=_words,
        )
        self.launch_product = self.names["launch_product"]
        self.launch_four_bit = self.names["launch_four_bit"]


class SwigluGroups(WarpGroups):
    """swiglu_hopper.py. module: a changed one."""

    def __init__(self, seed: int = 0, module: ModuleType = swiglu_hopper) -> None:
        super().__init__(module, "prompt_swiglu_kernel", seed)
        self.names["_blocks_of"] = _swiglu_blocks
        self.product = self.names["product"]


class ScoreGroups(WarpGroups):
    """routing_hopper.py, with halves of which the high one is all. module: a changed one."""

    def __init__(self, seed: int = 0, module: ModuleType = routing_hopper) -> None:
        super().__init__(module, "scores_kernel", seed)
        self.names["gl"].bfloat16 = tl.float32
        self.names.update(
            in_float32=lambda x: x,
            sum_of=lambda x, y: x + y,
            _blocks_of=lambda values, rows: _Blocks(values, (rows, routing_hopper.FEATURES), 2),
            reinterpret=lambda ring, _, shape, layout: _Recast(ring, [int(_number(size)) for size in shape]),
        )
        self.score = self.names["score"]


class _Recast:
    """A ring as of another shape [I, R, C]: its vectors as I matrices, or each matrix's first values as one of another
    shape."""

    def __init__(self, ring: _Ring, shape: list[int]) -> None:
        self._ring, self._shape = ring, shape

    def index(self, i: Any) -> _Rows | _Reshaped:
        if len(self._ring.blocks[0].shape) == 2:
            return _Reshaped(self._ring.index(i), self._shape[1:])
        first = int(_number(i)) * self._shape[1]
        return _Rows(self._ring.blocks[first : first + self._shape[1]])


class _Rows:
    """Vectors as one matrix."""

    def __init__(self, buffers: list[_Buffer]) -> None:
        self._buffers = buffers

    def store(self, value: Any) -> None:
        for buffer, row in zip(self._buffers, value.handle.data, strict=True):
            buffer.store(_tensor(row))


class _Reshaped:
    """The first values of a buffer of matrices. A store leaves nothing of what was there."""

    def __init__(self, buffer: _Buffer, shape: list[int]) -> None:
        self._buffer, self._shape = buffer, shape
        columns = buffer.shape[1]
        assert shape[0] * shape[1] % columns == 0
        self._part = slice(0, shape[0] * shape[1] // columns)

    def store(self, value: Any) -> None:
        self._buffer.clear()
        self._buffer.store(_tensor(value.handle.data.reshape(-1, self._buffer.shape[1])), self._part)

    def load(self, layout: object) -> Any:
        return _tensor(self._buffer.values(self._part).reshape(self._shape).copy())


class AttentionGroups(WarpGroups):
    """prefill_attention_groups_hopper.py, for float16 and tiles of few rows."""

    BLOCK_M = 32

    def __init__(self, seed: int = 0) -> None:
        super().__init__(prefill_attention_groups_hopper, "attend", seed)
        self.names.update(prompt_pages(), _ROWS=self.BLOCK_M // 2)
        self.names["gl"].static_assert = lambda condition: None
        self.attend = self.names["attend"]
        self.NUM_WARPS, self.REGISTERS = self.names["NUM_WARPS"], self.names["REGISTERS"]
        self.descriptor = _Pages


class _Pages:
    """A layer's pool as TMA sees it."""

    layout = "tile"

    def __init__(self, kv_P2SGD: Tensor) -> None:
        self._pool = _Pool(kv_P2SGD)
        self.dtype, self.block_type = self._pool.dtype, self._pool.block_type

    def block(self, *place: int) -> tuple[Any, int]:
        """(values, bytes)."""
        return self._pool.block(list(place)).handle.data, self.block_type.nbytes


class DownGroups(WarpGroups):
    """The down-projection of grouped_gemm_hopper.py. module: a changed one."""

    def __init__(self, seed: int = 0, module: ModuleType = grouped_gemm_hopper) -> None:
        super().__init__(module, "down_kernel", seed)
        self.names["_descriptor"] = lambda values, rows: _Blocks(values.float(), (rows, SCALE_BLOCK), 1)
        self.names["_num_programs"] = lambda device: 2
        self.down = self.names["down"]


class FoldGroups(WarpGroups):
    """chunked_delta_hopper.py, in place of that module for chunked_delta.py. module: a changed one."""

    def __init__(self, seed: int = 0, module: ModuleType = chunked_delta_hopper) -> None:
        super().__init__(module, "fold_blocks", seed)
        self.names["gl"].bfloat16 = tl.float32
        self.names["as_rows"] = lambda x, columns: _Blocks(x.flatten(0, -2), (BLOCK_TOKENS, columns), 2)
        self.names["in_float32"] = lambda x: x
        self.operands, self.fold_blocks = self.names["operands"], self.names["fold_blocks"]
        self.BLOCK_D, self.NUM_WARPS = module.BLOCK_D, module.NUM_WARPS

    def is_supported(self, *_: object) -> bool:
        return True


class _Group:
    def __init__(self, function: Any, arguments: tuple[Any, ...], num_warps: int) -> None:
        self.function, self.arguments, self.num_warps = function, arguments, num_warps
        self.turn = threading.Semaphore(0)
        self.is_able: Callable[[], bool] = lambda: True
        self.is_done = self.is_stopped = False
        self.error: BaseException | None = None
        self.under_way: list[_Product] = []
        self.stores: list[tuple[_Buffer, _Blocks, list[int]]] = []
        self.gathered: list[tuple[_Buffer | _Slice, Any, int]] = []
        self.written: list[_Buffer] = []
        """Since its last fence."""

    def start(self, machine: WarpGroups) -> None:
        is_registered = threading.Event()

        def run() -> None:
            machine._groups[threading.get_ident()] = self
            is_registered.set()
            try:
                self.sleep()
                self.function(*self.arguments)
                assert not self.stores, "a copy of shared memory that was not waited for"
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
        self.copies: list[tuple[_Buffer | _Slice, Any, int]] = []

    def arrive(self) -> None:
        assert self.left > 0, "more arrivals than a phase has"
        self.left -= 1
        self._advance()

    def land(self) -> None:
        for buffer, block, size in self.copies:
            buffer.fill(block)
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
    """Shared memory, or some of it (`_Part`)."""

    def __init__(self, machine: WarpGroups, dtype: Any, shape: list[int]) -> None:
        self._machine, self.dtype = machine, dtype
        self._data: Any = None
        self._is_here = np.zeros(shape, bool)
        self.num_readers = 0
        self.is_visible = True

    def whole(self) -> _Buffer:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self._is_here.shape

    def values(self, part: Any = ...) -> Any:
        assert self._is_here[part].all(), "a read of a buffer before its copy has landed"
        return self._data if part is ... else self._data[part]

    def load(self, layout: object) -> Any:
        return _tensor(self.values().copy())

    def store(self, value: Any, part: Any = ...) -> None:
        assert self.num_readers == 0, "a store to a buffer that still has readers"
        self._machine._current().written.append(self)
        self.fill(value.handle.data, part)
        self.is_visible = False

    def clear(self, part: Any = ...) -> None:
        self._is_here[part] = False

    def fill(self, block: Any, part: Any = ...) -> None:
        if self._data is None:
            self._data = np.zeros(self._is_here.shape, block.dtype)
        self._data[part] = block
        self._is_here[part] = True
        self.is_visible = True

    def slice(self, first: int, count: int, axis: int = 0) -> _Part:
        axes = range(self._is_here.ndim)
        return _Slice(self, tuple(slice(first, first + count) if i == axis else slice(None) for i in axes))

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

    def load(self, layout: object) -> Any:
        return _tensor(self.values().copy())

    def permute(self, order: tuple[int, int]) -> _Part:
        return _Part(self, lambda x: x.transpose(order))

    def store(self, value: Any) -> None:
        """To a transposed buffer."""
        self._buffer.store(_tensor(self._view(value.handle.data)))


class _Slice(_Part):
    def __init__(self, buffer: _Buffer, part: tuple[slice, ...]) -> None:
        super().__init__(buffer, lambda x: x[part])
        self._part = part

    def store(self, value: Any) -> None:
        self.whole().store(value, self._part)

    def clear(self) -> None:
        self.whole().clear(self._part)

    def fill(self, block: Any) -> None:
        self.whole().fill(block, self._part)


class _Product:
    """An asynchronous product in flight, which only another product may take."""

    def __init__(self, value: Any, reads: list[_Buffer]) -> None:
        self.value, self.reads, self.is_done = value, reads, False
        for buffer in reads:
            buffer.num_readers += 1

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a product before it was waited for")

    def end(self) -> None:
        self.is_done = True
        for buffer in self.reads:
            buffer.num_readers -= 1


class _Blocks:
    """A matrix as TMA sees it, in blocks. Rows past the end are read as zero and not written. item_bytes: of a value on
    a GPU."""

    layout = "tile"

    def __init__(self, values: Tensor, size: tuple[int, ...], item_bytes: int) -> None:
        self._values, self._size = values.numpy(), size
        self.block_type = SimpleNamespace(nbytes=int(np.prod(size)) * item_bytes)
        self.dtype = tl.float32

    def block(self, *place: int) -> tuple[Any, int]:
        """(values, bytes)."""
        part = self._values[self._part(place)]
        block = np.zeros(self._size, part.dtype)
        block[: len(part)] = part
        return block, self.block_type.nbytes

    def store(self, block: Any, *place: int) -> None:
        part = self._values[self._part(place)]
        part[:] = block[: len(part)]

    def _part(self, place: tuple[int, ...]) -> tuple[slice, ...]:
        assert len(place) == len(self._size)
        assert min(place) >= 0
        for first, size, most in list(zip(place, self._size, self._values.shape, strict=True))[1:]:
            assert first + size <= most
        return tuple(slice(first, first + size) for first, size in zip(place, self._size, strict=True))


def _linear_blocks(values: Tensor, rows: int, dtype: Any) -> _Blocks:
    """linear_hopper._blocks_of."""
    if dtype == tl.bfloat16:
        return _Blocks(values.float(), (rows, 128), 2)
    return _Blocks(values, (rows, 4, 32) if dtype == tl.int32 else (rows, 64), values.itemsize)


def _swiglu_blocks(values: Tensor, rows: int, columns: int) -> _Blocks:
    """swiglu_hopper._blocks_of. values: float32."""
    return _Blocks(values, (rows, columns), 2)


def _float(pairs: Any) -> Any:
    codes = torch.from_numpy(np.ascontiguousarray(pairs)).view(torch.float8_e4m3fn)
    return _tensor(codes.float().numpy())


def _words(words: Any) -> list[Any]:
    """Eight integers of each word, which is of a symmetric form: four pairs."""
    bits = words.handle.data.view(np.uint32)
    return [
        _tensor((bits >> (4 * pair + 16 * half) & 15).astype(np.float32) - 8) for pair in range(4) for half in range(2)
    ]


_TYPES = {
    np.dtype(np.float16): tl.float16,
    np.dtype(np.float32): tl.float32,
    np.dtype(np.uint16): tl.uint16,
    np.dtype(np.int32): tl.int32,
}


def _tensor(data: Any) -> Any:
    dtype = _TYPES[data.dtype]
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))
