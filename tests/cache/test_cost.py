"""Cost of cache operations, counted in Python and C calls instead of seconds: bounded by the prompt's path, not by the
size of the tree."""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TypeVar

from agentspec.cache.hybrid_cache import HybridCache
from agentspec.types import BLOCK_TOKENS, CheckpointKind, tokens

T = TypeVar("T")

NUM_TOKENS = 20_000
SYSTEM_TOKENS = 64 * BLOCK_TOKENS


def calls(operation: Callable[[], T]) -> tuple[T, int]:
    """The operation's result, and the number of function calls that it made."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        result = operation()
    finally:
        sys.setprofile(before)
    return result, count


def new_cache(num_rows: int = 10_000, num_pages: int = 400_000) -> HybridCache:
    return HybridCache(num_rows=num_rows, num_pages=num_pages, row_bytes=1000, page_bytes=10)


def prompt(seed: int, length: int = NUM_TOKENS) -> array[int]:
    """A system prompt that all prompts share, then random tokens."""
    rng = random.Random(seed)
    return tokens([*range(SYSTEM_TOKENS), *(rng.randrange(200_000) for _ in range(length - SYSTEM_TOKENS))])


def turn(cache: HybridCache, ids: array[int], *lengths: int) -> dict[str, int]:
    """Run one request that publishes at `lengths`; returns the calls of each operation."""
    match, cost_match = calls(lambda: cache.match("", ids))
    lease, cost_acquire = calls(lambda: cache.acquire(match))
    grown, cost_grow = calls(lambda: cache.grow_pages(lease, len(ids) // BLOCK_TOKENS + 1))
    rows, cost_rows = calls(lambda: cache.take_rows(lease, len(lengths)))
    assert grown
    assert rows is not None
    cost_publish = 0
    for length, row in zip(lengths, rows, strict=True):
        _, cost = calls(partial(cache.publish, lease, "", ids, length, row, CheckpointKind.TURN))
        cost_publish = max(cost_publish, cost)
    _, cost_release = calls(lambda: cache.release(lease))
    return {
        "match": cost_match,
        "acquire": cost_acquire,
        "grow": cost_grow,
        "rows": cost_rows,
        "publish": cost_publish,
        "release": cost_release,
    }


def test_cost_of_long_prompt_is_independent_of_tree_size() -> None:
    cache = new_cache()
    last = NUM_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
    costs = [turn(cache, prompt(seed), SYSTEM_TOKENS, last) for seed in range(150)]
    again = [turn(cache, prompt(seed) + tokens(range(100)), last + BLOCK_TOKENS) for seed in range(150)]
    for name, bound in {"match": 60, "acquire": 80, "grow": 80, "rows": 60, "publish": 150, "release": 1000}.items():
        assert max(cost[name] for cost in costs[1:] + again) <= bound, name
    for name in ("match", "acquire", "grow", "rows", "publish"):
        assert costs[-1][name] <= costs[1][name] + 10, f"{name} grows with the tree"


def test_cost_of_tool_loop_is_bounded_by_path_nodes() -> None:
    cache = new_cache()
    ids = prompt(1, 300 * BLOCK_TOKENS)
    for blocks in range(100, 300):
        costs = turn(cache, ids[: blocks * BLOCK_TOKENS + 1], blocks * BLOCK_TOKENS)
    assert cache.stats()["checkpoints_live"] == 1
    assert max(costs.values()) < 10 * 200, costs


def test_eviction_cost_is_amortised_constant() -> None:
    """In steady state every turn evicts about one checkpoint; the queues are not searched."""
    cache = new_cache(num_rows=402)
    short = {seed: prompt(seed, SYSTEM_TOKENS + 20 * BLOCK_TOKENS) for seed in range(900)}
    last = SYSTEM_TOKENS + 19 * BLOCK_TOKENS
    costs = [turn(cache, ids, last)["rows"] for ids in short.values()]
    assert cache.stats()["checkpoints_evicted"] > 400
    assert sum(costs[500:]) / 400 < 150


def test_eviction_queues_stay_bounded_without_eviction() -> None:
    cache = new_cache()
    ids = prompt(1, SYSTEM_TOKENS + 100)
    turn(cache, ids, SYSTEM_TOKENS)
    for _ in range(5000):
        cache.release(cache.acquire(cache.match("", ids), session_id="s"), hold_seconds=1.0)
    order = cache.checkpoints.order
    assert len(order._rows._heap) + len(order._for_pages._heap) < 3000


def test_available_counters_do_not_walk_tree() -> None:
    small, large = new_cache(), new_cache()
    for seed in range(50):
        turn(large, prompt(seed), NUM_TOKENS // BLOCK_TOKENS * BLOCK_TOKENS)
    for look in (HybridCache.available_pages, HybridCache.available_rows, HybridCache.available_bytes):
        assert calls(partial(look, small))[1] == calls(partial(look, large))[1]
