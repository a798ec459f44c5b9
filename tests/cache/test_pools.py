"""Row and page pools: reserved ids stay out, nothing is handed out or taken back twice."""

from __future__ import annotations

import random

import pytest

from agentspec.cache.id_pool import IdPool
from agentspec.cache.page_pool import PagePool
from agentspec.cache.row_pool import RowPool
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW


def test_reserved_ids_are_never_handed_out() -> None:
    rows, pages = RowPool(6), PagePool(6)
    assert sorted(rows.take(rows.num_free)) == [2, 3, 4, 5]
    assert sorted(pages.take(pages.num_free)) == [1, 2, 3, 4, 5]
    assert {ZERO_ROW, SCRATCH_ROW} == {0, 1}
    assert SCRATCH_PAGE == 0


@pytest.mark.parametrize("returned", [ZERO_ROW, SCRATCH_ROW, 6, -1])
def test_foreign_ids_are_not_taken_back(returned: int) -> None:
    rows = RowPool(6)
    rows.take(4)
    with pytest.raises(AssertionError, match="row"):
        rows.free([returned])


def test_double_free_is_an_assertion() -> None:
    pages = PagePool(6)
    taken = pages.take(2)
    pages.free(taken)
    with pytest.raises(AssertionError, match=f"page {taken[0]} is freed twice"):
        pages.free(taken[:1])


def test_more_than_free_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="take"):
        RowPool(6).take(5)


@pytest.mark.parametrize("pool", [RowPool(40), PagePool(40)], ids=["rows", "pages"])
def test_random_take_and_free_keeps_ids_apart(pool: IdPool) -> None:
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
