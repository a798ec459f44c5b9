"""Id pools: reserved ids are never handed out, and no id is handed out or freed twice."""

from __future__ import annotations

import random

import pytest

from agentspec.cache.hybrid_cache import HybridCache
from agentspec.cache.id_pool import IdPool
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW


def row_pool(num_ids: int = 6) -> IdPool:
    return IdPool(num_ids, num_reserved=2, noun="row")


def test_cache_never_hands_out_reserved_rows_and_pages() -> None:
    cache = HybridCache(num_rows=6, num_pages=6, row_bytes=1, page_bytes=1)
    assert sorted(cache.rows.take(cache.rows.num_free)) == [2, 3, 4, 5]
    assert sorted(cache.pages.take(cache.pages.num_free)) == [1, 2, 3, 4, 5]
    assert {ZERO_ROW, SCRATCH_ROW} == {0, 1}
    assert SCRATCH_PAGE == 0


@pytest.mark.parametrize("returned", [ZERO_ROW, SCRATCH_ROW, 6, -1])
def test_free_of_reserved_or_unknown_id_raises(returned: int) -> None:
    rows = row_pool()
    rows.take(4)
    with pytest.raises(AssertionError, match="row"):
        rows.free([returned])


def test_double_free_raises() -> None:
    rows = row_pool()
    taken = rows.take(2)
    rows.free(taken)
    with pytest.raises(AssertionError, match=f"row {taken[0]} is freed twice"):
        rows.free(taken[:1])


def test_take_of_more_than_free_raises() -> None:
    with pytest.raises(AssertionError, match="take"):
        row_pool().take(5)


@pytest.mark.parametrize("num_reserved", [1, 2])
def test_random_take_and_free_never_shares_an_id(num_reserved: int) -> None:
    pool = IdPool(40, num_reserved=num_reserved, noun="id")
    rng = random.Random(7)
    held: set[int] = set()
    for step in range(2000):
        if rng.random() < 0.5:
            taken = pool.take(rng.randint(0, pool.num_free))
            assert held.isdisjoint(taken), f"seed 7, step {step}"
            assert len(set(taken)) == len(taken)
            held.update(taken)
        else:
            returned = rng.sample(sorted(held), rng.randint(0, len(held)))
            pool.free(returned)
            held.difference_update(returned)
        assert pool.num_used == len(held)
        assert pool.num_free + pool.num_used == pool.capacity
        assert sorted(pool.free_ids()) == sorted(set(range(pool.num_reserved, 40)) - held)
    assert pool.peak_used == pool.capacity
