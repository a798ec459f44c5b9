"""Runs Gluon's kernels prefill_attention_hopper.py, attention_fp8.py, gated_delta_columns.py, gated_delta_ring.py,
linear_four_bit.py, experts_four_bit.py and grouped_four_bit_hopper.py in Triton's interpreter, which does not support
Gluon. Shared memory, barriers, copies and matrix units are replaced by plain operations, which also check the
synchronization whose absence a GPU would not report.

A copy lands only when its barrier is waited for, and a barrier has one phase in flight. A buffer may be overwritten
only when it has no more readers: its last reader was waited for, and a barrier of the whole program followed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

from agentspec.kernels.four_bit import E2M1
from agentspec.kernels.four_bit_tiles import E2M1_BITS, E5M3_BIAS
from agentspec.kernels.triton import (
    attention_fp8,
    experts_four_bit,
    gated_delta_columns,
    gated_delta_ring,
    grouped_four_bit_hopper,
    launch,
    linear_four_bit,
    prefill_attention_hopper,
    prefill_attention_pages,
)

COLUMNS_OF_A_WINDOW = (
    "by_ptx",
    "column_places",
    "entry_place",
    "float32",
    "live_columns",
    "load_window",
    "one_and_exp",
    "remainder",
    "rows_layout",
    "wide",
)
"""What the ring's kernel calls of gated_delta_columns.py."""
PAGES_OF_A_PROMPT = (
    "masked_scores",
    "page_at",
    "place_at",
    "rescaled",
    "share_on_line",
    "softmax",
    "tiles_of_share",
)
"""What attention kernels of prompts call of prefill_attention_pages.py."""


