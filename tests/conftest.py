"""Shared test set-up. Torch uses one thread in each process, also in those that tests start, because pytest runs two
workers on two cores. Without a GPU, Triton kernels are interpreted."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this at its first import, in some test module.


def pytest_collection_finish() -> None:
    """Exempt what is alive from garbage collection: thousands of tests and their modules, which every collection would
    look through."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def little_to_collect(request: pytest.FixtureRequest) -> None:
    """Benchmarks collect garbage after each case: exempt what earlier tests of this process left, too."""
    if request.module.__name__.endswith("_benchmark"):
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A running Chromium; skips the test on machines without one."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()
