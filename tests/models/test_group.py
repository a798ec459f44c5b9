"""Two ranks compute the outputs of a single process, with bit-identical results on both ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels import Norm, Plain, reference, within
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.compare import relative_error
from tests.models.rank_process import outputs

RANKS = 2
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "mixture": ("moe", {}),
    "mixture, packed projections": ("next", {}),
    "8 bits": ("dense", {"fp8": "stored"}),
    "one key head for both": ("dense", {"num_key_value_heads": 1}),
}
TOLERANCE = 1e-5
"""float32: only the order of the sums differs."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with the saved outputs of two processes. Heads are tied: an untied head would be split, and its
    scores would have to be gathered."""
    found = {}
    for name, (family, options) in MODELS.items():
        found[name] = write_checkpoint(
            tmp_path_factory.mktemp("model"), family, num_hidden_layers=4, tied=True, **options
        )
    command = [sys.executable, "-m", "tests.models.rank_process"]
    paths, environment = (
        list(map(str, found.values())),
        os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
    )
    processes = [subprocess.Popen([*command, str(rank), str(RANKS), *paths], env=environment) for rank in range(RANKS)]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0] * RANKS
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_match_single_process(name: str, directories: dict[str, Path]) -> None:
    ranks: list[dict[str, Tensor]] = [torch.load(directories[name] / f"rank-{rank}.pt") for rank in range(RANKS)]
    with torch.inference_mode():
        alone = outputs(directories[name])
    for what, expected in alone.items():
        assert torch.equal(ranks[0][what], ranks[1][what]), f"{what}: ranks differ"
        if expected.dtype == torch.int64:
            assert torch.equal(ranks[0][what], expected), what
        else:
            real = expected.isfinite()
            assert torch.equal(ranks[0][what].isfinite(), real), what
            assert relative_error(ranks[0][what][real], expected[real]) < TOLERANCE, what


class Pretended:
    """A group in which all other ranks have the same partial sums."""

    def __init__(self, size: int) -> None:
        self.size = size

    def add_partial(
        self, residual_NH: Tensor, partial_NH: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        """The norm is that of another residual: it shows where it was used."""
        x_NH = residual_NH + self.size * partial_NH
        return x_NH, None if next_norm is None else reference.rms_norm(-x_NH, next_norm)


def test_group_of_one_uses_plain_backend() -> None:
    assert within(None, reference) is reference
    assert within(Pretended(1), reference) is reference


def test_group_reduces_only_residual_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, values = (torch.randn(size, generator=generator) for size in ((3, 8), (3, 5), (5, 8)))
    ops = within(Pretended(4), reference)
    assert torch.equal(ops.linear(x, Plain(values)), x @ values.T)
    torch.testing.assert_close(ops.add_linear(residual, x, Plain(values)), residual + 4 * (x @ values.T))


def test_norm_that_came_with_the_sum_is_used_for_that_sum_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, out, following, extra = (
        torch.randn(size, generator=generator) for size in ((3, 8), (3, 5), (5, 8), (7, 5), (2, 5))
    )
    norm, other = (Norm(weight=torch.randn(5, generator=generator), eps=1e-6) for _ in range(2))
    ops = within(Pretended(4), reference)
    sum_NH = ops.add_linear(residual, x, Plain(out), norm)
    for same_NH in (sum_NH.clone(), sum_NH):
        expected = reference.norm_linear(same_NH, other, Plain(following), extra)
        torch.testing.assert_close(ops.norm_linear(same_NH, other, Plain(following), extra), expected)
    expected = reference.norm_linear(-sum_NH, norm, Plain(following), extra)
    torch.testing.assert_close(ops.norm_linear(sum_NH, norm, Plain(following), extra), expected)
    torch.testing.assert_close(ops.norm_linear(sum_NH.clone(), norm, Plain(following), extra), -expected)
    without_NH = ops.add_linear(residual, x, Plain(out))
    expected = reference.norm_linear(without_NH, norm, Plain(following))
    torch.testing.assert_close(ops.norm_linear(without_NH, norm, Plain(following)), expected)
