"""Live columns of windows as `open_window` gives them, for chosen counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from agentspec.kernels.slots import LiveColumns


def live_columns(
    counts: Sequence[int],
    *,
    num_columns: int,
    num_rows: int,
    entries_BT: Tensor | None = None,
    scratch_entry: int = 0,
    device: torch.device | str = "cpu",
) -> LiveColumns:
    """counts: live columns of each slot, 0 for an inert one; at most num_columns each and num_rows in all. entries_BT:
    None: there are no rings. scratch_entry: for dead rows. Tokens are 0."""
    first = [0, *accumulate(counts)]
    cells = [slot * num_columns + t for slot, count in enumerate(counts) for t in range(count)]
    num_dead = num_rows - len(cells)
    assert num_dead >= 0
    entries = [0] * len(cells) if entries_BT is None else entries_BT.flatten()[cells].tolist()
    rows = [
        [min(begin + min(t, max(count - 1, 0)), num_rows - 1) for t in range(num_columns)]
        for begin, count in zip(first, counts, strict=False)
    ]
    fields = {
        "first_B": first[:-1],
        "count_B": list(counts),
        "row_BT": rows,
        "cell_N": cells + [0] * num_dead,
        "token_N": [0] * num_rows,
        "entry_N": entries + [scratch_entry] * num_dead,
    }
    return LiveColumns(**{name: torch.tensor(values, device=device) for name, values in fields.items()})
