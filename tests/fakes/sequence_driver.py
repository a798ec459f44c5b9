"""Drives a StepModel one sequence at a time as the runtime would, over poisoned pools and scattered ids.

Everything that was not written reads as NaN, rows and pages are handed out in random order, and every window includes
inert slots: a model that reads too far, writes to the wrong place or mixes slots can't give the right logits.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels import PrefillBatch
from agentspec.models.protocol import VerifyBatch
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW
from tests.fakes.fp8_pool import POISON
from tests.fakes.prompt_run import Run, batch_of


@dataclass(kw_only=True)
class DrivenSequence:
    """One sequence: its pages, its own rows, and the place of its committed state."""

    pages: list[int]
    rows: list[int]
    read_row: int = ZERO_ROW
    length: int = 0


def poison(model: Qwen3_5Model) -> None:
    """Make every row but ZERO_ROW, and every page, NaN. Integers have none: exponents of FP8 pages become infinite."""
    for part_R in model.row_tensors():
        part_R[ZERO_ROW + 1 :] = torch.nan
    for part_P in model.page_tensors():
        part_P.fill_(torch.nan if part_P.dtype.is_floating_point else POISON)


class Driver:
    def __init__(
        self,
        model: Qwen3_5Model,
        *,
        num_sequences: int = 1,
        max_tokens: int = 256,
        num_rows_each: int = 9,
        seed: int = 0,
    ) -> None:
        self.model = model
        block = model.spec.block_tokens
        pages_each = -(-max_tokens // block) + 1
        num_rows, num_pages = 2 + num_sequences * num_rows_each, 1 + num_sequences * pages_each
        model.allocate(num_rows=num_rows, num_pages=num_pages)
        poison(model)
        shuffle = random.Random(seed)
        rows, pages = list(range(2, num_rows)), list(range(1, num_pages))
        shuffle.shuffle(rows)
        shuffle.shuffle(pages)
        self.sequences = [
            DrivenSequence(pages=pages[i::num_sequences], rows=rows[i::num_sequences]) for i in range(num_sequences)
        ]

    def prefill(
        self, tokens: Sequence[int], sizes: Iterable[int] = (), *, which: int = 0, wanted: Sequence[int] = ()
    ) -> Tensor:
        """Prefill in chunks of `sizes` (the rest in one) and return hidden_NH.

        `wanted`: sequence lengths whose state goes to rows[1], rows[2] ... on the way; the end state goes to rows[0].
        """
        sequence = self.sequences[which]
        out = []
        for size in [*sizes, len(tokens)]:
            chunk = tokens[:size]
            tokens = tokens[size:]
            if not chunk:
                break
            end = sequence.length + len(chunk)
            writes = [
                (n - sequence.length, sequence.rows[1 + i]) for i, n in enumerate(wanted) if sequence.length < n < end
            ]
            run = Run(
                token_ids=chunk,
                start=sequence.length,
                read_row=sequence.read_row,
                state_writes=(*writes, (len(chunk), sequence.rows[0])),
                page_ids=sequence.pages,
            )
            out.append(self.model.prefill(self._batch([run])))
            sequence.read_row, sequence.length = sequence.rows[0], end
        return torch.cat(out)

    def prefill_together(self, token_lists: Sequence[Sequence[int]]) -> list[Tensor]:
        """One chunk for each sequence in one call; the end states go to each one's rows[0]."""
        runs = [
            Run(
                token_ids=tokens,
                start=sequence.length,
                read_row=sequence.read_row,
                state_writes=((len(tokens), sequence.rows[0]),),
                page_ids=sequence.pages,
            )
            for sequence, tokens in zip(self.sequences, token_lists, strict=True)
        ]
        for sequence, tokens in zip(self.sequences, token_lists, strict=True):
            sequence.read_row, sequence.length = sequence.rows[0], sequence.length + len(tokens)
        return list(self.model.prefill(self._batch(runs)).split([len(tokens) for tokens in token_lists]))

    def verify(self, windows: Sequence[Sequence[int]], num_accepted: Sequence[int], *, num_inert: int = 1) -> Tensor:
        """One window per sequence (all of one length), then commit: column num_accepted is the last one that stays.
        Returns hidden_BTH."""
        sequences = self.sequences[: len(windows)]
        num_tokens = len(windows[0])
        inert = [[0] * num_tokens] * num_inert
        width = max(len(s.pages) for s in sequences)
        hidden_BTH = self.model.verify(
            VerifyBatch(
                tokens_BT=self._tensor([*map(list, windows), *inert]),
                length_B=self._tensor([*(s.length for s in sequences), *[0] * num_inert]),
                read_row_B=self._tensor([*(s.read_row for s in sequences), *[ZERO_ROW] * num_inert]),
                write_rows_BT=self._tensor(
                    [*(s.rows[:num_tokens] for s in sequences), *[[SCRATCH_ROW] * num_tokens] * num_inert]
                ),
                page_table_BP=self._tensor(
                    [*(s.pages for s in sequences), *[[SCRATCH_PAGE] * width] * num_inert], torch.int32
                ),
            )
        )
        for sequence, accepted in zip(sequences, num_accepted, strict=True):
            sequence.read_row = sequence.rows[accepted]
            sequence.length += accepted + 1
            # The row of the committed state goes last, so that the next window overwrites it only after reading it.
            sequence.rows.append(sequence.rows.pop(accepted))
        return hidden_BTH[: len(windows)]

    def mtp_prefill(
        self, tokens: Sequence[int], hidden_NH: Tensor, sizes: Iterable[int] = (), *, which: int = 0
    ) -> None:
        """MTP keys and values of a prompt, in chunks; hidden_NH[t] belongs to tokens[t]."""
        pages = self.sequences[which].pages
        start = 0
        for size in [*sizes, len(tokens)]:
            chunk = tokens[start : start + size]
            if not chunk:
                break
            first = self.model.read_hidden(self._tensor([ZERO_ROW])) if start == 0 else hidden_NH[start - 1 : start]
            previous = torch.cat([first, hidden_NH[start : start + len(chunk) - 1]])
            run = Run(token_ids=chunk, start=start, state_writes=((len(chunk), SCRATCH_ROW),), page_ids=pages)
            self.model.mtp_prefill(self._batch([run]), previous)
            start += len(chunk)

    def mtp(
        self, tokens: Sequence[int], hidden_TH: Tensor, start: int, *, which: int = 0, last: int | None = None
    ) -> Tensor:
        """m_TH of pairs (hidden of position start-1+t, tokens[t]) beside one inert slot; of column `last` alone if
        there is one."""
        pages = self.sequences[which].pages
        m_BTH = self.model.mtp(
            self._tensor([list(tokens), [0] * len(tokens)]),
            torch.stack([hidden_TH, torch.zeros_like(hidden_TH)]),
            self._tensor([start, 0]),
            self._tensor([pages, [SCRATCH_PAGE] * len(pages)], torch.int32),
            last_B=None if last is None else self._tensor([last, 0]),
        )
        return m_BTH[0]

    def _batch(self, runs: Sequence[Run]) -> PrefillBatch:
        return batch_of(runs, self.model.device, block_tokens=self.model.spec.block_tokens)

    def _tensor(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.model.device)


def every_output(model: Qwen3_5Model, prompt: Sequence[int]) -> list[Tensor]:
    """Scores of a prompt and of a window behind it, what the MTP head makes of the window, and its scores."""
    driver = Driver(model)
    hidden_NH = driver.prefill(prompt)
    driver.mtp_prefill(prompt, hidden_NH)
    window_NH = driver.verify([[3, 1, 4]], [2])[0]
    m_NH = driver.mtp([3, 1, 4], window_NH, len(prompt))
    return [model.logits(hidden_NH), model.logits(window_NH), m_NH, model.draft_head(m_NH)]
