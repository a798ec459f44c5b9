"""Poisons uninitialized memory: elements that a kernel fails to write show as NaN or as an extreme integer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


def poison(x: Tensor) -> Tensor:
    """Fill x, in place, with NaN or the least value of its integer type; bool with True."""
    if x.is_floating_point():
        return x.fill_(torch.nan)
    return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).min)


def poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `torch.empty` and `torch.empty_like` return poisoned tensors until the test ends."""

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: poison(allocate(*args, **kwargs))

    replacements: dict[str, Any] = {name: poisoned(getattr(torch, name)) for name in ("empty", "empty_like")}
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch, name, replacement)