class _Buffer:
    """One block of shared memory; `data` is None until it is written."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.data: Any = None
        self.reader: Any = None

    def permute(self, order: tuple[int, int]) -> _Transposed:
        assert tuple(order) == (1, 0)
        return _Transposed(self)

    def load(self, layout: object) -> Any:
        return self.data

    def store(self, value: Any) -> None:
        assert self.reader is None, "a store to a buffer that still has readers"
        self.data = value

    def slice(self, first: int, count: int) -> _Rows:
        return _Rows(self, first, count)


class _Rows:
    """Some rows of a buffer."""

    def __init__(self, buffer: _Buffer, first: int, count: int) -> None:
        self.buffer, self.rows = buffer, slice(first, first + count)

    def load(self, layout: object) -> Any:
        whole = self.buffer.data.handle
        return _tensor(whole.data[self.rows].copy(), whole.dtype)

    def store(self, value: Any) -> None:
        old, new = self.buffer.data, value.handle.data
        whole = np.zeros((0, new.shape[1]), new.dtype) if self.rows.start == 0 else old.handle.data
        assert len(whole) == self.rows.start, "rows are stored in order"
        self.buffer.store(_tensor(np.concatenate((whole, new)), value.dtype))


def _tensor(data: Any, dtype: Any) -> Any:
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


class _Transposed:
    def __init__(self, buffer: _Buffer) -> None:
        self.buffer = buffer


class _Barrier:
    def __init__(self) -> None:
        self.phase = 0
        self.bytes = 0
        self.copies: list[tuple[_Buffer, Any, int]] = []


class _Ring:
    def __init__(self, blocks: list[Any]) -> None:
        self.blocks = blocks

    def index(self, i: Any) -> Any:
        return self.blocks[int(_number(i))]


class _Product:
    """An asynchronous product in flight."""

    def __init__(self, run: Any, value: Any, reads: list[_Buffer]) -> None:
        self.value, self.reads, self.is_done = value, reads, False
        run.under_way.append(self)
        for buffer in reads:
            buffer.reader = self


class _Machine:
    """The state shared by the threads of one program."""

    def __init__(self) -> None:
        self.under_way: list[_Product] = []
        self.waited_for: set[_Buffer] = set()
        self.gathered: list[tuple[_Buffer, Any]] = []
        # Looked up at every call: the interpreter patches Triton's functions while it runs a kernel.
        self.dot: Callable[[Any, Any], Any] = lambda a, b: tl.dot(a, b)

    def barrier(self) -> None:
        for buffer in self.waited_for:
            if buffer.reader.is_done:
                buffer.reader = None
        self.waited_for.clear()

    def allocate(self, dtype: object, shape: list[int], layout: object) -> Any:
        assert not self.under_way
        if layout == "barrier":
            return _Ring([_Barrier() for _ in range(shape[0])])
        return _Ring([_Buffer(dtype) for _ in range(shape[0])]) if len(shape) == 3 else _Buffer(dtype)

    def expect(self, barrier: _Barrier, num_bytes: int, pred: Any = True) -> None:
        if _number(pred):
            assert barrier.bytes == 0, "a barrier expects bytes twice in one phase"
            barrier.bytes = num_bytes

    def copy(self, pool: Any, place: list[Any], barrier: _Barrier, buffer: _Buffer, pred: Any = True) -> None:
        if _number(pred):
            assert buffer.reader is None, "a copy to a buffer that still has readers"
            buffer.data = None
            block = pool.block(place)
            barrier.copies.append((buffer, block, block.handle.data.nbytes))

    def gather(self, buffer: _Buffer, pointers: Any) -> None:
        """A copy by the threads, which lands when they wait for it."""
        assert buffer.reader is None, "a copy to a buffer that still has readers"
        buffer.data = None
        self.gathered.append((buffer, tl.load(pointers)))

    def wait_group(self, num_outstanding: int) -> None:
        assert num_outstanding == 0
        for buffer, values in self.gathered:
            buffer.data = values
        self.gathered.clear()

    def wait_barrier(self, barrier: _Barrier, phase: Any) -> None:
        assert int(_number(phase)) == barrier.phase % 2, "a wait for a phase that is not in flight"
        assert barrier.bytes, "a wait for a barrier that expects no bytes would hang"
        assert sum(size for *_, size in barrier.copies) == barrier.bytes
        for buffer, block, _ in barrier.copies:
            buffer.data = block
        barrier.copies, barrier.bytes, barrier.phase = [], 0, barrier.phase + 1

    def product(
        self, a: Any, b: _Buffer | _Transposed, sums: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> _Product:
        assert is_async
        buffers = [x for x in (a, b.buffer if isinstance(b, _Transposed) else b) if isinstance(x, _Buffer)]
        assert not isinstance(sums, _Product) or sums.is_done, "an accumulator of a product in flight"
        right = tl.trans(b.buffer.data) if isinstance(b, _Transposed) else b.data
        value = self.dot(a.data if isinstance(a, _Buffer) else a, right)
        return _Product(self, value + _plain(sums) if use_acc else value, buffers)

    def wait_products(self, num_outstanding: int, deps: list[Any]) -> Any:
        while len(self.under_way) > num_outstanding:
            done = self.under_way.pop(0)
            done.is_done = True
            self.waited_for |= set(done.reads)
        assert all(not isinstance(x, _Product) or x.is_done for x in deps), "use of a product before it was waited for"
        (value,) = deps
        return _plain(value)


def _plain(x: Any) -> Any:
    return x.value if isinstance(x, _Product) else x


def _number(x: Any) -> Any:
    return x.handle.data.item() if isinstance(x, tl.tensor) else x


class _Pool:
    """A layer's pool as TMA sees it: prefill_attention_hopper.descriptor."""

    layout = "tile"

    def __init__(self, kv_P2SGD: Tensor) -> None:
        self.page_tokens, num_kv_heads, self.head_dim = kv_P2SGD.shape[2:]
        self.rows = kv_P2SGD.view(-1, num_kv_heads * self.head_dim).numpy()
        self.dtype = tl.uint8 if self.rows.dtype == np.uint8 else tl.float16
        self.block_type = tl.block_type(self.dtype, [self.page_tokens, self.head_dim])

    def block(self, place: list[Any]) -> Any:
        row, column = map(_number, place)
        return _tensor(self.rows[row : row + self.page_tokens, column : column + self.head_dim].copy(), self.dtype)


