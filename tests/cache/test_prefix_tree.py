"""The radix tree alone: walking, splitting, reference levels and ghosts, compared with a plain set of prefixes."""

from __future__ import annotations

import random

import pytest

from agentspec.cache.id_pool import IdPool
from agentspec.cache.prefix_tree import HOLD, LOCK, NEED, Node, PrefixTree
from agentspec.types import tokens

BLOCK = 2


def data(*blocks: int) -> bytes:
    """One number per block, repeated to fill it."""
    return tokens(number for number in blocks for _ in range(BLOCK)).tobytes()


def new_tree(num_pages: int = 100, max_ghost_blocks: int = 100) -> tuple[PrefixTree, IdPool]:
    pages = IdPool(num_pages, num_reserved=1, noun="page")
    return PrefixTree(pages, block_tokens=BLOCK, max_ghost_blocks=max_ghost_blocks), pages


def need(tree: PrefixTree, pages: IdPool, *blocks: int) -> Node:
    """Insert a path, give pages to its ghosts and add a NEED reference to its end."""
    path = tree.insert("", data(*blocks))
    for node in path:
        if node.page_ids is None:
            tree.give_pages(node, pages.take(node.num_blocks))
    tree.ref(path[-1], NEED)
    return path[-1]


def matched(tree: PrefixTree, *blocks: int) -> int:
    """Number of blocks whose tokens are known."""
    path, _, num_common = tree.walk("", data(*blocks))
    return sum(node.num_blocks for node in path) + num_common


def test_split_keeps_page_order_and_lower_node() -> None:
    tree, pages = new_tree()
    leaf = need(tree, pages, 1, 2, 3, 4)
    before = tree.page_ids(leaf)
    tree.ref(leaf, LOCK)
    upper = need(tree, pages, 1, 2)
    assert upper.children == {data(3): leaf}
    assert (upper.depth, leaf.depth) == (2 * BLOCK, 4 * BLOCK)
    assert (tree.page_ids(upper), tree.page_ids(leaf)) == (before[:2], before)
    assert upper.refs == [2, 0, 1, 0], "its own reference and the child's; no hold; the child's lock"
    assert tree.num_blocks == [4, 0, 4, 0]
    tree.unref(leaf, LOCK)
    assert upper.refs == [2, 0, 0, 0]
    assert tree.num_blocks == [4, 0, 0, 0]


def test_inserting_existing_path_changes_nothing() -> None:
    tree, pages = new_tree()
    leaf = need(tree, pages, 1, 2, 3)
    assert tree.insert("", data(1, 2, 3)) == [leaf]
    assert tree.num_ghost_blocks == 0


def test_unref_frees_pages_up_to_deepest_referenced_node() -> None:
    tree, pages = new_tree()
    deep, branch = need(tree, pages, 1, 2, 3, 4), need(tree, pages, 1, 2, 5)
    middle = tree.insert("", data(1, 2))[-1]
    assert tree.unref(deep, NEED) is middle
    assert pages.num_used == 3
    assert (tree.num_ghost_blocks, matched(tree, 1, 2, 3, 4)) == (2, 4)
    tree.unref(branch, NEED)
    assert pages.num_used == 0
    assert tree.num_ghost_blocks == 5


def test_hold_references_are_counted_separately() -> None:
    tree, pages = new_tree()
    leaf = need(tree, pages, 1, 2)
    tree.ref(leaf, HOLD)
    tree.ref(leaf, HOLD)
    tree.unref(leaf, HOLD)
    assert tree.num_blocks == [2, 2, 0, 0]
    tree.unref(leaf, HOLD)
    assert tree.num_blocks == [2, 0, 0, 0]


def test_ghosts_are_trimmed_from_their_ends() -> None:
    tree, pages = new_tree(max_ghost_blocks=3)
    tree.unref(need(tree, pages, 1, 2, 3, 4), NEED)
    assert matched(tree, 1, 2, 3, 4) == 3
    tree.unref(need(tree, pages, 5), NEED)
    assert (matched(tree, 1, 2, 3, 4), matched(tree, 5)) == (2, 1)
    tree.trim_ghosts(0)
    assert tree.roots == {}


@pytest.mark.parametrize("seed", range(5))
def test_random_paths_match_reference_set(seed: int) -> None:
    rng = random.Random(seed)
    tree, pages = new_tree(num_pages=5000, max_ghost_blocks=10**6)
    known: set[tuple[int, ...]] = set()
    needed: list[tuple[tuple[int, ...], Node]] = []
    for _ in range(300):
        blocks = tuple(rng.randint(0, 2) for _ in range(rng.randint(1, 12)))
        depth = max((n for n in range(1, len(blocks) + 1) if blocks[:n] in known), default=0)
        assert matched(tree, *blocks) == depth, f"seed {seed}"
        if rng.random() < 0.5:
            needed.append((blocks, need(tree, pages, *blocks)))
            known.update(blocks[:n] for n in range(1, len(blocks) + 1))
        elif needed:
            tree.unref(needed.pop(rng.randrange(len(needed)))[1], NEED)
        alive = {path[:n] for path, _ in needed for n in range(1, len(path) + 1)}
        assert tree.num_blocks[NEED] == len(alive) == pages.num_used, f"seed {seed}"
        assert tree.num_ghost_blocks == len(known) - len(alive), f"seed {seed}"
        for path, node in needed:
            assert node.depth == len(path) * BLOCK
            assert len(tree.page_ids(node)) == len(path)
