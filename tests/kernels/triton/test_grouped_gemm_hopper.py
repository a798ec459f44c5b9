"""The experts' down-projection for Hopper under the interpreter: runs of several tiles with weights that stay, experts
with any number of pairs, any order in which groups of warps run. Operands are such that every sum is exact.

On a GPU both products are compared with Triton's: tests/gpu/test_grouped_gemm_on_hopper.py."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from agentspec.kernels.triton import expert_groups, grouped_gemm_hopper
from agentspec.kernels.triton.expert_groups import ExpertGroups, group_pairs
from agentspec.kernels.triton.fp8_activations import ScaledTokens
from agentspec.kernels.triton.launch import INTERPRETED, arrival_counters
from agentspec.kernels.weights import FP8, BlockScaled
from tests.kernels.triton.gluon_warp_groups import DownGroups

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a GPU need not show that a wait is missing")
SIZES = (128, 0, 1, 300, 64, 65, 513)
"""Pairs of each expert: the last has more than a run."""


class Case:
    """Two choices a token. sizes: pairs of each expert; is_held: whether the last expert is there."""

    def __init__(self, sizes: tuple[int, ...], steps: int, *, is_held: bool = True, outputs: int = 256) -> None:
        generator = torch.Generator().manual_seed(steps)

        def integers(*shape: int) -> Tensor:
            return torch.randint(-3, 4, shape, generator=generator).float()

        def powers(*shape: int) -> Tensor:
            return 2.0 ** torch.randint(-1, 2, shape, generator=generator)

        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        ids = ids[torch.randperm(len(ids), generator=generator)][: len(ids) // 2 * 2].view(-1, 2)
        num_held, num_pairs, depth = len(sizes) - (not is_held), ids.numel(), 128 * steps
        self.groups: ExpertGroups = group_pairs(ids.int().contiguous(), num_held, 128, all_held=is_held)
        self.h = ScaledTokens(values_RK=integers(num_pairs, depth).to(FP8), scales_GR=powers(steps, num_pairs))
        self.weight = BlockScaled(
            values=integers(num_held, outputs, depth).to(FP8), scales=powers(num_held, outputs // 128, steps)
        )
        self.weights_NJ = powers(*ids.shape)
        h = self.h.values_RK.float() * self.h.scales_GR.t().repeat_interleave(128, 1)
        parts = torch.zeros(num_pairs, outputs)
        pairs_P = self.groups.pairs_P.long()
        for expert, weight in enumerate(self.weight.dequantize()):
            is_mine = ids.flatten()[pairs_P] == expert
            parts[pairs_P[is_mine]] = h[is_mine] @ weight.t()
        self.expected = parts.view(*ids.shape, outputs) * self.weights_NJ[:, :, None]

    def check(self, groups: DownGroups) -> None:
        got = groups.down(self.h, self.weight, self.groups, self.weights_NJ, torch.float32)
        assert torch.equal(got, self.expected)
        assert not arrival_counters(got.device).any()


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("pairs_of_one_launch", [0, 100_000], ids=["no gaps", "gaps"])
@pytest.mark.parametrize("steps", [1, 3, 4, 8])
def test_down_is_exact(steps: int, pairs_of_one_launch: int, is_held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_groups, "_PAIRS_OF_ONE_LAUNCH", pairs_of_one_launch)
    Case(SIZES, steps, is_held=is_held).check(DownGroups(seed=steps))


def test_any_order_of_warp_groups() -> None:
    case = Case((1, 300), 4, outputs=512)
    for seed in range(10):
        case.check(DownGroups(seed))


def test_experts_that_are_not_there_may_have_all_pairs() -> None:
    Case((0, 0, 300), 4, is_held=False).check(DownGroups())


def run_in_many_orders(module: ModuleType) -> None:
    cases = [Case((1, 300), steps, outputs=512) for steps in (1, 3, 8)]
    for seed in range(20):
        for case in cases:
            case.check(DownGroups(seed, module))


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("_TILES = gl.constexpr(8)", "_TILES = gl.constexpr(2)"),
        ("stay = depth <= _STEPS * SCALE_BLOCK", "stay = True"),
        ("            weight_turn += num_steps\n", "            weight_turn += 0\n"),
    ],
    ids=["too few descriptions", "weights without room stay", "weights that overwrite others"],
)
def test_a_planted_fault_is_found(line: str, instead: str, tmp_path: Path) -> None:
    source = Path(str(grouped_gemm_hopper.__file__)).read_text()
    assert source.count(line) == 1
    changed = ModuleType("changed")
    changed.__file__ = str(tmp_path / "changed.py")
    Path(changed.__file__).write_text(source.replace(line, instead))
    with pytest.raises((AssertionError, InterpreterError)):
        run_in_many_orders(changed)
    # A program that has failed leaves them to the next kernel.
    arrival_counters(torch.device("cpu")).zero_()