class _Shared:
    """float32 in shared memory, which holds NaN until it is written, and views of it."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def index(self, i: Any) -> _Shared:
        return _Shared(self.data[int(_number(i))])

    def reinterpret(self, dtype: object, shape: list[int], layout: object) -> _Shared:
        return _Shared(self.data.reshape(shape))

    def store(self, value: Any) -> None:
        self.data[...] = value.handle.data

    def load(self, layout: object) -> Any:
        return tl.tensor(TensorHandle(self.data.copy(), tl.float32), tl.block_type(tl.float32, list(self.data.shape)))


class _Copies:
    """Copies from global to shared memory, which land when they are waited for."""

    def __init__(self) -> None:
        self.under_way: list[tuple[_Shared, Any, Any]] = []

    def async_load(self, shared: _Shared, pointers: Any, mask: Any) -> None:
        assert all(pointers.shape[i] == size for i, size in enumerate(shared.data.shape)), "a copy of another shape"
        self.under_way.append((shared, tl.load(pointers, mask=mask, other=float("nan")), mask))

    def commit_group(self) -> None:
        pass

    def wait_group(self, num_outstanding: int) -> None:
        assert num_outstanding == 0
        for shared, values, mask in self.under_way:
            wanted = np.broadcast_to(mask.handle.data, shared.data.shape)
            shared.data[wanted] = values.handle.data[wanted]
        self.under_way.clear()


class _Language:
    """The functions that the kernels use from gluon.language; others are Triton's own. Layouts are strings."""

    static_range = range
    NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *_: "tile")

    def __init__(self, allocate: Any) -> None:
        self.allocate_shared_memory = allocate
        self.NVMMADistributedLayout = self.SliceLayout = self.BlockedLayout = self.DotOperandLayout = (
            self.SwizzledSharedLayout
        ) = self.DistributedLinearLayout = lambda *_, **__: "registers"

    def __getattr__(self, name: str) -> Any:
        # Looked up at every call: the interpreter patches Triton's functions while it runs a kernel.
        return getattr(tl, name)

    def arange(self, begin: int, end: int, layout: str) -> Any:
        return tl.arange(begin, end)

    def zeros(self, shape: list[int], dtype: Any, layout: str) -> Any:
        return tl.zeros(shape, dtype)

    def full(self, shape: list[int], value: float, dtype: Any, layout: str) -> Any:
        return tl.full(shape, value, dtype)

    def convert_layout(self, x: Any, layout: str, assert_trivial: bool = False) -> Any:
        return x


class _Kernel(InterpretedFunction):  # type: ignore[misc]
    """Run the function without rewriting: the interpreter would turn every assigned value into a tensor, shared memory
    too."""

    def rewrite(self) -> Any:
        return self.fn


@lru_cache
def _code(path: str) -> CodeType:
    """A module without its imports of Gluon."""
    # The annotation by the name that the interpreter knows.
    tree = ast.parse(Path(path).read_text().replace("gl.constexpr", "tl.constexpr"))
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.ImportFrom) and str(node.module).startswith("triton.experimental"))
    ]
    return compile(tree, path, "exec")


def _plain_names(*, tma: Any = None, async_copy: Any = None, **_: Any) -> dict[str, Any]:
    """What gluon_names.py has, of these modules."""
    return {
        "copy_block": getattr(tma, "async_load", None),
        "copy_out": getattr(tma, "async_store", None),
        "copy_values": getattr(async_copy, "async_load", None),
        "reinterpret": lambda shared, *form: shared.reinterpret(*form),
        "warp_barrier": lambda: None,
        "release_next": launch.release_next.fn,
        "await_previous": launch.await_previous.fn,
    }


