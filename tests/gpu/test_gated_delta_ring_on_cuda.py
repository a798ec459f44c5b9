"""The recurrent mixer's kernel for slots with rings, compiled, at served shapes: the interpreter's checks."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.test_kernels_at_served_shapes import RECURRENT
from tests.kernels.triton import test_gated_delta_ring as checks
from tests.kernels.triton.poison import poison_new_memory

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize("num_columns", [1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize("model", RECURRENT)
def test_ring_step_matches_reference(model: str, num_columns: int, cuda: torch.device) -> None:
    checks.check_against_reference(RECURRENT[model], checks.MIXED, num_columns, cuda, seed=num_columns)
    checks.check_against_reference(RECURRENT[model], ["fold"], num_columns, cuda, seed=100 + num_columns)


@pytest.mark.parametrize("model", RECURRENT)
def test_ring_step_of_32_slots_matches_reference(model: str, cuda: torch.device) -> None:
    checks.check_against_reference(RECURRENT[model], checks.MIXED * 4, 4, cuda, seed=1)


@pytest.mark.parametrize("model", RECURRENT)
def test_ring_step_is_batch_invariant(model: str, cuda: torch.device) -> None:
    checks.check_bits(RECURRENT[model], 4, cuda, seed=2)
    checks.check_bits(RECURRENT[model], 16, cuda, seed=3)


@pytest.mark.parametrize("model", RECURRENT)
def test_ring_step_does_not_depend_on_the_tiling(model: str, cuda: torch.device) -> None:
    checks.check_tilings(RECURRENT[model], 4, cuda, seed=4)
    checks.check_tilings(RECURRENT[model], 16, cuda, seed=5)


@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("model", RECURRENT)
def test_rings_equal_rows(model: str, width: int, cuda: torch.device) -> None:
    checks.check_windows(RECURRENT[model], width, 3, 200, cuda, seed=width)
