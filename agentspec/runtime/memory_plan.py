"""How a budget of bytes becomes state rows and KV pages, and how long a sequence they can hold.

Rows of running requests come first; the rest is split between checkpoint rows and pages. Both pools are allocated once,
so the split is fixed at start. Within it, one LRU over checkpoints decides what is evicted (cache/hybrid_cache.py).
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
from agentspec.types import ModelSpec, RingShape, rows_of_request

TOKENS_PER_CHECKPOINT = 8192
"""KV tokens per checkpoint row, beyond one row per running request. A session keeps about two checkpoints, beside a few
thousand tokens in a short chat and tens of thousands in a long tool loop. Too few pages cost the most: long sessions
then evict each other's whole paths. With too few rows, states that future sessions would share go first."""
_TOKENS_PER_CHECKPOINT_FP8 = 16384
"""The same where keys and values are in 8 bits: the same memory has as many rows, and twice the tokens."""

_LEAST_HOST_PAGES = 16
"""Host memory that can't hold a path of 1,024 tokens is useless."""

RESERVED = 2
"""Rows: the zero row and the scratch row."""

AUTO_MAX_RUNNING = 64
"""Most slots that are chosen automatically. With this limit, sessions that start together get their first tokens one
prompt after another. Smaller choices are powers of two, whose kernels are a subset of the largest choice's."""

_RUNNING_SHARE = 1 / 3
"""Where the number of slots is chosen: most of the memory for rows and pages that running requests' own rows may
take."""
_MOST_RUNNING_SHARE = 1 / 2
"""The same where memory is so small that fewer slots than usual are chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    num_rows: int
    """Zero row, scratch row, running rows and checkpoint rows."""
    num_pages: int
    """Including the scratch page."""
    max_length: int
    """Tokens, prompt and output, of the longest sequence that fits when it runs alone."""
    host: HostMemory | None = None
    """Rows and pages in host memory for checkpoints evicted from the device; None: no host tier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Concurrency:
    """How many requests of one length each part of a memory plan allows."""

    pages: int
    rows: int
    slots: int

    @property
    def requests(self) -> int:
        """How many can run at the same time."""
        return min(self.pages, self.rows, self.slots)


def concurrency(
    plan: MemoryPlan,
    num_tokens: int,
    *,
    max_running: int,
    max_draft_tokens: int,
    block_tokens: int,
    has_ring: bool = False,
) -> Concurrency:
    """num_tokens: of each request, prompt and output; none has a cached prefix in common with another. Checkpoints are
    evicted where pages are needed."""
    return Concurrency(
        pages=(plan.num_pages - 1) // pages_of_sequence(num_tokens, max_draft_tokens, block_tokens),
        rows=(plan.num_rows - RESERVED) // rows_of_request(max_draft_tokens, has_ring=has_ring),
        slots=max_running,
    )