def _interpreted(module: ModuleType, allocate: Any, **names: Any) -> dict[str, Any]:
    """Run the source of a module with Gluon replaced, and with other values for what it imports from there. Return its
    globals."""
    copy = ModuleType(module.__name__)
    gluon = SimpleNamespace(
        jit=lambda function=None, **_: function or (lambda decorated: decorated),
        constexpr_function=lambda function: function,
    )
    copy.__dict__.update(gluon=gluon, gl=_Language(allocate), tl=tl, **names)
    exec(_code(str(module.__file__)), copy.__dict__)
    copy.__dict__.update({name: x for name, x in _plain_names(**names).items() if name in copy.__dict__})
    plain = {name: value.value for name, value in copy.__dict__.items() if isinstance(value, tl.constexpr)}
    copy.__dict__.update(plain)
    return copy.__dict__


def interpreted_ring_step() -> tuple[Any, Any]:
    """The kernels of gated_delta_columns.py and gated_delta_ring.py."""

    def allocate(dtype: object, shape: list[int], layout: object) -> _Shared:
        assert dtype == tl.float32
        return _Shared(np.full(shape, np.nan, np.float32))

    columns = _interpreted(gated_delta_columns, allocate)
    names = _interpreted(gated_delta_ring, allocate, async_copy=_Copies())
    names.update({name: columns[name] for name in COLUMNS_OF_A_WINDOW})
    for module in (columns, names):
        module["warp_barrier"] = lambda: None
    return _Kernel(columns["_prepare_columns"]), _Kernel(names["_gated_delta_ring_step"])


class _Tile:
    """Shared memory whose barriers the compiler inserts."""

    def __init__(self, dtype: Any, shape: list[int], layout: object) -> None:
        self.dtype, self.value = dtype, None

    def store(self, value: Any) -> None:
        self.value = value

    def load(self, layout: object) -> Any:
        return self.value

    def permute(self, order: tuple[int, int]) -> SimpleNamespace:
        assert order == (1, 0)
        return SimpleNamespace(load=lambda layout: tl.trans(self.value))


