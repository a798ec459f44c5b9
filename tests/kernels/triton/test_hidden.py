"""The kernel that saves hiddens against the reference: every row of the pool, bit for bit."""

from __future__ import annotations

import pytest
import torch

from agentspec.kernels import reference
from agentspec.kernels.triton.hidden import save_hidden
from agentspec.runtime.prefill_tables import PrefillSizes
from tests.fakes.prompt_run import Run, batch_of


@pytest.mark.parametrize("width", [48, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_last_hidden_of_block_is_stored_to_save_rows(width: int, dtype: torch.dtype, device: torch.device) -> None:
    runs = [
        Run(token_ids=range(70), state_writes=((64, 9), (70, 4)), page_ids=(1, 2)),
        Run(token_ids=range(3), start=5, read_row=7, state_writes=((1, 7), (3, 2), (3, 3)), page_ids=(3,)),
    ]
    batch = batch_of(runs, device, sizes=PrefillSizes(num_tokens=80, num_spans=4, num_blocks=7, num_pages=3))
    rng = torch.Generator().manual_seed(width)
    hidden_NH = torch.randn(80, width + 8, generator=rng).to(device, dtype)[:, :width]
    hidden_NH[73:] = torch.nan
    pool = torch.randn(11, width, generator=rng).to(device, dtype)
    expected = pool.clone()
    reference.save_hidden(hidden_NH, expected, batch)
    save_hidden(hidden_NH, pool, batch)
    assert torch.equal(pool, expected)
