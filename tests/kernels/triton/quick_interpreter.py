"""Removes redundant work from Triton's interpreter, nine tenths of a test's time. None of it checks anything.

- It prepares triton.language again at every call of a device function. The result depends only on the function's
  module and is valid until the launch ends, so once per launch and module is enough.
- For every integer sum and product it computes, with six more operations, whether it overflows, and drops the
  answer unless in debug mode, which cannot be requested.
- It derives the types of an operation and of its result anew each time: interpreter_plans.py.
- It builds a table of all types whenever it needs numpy's type for one of Triton's, builds a block's type again where
  it already has it, and derives all that follows from a type again for each block and tensor.
- It takes numbers apart to convert between float32 and bfloat16, where it drops half of the bits.

Repairs what older versions of it can't do with the numpy that is here.
"""

from __future__ import annotations

from dataclasses import replace
from operator import index
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.kernels.triton.interpreter_plans import use_plans

_INDEXES_BY_ONE_ELEMENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter. The names are private to Triton: if another version lacks one, this fails."""
    _prepare_once_a_launch(monkeypatch)
    options = interpreter.interpreter_builder.options
    monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=options.debug))
    _remember_types(monkeypatch)
    _convert_bfloat16(monkeypatch)
    use_plans(monkeypatch)
    if not _INDEXES_BY_ONE_ELEMENT:
        _index_by_one_element(monkeypatch)


def _prepare_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, prepare = interpreter.GridExecutor.__call__, interpreter._patch_lang
    prepared: set[int] = set()
    """Globals of the modules whose functions have run in this launch."""

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> None:
        prepared.clear()
        prepared.add(id(executor.fn.__globals__))  # prepared by the launch itself
        launch(executor, *args, **kwargs)

    def call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
        if id(function.fn.__globals__) not in prepared:
            prepared.add(id(function.fn.__globals__))
            prepare(function.fn)
        return function.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_afresh)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call_device_function)


def _remember_types(monkeypatch: pytest.MonkeyPatch) -> None:
    find = interpreter._get_np_dtype
    found: dict[str, Any] = {}
    """Keyed by the name of Triton's scalar type: pointers and blocks have no hash."""

    def remember(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", remember)
    monkeypatch.setattr(tl.block_type, "to_ir", lambda block, builder: block)

    make_block = tl.block_type.__init__
    blocks: dict[Any, dict[str, Any]] = {}

    def block_type(block: Any, element_ty: Any, shape: Any) -> None:
        kind = element_ty.name, *map(index, shape)
        if kind not in blocks:
            make_block(block, element_ty, shape)
            blocks[kind] = dict(block.__dict__)
        block.__dict__.update(blocks[kind])

    make_tensor = tl.tensor.__init__
    tensors: dict[str, dict[str, Any]] = {}

    def tensor(new: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(new, handle, type)
            tensors[type.name] = dict(new.__dict__)
        new.__dict__.update(tensors[type.name])
        new.handle = handle

    monkeypatch.setattr(tl.block_type, "__init__", block_type)
    monkeypatch.setattr(tl.tensor, "__init__", tensor)


def _convert_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert between bfloat16 and float32 by a shift where that gives the same: no subnormal number is among them."""
    convert = interpreter._convert_float
    sizes: dict[str, Any] = {"bf16": np.dtype(np.uint16), "fp32": np.dtype(np.uint32)}

    def shifted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if rounding is not None or {source.name, target.name} != sizes.keys():
            return convert(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(sizes[source.name]).reshape(data.shape)
        is_wide = source.name == "fp32"
        magnitude = bits & (0x7FFFFFFF if is_wide else 0x7FFF)
        if ((magnitude < (1 << 23 if is_wide else 1 << 7)) & (magnitude != 0)).any():
            return convert(data, source, target, rounding)
        return (bits >> 16).astype(np.uint16) if is_wide else bits.astype(np.uint32) << 16

    monkeypatch.setattr(interpreter, "_convert_float", shifted)


def _index_by_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a scalar bound a `range`. Its data is an array of one element in one dimension, of which Triton 3.6 takes
    `int(data)`: numpy warns of that from 1.25 on and refuses it from 2.4 on."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
