"""Tests that need a CUDA device. Elsewhere each one is skipped, and says why."""

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
    """Other processes may test on the same device."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def no_waits() -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts in which whatever lets the host wait for the device raises RuntimeError."""

    @contextmanager
    def watch() -> Iterator[None]:
        with warnings.catch_warnings():
            # A process's first change of the mode warns, after it was made, that not all waits are seen.
            warnings.filterwarnings(
                "ignore", message="Synchronization debug mode is a prototype feature", category=UserWarning
            )
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watch
