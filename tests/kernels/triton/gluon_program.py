"""Runs chunked_delta_solve_hopper.py, a Gluon kernel whose warps all do the same, in Triton's interpreter.

As in gluon_warp_groups.py copies land, and products end, when they are waited for. What the warps store to a buffer is
visible to products and copies once a fence and then a barrier of the warps have passed. A buffer that a product or a
copy has read can be overwritten once that was waited for and a barrier has passed. Barriers between plain stores and
loads are the compiler's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton import chunked_delta_solve_hopper
from agentspec.types import BLOCK_TOKENS
from tests.kernels.triton.gluon_in_interpreter import _number, _Ring
from tests.kernels.triton.gluon_warp_groups import WarpGroups, _Barrier, _Blocks, _Buffer, _Group, _Product, _tensor


class SolveProgram(WarpGroups):
    """chunked_delta_solve_hopper.py, in place of that module for chunked_delta.py. Values are float32, except the
    halves of matrices. module: a changed one."""

    def __init__(self, module: ModuleType = chunked_delta_solve_hopper) -> None:
        super().__init__(module, "solve_blocks")
        self.names["gl"].bfloat16 = tl.float32
        self.names.update(
            as_rows=lambda x, columns: _Blocks(x.flatten(0, -2), (BLOCK_TOKENS, columns), 2),
            reinterpret=self._view,
            warp_barrier=self._pass_barrier,
            _halves=_halves,
            _power=lambda x: tl.exp2(x),
            _layout_of=lambda x: "registers",
            in_float32=lambda x: x,
            _store_values=self._recorded(self.names["_store_values"]),
        )
        self.names["release_next"] = self._begin
        self._program = self._begin(PDL=False)
        self.operands, self.solve_blocks = self.names["operands"], _Launches(self, self.names["solve_blocks"])
        self.NUM_WARPS, self.MAX_REGISTERS = module.NUM_WARPS, module.MAX_REGISTERS
        self.values: dict[tuple[int, int], Tensor] = {}
        """v that programs have computed, by block and head."""

    def _recorded(self, store: Callable[..., None]) -> Callable[..., None]:
        def store_values(v: Any, count: Any, buffer: _Buffer) -> None:
            store(v, count, buffer)
            place = int(_number(tl.program_id(1))), int(_number(tl.program_id(0)))
            self.values[place] = torch.from_numpy(buffer.values().copy())

        return store_values

    def _begin(self, PDL: bool) -> _Group:
        """Begin a program."""
        if hasattr(self, "_program"):
            self.check_ended()
        self._program = _Group(None, (), 4)
        self._fenced: list[_Buffer] = []
        self._read: list[_Product] = []
        self._landing: list[_Barrier] = []
        return self._program

    def check_ended(self) -> None:
        assert not self._program.stores, "a copy of shared memory that was not waited for"
        assert not self._landing, "a copy to shared memory that was not waited for"

    def is_supported(self, *_: object) -> bool:
        return True

    def _current(self) -> _Group:
        return self._program

    def _expect(self, barrier: _Barrier, num_bytes: int) -> None:
        super()._expect(barrier, num_bytes)
        self._landing.append(barrier)

    def _wait(self, barrier: _Barrier, phase: Any) -> None:
        barrier.land()
        assert barrier.phase % 2 != int(_number(phase)), "a wait that never ends"
        if barrier in self._landing:
            self._landing.remove(barrier)

    def _fence(self) -> None:
        self._fenced += self._program.written
        self._program.written.clear()

    def _pass_barrier(self) -> None:
        for buffer in self._fenced:
            buffer.is_visible = True
        self._fenced.clear()
        for product in self._read:
            product.end()
        self._read.clear()

    def _wait_products(self, num_outstanding: int, deps: list[_Product]) -> Any:
        under_way = self._program.under_way
        while len(under_way) > num_outstanding:
            under_way[0].is_done = True
            self._read.append(under_way.pop(0))
        assert all(product.is_done for product in deps), "use of a product before it was waited for"
        values = tuple(_tensor(product.value) for product in deps)
        return values if len(values) > 1 else values[0]

    def _view(self, buffer: _Buffer, dtype: Any, shape: list[int], layout: object) -> Any:
        sizes = [int(_number(size)) for size in shape]
        if sizes[1] == BLOCK_TOKENS // 16:
            return _Columns(buffer, sizes)
        if len(sizes) == 2:
            return _Room(self, dtype, sizes, buffer)
        return _Ring([_Room(self, dtype, sizes[1:], buffer) for _ in range(sizes[0])])


class _Launches:
    """A kernel, whose last program is checked too."""

    def __init__(self, machine: SolveProgram, kernel: Any) -> None:
        self._machine, self._kernel = machine, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._kernel[grid](*args, **kwargs)
            self._machine.check_ended()

        return launch


class _Room(_Buffer):
    """Memory of another buffer, which loses its values."""

    def __init__(self, machine: WarpGroups, dtype: Any, shape: list[int], owner: _Buffer) -> None:
        super().__init__(machine, dtype, shape)
        self._owner = owner

    def store(self, value: Any, part: Any = ...) -> None:
        assert self._owner.num_readers == 0, "a store to a buffer that still has readers"
        self._owner.clear()
        super().store(value, part)


class _Columns:
    """A buffer's values as they lie in memory: of row j, chunk c of each four is at place c ^ j // 2 % 4."""

    def __init__(self, buffer: _Buffer, shape: list[int]) -> None:
        values = buffer.values()
        rows, chunks = np.arange(len(values))[:, None], np.arange(values.shape[1] // 4)[None, :]
        places = values.reshape(len(values), -1, 4)
        self._data = places[rows, chunks ^ rows // 2 % 4].reshape(shape)

    def index(self, i: Any) -> _Columns:
        column = object.__new__(_Columns)
        column._data = self._data[int(_number(i))]
        return column

    def slice(self, first: int, count: int, axis: int) -> _Columns:
        part = object.__new__(_Columns)
        part._data = self._data.take(range(first, first + count), axis)
        return part

    def load(self, layout: object) -> Any:
        return _tensor(self._data.copy())


def _halves(x: Any) -> tuple[Any, Any]:
    """chunked_delta_solve_hopper._halves."""
    values = torch.from_numpy(x.handle.data)
    high = values.bfloat16().float()
    return _tensor(high.numpy()), _tensor((values - high).bfloat16().float().numpy())
