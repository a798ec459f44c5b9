"""The kernels that store hiddens to rows against the reference: every row of the pool, bit for bit."""

from __future__ import annotations

import pytest
import torch

from agentspec.kernels import reference
from agentspec.kernels.slots import RingWindow
from agentspec.kernels.triton.hidden import fold_hidden, save_hidden
from agentspec.runtime.prefill_tables import PrefillSizes
from agentspec.types import SCRATCH_ROW
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


@pytest.mark.parametrize("width", [48, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_before_fold_length_is_stored_to_fold_row(width: int, dtype: torch.dtype, device: torch.device) -> None:
    """The third slot folds nothing, the last one is the padding slot."""
    fold_length, fold_row = [32, 16, 48, 0], [5, 7, SCRATCH_ROW, SCRATCH_ROW]
    rng = torch.Generator().manual_seed(width)
    hidden_SCH = torch.randn(5, 23, width, generator=rng).to(device, dtype)
    pool = torch.randn(9, width, generator=rng).to(device, dtype)
    expected = pool.clone()
    integers = [torch.tensor(values, device=device) for values in ([3, 0, 1, 4], [34, 18, 50, 0], [16, 11, 48, 0])]
    window = RingWindow(
        slot_B=integers[0],
        start_B=integers[1],
        read_length_B=integers[2],
        fold_length_B=torch.tensor(fold_length, device=device),
        fold_row_B=torch.tensor(fold_row, device=device),
        entries_BT=torch.zeros(4, 1, dtype=torch.int64, device=device),
    )
    reference.fold_hidden(expected, hidden_SCH, window)
    fold_hidden(pool, hidden_SCH, window)
    kept = torch.arange(9, device=device) != SCRATCH_ROW
    assert torch.equal(pool[kept], expected[kept])
    assert not torch.equal(pool[5], pool[7])
