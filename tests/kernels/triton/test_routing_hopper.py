"""Scores of many tokens on Hopper's matrix units: any division of the features, any order in which groups of warps run;
of sums that nothing has added yet, too. On a CPU without bfloat16, whose products are then of float32."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from agentspec.kernels.triton import routing_hopper
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.variants import Machine
from tests.kernels.triton.gluon_warp_groups import ScoreGroups

pytestmark = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.get_device_capability()[0] != 9, reason="Hopper's instructions"
)
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
SIZES = (
    (1, 256, 64, 1),
    (65, 256, 512, 2),
    (130, 512, 448, 1),
    (64, 256, 384, 3),
    (63, 256, 192, 1),
    (2, 256, 64 * 5, 1),
    (66, 512, 64 * 12, 2),
)
"""(tokens, experts, features, parts). Each group of warps has no, one, two or more steps, and both as many or not."""


def operands(size: tuple[int, int, int, int], device: torch.device) -> tuple[Tensor, ...]:
    """(tokens, router, norm, product)."""
    num_tokens, num_experts, width, _ = size
    generator = torch.Generator().manual_seed(num_tokens)
    print(f"seed {num_tokens}: {size}")
    x, router = (torch.randn(rows, width, generator=generator) for rows in (num_tokens, num_experts))
    norm, product = (
        0.3 * torch.randn(width, generator=generator),
        3 * torch.randn(num_tokens, width, generator=generator),
    )
    return tuple(values.to(DTYPE).to(device) for values in (x, router, norm, product))


def score(
    x: Tensor,
    router: Tensor,
    norm: Tensor,
    split: int,
    seed: int,
    product: Tensor | None = None,
    module: ModuleType = routing_hopper,
) -> tuple[Tensor, ...]:
    """(parts, squares), and the sums if there is a product."""
    parts = torch.full((split, len(x), len(router)), torch.nan, device=x.device)
    squares = torch.full((split, len(x)), torch.nan, device=x.device)
    run: Any = ScoreGroups(seed, module).score if INTERPRETED else routing_hopper.score
    if product is None:
        run(x, router, norm, parts, squares)
        return parts, squares
    # One more row: the sums of tokens that there aren't are not stored.
    summed = torch.full((len(x) + 1, x.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    run(x, router, norm, parts, squares, product, summed[:-1])
    assert summed[-1].isnan().all()
    return parts, squares, summed[:-1]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_scores_match_float64(size: tuple[int, int, int, int], device: torch.device) -> None:
    """Almost as precisely as float32 would: one bfloat16 for the input times the gain would be off by 2e-3."""
    (x, router, norm, _), split, seed = operands(size, device), size[-1], size[0]
    expected = x.double() * (1.0 + norm.double()) @ router.double().t()
    got = [score(x, router, norm, split, seed=10 * seed + i) for i in range(2)]
    parts, squares = got[0]
    assert ((parts.double().sum(0) - expected).norm() / expected.norm()).item() < 2e-5
    assert torch.allclose(squares.double().sum(0), x.double().square().sum(1), rtol=1e-5)
    assert torch.equal(parts, got[1][0]), "other bits in another order of warp groups"
    assert torch.equal(squares, got[1][1])


@pytest.mark.parametrize("size", [*SIZES, (129, 256, 64 * 11, 1)], ids=str)
def test_sums_have_the_bits_of_an_addition_before(size: tuple[int, int, int, int], device: torch.device) -> None:
    """Also where one step is all, and where the last has the stage of an earlier one."""
    (x, router, norm, product), split, seed = operands(size, device), size[-1], size[0]
    before = x.clone(), product.clone()
    summed = x.clone().add_(product)
    expected = *score(summed, router, norm, split, seed), summed
    for i in range(3 if INTERPRETED else 20):
        got = score(x, router, norm, split, 10 * seed + i, product)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert torch.equal(x, before[0])
    assert torch.equal(product, before[1])


@pytest.mark.skipif(INTERPRETED, reason="bfloat16")
def test_sums_round_as_torch_does(device: torch.device) -> None:
    """Every exponent, ties, infinities and what is smaller than normal numbers."""
    _, router, norm, _ = operands((1, 256, 2048, 1), device)
    generator = torch.Generator().manual_seed(1)
    x, product = (
        torch.randint(-(2**15), 2**15, (512, 2048), generator=generator, dtype=torch.int16).view(DTYPE).to(device)
        for _ in range(2)
    )
    product[:256] = x[:256].flip(1) * 2.0 ** torch.arange(-8, 8, device=device)[torch.arange(2048, device=device) % 16]
    expected, (_, _, got) = x + product, score(x, router, norm, 1, 0, product)
    assert torch.equal(expected.isnan(), got.isnan())
    assert torch.equal(expected.nan_to_num(7.0).view(torch.int16), got.nan_to_num(7.0).view(torch.int16))


def score_in_many_orders(tensors: tuple[Tensor, ...], module: ModuleType) -> None:
    x, router, norm, product = tensors
    expected = (x + product).double()
    scores = expected * (1.0 + norm.double()) @ router.double().t()
    for seed in range(20):
        parts, squares, summed = score(x, router, norm, 1, seed, product, module)
        assert torch.equal(summed, x + product), "other sums"
        assert torch.allclose(parts[0].double(), scores, rtol=1e-3, atol=1e-2), "other scores"
        assert torch.allclose(squares[0].double(), expected.square().sum(1), rtol=1e-5), "other squares"


@pytest.mark.skipif(not INTERPRETED, reason="a GPU need not show that a wait is missing")
@pytest.mark.parametrize(
    ("line", "instead", "fault"),
    [
        # Of the sums.
        ("fence_async_shared()\n", "pass\n", "not yet visible"),
        ("        tma.store_wait(1)\n", "", "a copy to a buffer that still has readers"),
        ("        tma.store_wait(0)\n", "        pass\n", "that was not waited for"),
        ("0 if summed is None else 1", "0", "a copy to a buffer that still has readers"),
        (
            "mbarrier.wait(converted.index(step % _TOKEN_STAGES), step // _TOKEN_STAGES & 1)",
            "pass",
            "still has readers|more arrivals than a phase has|not yet visible",
        ),
        # Of a group's operands.
        (
            "mbarrier.wait(rows_full.index(stage), step // _ROW_STAGES & 1)",
            "pass",
            "a read of a buffer before its copy has landed",
        ),
        (
            "mbarrier.wait(tokens_full.index(next_stage), following // _TOKEN_STAGES & 1)",
            "pass",
            "a read of a buffer before its copy has landed",
        ),
        ("if step >= 2 and", "if step >= 1 and", "a copy to a buffer that still has readers"),
        # Between the groups.
        ("mbarrier.wait(given.index(1 - GROUP), 0)", "pass", "before its copy has landed|other scores"),
        ("mbarrier.arrive(given.index(GROUP), count=1)", "pass", "a deadlock"),
        (
            "given_sums.index(GROUP).store(",
            "given_sums.index(1 - GROUP).store(",
            "still has readers|before its copy has landed",
        ),
        ("given_sums.index(1 - GROUP).load(", "given_sums.index(GROUP).load(", "other scores"),
        ("own, other = upper, lower", "own, other = lower, upper", "other scores"),
        ("        squares += given_squares.load(", "        given_squares.load(", "other squares"),
    ],
)
def test_a_planted_fault_is_found(line: str, instead: str, fault: str, device: torch.device, tmp_path: Path) -> None:
    source = Path(str(routing_hopper.__file__)).read_text()
    assert source.count(line) == 1
    changed = ModuleType("changed")
    changed.__file__ = str(tmp_path / "changed.py")
    Path(changed.__file__).write_text(source.replace(line, instead))
    tensors = operands((64, 256, 64 * 9, 1), device)
    score_in_many_orders(tensors, routing_hopper)
    with pytest.raises((InterpreterError, AssertionError), match=fault):
        score_in_many_orders(tensors, changed)


def test_features_are_divided_while_programs_fit() -> None:
    splits = [routing_hopper.split_of(num_tokens, 256, 2048, 132) for num_tokens in (257, 800, 2048, 4096, 8192)]
    assert splits == [8, 8, 4, 2, 1]
    assert routing_hopper.split_of(257, 512, 3072, 132) == 8
    assert routing_hopper.split_of(257, 256, 192, 132) == 1


def test_widths_whose_gains_fit_into_shared_memory_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = Machine(capability=(9, 0), num_multiprocessors=132)
    monkeypatch.setattr(routing_hopper, "INTERPRETED", False)
    monkeypatch.setattr(routing_hopper, "machine_of", lambda _: hopper)

    def is_supported(width: int) -> bool:
        x, router = (torch.zeros(rows, width, dtype=torch.bfloat16) for rows in (1, 256))
        return routing_hopper.is_supported(x, router, x[0])

    assert [width for width in (2048, 2080, 3072, 4096, 4160, 8192) if is_supported(width)] == [2048, 3072, 4096]
