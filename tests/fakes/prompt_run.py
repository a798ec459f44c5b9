"""Prompt runs made by hand, and the batch that a prefill gets of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentspec.kernels import PrefillBatch
from agentspec.runtime.prefill_tables import PrefillSizes, build_tables
from agentspec.types import BLOCK_TOKENS


@dataclass(frozen=True, kw_only=True)
class Run:
    """prefill_tables.PromptRun."""

    token_ids: Sequence[int]
    start: int = 0
    read_row: int = 0
    state_writes: tuple[tuple[int, int], ...]
    page_ids: Sequence[int] = ()


def batch_of(
    runs: Sequence[Run],
    device: torch.device | str = "cpu",
    *,
    block_tokens: int = BLOCK_TOKENS,
    sizes: PrefillSizes | None = None,
) -> PrefillBatch:
    return build_tables(runs, block_tokens=block_tokens, sizes=sizes).on(torch.device(device)).batch
