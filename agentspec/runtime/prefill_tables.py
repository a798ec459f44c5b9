"""Prompt chunks as the integer tables that a prefill reads (kernels/prefill_batch.py): built on the host, brought to the device in two copies.

Owns how spans are cut into blocks, and what padding looks like. Knows no requests and no kernels.

Shape letters: N tokens, U spans, M blocks, P pages a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
    SAVE_ROW,
    SECOND_SAVE_ROW,
)
from agentspec.runtime.step_buffers import stage
from agentspec.types import SCRATCH_PAGE, ZERO_ROW

Int64s = npt.NDArray[np.int64]


class PromptRun(Protocol):
    """Consecutive prompt tokens of one sequence: what the tables need of a plan.ChunkPlan."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def start(self) -> int:
        """Position of token_ids[0]."""
        ...

    @property
    def read_row(self) -> int:
        """Row that holds the state after `start` tokens (ZERO_ROW when start is 0)."""
        ...

    @property
    def state_writes(self) -> tuple[tuple[int, int], ...]:
        """(count, row): after `count` tokens of the run the state goes to `row`. Counts ascend, each at most twice; the last is the run's."""
        ...

    @property
    def page_ids(self) -> Sequence[int]:
        """Pages of the sequence, covering start + the run's tokens at least."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillSizes:
    """Places in the tables."""

    num_tokens: int
    num_spans: int
    num_blocks: int
    num_pages: int
    """Of each span's sequence."""

    @property
    def num_integers(self) -> int:
        """Everything but the page table."""
        return 3 * self.num_tokens + NUM_SPAN_FIELDS * self.num_spans + NUM_BLOCK_FIELDS * self.num_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTables:
    """A batch in two tensors, on the host or on the device."""

    sizes: PrefillSizes
    integers: Tensor
    """int64 [num_integers]: token ids, positions, previous, spans, blocks."""
    page_table_UP: Tensor
    """int32."""

    def on(self, device: torch.device) -> PrefillTables:
        return PrefillTables(
            sizes=self.sizes, integers=stage(self.integers, torch.int64, device), page_table_UP=stage(self.page_table_UP, torch.int32, device)
        )

    @property
    def batch(self) -> PrefillBatch:
        """Views of the two tensors."""
        sizes = self.sizes
        lengths = [sizes.num_tokens] * 3 + [NUM_SPAN_FIELDS * sizes.num_spans, NUM_BLOCK_FIELDS * sizes.num_blocks]
        token_ids_N, position_N, previous_N, spans, blocks = torch.split(self.integers, lengths)
        return PrefillBatch(
            token_ids_N=token_ids_N,
            position_N=position_N,
            previous_N=previous_N,
            spans_UF=spans.view(-1, NUM_SPAN_FIELDS),
            blocks_MF=blocks.view(-1, NUM_BLOCK_FIELDS),
            page_table_UP=self.page_table_UP,
        )


def build_tables(runs: Sequence[PromptRun], *, block_tokens: int, sizes: PrefillSizes | None = None) -> PrefillTables:
    """The tables of `runs` (of distinct sequences) on the host.

    sizes: None: exactly what the runs need; otherwise at least that much, and the rest is padding."""
    blocks = [_blocks(place, run, block_tokens) for place, run in enumerate(runs)]
    if sizes is None:
        sizes = PrefillSizes(
            num_tokens=sum(len(run.token_ids) for run in runs),
            num_spans=len(runs),
            num_blocks=sum(map(len, blocks)),
            num_pages=max(-(-(run.start + len(run.token_ids)) // block_tokens) for run in runs),
        )
    num_tokens = sizes.num_tokens
    integers = np.zeros(sizes.num_integers, dtype=np.int64)
    token_ids_N, position_N, previous_N = integers[: 3 * num_tokens].reshape(3, num_tokens)
    first_block_field = 3 * num_tokens + NUM_SPAN_FIELDS * sizes.num_spans
    spans_UF = integers[3 * num_tokens : first_block_field].reshape(-1, NUM_SPAN_FIELDS)
    blocks_MF = integers[first_block_field:].reshape(-1, NUM_BLOCK_FIELDS)
    blocks_MF[:, SAVE_ROW : SECOND_SAVE_ROW + 1] = NO_ROW
    page_table_UP = np.full((sizes.num_spans, sizes.num_pages), SCRATCH_PAGE, dtype=np.int32)
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
    return PrefillTables(sizes=sizes, integers=torch.from_numpy(integers), page_table_UP=torch.from_numpy(page_table_UP))


def _blocks(place: int, run: PromptRun, block_tokens: int) -> Int64s:
    """Rows of `blocks_MF`, their offsets counted from the run's first token."""
    count = len(run.token_ids)
    assert count > 0
    assert run.state_writes[-1][0] == count, "the last state write stands at the run's end"
    rows: dict[int, list[int]] = {}
    for end, row in run.state_writes:
        assert row != ZERO_ROW
        rows.setdefault(end, []).append(row)
    ends = np.array(sorted({*range(block_tokens - run.start % block_tokens, count, block_tokens), *rows}), dtype=np.int64)
    blocks = np.full((len(ends), NUM_BLOCK_FIELDS), NO_ROW, dtype=np.int64)
    blocks[1:, BLOCK_OFFSET], blocks[0, BLOCK_OFFSET] = ends[:-1], 0
    blocks[:, BLOCK_COUNT] = ends - blocks[:, BLOCK_OFFSET]
    blocks[:, BLOCK_SPAN] = place
    for end, wanted in rows.items():
        assert len(wanted) <= 2, f"{len(wanted)} rows want the state after {end} tokens"
        blocks[np.searchsorted(ends, end), SAVE_ROW : SAVE_ROW + len(wanted)] = wanted
    return blocks
