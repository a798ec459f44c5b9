"""Work sharing of a prompt's attention: every unit belongs to one program, and costs are about equal, including each
tile's own cost."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton import prefill_line
from agentspec.kernels.triton.prefill_attention import _share

TILE_COST = prefill_line.TILE_COST.value
LONGEST = 900
"""Most units of a tile in excess of a share."""


@triton.jit
def _shares_kernel(cuts_C2, line_4I, most_tiles, num_programs):  # type: ignore[no-untyped-def]
    begin, end = _share(line_4I, most_tiles, tl.program_id(0), num_programs)
    tl.store(cuts_C2 + 2 * tl.program_id(0), begin)
    tl.store(cuts_C2 + 2 * tl.program_id(0) + 1, end)


def shares(units: list[int], num_programs: int, room: int, device: torch.device) -> list[list[int]]:
    """Return [first unit, one past the last] of every program, for tiles with these numbers of units; `room`: places
    of the line after them."""
    starts = [sum(units[:tile]) for tile in range(len(units) + 1)]
    line = torch.tensor(starts + [starts[-1]] * room, dtype=torch.int32, device=device)
    line_4I: Tensor = line.expand(4, -1).contiguous()
    cuts_C2 = torch.full((num_programs, 2), -1, dtype=torch.int32, device=device)
    _shares_kernel[(num_programs,)](cuts_C2, line_4I, line.numel() - 1, num_programs)
    found: list[list[int]] = cuts_C2.tolist()
    return found


@pytest.mark.parametrize("seed", range(6))
def test_shares_cover_every_unit_with_equal_cost(seed: int, device: torch.device) -> None:
    rng = random.Random(seed)
    for num_programs in (1, 5, 132):
        units = [rng.choice((1, 2, rng.randint(1, 40), rng.randint(1, LONGEST))) for _ in range(rng.randint(1, 70))]
        text = f"seed {seed}: {num_programs} programs, tiles of {units}"
        starts = [sum(units[:tile]) for tile in range(len(units))]
        used = [share for share in shares(units, num_programs, rng.choice((0, 3)), device) if share[0] < share[1]]
        assert [unit for begin, end in used for unit in range(begin, end)] == list(range(sum(units))), text
        fair = (sum(units) + TILE_COST * len(units)) / min(num_programs, -(-sum(units) // 4))
        costs = [end - begin + TILE_COST * sum(begin <= start < end for start in starts) for begin, end in used]
        assert max(costs) <= fair + TILE_COST + 1, text


def test_empty_line_gives_empty_shares(device: torch.device) -> None:
    assert all(begin == end for begin, end in shares([], 4, 3, device))
