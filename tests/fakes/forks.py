"""Ranks of tests as forks of one process, which imports what they need once for all tests of a worker.

They have the environment of the worker when the first of them starts."""

from __future__ import annotations

from multiprocessing import get_context

FORKS = get_context("forkserver")
# One list for all tests: there is one such process, and the last list would be the one that counts.
FORKS.set_forkserver_preload(["tests.kernels.triton.exchange_rank", "tests.models.rank_process"])
