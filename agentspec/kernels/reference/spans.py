"""A prefill's tables read back on the host, so that the reference can loop over spans and blocks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from agentspec.kernels.prefill_batch import NO_ROW, PrefillBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    begin: int
    """Index of the first token among the N."""
    end: int
    """One past the last."""
    save_rows: tuple[int, ...]
    """Rows to which the state after the last token is stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    begin: int
    """Index of the first token among the N."""
    end: int
    """One past the last."""
    start: int
    """Position of the first token in its sequence."""
    read_row: int
    blocks: list[Block]
    page_ids_P: Tensor

    @property
    def tokens(self) -> slice:
        return slice(self.begin, self.end)


def read_spans(batch: PrefillBatch) -> list[Span]:
    """Return every span that has tokens. Reads the device tables on the host."""
    blocks = [
        Block(begin=offset, end=offset + count, save_rows=tuple(row for row in rows if row != NO_ROW))
        for offset, count, _, *rows in batch.blocks_MF.tolist()
    ]
    return [
        Span(
            begin=offset,
            end=offset + count,
            start=start,
            read_row=read_row,
            blocks=blocks[first : first + num_blocks],
            page_ids_P=batch.page_table_UP[place],
        )
        for place, (offset, count, start, read_row, first, num_blocks) in enumerate(batch.spans_UF.tolist())
        if count
    ]
