"""The Triton RMS norms against the reference: odd sizes, leading shapes, strided rows, and unchanged pool rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentspec.kernels.backend import Norm
from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import norms
from agentspec.types import SCRATCH_ROW
from tests.fakes.compare import relative_error
from tests.kernels.triton.poison import poison

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""One rounding of the result, largest difference over largest value. The interpreter truncates bfloat16 instead of
rounding."""


def randn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm_of(width: int, *, seed: int, device: torch.device, dtype: torch.dtype) -> Norm:
    return Norm(weight=randn(width, seed=seed, device=device, dtype=dtype), eps=1e-6)


def check_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    x = randn(*shape, seed=1, device=device, dtype=dtype)
    norm = norm_of(shape[-1], seed=2, device=device, dtype=dtype)
    got = norms.rms_norm(x, norm)
    assert got.dtype == dtype
    assert relative_error(got, reference.rms_norm(x, norm)) < TOLERANCES[dtype], f"{shape} {dtype}"


def check_norm_to_rows(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows in any order, one in three to the scratch row; no other row of the pool changes."""
    seed = num_tokens * width
    x_NH, norm = (
        randn(num_tokens, width, seed=seed, device=device, dtype=dtype),
        norm_of(width, seed=2, device=device, dtype=dtype),
    )
    rows_N = (
        torch.randperm(2 * num_tokens + 1, generator=torch.Generator().manual_seed(seed))[:num_tokens] + SCRATCH_ROW + 1
    )
    rows_N[::3] = SCRATCH_ROW
    hidden_RH = poison(torch.empty(2 * num_tokens + 3, width, dtype=dtype, device=device))
    got = norms.norm_to_rows(x_NH, norm, hidden_RH, rows_N.to(device))
    assert relative_error(got, reference.rms_norm(x_NH, norm)) < TOLERANCES[dtype], f"{num_tokens}x{width} {dtype}"
    is_own = rows_N != SCRATCH_ROW
    assert torch.equal(hidden_RH[rows_N[is_own].to(device)], got[is_own.to(device)])
    untouched = sorted(set(range(len(hidden_RH))) - set(rows_N.tolist()))
    assert hidden_RH[untouched].isnan().all()


def check_pair_norms(num_tokens: int, width: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    embedding_VH = randn(vocab_size, width, seed=3, device=device, dtype=dtype)
    hidden_NH = randn(num_tokens, 2 * width, seed=4, device=device, dtype=dtype)[:, width:]
    tokens_N = torch.randint(vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(5)).to(device)
    pair = (
        norm_of(width, seed=6, device=device, dtype=dtype),
        Norm(weight=randn(width, seed=7, device=device, dtype=dtype), eps=1e-2),
    )
    got, expected = (backend.pair_norms(tokens_N, embedding_VH, hidden_NH, *pair) for backend in (norms, reference))
    assert got.dtype == dtype
    for half in (slice(0, width), slice(width, 2 * width)):
        assert relative_error(got[:, half], expected[:, half]) < TOLERANCES[dtype], f"{num_tokens}x{width} {dtype}"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(64,), (3, 63), (2, 5, 32), (7, 1, 256), (0, 64), (2, 2560), (1, 5120)], ids=str)
def test_rms_norm_matches_reference(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if 0 in shape:
        empty = torch.empty(shape, dtype=dtype, device=device)
        assert norms.rms_norm(empty, norm_of(shape[-1], seed=2, device=device, dtype=dtype)).shape == shape
    else:
        check_rms_norm(shape, dtype, device)


def test_rms_norm_of_strided_rows_is_batch_invariant(device: torch.device) -> None:
    wide = randn(9, 100, seed=1, device=device, dtype=torch.float32)
    norm = norm_of(48, seed=2, device=device, dtype=torch.float32)
    together = norms.rms_norm(wide[:, 20:68], norm)
    assert relative_error(together, reference.rms_norm(wide[:, 20:68], norm)) < TOLERANCES[torch.float32]
    for n in range(9):
        assert torch.equal(norms.rms_norm(wide[n, 20:68], norm), together[n])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (8, 63), (40, 32), (3, 1500)])
def test_final_norm_writes_only_its_rows(num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    check_norm_to_rows(num_tokens, width, dtype, device)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (5, 63), (3, 1500)])
def test_pair_norms_uses_own_norm_for_each_half(
    num_tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    check_pair_norms(num_tokens, width, 11, dtype, device)