def interpreted_fp8_attention() -> Any:
    """The kernel of attention_fp8.py."""
    names = _interpreted(attention_fp8, _Tile, mma_v2=lambda a, b, sums: sums + tl.dot(a, b.to(tl.float32)))
    by_word, by_byte = names["_WORD_BY_WORD"], names["_BYTE_BY_BYTE"]

    def decoded(words: Any, ptx: str) -> list[Any]:
        """What the PTX computes, of [..., 2 n] words: of two neighbours along the axis that is in registers first."""
        data = words.handle.data
        codes = np.ascontiguousarray(data).view(np.uint8).reshape(*data.shape, 4)
        values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        # The code of NaN, which no key has, is 480 in the kernel.
        values = np.where(np.isnan(values), np.where(codes > 127, -480.0, 480.0), values).astype(np.float32)
        if ptx == by_byte:
            found = [values[..., byte] for byte in range(4)]
        else:
            assert ptx == by_word
            # Output 2 i + h has half h of word i of each two words, as two elements.
            halves = values.reshape(data.shape[0], data.shape[1] // 2, 2, 2, 2)
            found = [halves[:, :, word, half].reshape(data.shape) for word in range(2) for half in range(2)]
        return [tl.tensor(TensorHandle(x.copy(), tl.float32), tl.block_type(tl.float32, list(x.shape))) for x in found]

    names.update(
        _decoded=decoded,
        _sum=tl.standard._sum_combine,
        _all_if=lambda place, condition: place >= (0 if _number(condition) else 1 << 30),
    )
    return _Kernel(names["attend_fp8"])


def interpreted_four_bit() -> Any:
    """The kernel of linear_four_bit.py. Decoded weights and activations are float32 here."""
    return _Kernel(_four_bit_names()["four_bit_kernel"])


def interpreted_four_bit_experts() -> tuple[Any, Any]:
    """The kernels of experts_four_bit.py: gate and up, down."""
    names = _interpreted(experts_four_bit, None)
    walk = _four_bit_names()
    names.update({name: walk[name] for name in ("walk", "gated", "has_zeros", "index_along", "layout_of", "scales_of")})
    names["mma_layout"] = names["tokens_layout"] = lambda *_: "registers"
    return _Kernel(names["four_bit_gate_up_kernel"]), _Kernel(names["four_bit_down_kernel"])


def interpreted_four_bit_prompt() -> Any:
    """The kernel of grouped_four_bit_hopper.py. Decoded weights are float32 with bfloat16's values."""
    machine = _Machine()
    machine.dot = lambda a, b: tl.dot(a, b.to(tl.float32))
    copies = SimpleNamespace(async_load=machine.gather, commit_group=lambda: None, wait_group=machine.wait_group)
    names = _interpreted(grouped_four_bit_hopper, machine.allocate, async_copy=copies)
    walk = _four_bit_names()
    names.update(
        {
            name: walk[name]
            for name in ("block_of_tile", "gated", "has_zeros", "index_along", "layout_of", "scales_of", "sums_of")
        }
    )
    names.update(
        words_layout=lambda *_: "registers",
        fence_async_shared=lambda: None,
        warpgroup_mma=machine.product,
        warpgroup_mma_init=lambda value: value,
        warpgroup_mma_wait=machine.wait_products,
        warp_barrier=machine.barrier,
        _decoded=_rounded,
    )
    halves = names["_halves"]

    def pairs(scales: Any, zeros: Any, FORMAT: str, WARPS: int) -> tuple[Any, Any, Any, Any]:
        scales = scales if FORMAT == "e2m1" else scales.to(tl.float32)
        zeros = zeros if "zeros" in FORMAT else scales
        return (*halves(scales, WARPS), *halves(zeros, WARPS))

    names["_pairs"] = pairs
    return _Kernel(names["four_bit_prompt_kernel"])


def _rounded(words: Any, scales: Any, offset: Any, FORMAT: str) -> list[Any]:
    """As that kernel's `_decoded`."""
    by_word = []
    for word in range(2):
        of_word = scales.handle.data[..., word : word + 1]
        zero = offset.handle.data[..., word : word + 1].astype(np.float32) if "zeros" in FORMAT else 8
        by_word += _decoded_words(
            words.handle.data[..., word : word + 1].view(np.uint32), of_word if FORMAT == "e2m1" else None, zero
        )
        if FORMAT != "e2m1":
            by_word[-4:] = [values * of_word for values in by_word[-4:]]
    rounded = [torch.from_numpy(values).bfloat16().float().numpy() for values in by_word]
    return [tl.tensor(TensorHandle(x, tl.float32), tl.block_type(tl.float32, list(x.shape))) for x in rounded]


def _four_bit_names() -> dict[str, Any]:
    """What linear_four_bit.py defines."""
    names = _interpreted(linear_four_bit, None, mma_v2=lambda a, b, sums: sums + tl.dot(a, b.to(tl.float32)))
    names["warp_barrier"] = lambda: None
    names["layout_of"] = lambda _: "registers"
    names["_prefetch"] = lambda *_: None
    names["_decoded"] = _decoded
    inputs = _Inputs()
    names.update(_inputs_at=inputs.at, _load_where=inputs.load_where, _halves=inputs.halves)
    return names


class _Inputs:
    """Loads of activations in words of two, which are 32 or 64 bits here."""

    def at(self, x: Any, offset: Any, k: Any, PAIRS: bool, CLEARED: bool) -> Any:
        self._dtype = x.dtype.element_ty
        if not PAIRS:
            return x + offset * 2 + k
        word = tl.int32 if self._dtype.primitive_bitwidth == 16 else tl.int64
        return x.to(tl.pointer_type(word), bitcast=True) + offset + k

    def load_where(self, at: Any, is_in: Any) -> Any:
        """Lanes that load nothing have NaN: no sum that is read may depend on them."""
        return tl.load(at, mask=is_in, other=-1)

    def halves(self, pairs: Any) -> list[Any]:
        words = np.ascontiguousarray(pairs.handle.data)
        if self._dtype == tl.bfloat16:
            single = (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            single = words.view({4: np.float16, 8: np.float32}[words.itemsize]).astype(np.float32)
        halves = single.reshape(*words.shape, 2).transpose(0, 1, 3, 2)
        by_two = [np.ascontiguousarray(halves[:, first::2].reshape(words.shape)) for first in range(2)]
        return [tl.tensor(TensorHandle(x, tl.float32), tl.block_type(tl.float32, list(words.shape))) for x in by_two]


def _decoded(words: Any, scales: Any, zeros: Any, FORMAT: str) -> list[Any]:
    """What the kernel's PTX computes: for each word of two and each of its pairs, [..., 2 x 2]."""
    data = words.handle.data
    by_word = []
    for word in range(2):
        of_scale = None
        if FORMAT == "e2m1":  # four in an int32
            of_scale = scales.handle.data.view(np.uint8).reshape(data.shape)[..., word::2]
        of_zero = zeros.handle.data[..., word::2] if "zeros" in FORMAT else 8
        by_word += _decoded_words(data[..., word::2].view(np.uint32), of_scale, of_zero)
    return [
        tl.tensor(TensorHandle(values, tl.float32), tl.block_type(tl.float32, list(values.shape))) for values in by_word
    ]


def _decoded_words(words: Any, scales: Any, zeros: Any) -> list[Any]:
    """Four pairs of words [..., n], of which each is [..., n x 2]: word, half. scales: of floats, in five exponent and
    three fraction bits; times 2^-8, as in the kernel, whose multipliers make up for it."""
    if scales is not None:
        scale = (1 + (scales & 7) / 8) * 2.0 ** ((scales >> 3).astype(np.float64) - E5M3_BIAS - 8)
    pairs = []
    for pair in range(4):
        halves = []
        for half in range(2):
            bits = words >> (16 * half) & 0xFFFF
            if scales is None:
                value = (bits >> (4 * pair) & 15).astype(np.float32) - zeros
            else:
                value = _E2M1[pair, bits] * scale
            halves.append(value.astype(np.float32))
        pairs.append(np.stack(halves, -1).reshape(*words.shape[:-1], 2 * words.shape[-1]))
    return pairs


def _values_of_halves() -> Any:
    """[pair, 16 bits of a word]."""
    bits = np.arange(1 << 16)
    codes = np.array([sum((bits >> place & 1) << bit for bit, place in enumerate(places)) for places in E2M1_BITS])
    return np.array([*E2M1, *(-x for x in E2M1)])[codes]


_E2M1 = _values_of_halves()


def prompt_pages() -> dict[str, Any]:
    """The functions of prefill_attention_pages.py."""
    names = _interpreted(prefill_attention_pages, None)
    return {name: names[name] for name in PAGES_OF_A_PROMPT}


def interpreted_hopper() -> SimpleNamespace:
    """Return (attend, descriptor) of prefill_attention_hopper.py, for float16."""
    machine = _Machine()
    names = _interpreted(
        prefill_attention_hopper,
        machine.allocate,
        fence_async_shared=lambda: None,
        mbarrier=SimpleNamespace(
            init=lambda barrier, count: None,
            expect=machine.expect,
            wait=machine.wait_barrier,
            MBarrierLayout=lambda: "barrier",
        ),
        tma=SimpleNamespace(async_load=machine.copy),
        warpgroup_mma=machine.product,
        warpgroup_mma_init=lambda value: value,
        warpgroup_mma_wait=machine.wait_products,
        TensorDescriptor=None,
    )
    names["warp_barrier"] = machine.barrier
    names.update(prompt_pages())
    return SimpleNamespace(attend=_Kernel(names["attend"]), descriptor=_Pool)
