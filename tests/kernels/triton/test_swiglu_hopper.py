"""Gate and up of many tokens with SwiGLU in one launch: any division of the pieces between programs, any order in which
groups of warps run. On a CPU without bfloat16, whose products are then of float32."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from triton.runtime.errors import InterpreterError

from agentspec.kernels.triton import swiglu_hopper
from agentspec.kernels.triton.launch import INTERPRETED
from tests.kernels.triton.gluon_warp_groups import SwigluGroups

pytestmark = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's instructions"
)
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOLERANCE = 2e-6 if INTERPRETED else 3e-3
SIZES = ((1, 128, 128), (65, 256, 384), (300, 384, 64), (130, 128, 512))
"""(tokens, outputs, columns)."""


def operands(num_tokens: int, width: int, depth: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(x, gate and up, their product in float64 with SwiGLU)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, depth, generator=generator).to(DTYPE).to(device)
    weight = (torch.randn(2 * width, depth, generator=generator) * depth**-0.5).to(DTYPE).to(device)
    gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
    print(f"seed {seed}: {num_tokens} tokens, {width} outputs, {depth} columns")
    return x, weight, silu(gate) * up


def product(x: Tensor, weight: Tensor, programs: int, seed: int) -> Tensor:
    run: Any = SwigluGroups(seed).product if INTERPRETED else swiglu_hopper.product
    got: Tensor = run(x, weight, programs)
    return got


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_products_match_float64(programs: int, device: torch.device) -> None:
    for seed, size in enumerate(SIZES):
        x, weight, expected = operands(*size, seed, device)
        got = [product(x, weight, programs, seed=10 * seed + i) for i in range(2)]
        error = ((got[0].double() - expected).norm() / expected.norm()).item()
        assert got[0].shape == expected.shape
        assert error < TOLERANCE, f"{size}: relative error {error}"
        assert torch.equal(*got), f"{size}: other bits in another order of warp groups"


def test_more_tokens_than_are_multiplied_with_the_same_rows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of several sets of tokens, of which the last has fewer."""
    x, weight, expected = operands(5 * 128 - 3, 384, 64, 7, device)
    groups = SwigluGroups(1) if INTERPRETED else None
    if groups is None:
        monkeypatch.setattr(swiglu_hopper, "_TILES_M", 2)
    else:
        groups.names["_TILES_M"] = 2
    got = product(x, weight, 3, 0) if groups is None else groups.product(x, weight, 3)
    assert ((got.double() - expected).norm() / expected.norm()).item() < TOLERANCE


def test_no_tokens(device: torch.device) -> None:
    x, weight, _ = operands(0, 128, 128, 0, device)
    assert product(x, weight, 2, 0).shape == (0, 128)


def test_a_product_by_hand(device: torch.device) -> None:
    """Ones: each of gate's and up's sums is known."""
    x = torch.ones(3, 64, dtype=DTYPE, device=device)
    weight = torch.cat([torch.full((128, 64), 1 / 64), torch.full((128, 64), 1 / 32)]).to(DTYPE).to(device)
    expected = 2 / (1 + math.exp(-1.0))
    assert torch.allclose(product(x, weight, 1, 0).double().cpu(), torch.tensor(expected).double(), rtol=4e-3)


def run_in_many_orders(module: ModuleType, x: Tensor, weight: Tensor) -> None:
    for seed in range(20):
        SwigluGroups(seed, module).product(x, weight, 1)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU need not show that a wait is missing")
@pytest.mark.parametrize(
    ("line", "instead", "fault"),
    [
        ("mbarrier.wait(full.index(stage), turn // _STAGES & 1)", "pass", "a read of a buffer before its copy"),
        ("mbarrier.wait(empty.index(stage), (turn // _STAGES & 1) ^ 1)", "pass", "more arrivals than a phase has"),
        ("warpgroup_mma_wait(1, deps=[sums])", "warpgroup_mma_wait(2, deps=[sums])", "a copy to a buffer that still"),
        ("sums = warpgroup_mma_wait(0, deps=[sums])", "pass", "of a product before it was waited for"),
        ("        tma.store_wait(0)\n        warp", "        warp", "a store to a buffer that still"),
        ("fence_async_shared()\n", "pass\n", "not yet visible"),
        ("    tma.store_wait(0)\n\n", "\n", "that was not waited for"),
    ],
)
def test_a_planted_fault_is_found(line: str, instead: str, fault: str, device: torch.device, tmp_path: Path) -> None:
    source = Path(str(swiglu_hopper.__file__)).read_text()
    assert source.count(line) == 1
    changed = ModuleType("changed")
    changed.__file__ = str(tmp_path / "changed.py")
    Path(changed.__file__).write_text(source.replace(line, instead))
    x, weight, _ = operands(140, 256, 640, 3, device)
    with pytest.raises(InterpreterError, match=fault):
        run_in_many_orders(changed, x, weight)
