"""Imports xgrammar into processes of the engine's own without the large packages that only other uses of it need.

xgrammar imports torch, for masks that are tensors, and transformers, for the names of its tokenizer classes. Here masks
are numpy arrays and vocabularies lists of bytes. Without both, the import takes a quarter of the time and 200 MB less.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Nothing:
    """Stands for a class, constant or function that is named at import and never used."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # without one, `importlib.util.find_spec` raises

    def __getattr__(self, name: str) -> type[_Nothing]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


def stand_in_for_transformers() -> None:
    """For a process in which nothing else uses transformers."""
    sys.modules.setdefault("transformers", _StandIn("transformers"))


def import_without_torch() -> None:
    """Import xgrammar into a process in which nothing else uses torch or transformers. May raise anything where a
    version of xgrammar or tvm_ffi needs more of them; then this process can't import xgrammar any more."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # its import fails, which tvm_ffi takes well
    import tvm_ffi  # noqa: F401

    sys.modules["torch"] = _StandIn("torch")
    stand_in_for_transformers()
    import xgrammar  # noqa: F401
