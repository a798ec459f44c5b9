"""A prompt pass and decode windows that a model can compute together or separately."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from agentspec.models.protocol import VerifyBatch
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.runtime.prefill_tables import PrefillSizes
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW
from tests.fakes.prompt_run import Run, batch_of
from tests.fakes.sequence_driver import Driver

COLUMNS = 4
PADDED = PrefillSizes(num_tokens=128, num_spans=4, num_blocks=10, num_pages=6)


class RiddenPass:
    """A prompt that continues, a new one, and the windows of two other sequences beside an inert slot, over a poisoned
    model."""

    num_tokens = 89
    """Of both prompts."""

    def __init__(self, model: Qwen3_5Model, prompt: Sequence[int], sizes: PrefillSizes | None = None) -> None:
        """prompt: at least 120 and fewer than 160 tokens."""
        self.model = model
        self.driver = Driver(model, num_sequences=4, seed=7)
        words = random.Random(1)
        for which, length in ((0, 70), (1, 33), (2, 64)):
            self.driver.prefill(prompt[which : which + length], which=which)
        resumed, fresh = self.driver.sequences[2], self.driver.sequences[3]
        self.prompts = batch_of(
            [
                Run(
                    token_ids=prompt[66:120],
                    start=64,
                    read_row=resumed.read_row,
                    state_writes=((54, resumed.rows[0]),),
                    page_ids=resumed.pages,
                ),
                Run(
                    token_ids=prompt[5:40],
                    state_writes=((10, fresh.rows[1]), (35, fresh.rows[0])),
                    page_ids=fresh.pages,
                ),
            ],
            model.device,
            sizes=sizes,
        )
        slots = self.driver.sequences[:2]
        width = len(slots[0].pages)
        self.windows = VerifyBatch(
            tokens_BT=self._tensor([[words.randrange(160) for _ in range(COLUMNS)] for _ in range(3)]),
            length_B=self._tensor([*(slot.length for slot in slots), 0]),
            read_row_B=self._tensor([*(slot.read_row for slot in slots), ZERO_ROW]),
            # The first slot's read row is one of its write rows, as after a step that accepted nothing.
            write_rows_BT=self._tensor(
                [slots[0].rows[:COLUMNS], slots[1].rows[1 : COLUMNS + 1], [SCRATCH_ROW] * COLUMNS]
            ),
            page_table_BP=self._tensor([*(slot.pages for slot in slots), [SCRATCH_PAGE] * width], torch.int32),
        )

    def apart(self) -> list[Tensor]:
        """Run both separately; returns the hiddens of the prompts and of the windows, then `storage`."""
        return [
            self.model.prefill(self.prompts)[: self.num_tokens],
            self.model.verify(self.windows)[:2],
            *self.storage(),
        ]

    def ridden(self) -> list[Tensor]:
        hidden_NH, hidden_BTH = self.model.ride(self.prompts, self.windows)
        assert (len(hidden_NH), hidden_BTH.shape[:2]) == (len(self.prompts.token_ids_N), (3, COLUMNS))
        return [hidden_NH[: self.num_tokens], hidden_BTH[:2], *self.storage()]

    def storage(self) -> list[Tensor]:
        """All rows and pages but scratch; what was never written is zero."""
        pools = self.model.pools
        rows = [
            pools["ssm_LRVDK"][:, SCRATCH_ROW + 1 :],
            pools["conv_LR3C"][:, SCRATCH_ROW + 1 :],
            pools.hidden_RH[SCRATCH_ROW + 1 :],
        ]
        return [tensor.nan_to_num(0.0) for tensor in (*rows, pools["kv_AP2SGD"][:, SCRATCH_PAGE + 1 :])]

    def _tensor(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.model.device)
