"""Triton's interpreter without its largest wastes, more than half of a test's time. None of them checks anything.

- It prepares triton.language anew at every call of a device function. What it prepares depends on the module of the
  function alone and holds until the launch ends, so that once a launch and module is enough.
- It computes for every sum and product of integers, in six more operations, whether they overflow, and drops the answer
  unless it debugs, which it can't be asked to.
- It builds a table of all types wherever it needs numpy's type for one of Triton's, and a block's type anew where it
  has it in hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """These names are private to Triton: one that another version lacks fails here."""
    _prepare_once_a_launch(monkeypatch)
    options = interpreter.interpreter_builder.options
    monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=options.debug))
    _remember_types(monkeypatch)


def _prepare_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    launch, prepare = interpreter.GridExecutor.__call__, interpreter._patch_lang
    prepared: set[int] = set()
    """The globals of modules whose functions have run in this launch."""

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> None:
        prepared.clear()
        prepared.add(id(executor.fn.__globals__))  # which a launch prepares itself
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
    """By the name of Triton's scalar type: pointers and blocks have no hash."""

    def remember(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", remember)
    monkeypatch.setattr(tl.block_type, "to_ir", lambda block, builder: block)
