"""The tables of a prefill: how spans are cut into blocks, the padding, and the alignment."""

from __future__ import annotations

import itertools

import pytest

from agentspec.kernels.prefill_batch import NO_ROW
from agentspec.runtime.prefill_tables import PrefillSizes, build_tables
from agentspec.types import SCRATCH_PAGE, ZERO_ROW
from tests.fakes.prompt_run import Run, batch_of

BLOCK = 16


@pytest.mark.parametrize(
    ("start", "count", "writes", "ends"),
    [
        (0, 16, ((16, 2),), [16]),
        (0, 17, ((17, 2),), [16, 17]),
        (15, 2, ((2, 2),), [1, 2]),
        (16, 40, ((16, 3), (40, 2)), [16, 32, 40]),
        (10, 30, ((6, 3), (9, 4), (30, 2)), [6, 9, 22, 30]),
        (7, 1, ((1, 3), (1, 2)), [1]),
    ],
    ids=[
        "whole",
        "a token more",
        "across a boundary",
        "a state at a boundary",
        "a state inside of a block",
        "two rows",
    ],
)
def test_blocks_end_at_boundaries_of_the_sequence_and_where_states_are_wanted(
    start: int, count: int, writes: tuple[tuple[int, int], ...], ends: list[int]
) -> None:
    batch = batch_of(
        [Run(token_ids=[5] * count, start=start, state_writes=writes, page_ids=[1, 2, 3, 4])], block_tokens=BLOCK
    )
    blocks = batch.blocks_MF.tolist()
    assert [offset + size for offset, size, *_ in blocks] == ends
    assert [offset for offset, *_ in blocks] == [0, *ends[:-1]]
    saved = [(offset + size, row) for offset, size, _, *rows in blocks for row in rows if row != NO_ROW]
    assert saved == list(writes)


def test_unused_table_entries_are_padding() -> None:
    sizes = PrefillSizes(num_tokens=9, num_spans=3, num_blocks=5, num_pages=3)
    runs = [
        Run(token_ids=[7, 8, 9], start=16, read_row=4, state_writes=((3, 5),), page_ids=[11, 12, 13]),
        Run(token_ids=[6, 5], start=0, state_writes=((2, 6),), page_ids=[14]),
    ]
    batch = batch_of(runs, block_tokens=BLOCK, sizes=sizes)
    assert batch.token_ids_N.tolist() == [7, 8, 9, 6, 5, 0, 0, 0, 0]
    assert batch.position_N.tolist() == [16, 17, 18, 0, 1, 0, 0, 0, 0]
    assert batch.previous_N.tolist() == [0, 3, 4, 1, 6, 0, 0, 0, 0], "of [three spans' read rows | hiddens]"
    assert batch.spans_UF.tolist() == [[0, 3, 16, 4, 0, 1], [3, 2, 0, ZERO_ROW, 1, 1], [0, 0, 0, ZERO_ROW, 0, 0]]
    assert batch.blocks_MF.tolist() == [[0, 3, 0, 5, NO_ROW], [3, 2, 1, 6, NO_ROW], *[[0, 0, 0, NO_ROW, NO_ROW]] * 3]
    assert batch.page_table_UP.tolist() == [
        [11, 12, SCRATCH_PAGE],
        [14, SCRATCH_PAGE, SCRATCH_PAGE],
        [SCRATCH_PAGE] * 3,
    ]


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64])
@pytest.mark.parametrize(("num_spans", "num_blocks", "num_pages"), [(1, 3, 1), (3, 5, 7), (4, 24, 33)])
def test_every_table_is_aligned_for_vector_loads(
    num_tokens: int, num_spans: int, num_blocks: int, num_pages: int
) -> None:
    sizes = PrefillSizes(num_tokens=num_tokens, num_spans=num_spans, num_blocks=num_blocks, num_pages=num_pages)
    tables = build_tables([], block_tokens=BLOCK, sizes=sizes)
    batch = tables.batch
    views = (
        batch.token_ids_N,
        batch.position_N,
        batch.previous_N,
        batch.spans_UF,
        batch.blocks_MF,
        batch.page_table_UP,
    )
    first = tables.words.data_ptr()
    places = [(view.data_ptr() - first, view.nbytes) for view in views]
    assert all(offset % 16 == 0 for offset, _ in places), places
    assert all(view.is_contiguous() for view in views)
    ordered = sorted(places)
    assert all(offset + size <= following for (offset, size), (following, _) in itertools.pairwise(ordered)), (
        "tables overlap"
    )
    assert sum(ordered[-1]) <= tables.words.nbytes
