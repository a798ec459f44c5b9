"""How a budget of bytes becomes state rows and KV pages, and what sequence length they can hold.

Rows that running requests need come first; what is left is split between checkpoint rows and pages. Both pools are
allocated once, so the split is fixed at start; inside it, one LRU over checkpoints decides what stays
(cache/hybrid_cache.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentspec.cache.host_tier import HostMemory
from agentspec.errors import ConfigError
from agentspec.types import ModelSpec, rows_of_request

TOKENS_PER_CHECKPOINT = 8192
"""Tokens of KV that are bought with each checkpoint row beyond one a running request. A session keeps about two
checkpoints, beside a few thousand tokens in a short chat and tens of thousands in a long tool loop. Too few pages cost
most: long sessions then push each other out, path and all. Where rows are too few, what goes first are states that
sessions yet to come would share."""

_LEAST_HOST_PAGES = 16
"""Host memory that doesn't hold a path of 1,024 tokens is of no use."""

RESERVED = 2
"""Zero row and scratch row."""

AUTO_MAX_RUNNING = 64
"""Most slots that are chosen: so a fleet that starts at once has its first tokens one prompt after the other. Fewer are
powers of two, whose kernels are among those of the most."""

_RUNNING_SHARE = 1 / 3
"""Of the memory for rows and pages, at most, for the rows in which running requests write, where their number is
chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    num_rows: int
    """Zero row, scratch row, running rows and checkpoint rows."""
    num_pages: int
    """The scratch page included."""
    max_length: int
    """Tokens, prompt and output, of the longest sequence that fits when it runs alone."""
    host: HostMemory | None = None
    """What the host's memory adds for checkpoints that the device lets go; None: nothing."""


def longest_sequence(num_pages: int, max_draft_tokens: int, block_tokens: int) -> int:
    """Tokens that fit into all pages but the scratch page, less the window that a step may touch beyond its end."""
    return (num_pages - 1) * block_tokens - 2 * (max_draft_tokens + 1)


def choose_slots(spec: ModelSpec, memory_bytes: Callable[[int], int], *, max_draft_tokens: int, least: int) -> int:
    """How many requests may run at the same time. A running request writes into rows of its own; they must leave room
    for what is cached.

    memory_bytes: for rows and pages with so many slots, whose graphs and buffers take memory, too."""
    num_slots = least
    while num_slots < AUTO_MAX_RUNNING:
        rows_bytes = 2 * num_slots * rows_of_request(max_draft_tokens) * spec.row_bytes
        if rows_bytes > _RUNNING_SHARE * memory_bytes(2 * num_slots):
            break
        num_slots *= 2
    return num_slots


def plan_memory(spec: ModelSpec, *, memory_bytes: int, max_running: int, max_draft_tokens: int) -> MemoryPlan:
    """Split `memory_bytes`. Raises ConfigError when not even one short request per slot fits."""
    running_rows = max_running * rows_of_request(max_draft_tokens)
    base = (RESERVED + running_rows + max_running) * spec.row_bytes
    least = base + (2 * max_running + 1) * spec.page_bytes
    if memory_bytes < least:
        raise ConfigError(
            "memory",
            f"{memory_bytes / 2**30:.4g} GiB",
            f"{max_running} running requests with up to {max_draft_tokens} drafts need at least {math.ceil(least / 2**30 * 1000) / 1000} GiB",
        )
    left = memory_bytes - base
    whole_contexts = max_running * -(-(spec.max_context + 2 * (max_draft_tokens + 1)) // spec.block_tokens)
    num_pages = max(2 * max_running + 1, _pages_of(spec, left))
    checkpoint_rows = max_running + max(0, left - num_pages * spec.page_bytes) // spec.row_bytes
    # No more than one checkpoint a page can stand in the tree, and there is no use for many times all contexts.
    num_pages = min(num_pages, 8 * whole_contexts + 1)
    checkpoint_rows = min(checkpoint_rows, num_pages)
    return MemoryPlan(
        num_rows=RESERVED + running_rows + checkpoint_rows,
        num_pages=num_pages,
        max_length=min(spec.max_context, longest_sequence(num_pages, max_draft_tokens, spec.block_tokens)),
    )


def plan_host_memory(spec: ModelSpec, host_bytes: int) -> HostMemory | None:
    """Split `host_bytes` like the device's, for one state at least. None when not even a short path and its state
    fit."""
    left = max(0, host_bytes - spec.row_bytes)
    num_pages = _pages_of(spec, left)
    num_rows = min(1 + (left - num_pages * spec.page_bytes) // spec.row_bytes, num_pages)
    return HostMemory(num_rows=num_rows, num_pages=num_pages) if num_pages >= _LEAST_HOST_PAGES else None


def _pages_of(spec: ModelSpec, memory_bytes: int) -> int:
    """Pages out of `memory_bytes`; what they leave is for checkpoint rows."""
    pages_bytes = TOKENS_PER_CHECKPOINT // spec.block_tokens * spec.page_bytes
    return memory_bytes * pages_bytes // (pages_bytes + spec.row_bytes) // spec.page_bytes


def machine_bytes() -> int:
    """Memory that this process may use: the machine's, or what its container is allowed."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with suppress(OSError, ValueError):  # another system, or "max"
            available = min(available, int(limit.read_text()))
    return available
