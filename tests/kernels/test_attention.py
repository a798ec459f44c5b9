"""Paged attention and page stores against one query at a time in float64, over poisoned and permuted pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentspec.kernels import PrefillBatch
from agentspec.kernels.reference.attention import paged_attention, paged_attention_prefill, write_kv, write_kv_prefill
from agentspec.types import SCRATCH_PAGE
from tests.fakes.compare import relative_error
from tests.fakes.prompt_run import Run, batch_of

HEADS, GROUPS, DIM, PAGE = 6, 2, 8, 16
SCALE = DIM**-0.5
TOLERANCE = 1e-5


def history(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return (pool of NaN with each sequence's keys and values, page table, keys, values); unwritten slots stay NaN."""
    rng = torch.Generator().manual_seed(seed)
    pages_each = max(lengths) // PAGE + 2
    pool = torch.full((1 + len(lengths) * pages_each, 2, PAGE, GROUPS, DIM), torch.nan)
    table = (torch.randperm(len(pool) - 1, generator=rng) + 1).view(len(lengths), -1).int()
    keys, values = ([torch.randn(n, GROUPS, DIM, generator=rng) for n in lengths] for _ in range(2))
    for pages, k, v in zip(table, keys, values, strict=True):
        for p in range(len(k)):
            pool[pages[p // PAGE], 0, p % PAGE] = k[p]
            pool[pages[p // PAGE], 1, p % PAGE] = v[p]
    return pool, table, keys, values


def attend(q_QD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
    out = torch.zeros(HEADS, DIM, dtype=torch.float64)
    for h in range(HEADS):
        g = h // (HEADS // GROUPS)
        out[h] = (k_NGD[:, g].double() @ q_QD[h].double() * SCALE).softmax(0) @ v_NGD[:, g].double()
    return out


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize("first_position", [0, 1])
def test_window_matches_per_query_reference(num_tokens: int, first_position: int) -> None:
    lengths = [length + num_tokens for length in (1, 15, 16, 63, 1000)]
    pool, table, keys, values = history(lengths, seed=num_tokens)
    q = torch.randn(len(lengths), num_tokens, HEADS, DIM, generator=torch.Generator().manual_seed(9))
    if first_position:
        pool[table[:, 0].long(), :, 0] = torch.nan
    start = torch.tensor(lengths) - num_tokens
    out = paged_attention(q, pool, table, start, scale=SCALE, first_position=first_position)
    for slot in range(len(lengths)):
        for t in range(num_tokens):
            visible = slice(first_position, lengths[slot] - num_tokens + t + 1)
            want = attend(q[slot, t], keys[slot][visible], values[slot][visible])
            assert relative_error(out[slot, t], want) < TOLERANCE, (slot, t)


def test_query_without_keys_returns_zeros() -> None:
    """With first_position 1 (the MTP layer), position 0 sees no key."""
    pool, table, _, _ = history([2], seed=0)
    pool[table[0, 0].long(), :, 0] = torch.nan
    out = paged_attention(torch.ones(1, 2, HEADS, DIM), pool, table, torch.tensor([0]), scale=SCALE, first_position=1)
    assert torch.equal(out[0, 0], torch.zeros(HEADS, DIM))
    assert out[0, 1].isfinite().all()
    alone = paged_attention(torch.ones(1, 1, HEADS, DIM), pool, table, torch.tensor([0]), scale=SCALE, first_position=1)
    assert torch.equal(alone, torch.zeros(1, 1, HEADS, DIM))


def test_inert_slots_do_not_affect_active_slots() -> None:
    pool, table, keys, values = history([40, 40], seed=3)
    table[1] = SCRATCH_PAGE
    q = torch.randn(2, 2, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    out = paged_attention(q, pool, table, torch.tensor([38, 0]), scale=SCALE, first_position=0)
    assert relative_error(out[0, 1], attend(q[0, 1], keys[0], values[0])) < TOLERANCE


def _batch(table: Tensor, counts: list[int], starts: list[int]) -> PrefillBatch:
    runs = [
        Run(token_ids=range(count), start=start, state_writes=((count, 1),), page_ids=pages)
        for pages, count, start in zip(table.tolist(), counts, starts, strict=True)
    ]
    return batch_of(runs, block_tokens=PAGE)


def test_spans_match_per_query_reference() -> None:
    lengths, counts = [1, 16, 63, 200], [1, 16, 20, 7]
    pool, table, keys, values = history(lengths, seed=7)
    batch = _batch(table, counts, [n - c for n, c in zip(lengths, counts, strict=True)])
    q = torch.randn(sum(counts), HEADS, DIM, generator=torch.Generator().manual_seed(2))
    out = paged_attention_prefill(q, pool, batch, scale=SCALE)
    for i, (queries, outputs) in enumerate(zip(q.split(counts), out.split(counts), strict=True)):
        for t in range(counts[i]):
            end = lengths[i] - counts[i] + t + 1
            want = attend(queries[t], keys[i][:end], values[i][:end])
            assert relative_error(outputs[t], want) < TOLERANCE, (i, t)


@pytest.mark.parametrize("num_tokens", [1, 5, 20])
def test_window_stores_write_only_their_page_slots(num_tokens: int) -> None:
    starts = [0, 13, 16, 100]
    pool, table, _, _ = history([start + num_tokens for start in starts], seed=4)
    pool[:] = torch.nan
    shape = (len(starts), num_tokens, GROUPS, DIM)
    rng = torch.Generator().manual_seed(0)
    k, v = torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)
    write_kv(pool, k, v, table, torch.tensor(starts))
    for slot, start in enumerate(starts):
        for t in range(num_tokens):
            page, offset = table[slot, (start + t) // PAGE], (start + t) % PAGE
            assert torch.equal(pool[page, 0, offset], k[slot, t])
            assert torch.equal(pool[page, 1, offset], v[slot, t])
    assert int(pool.isfinite().sum()) == k.numel() + v.numel()


def test_span_stores_write_only_their_page_slots() -> None:
    counts, starts = [1, 33, 16], [31, 5, 16]
    pool, table, _, _ = history([64, 64, 64], seed=5)
    pool[:] = torch.nan
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(sum(counts), GROUPS, DIM, generator=rng) for _ in range(2))
    write_kv_prefill(pool, k, v, _batch(table, counts, starts))
    for i, (keys, values) in enumerate(zip(k.split(counts), v.split(counts), strict=True)):
        for t in range(counts[i]):
            page, offset = table[i, (starts[i] + t) // PAGE], (starts[i] + t) % PAGE
            assert torch.equal(pool[page, 0, offset], keys[t])
            assert torch.equal(pool[page, 1, offset], values[t])
    assert int(pool.isfinite().sum()) == k.numel() + v.numel()
