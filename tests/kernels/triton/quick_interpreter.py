"""Removes redundant work from Triton's interpreter, more than half of a test's time. None of it checks anything.

- It prepares triton.language again at every call of a device function. The result depends only on the function's
  module and is valid until the launch ends, so once per launch and module is enough.
- For every integer sum and product it computes, with six more operations, whether it overflows, and drops the
  answer unless in debug mode, which cannot be requested.
- It builds a table of all types whenever it needs numpy's type for one of Triton's, and builds a block's type again
  where it already has it.

Repairs what older versions of it can't do with the numpy that is here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.runtime import interpreter

_INDEXES_BY_ONE_ELEMENT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the interpreter. The names are private to Triton: if another version lacks one, this fails."""
    _prepare_once_a_launch(monkeypatch)
    options = interpreter.interpreter_builder.options
    monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=options.debug))
    _remember_types(monkeypatch)
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


def _index_by_one_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a scalar bound a `range`. Its data is an array of one element in one dimension, of which Triton 3.6 takes
    `int(data)`: numpy warns of that from 1.25 on and refuses it from 2.4 on."""
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
