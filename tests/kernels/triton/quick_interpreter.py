"""Triton's interpreter without its largest waste: it prepares triton.language anew at every call of a device function, a third of a test's time.

What it prepares depends on the module of the function alone and holds until the launch ends, so that once a launch and module is enough.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime import interpreter


def prepare_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """These names are private to Triton: one that another version lacks fails here."""
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