def pages_of_sequence(num_tokens: int, max_draft_tokens: int, block_tokens: int) -> int:
    """Pages of a sequence, with the window that a step may write beyond its end."""
    return -(-(num_tokens + 2 * (max_draft_tokens + 1)) // block_tokens)


def longest_sequence(num_pages: int, max_draft_tokens: int, block_tokens: int) -> int:
    """Tokens that fit into all pages but the scratch page, minus the window that a step may write beyond the end."""
    return (num_pages - 1) * block_tokens - 2 * (max_draft_tokens + 1)


def rings_bytes(spec: ModelSpec, ring: RingShape | None, max_running: int) -> int:
    """Memory of all slots' rings, that of the padding slot included."""
    return 0 if ring is None else (max_running + 1) * ring.capacity * spec.entry_bytes


def choose_slots(
    spec: ModelSpec,
    memory_bytes: Callable[[int], int],
    *,
    max_draft_tokens: int,
    usual: int,
    ring: RingShape | None = None,
) -> int:
    """How many requests may run at the same time: `usual`, or by memory several times as many, or a part of it. A
    running request writes into rows of its own; they must leave room for the cache.

    memory_bytes: memory for rows and pages, given the number of slots; their graphs and buffers take memory too."""

    def share(num_slots: int) -> float:
        rows_bytes = num_slots * rows_of_request(max_draft_tokens, has_ring=ring is not None) * spec.row_bytes
        return (rows_bytes + rings_bytes(spec, ring, num_slots)) / max(memory_bytes(num_slots), 1)

    num_slots = usual
    while num_slots < AUTO_MAX_RUNNING and share(2 * num_slots) <= _RUNNING_SHARE:
        num_slots *= 2
    while 1 < num_slots <= usual and share(num_slots) > _MOST_RUNNING_SHARE:
        num_slots //= 2
    return num_slots


def running_rows(max_running: int, max_draft_tokens: int, *, has_ring: bool = False) -> int:
    """Rows that never hold a cached checkpoint: the reserved ones and those in which running requests write."""
    return RESERVED + max_running * rows_of_request(max_draft_tokens, has_ring=has_ring)


def plan_memory(
    spec: ModelSpec, *, memory_bytes: int, max_running: int, max_draft_tokens: int, ring: RingShape | None = None
) -> MemoryPlan:
    """Split `memory_bytes` into rings, rows and pages. ring: sizes of the slots' rings; None: they have none. Raises
    ConfigError if not even one short request per slot fits."""
    own_rows = running_rows(max_running, max_draft_tokens, has_ring=ring is not None)
    base = (own_rows + max_running) * spec.row_bytes + rings_bytes(spec, ring, max_running)
    least = base + (2 * max_running + 1) * spec.page_bytes
    if memory_bytes < least:
        raise ConfigError(
            "memory",
            f"{memory_bytes / 2**30:.4g} GiB",
            f"{max_running} running requests with up to {max_draft_tokens} drafts need "
            f"at least {math.ceil(least / 2**30 * 1000) / 1000} GiB",
        )
    left = memory_bytes - base
    whole_contexts = max_running * pages_of_sequence(spec.max_context, max_draft_tokens, spec.block_tokens)
    num_pages = max(2 * max_running + 1, _pages_of(spec, left))
    checkpoint_rows = max_running + max(0, left - num_pages * spec.page_bytes) // spec.row_bytes
    # The tree holds at most one checkpoint per page, and memory for many times all contexts is useless.
    num_pages = min(num_pages, 8 * whole_contexts + 1)
    checkpoint_rows = min(checkpoint_rows, num_pages)
    return MemoryPlan(
        num_rows=own_rows + checkpoint_rows,
        num_pages=num_pages,
        max_length=min(spec.max_context, longest_sequence(num_pages, max_draft_tokens, spec.block_tokens)),
    )


def plan_host_memory(spec: ModelSpec, host_bytes: int) -> HostMemory | None:
    """Split `host_bytes` like the device's memory, with at least one row. None if a short path and its state don't
    fit."""
    left = max(0, host_bytes - spec.row_bytes)
    num_pages = _pages_of(spec, left)
    num_rows = min(1 + (left - num_pages * spec.page_bytes) // spec.row_bytes, num_pages)
    return HostMemory(num_rows=num_rows, num_pages=num_pages) if num_pages >= _LEAST_HOST_PAGES else None


def _pages_of(spec: ModelSpec, memory_bytes: int) -> int:
    """Pages that `memory_bytes` buys, leaving the rest for checkpoint rows."""
    tokens = _TOKENS_PER_CHECKPOINT_FP8 if spec.fp8_pages else TOKENS_PER_CHECKPOINT
    pages_bytes = tokens // spec.block_tokens * spec.page_bytes
    return memory_bytes * pages_bytes // (pages_bytes + spec.row_bytes) // spec.page_bytes


def machine_bytes() -> int:
    """Memory that this process may use: the machine's, or the container's limit."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        with suppress(OSError, ValueError):  # not Linux, or the limit is "max"
            available = min(available, int(limit.read_text()))
    return available
