"""Prompt chunks as the integer tables that a prefill reads (kernels/prefill_batch.py): built on the host, copied to the
device in one piece.

Owns how spans are cut into blocks, and the padding. Knows no requests and no kernels.

Shape letters: N tokens, U spans, M blocks, P pages per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentspec.kernels import PrefillBatch
from agentspec.kernels.prefill_batch import (
    BLOCK_COUNT,
    BLOCK_OFFSET,
    BLOCK_SPAN,
    NO_ROW,
    NUM_BLOCK_FIELDS,
    NUM_SPAN_FIELDS,
    READ_ROW,
    SAVE_ROW,
    SECOND_SAVE_ROW,
)
from agentspec.runtime.step_buffers import stage
from agentspec.types import SCRATCH_PAGE, ZERO_ROW

Int64s = npt.NDArray[np.int64]
Words = TypeVar("Words", Tensor, Int64s)

_ALIGNED_WORDS = 2
"""Every table begins at a multiple of 16 bytes, whatever the sizes: Triton compiles a kernel again for unaligned
pointers."""


class PromptRun(Protocol):
    """Consecutive prompt tokens of one sequence: the part of plan.ChunkPlan that the tables need."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def start(self) -> int:
        """Position of token_ids[0]."""

    @property
    def read_row(self) -> int:
        """Row that holds the state after `start` tokens (ZERO_ROW if start is 0)."""

    @property
    def state_writes(self) -> tuple[tuple[int, int], ...]:
        """(count, row): after `count` tokens of the run the state goes to `row`. Counts ascend, each at most twice; the
        last is the run's length."""

    @property
    def page_ids(self) -> Sequence[int]:
        """Pages of the sequence, covering at least start + the run's tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillSizes:
    """Entries in each table."""

    num_tokens: int
    num_spans: int
    num_blocks: int
    num_pages: int
    """Per sequence."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """8-byte words of: the page table (two pages per word), token ids, positions, previous, spans and blocks."""
        num_page_words = -(-self.num_spans * self.num_pages // 2)
        return (
            num_page_words,
            *[self.num_tokens] * 3,
            NUM_SPAN_FIELDS * self.num_spans,
            NUM_BLOCK_FIELDS * self.num_blocks,
        )

    @property
    def num_words(self) -> int:
        return sum(map(_aligned, self.lengths))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTables:
    """A batch in one tensor, on the host or on the device."""

    sizes: PrefillSizes
    words: Tensor
    """int64 [num_words]. See PrefillSizes.lengths."""

    def on(self, device: torch.device) -> PrefillTables:
        return PrefillTables(sizes=self.sizes, words=stage(self.words, torch.int64, device))

    @property
    def batch(self) -> PrefillBatch:
        """The tables, as views of the words."""
        sizes = self.sizes
        page_words, token_ids_N, position_N, previous_N, spans, blocks = _sections(self.words, sizes)
        return PrefillBatch(
            token_ids_N=token_ids_N,
            position_N=position_N,
            previous_N=previous_N,
            spans_UF=spans.view(-1, NUM_SPAN_FIELDS),
            blocks_MF=blocks.view(-1, NUM_BLOCK_FIELDS),
            page_table_UP=page_words.view(torch.int32)[: sizes.num_spans * sizes.num_pages].view(
                sizes.num_spans, sizes.num_pages
            ),
        )


def _aligned(num_words: int) -> int:
    return -(-num_words // _ALIGNED_WORDS) * _ALIGNED_WORDS


def _sections(words: Words, sizes: PrefillSizes) -> Iterator[Words]:
    offset = 0
    for length in sizes.lengths:
        yield words[offset : offset + length]
        offset += _aligned(length)


def build_tables(runs: Sequence[PromptRun], *, block_tokens: int, sizes: PrefillSizes | None = None) -> PrefillTables:
    """The tables of `runs` (of distinct sequences) on the host.

    sizes: None: exactly what the runs need; otherwise at least that much, the rest being padding."""
    blocks = [_blocks(place, run, block_tokens) for place, run in enumerate(runs)]
    if sizes is None:
        sizes = PrefillSizes(
            num_tokens=sum(len(run.token_ids) for run in runs),
            num_spans=len(runs),
            num_blocks=sum(map(len, blocks)),
            num_pages=max(-(-(run.start + len(run.token_ids)) // block_tokens) for run in runs),
        )
    words = np.zeros(sizes.num_words, dtype=np.int64)
    page_words, token_ids_N, position_N, previous_N, spans, all_blocks = _sections(words, sizes)
    spans_UF, blocks_MF = spans.reshape(-1, NUM_SPAN_FIELDS), all_blocks.reshape(-1, NUM_BLOCK_FIELDS)
    spans_UF[:, READ_ROW] = ZERO_ROW
    blocks_MF[:, SAVE_ROW : SECOND_SAVE_ROW + 1] = NO_ROW
    page_table_UP = page_words.view(np.int32)[: sizes.num_spans * sizes.num_pages].reshape(
        sizes.num_spans, sizes.num_pages
    )
    page_table_UP.fill(SCRATCH_PAGE)
    offset = first_block = 0
    for place, (run, own_blocks) in enumerate(zip(runs, blocks, strict=True)):
        count, end_block = len(run.token_ids), first_block + len(own_blocks)
        tokens = slice(offset, offset + count)
        token_ids_N[tokens] = run.token_ids
        position_N[tokens] = np.arange(run.start, run.start + count)
        previous_N[tokens] = np.arange(sizes.num_spans + offset - 1, sizes.num_spans + offset + count - 1)
        previous_N[offset] = place
        spans_UF[place] = (offset, count, run.start, run.read_row, first_block, len(own_blocks))
        blocks_MF[first_block:end_block] = own_blocks
        blocks_MF[first_block:end_block, BLOCK_OFFSET] += offset
        num_pages = -(-(run.start + count) // block_tokens)
        page_table_UP[place, :num_pages] = run.page_ids[:num_pages]
        offset, first_block = offset + count, end_block
    return PrefillTables(sizes=sizes, words=torch.from_numpy(words))


def block_ends(run: PromptRun, block_tokens: int) -> list[int]:
    """Where the run's blocks end, in tokens of the run, ascending: at block boundaries of its sequence, and wherever a
    state is wanted."""
    first_cut = block_tokens - run.start % block_tokens
    return sorted({*range(first_cut, len(run.token_ids), block_tokens), *(count for count, _ in run.state_writes)})


def _blocks(place: int, run: PromptRun, block_tokens: int) -> Int64s:
    """Rows of `blocks_MF`, with offsets relative to the run's first token."""
    count = len(run.token_ids)
    assert count > 0
    assert run.state_writes[-1][0] == count, "the last state write stands at the run's end"
    rows: dict[int, list[int]] = {}
    for end, row in run.state_writes:
        assert row != ZERO_ROW
        rows.setdefault(end, []).append(row)
    ends = np.array(block_ends(run, block_tokens), dtype=np.int64)
    blocks = np.full((len(ends), NUM_BLOCK_FIELDS), NO_ROW, dtype=np.int64)
    blocks[1:, BLOCK_OFFSET], blocks[0, BLOCK_OFFSET] = ends[:-1], 0
    blocks[:, BLOCK_COUNT] = ends - blocks[:, BLOCK_OFFSET]
    blocks[:, BLOCK_SPAN] = place
    for end, wanted in rows.items():
        assert len(wanted) <= 2, f"{len(wanted)} rows want the state after {end} tokens"
        blocks[np.searchsorted(ends, end), SAVE_ROW : SAVE_ROW + len(wanted)] = wanted
    return blocks
