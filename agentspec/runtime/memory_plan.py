"""How a budget of bytes becomes state rows and KV pages, and what sequence length they can hold.

Rows that running requests need come first; what is left is split between checkpoint rows and pages. Both pools are allocated once, so the
split is fixed at start; inside it, one LRU over checkpoints decides what stays (cache/hybrid_cache.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentspec.cache.host_tier import HostMemory
from agentspec.errors import ConfigError
from agentspec.types import ModelSpec

CHECKPOINT_SHARE = 0.4
"""Share of the memory beyond running rows that goes to checkpoint rows. Agent sessions keep about two checkpoints each beside a few thousand
tokens of KV of their own, which in bytes lies between 1:4 (long tool loops) and 4:1 (short chats)."""

_LEAST_HOST_PAGES = 16
"""Host memory that doesn't hold a path of 1,024 tokens is of no use."""

RESERVED = 2
"""Zero row and scratch row."""


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


def plan_memory(spec: ModelSpec, *, memory_bytes: int, max_running: int, max_draft_tokens: int) -> MemoryPlan:
    """Split `memory_bytes`. Raises ConfigError when not even one short request per slot fits."""
    running_rows = max_running * (max_draft_tokens + 3)
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
    num_pages = max(2 * max_running + 1, int(left * (1 - CHECKPOINT_SHARE)) // spec.page_bytes)
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
    """Split `host_bytes` like the device's. None when not even a short path and its state fit."""
    num_pages = int(host_bytes * (1 - CHECKPOINT_SHARE)) // spec.page_bytes
    num_rows = min((host_bytes - num_pages * spec.page_bytes) // spec.row_bytes, num_pages)
    return HostMemory(num_rows=num_rows, num_pages=num_pages) if num_rows and num_pages >= _LEAST_HOST_PAGES else None
