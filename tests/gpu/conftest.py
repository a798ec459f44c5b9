"""Tests that need a CUDA device. Without one, each is skipped with a reason."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _give_memory_back() -> Iterator[None]:
    """Free cached memory, because other processes may test on the same device."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def no_waits() -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of contexts in which any synchronization of the host with the device raises RuntimeError."""

    @contextmanager
    def watch() -> Iterator[None]:
        with warnings.catch_warnings():
            # The first change of the mode in a process warns afterwards that not all waits are detected.
            warnings.filterwarnings(
                "ignore", message="Synchronization debug mode is a prototype feature", category=UserWarning
            )
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watch
