"""One column of each window, of two tensors, against the reference: bit for bit."""

from __future__ import annotations

import pytest
import torch

from agentspec.kernels import reference
from agentspec.kernels.triton.window_columns import take_columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("columns", "widths"), [([2, 0, 3], (48, 1100)), ([0], (1024, 24)), ([15, 7], (2049, 2048))])
def test_own_column_of_each_slot_is_taken(
    columns: list[int], widths: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of the first tensor are a part of wider ones."""
    num_rows = len(columns) * (max(columns) + 1)
    rng = torch.Generator().manual_seed(num_rows)
    x_NH, y_NX = (torch.randn(num_rows, width + 8, generator=rng).to(device, dtype) for width in widths)
    arguments = x_NH[:, : widths[0]], y_NX[:, : widths[1]].contiguous(), torch.tensor(columns, device=device)
    for got, expected in zip(take_columns(*arguments), reference.take_columns(*arguments), strict=True):
        assert torch.equal(got, expected)
