"""HybridCache: where a prompt resumes, what a lease locks, and how publishing changes pages and ghosts.

Blocks have 4 tokens (tests/cache/world.py). Every operation is followed by the full audit, contents included.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from agentspec.cache.hybrid_cache import HybridCache
from agentspec.errors import ConfigError
from agentspec.types import ZERO_ROW, CheckpointKind, tokens
from tests.cache.world import PAGE_BYTES, ROW_BYTES, World

SYSTEM, USER, TURN, BRANCH, GRID = (
    CheckpointKind.SYSTEM,
    CheckpointKind.USER,
    CheckpointKind.TURN,
    CheckpointKind.BRANCH,
    CheckpointKind.GRID,
)


def ids(*parts: tuple[int, int]) -> list[int]:
    """Token ids: ids((1, 8), (2, 4)) is 8 tokens of story 1, then 4 of story 2."""
    return [story * 1000 + index for story, count in parts for index in range(count)]


def test_hit_is_deepest_checkpoint_before_last_token() -> None:
    world = World()
    world.turn(ids((1, 16)), kinds={8: SYSTEM, 16: TURN})
    assert world.start(ids((1, 16), (2, 3))).length == 16
    assert world.start(ids((1, 17))).length == 16
    assert world.start(ids((1, 16))).length == 8, "the 16th token must be computed"
    assert world.start(ids((1, 12), (2, 9))).length == 8, "there is no state at 12"
    assert world.start(ids((1, 4), (2, 9))).length == 0
    assert world.start(ids((1, 24)), limit=0).length == 0
    assert world.start(ids((1, 24)), limit=15).length == 8
    assert world.start(ids((1, 16)), limit=99).length == 16, "a limit beyond the prompt means all of it"


def test_branch_tokens_counts_known_tokens_beyond_state() -> None:
    world = World()
    world.turn(ids((1, 24)), kinds={8: SYSTEM, 24: TURN})
    match = world.cache.match("", tokens(ids((1, 18), (2, 9))))
    assert (match.num_tokens, match.branch_tokens, match.kind) == (8, 16, SYSTEM)
    assert world.cache.match("", tokens(ids((3, 30)))).branch_tokens == 0


def test_short_prompts_match_nothing() -> None:
    world = World()
    world.turn(ids((1, 8)))
    for length in range(5):
        match = world.cache.match("", tokens(ids((1, length))))
        assert (match.num_tokens, match.row, match.kind, match.branch_tokens) == (0, ZERO_ROW, None, 0)


def test_namespaces_share_nothing() -> None:
    world = World()
    world.turn(ids((1, 16)), namespace="a")
    assert world.start(ids((1, 20)), namespace="b").length == 0
    assert world.start(ids((1, 20)), namespace="a").length == 16


def test_match_changes_nothing() -> None:
    world = World(rows=2)
    world.turn(ids((1, 8)))
    world.turn(ids((2, 8)))
    world.cache.match("", tokens(ids((1, 12))))  # doesn't count as a use: story 1 stays the older one
    world.turn(ids((3, 8)))
    assert world.start(ids((2, 9)), limit=8).length == 8
    assert world.start(ids((1, 9)), limit=8).length == 0


def test_leases_share_tree_pages_and_own_new_pages() -> None:
    world = World()
    world.turn(ids((1, 16)))
    first, second = world.start(ids((1, 16), (2, 8))), world.start(ids((1, 16), (3, 8)))
    assert first.lease.page_ids == second.lease.page_ids
    assert first.lease.read_row == second.lease.read_row
    assert world.compute(first, 24)
    assert world.compute(second, 23)
    assert first.lease.page_ids[:4] == second.lease.page_ids[:4]
    assert set(first.lease.page_ids[4:]).isdisjoint(second.lease.page_ids[4:])


def test_release_frees_unpublished_rows_and_pages() -> None:
    world = World()
    run = world.start(ids((1, 30)))
    assert world.compute(run, 16)
    assert world.publish(run)
    assert world.compute(run, 29)
    world.release(run)
    stats = world.cache.stats()
    assert (stats["pages_used"], stats["rows_used"], stats["leases"]) == (4, 1, 0)
    assert stats["used_bytes"] == 4 * PAGE_BYTES + ROW_BYTES


def test_growing_to_fewer_pages_is_a_no_op() -> None:
    world = World()
    run = world.start(ids((1, 30)))
    assert world.cache.grow_pages(run.lease, 3)
    assert world.cache.grow_pages(run.lease, 2)
    assert len(run.lease.page_ids) == 3


def test_second_publisher_of_same_prefix_keeps_duplicates() -> None:
    """The tree takes the pages of the first publisher. The second keeps its duplicates, and publishes only new
    pages."""
    world = World()
    first, second = world.start(ids((1, 16))), world.start(ids((1, 16), (2, 8)))
    assert world.compute(first, 16)
    assert world.compute(second, 16)
    before = list(second.lease.page_ids)
    assert world.publish(first)
    assert not world.publish(second), "there is a checkpoint already"
    assert second.lease.page_ids == before
    assert world.cache.stats()["pages_used"] == 8
    assert world.compute(second, 24)
    assert world.publish(second)
    assert second.lease.page_ids[:4] == before
    assert world.cache.stats()["tree_pages"] == 6
    world.release(second)
    assert world.cache.stats()["pages_used"] == 6, "the duplicates are gone"
    world.release(first)


def test_unshared_duplicates_replace_tree_pages() -> None:
    world = World()
    world.turn(ids((1, 16)))
    run = world.start(ids((1, 16), (2, 8)), limit=0)
    assert world.compute(run, 24)
    assert world.cache.stats()["pages_used"] == 4 + 6
    before = list(run.lease.page_ids)
    assert world.publish(run)
    assert run.lease.page_ids == before
    assert world.cache.stats()["pages_used"] == 6


def test_lone_request_can_use_pages_it_duplicates() -> None:
    """The last running request can use all pages except the scratch page, whatever happened before."""
    world = World(pages=10)
    first, second = world.start(ids((1, 16))), world.start(ids((1, 16), (2, 24)))
    assert world.compute(first, 16)
    assert world.compute(second, 16)
    assert world.publish(first)
    assert world.compute(second, 20)
    assert world.publish(second), "locks the path through the pages of the first"
    assert not world.compute(second, 40)
    world.release(first)
    assert world.compute(second, 40)


def test_publish_splits_node_locked_by_another_lease() -> None:
    world = World()
    world.turn(ids((1, 24)))
    reader = world.start(ids((1, 24), (2, 8)))
    brancher = world.start(ids((1, 12), (3, 8)))
    assert world.compute(brancher, 12)
    assert world.publish(brancher, BRANCH)
    assert world.compute(brancher, 20)
    assert world.publish(brancher)
    assert world.lengths() == [12, 20, 24]
    assert world.compute(reader, 32)
    assert world.publish(reader)
    world.release(reader)
    world.release(brancher)
    assert world.start(ids((1, 12), (3, 8), (4, 1))).length == 20
    assert world.start(ids((1, 24), (2, 8), (4, 1))).length == 32


def test_pages_below_deepest_checkpoint_become_ghosts() -> None:
    world = World(rows=2)
    world.turn(ids((1, 24)), kinds={8: SYSTEM, 24: TURN})
    run = world.start(ids((1, 8), (2, 8)))
    assert world.compute(run, 16), "takes a row: the TURN at 24 is the only one that isn't locked"
    assert world.lengths() == [8]
    assert world.cache.stats()["ghost_blocks"] == 4
    assert world.cache.stats()["tree_pages"] == 2
    match = world.cache.match("", tokens(ids((1, 20), (3, 8))))
    assert (match.num_tokens, match.branch_tokens) == (8, 20)


def test_ghost_gets_pages_from_next_publish() -> None:
    world = World(rows=2)
    world.turn(ids((1, 24)), kinds={8: SYSTEM, 24: TURN})
    world.turn(ids((2, 8)))
    world.turn(ids((3, 8)))
    assert world.lengths() == [8, 8]
    assert world.cache.match("", tokens(ids((1, 30)))).branch_tokens == 24
    run = world.start(ids((1, 16), (4, 8)))
    assert run.length == 0
    assert world.compute(run, 16)
    assert world.publish(run, BRANCH), "in the middle of the ghost"
    assert world.compute(run, 24)
    assert world.publish(run)
    world.release(run)
    assert world.start(ids((1, 16), (4, 9))).length == 24
    assert world.cache.match("", tokens(ids((1, 30)))).branch_tokens == 24, "the rest of the ghost is still known"


def test_evicted_ancestor_keeps_pages_for_descendants() -> None:
    world = World(rows=3)
    world.turn(ids((1, 24)), kinds={8: SYSTEM, 24: TURN})
    assert world.start(ids((1, 24), (2, 4))).length == 24
    run = world.start(ids((5, 9)))
    assert world.take_rows(run, 2) is not None
    assert world.lengths() == [24]
    assert world.cache.stats()["tree_pages"] == 6
    assert world.start(ids((1, 8), (2, 4))).length == 0


@pytest.mark.parametrize("bound", [0, 3, 7])
def test_oldest_ghosts_are_trimmed_first(bound: int) -> None:
    world = World(rows=1, ghost_blocks=bound)
    for story in range(4):
        world.turn(ids((story, 12)))
    assert world.cache.stats()["ghost_blocks"] == bound
    known = [world.cache.match("", tokens(ids((story, 13)))).branch_tokens // 4 for story in range(4)]
    assert known == {0: [0, 0, 0, 3], 3: [0, 0, 3, 3], 7: [1, 3, 3, 3]}[bound]


def test_publish_accepts_any_order_of_lengths() -> None:
    """Rolling checkpoints of a turn: a shorter one may be published after a longer one."""
    world = World()
    run = world.start(ids((1, 30)))
    for length in (8, 16, 20):
        assert world.compute(run, length)
        assert world.snapshot(run)
    assert world.publish(run, TURN, 16)
    assert world.publish(run, USER, 8)
    assert world.publish(run, SYSTEM, 20)
    world.release(run)
    assert world.lengths() == [8, 16, 20]


def test_republish_keeps_more_protected_kind() -> None:
    order = [GRID, TURN, USER, BRANCH, SYSTEM]
    for weaker, stronger in itertools.pairwise(order):
        for kinds in ((weaker, stronger), (stronger, weaker)):
            world = World()
            for kind in kinds:
                run = world.start(ids((1, 8)), limit=0)
                assert world.compute(run, 8)
                assert world.publish(run, kind) == (kind == kinds[0])
                world.release(run)
            assert world.cache.match("", tokens(ids((1, 9)))).kind == stronger


def test_disabled_cache_stores_nothing() -> None:
    world = World(enabled=False)
    run = world.start(ids((1, 16)))
    assert world.compute(run, 8)
    assert not world.publish(run)
    world.release(run, hold_seconds=5.0)
    assert world.start(ids((1, 16))).length == 0
    stats = world.cache.stats()
    assert (stats["pages_used"], stats["rows_used"], stats["checkpoints_created"], stats["ghost_blocks"]) == (
        0,
        0,
        0,
        0,
    )


def test_clear_drops_all_but_locked_paths() -> None:
    world = World(rows=5)
    world.turn(ids((1, 16)), kinds={8: SYSTEM, 16: TURN})
    world.turn(ids((2, 8)), session="s", hold_seconds=5.0)
    run = world.start(ids((1, 20)))
    world.cache.clear()
    world.audit()
    assert world.lengths() == [16]
    assert world.cache.stats()["tree_pages"] == 4
    assert world.cache.stats()["sessions_held"] == 0
    world.release(run)
    world.cache.clear()
    world.audit()
    stats = world.cache.stats()
    assert (stats["used_bytes"], stats["ghost_blocks"], world.cache.tree.roots) == (0, 0, {})


def test_private_bytes_exclude_shared_path() -> None:
    world = World()
    world.turn(ids((1, 8), (2, 8)), kinds={8: SYSTEM, 16: TURN})
    run = world.start(ids((1, 8), (2, 8), (3, 8)), session="s")
    assert world.cache.private_bytes(run.lease) == (2 * ROW_BYTES, 4 * PAGE_BYTES), "no other lease uses any of it"
    assert world.compute(run, 24)
    assert world.cache.private_bytes(run.lease) == (3 * ROW_BYTES, 6 * PAGE_BYTES)
    other = world.start(ids((1, 8), (4, 8)))
    assert world.cache.private_bytes(run.lease) == (2 * ROW_BYTES, 4 * PAGE_BYTES), "the system prompt is shared now"
    assert world.cache.private_bytes(other.lease) == (0, 0)
    world.release(other)
    twin = world.start(ids((1, 8), (2, 8), (5, 8)))
    assert world.cache.private_bytes(run.lease) == (ROW_BYTES, 2 * PAGE_BYTES)
    world.release(twin)
    assert world.publish(run)
    assert world.cache.private_bytes(run.lease) == (2 * ROW_BYTES, 6 * PAGE_BYTES), "the TURN at 16 was superseded"
    world.release(run)


def test_private_bytes_exclude_held_path() -> None:
    world = World()
    world.turn(ids((1, 8)), session="a", hold_seconds=5.0)
    run = world.start(ids((1, 12)), session="b")
    assert world.cache.private_bytes(run.lease) == (0, 0)
    world.clock.now += 6
    world.cache.available_pages()
    assert world.cache.private_bytes(run.lease) == (ROW_BYTES, 2 * PAGE_BYTES)


def test_publish_and_give_rows_assert_on_misuse() -> None:
    world = World()
    run = world.start(ids((1, 30)))
    assert world.compute(run, 8)
    sequence = tokens(run.sequence)
    for length, row in ((6, run.state_row), (0, run.state_row), (32, run.state_row), (12, run.state_row), (8, 49)):
        with pytest.raises(AssertionError):
            world.cache.publish(run.lease, "", sequence, length, row, TURN)
    with pytest.raises(AssertionError, match="not the lease's"):
        world.cache.give_rows(run.lease, [49])
    assert world.publish(run)
    rows = world.take_rows(run, 1)
    assert rows is not None
    with pytest.raises(AssertionError, match="leaves the path"):
        world.cache.publish(run.lease, "", tokens(ids((2, 30))), 8, rows[0], TURN)


def test_acquire_of_stale_match_asserts() -> None:
    world = World()
    world.turn(ids((1, 8)))
    match = world.cache.match("", tokens(ids((1, 9))))
    world.cache.clear()
    with pytest.raises(AssertionError, match="between match and acquire"):
        world.cache.acquire(match)


def test_second_release_asserts() -> None:
    world = World()
    run = world.start(ids((1, 8)))
    world.release(run)
    with pytest.raises(AssertionError, match="released before"):
        world.cache.release(run.lease)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_rows", 2),
        ("num_pages", 1),
        ("row_bytes", 0),
        ("page_bytes", 0),
        ("block_tokens", 0),
        ("budget_bytes", -1),
        ("ghost_blocks", -1),
    ],
)
def test_invalid_cache_settings_are_refused(field: str, value: int) -> None:
    settings: dict[str, Any] = {"num_rows": 4, "num_pages": 4, "row_bytes": 1, "page_bytes": 1, field: value}
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        HybridCache(**settings)
