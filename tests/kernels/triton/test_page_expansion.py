"""Pages in FP8 that are written out before a prompt's attention: which, and what is written."""

from __future__ import annotations

import pytest
import torch

from agentspec.kernels.triton import page_expansion, prefill_attention
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.page_expansion import Expansion
from agentspec.kernels.triton.prefill_attention import AttendPlan
from tests.fakes import fp8_pool
from tests.kernels.triton.gluon_in_interpreter import interpreted_hopper
from tests.kernels.triton.test_prefill_attention import Case, inputs_of, run

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has the kernel itself")

SPANS = Case(
    spans=((70, 20), (0, 5), (100, 30), (3, 17), (40, 16)),
    num_heads=3,
    num_kv_heads=1,
    padding=(4, 2),
    fp8=True,
    dtype=torch.float16,
    seed=26,
)
"""Tiles of 16 rows: those of the first, third and fourth span have four of them, with 6, 9 and 2 pages."""


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = AttendPlan(block_rows=16, num_warps=8, num_stages=1, is_hopper=True)
    monkeypatch.setattr(prefill_attention, "attend_plan", lambda *_, **__: plan)
    monkeypatch.setattr(prefill_attention, "hopper", interpreted_hopper())


@pytest.fixture
def expansions(monkeypatch: pytest.MonkeyPatch) -> list[Expansion | None]:
    """What attention allocates, in order."""
    made: list[Expansion | None] = []

    def kept(*args: object) -> Expansion | None:
        made.append(allocate(*args))  # type: ignore[arg-type]
        return made[-1]

    allocate = page_expansion.expansion_for
    monkeypatch.setattr(page_expansion, "expansion_for", kept)
    return made


def test_pages_of_spans_with_many_tiles_are_written_out(expansions: list[Expansion | None]) -> None:
    inputs = inputs_of(SPANS)
    run(inputs)
    (expansion,) = expansions
    assert expansion is not None
    assert expansion.first_U.tolist() == [0, -1, 6, 15, -1, -1, -1, 17]
    plain = fp8_pool.plain(inputs.kv_P2SGD, inputs.exponent_P2GS)
    for u, first in ((0, 0), (2, 6), (3, 15)):
        length = sum(SPANS.spans[u])
        for position in range(length):
            page, place = inputs.batch.page_table_UP[u, position // SPANS.page_tokens], position % SPANS.page_tokens
            got = expansion.pool_E2SGD[first + position // SPANS.page_tokens, :, place].to(plain.dtype)
            torch.testing.assert_close(got, plain[page, :, place], rtol=0, atol=0)


@pytest.mark.parametrize(("capacity", "placed"), [(17, [0, 2, 3]), (14, [0]), (6, [0]), (5, [])])
def test_spans_that_do_not_fit_are_decoded_by_each_tile(
    monkeypatch: pytest.MonkeyPatch, expansions: list[Expansion | None], capacity: int, placed: list[int]
) -> None:
    want = run(inputs_of(SPANS))
    page_bytes = 2 * SPANS.page_tokens * SPANS.num_kv_heads * SPANS.head_dim * SPANS.dtype.itemsize
    monkeypatch.setattr(page_expansion, "MOST_BYTES", capacity * page_bytes)
    got = run(inputs_of(SPANS))
    num_tokens = sum(count for _, count in SPANS.spans)
    # In float16 powers of two round weights that are subnormal; bfloat16 has tests/gpu.
    torch.testing.assert_close(got[:num_tokens], want[:num_tokens], rtol=2e-3, atol=2e-3)
    expansion = expansions[-1]
    assert expansion is not None
    assert [u for u, first in enumerate(expansion.first_U[:-1].tolist()) if first >= 0] == placed


def test_a_batch_of_short_spans_has_no_scratch_pool(expansions: list[Expansion | None]) -> None:
    run(inputs_of(Case(spans=((90, 6), (32, 5)), num_heads=4, num_kv_heads=1, fp8=True, dtype=torch.float16, seed=3)))
    assert expansions == [None]
