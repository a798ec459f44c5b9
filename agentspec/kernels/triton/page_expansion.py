"""Pages in FP8, decoded once for all queries of a prompt: between the first and the second launch of
prefill_attention.py, for the kernel of prefill_attention_hopper.py.

Every tile of a span's queries needs all pages of its context, and the threads of a program take nearly as long to
decode a page as the matrix units take to multiply it. So the pages of spans with several tiles are written to a scratch
pool in the activations' dtype, from which these tiles read them like any pages. The scratch pool is bounded: spans that
don't fit are decoded tile by tile, as spans with few tiles are. All numbers are exact, so the way changes no bit.

Knows nothing of queries. Shape letters: as in prefill_attention.py; E pages of the scratch pool.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.triton.fp8_pages import decoded, multipliers
from agentspec.kernels.triton.launch import INTERPRETED, await_previous, overlapped, release_next
from agentspec.kernels.triton.prefill_columns import COUNT, NUM_SPAN_FIELDS, START
from agentspec.kernels.triton.prefill_line import NOT_SPECIALIZED

MOST_BYTES = 2**29
"""Of the scratch pool: 131,072 tokens with four key/value heads of 256."""
_LEAST_TILES = tl.constexpr(4)
"""Of a span and key/value head. On an H100, writing a page of one head takes 4.3 us of a multiprocessor, and decoding
it for a tile 1.4."""
_ROWS = 32
"""Heads that a program decodes at once."""
_PROGRAMS_PER_SM = 8


class Expansion(NamedTuple):
    """The scratch pool of one launch of attention."""

    pool_E2SGD: Tensor
    page_E: Tensor
    """int32: e at place e, where something was written."""
    first_U: Tensor
    """int32 [U + 1]: the first page of each span, whose others follow; -1: the span has none. At the end, the number
    of pages in use. Written by the first launch (`place_spans`)."""


def expansion_for(
    kv_P2SGD: Tensor, batch: PrefillBatch, dtype: torch.dtype, shares: int, block_rows: int
) -> Expansion | None:
    """Allocate the scratch pool for a batch; None: no span can have enough tiles. dtype: of activations. shares: query
    heads of a key/value head. block_rows: rows of a tile."""
    num_spans, num_pages = batch.page_table_UP.shape
    if len(batch.token_ids_N) * shares <= (_LEAST_TILES.value - 1) * block_rows:
        return None
    most = max(1, MOST_BYTES // (kv_P2SGD[0].numel() * dtype.itemsize))
    num_scratch, device = min(most, num_spans * num_pages), kv_P2SGD.device
    return Expansion(
        pool_E2SGD=torch.empty(num_scratch, *kv_P2SGD.shape[1:], dtype=dtype, device=device),
        page_E=torch.empty(num_scratch, dtype=torch.int32, device=device),
        first_U=torch.empty(num_spans + 1, dtype=torch.int32, device=device),
    )


def expand(
    expansion: Expansion, kv_P2SGD: Tensor, exponent_P2GS: Tensor, batch: PrefillBatch, num_multiprocessors: int
) -> None:
    """Write the pages of the spans that have a place in the scratch pool. kv_P2SGD: as bytes (`fp8_pages.as_bytes`)."""
    num_spans, num_pages = batch.page_table_UP.shape
    _, _, page_tokens, num_kv_heads, head_dim = kv_P2SGD.shape
    _expand[(num_multiprocessors * (1 if INTERPRETED else _PROGRAMS_PER_SM),)](
        *expansion,
        kv_P2SGD,
        exponent_P2GS,
        batch.page_table_UP,
        batch.spans_UF,
        num_spans,
        num_pages,
        G=num_kv_heads,
        D=head_dim,
        PAGE=page_tokens,
        ROWS=min(_ROWS, page_tokens * num_kv_heads),
        BLOCK_U=triton.next_power_of_2(num_spans),
        num_warps=4,
        **overlapped(),
    )


@triton.jit
def place_spans(  # type: ignore[no-untyped-def]
    spans_UF, num_spans, first_U, capacity, SHARES: tl.constexpr, PAGE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_U: tl.constexpr
):  # fmt: skip
    """Fill `Expansion.first_U`. capacity: pages of the scratch pool."""
    u = tl.arange(0, BLOCK_U)
    count = tl.load(spans_UF + u * NUM_SPAN_FIELDS + COUNT, mask=u < num_spans, other=0).to(tl.int32)
    start = tl.load(spans_UF + u * NUM_SPAN_FIELDS + START, mask=u < num_spans, other=0).to(tl.int32)
    pages = tl.where(count * SHARES > (_LEAST_TILES - 1) * BLOCK_M, tl.cdiv(start + count, PAGE), 0)
    end = tl.cumsum(pages, axis=0)
    fits = (pages > 0) & (end <= capacity)
    tl.store(first_U + u, tl.where(fits, end - pages, -1), mask=u < num_spans)
    tl.store(first_U + num_spans, tl.max(tl.where(fits, end, 0), axis=0))


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def _expand(  # type: ignore[no-untyped-def]
    pool_E2SGD, page_E, first_U, kv_P2SGD, exponent_P2GS, page_table_UP, spans_UF, num_spans, num_pages,
    G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK_U: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Programs take turns at blocks of ROWS rows; a page has keys and values, each of PAGE * G rows of D. Places after
    a span's end become 0."""
    release_next(PDL)
    await_previous(PDL)
    u = tl.arange(0, BLOCK_U)
    first = tl.load(first_U + u, mask=u < num_spans, other=-1)
    blocks: tl.constexpr = 2 * PAGE * G // ROWS
    d = tl.arange(0, D)
    for block in tl.range(tl.program_id(0), tl.load(first_U + num_spans) * blocks, tl.num_programs(0), num_stages=1):
        to = block // blocks
        is_before = (first >= 0) & (first <= to)
        span = tl.max(tl.where(is_before, u, 0), axis=0)
        place = to - tl.max(tl.where(is_before, first, 0), axis=0)
        page = tl.load(page_table_UP + span.to(tl.int64) * num_pages + place).to(tl.int64)
        row = block % blocks * ROWS + tl.arange(0, ROWS)
        half, token, g = row // (PAGE * G), row // G % PAGE, row % G
        at = row[:, None] * D + d[None, :]
        length = tl.load(spans_UF + span * NUM_SPAN_FIELDS + START) + tl.load(spans_UF + span * NUM_SPAN_FIELDS + COUNT)
        is_written = place * PAGE + token < length
        codes = tl.load(kv_P2SGD + page * (2 * PAGE * G * D) + at, mask=is_written[:, None], other=0)
        power = multipliers(exponent_P2GS + page * (2 * G * PAGE) + (half * G + g) * PAGE + token, is_written)
        values = decoded(codes, pool_E2SGD.dtype.element_ty).to(tl.float32) * power[:, None]
        tl.store(pool_E2SGD + to.to(tl.int64) * (2 * PAGE * G * D) + at, values.to(pool_E2SGD.dtype.element_ty))
        tl.store(page_E + to, to)
