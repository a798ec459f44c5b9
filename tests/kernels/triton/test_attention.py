"""attention_step in Triton against the reference, with NaN in every place that must not be read, permuted pages, inert
slots and odd sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels import reference
from agentspec.kernels.backend import AttentionWeights, Norm, RopeTable
from agentspec.kernels.reference import fused
from agentspec.kernels.slots import LiveColumns
from agentspec.kernels.triton import attention
from agentspec.kernels.triton.attention import attention_step
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.types import SCRATCH_PAGE
from tests.fakes import fp8_pool
from tests.fakes.compare import relative_error
from tests.fakes.live_columns import live_columns

MOST_ROUNDED = 0.1
"""Share of keys in FP8 that another order of sums in 16 bits may round to the next 8-bit float."""
FP8_STEP = 1 / 8
"""Between two such neighbours, of the smaller one, at most."""
FP8_TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.03, torch.bfloat16: 0.03}
"""Of a prompt's outputs over such keys."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Against the reference in float32 on the same inputs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    starts: tuple[int | None, ...]
    """Position of column 0 of every slot; None: an inert slot."""
    num_columns: int
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    half_rope: int = 4
    page_tokens: int = 16
    first_position: int = 0
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    """Keys and values are in FP8."""
    seed: int = 0
    counts: tuple[int, ...] = ()
    """Live columns of each slot, 0 for an inert one; empty: all are."""
    num_dead: int = 0
    """Dead rows behind the live columns."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    projected_NP: Tensor
    weights: AttentionWeights
    rope: RopeTable
    kv_P2SGD: Tensor
    page_table_BP: Tensor
    start_B: Tensor
    exponent_P2GS: Tensor | None = None
    live: LiveColumns | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Inputs:
        return Inputs(
            projected_NP=self.projected_NP.to(device, dtype),
            weights=weights_on(device, self.weights, dtype),
            rope=rope_on(device, self.rope),
            kv_P2SGD=self.kv_P2SGD.to(device, dtype if self.exponent_P2GS is None else None, copy=True),
            page_table_BP=self.page_table_BP.to(device),
            start_B=self.start_B.to(device),
            exponent_P2GS=None if self.exponent_P2GS is None else self.exponent_P2GS.to(device, copy=True),
            live=None
            if self.live is None
            else LiveColumns(**{name: getattr(self.live, name).to(device) for name in LiveColumns.__slots__}),
        )

    @property
    def pool(self) -> Tensor:
        """The pool's numbers, on the CPU, whatever its form."""
        return fp8_pool.plain(self.kv_P2SGD, self.exponent_P2GS)


def weights_on(device: torch.device | str, weights: AttentionWeights, dtype: torch.dtype | None) -> AttentionWeights:
    def norm(old: Norm) -> Norm:
        return replace(old, weight=old.weight.to(device, dtype))

    return replace(weights, q_norm=norm(weights.q_norm), k_norm=norm(weights.k_norm))


def rope_on(device: torch.device | str, rope: RopeTable) -> RopeTable:
    return RopeTable(cos_LA=rope.cos_LA.to(device), sin_LA=rope.sin_LA.to(device))


def inputs_of(case: Case) -> Inputs:
    """Inputs on the CPU. Places of the pool that no slot wrote are NaN; pages are in random order; unused table
    entries are the scratch page, which is NaN."""
    rng = torch.Generator().manual_seed(case.seed)
    lengths = [start + case.num_columns for start in case.starts if start is not None]
    num_pages = -(-max(lengths, default=1) // case.page_tokens) + 2
    pool = torch.full(
        (1 + len(case.starts) * num_pages, 2, case.page_tokens, case.num_kv_heads, case.head_dim),
        torch.nan,
        dtype=case.dtype,
    )
    table = torch.full((len(case.starts), num_pages), SCRATCH_PAGE, dtype=torch.int32)
    free = torch.randperm(len(pool) - 1, generator=rng) + 1
    for slot, start in enumerate(case.starts):
        if start is not None:
            used = -(-(start + case.num_columns) // case.page_tokens)
            table[slot, :used] = free[slot * num_pages :][:used]
            position = torch.arange(start)
            page, place = table[slot, position // case.page_tokens].long(), position % case.page_tokens
            pool[page, :, place] = torch.randn(start, 2, case.num_kv_heads, case.head_dim, generator=rng).to(case.dtype)
            if case.first_position:
                pool[table[slot, 0].long(), :, : case.first_position] = torch.nan
    width = 2 * (case.num_heads + case.num_kv_heads) * case.head_dim
    wide = torch.full((len(case.starts) * case.num_columns, width + 16), torch.nan, dtype=case.dtype)
    wide[:, :width] = torch.randn(len(wide), width, generator=rng)
    live = None
    if case.counts:
        num_live, all_columns = sum(case.counts), wide
        live = live_columns(case.counts, num_columns=case.num_columns, num_rows=num_live + case.num_dead)
        wide = torch.full((num_live + case.num_dead, width + 16), torch.nan, dtype=case.dtype)
        wide[:num_live] = all_columns[live.cell_N[:num_live]]
    norms = [Norm(weight=torch.randn(case.head_dim, generator=rng).mul(0.3).to(case.dtype), eps=1e-6) for _ in range(2)]
    angles = torch.arange(max(lengths, default=case.num_columns))[:, None] * torch.rand(case.half_rope, generator=rng)
    pools = fp8_pool.in_fp8(pool) if case.fp8 else (pool, None)
    return Inputs(
        projected_NP=wide[:, :width],
        weights=AttentionWeights(
            q_norm=norms[0],
            k_norm=norms[1],
            scale=case.head_dim**-0.5,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
        ),
        rope=RopeTable(cos_LA=angles.cos(), sin_LA=angles.sin()),
        kv_P2SGD=pools[0],
        page_table_BP=table,
        start_B=torch.tensor([start or 0 for start in case.starts]),
        exponent_P2GS=pools[1],
        live=live,
    )


def step(inputs: Inputs, case: Case) -> Tensor:
    """Run attention_step with every new buffer filled with NaN."""
    with poisoned():
        return run(attention_step, inputs, case)


def reference_step(inputs: Inputs, case: Case) -> Tensor:
    return run(reference.attention_step, inputs, case)


def run(attend: Callable[..., Tensor], inputs: Inputs, case: Case) -> Tensor:
    return attend(
        inputs.projected_NP,
        inputs.weights,
        inputs.rope,
        inputs.kv_P2SGD,
        inputs.page_table_BP,
        inputs.start_B,
        first_position=case.first_position,
        exponent_P2GS=inputs.exponent_P2GS,
        live=inputs.live,
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """Make `torch.empty` return NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _store_nothing_more(*_: object) -> None:
    """Stands in for the reference's store where the pool has the window's keys already."""


def check_step(device: torch.device, case: Case) -> None:
    """Check that outputs and stores match the reference, and that an inert slot gets zeros and stores nothing."""
    inputs = inputs_of(case)
    plain, real = inputs.to("cpu", torch.float32), inputs.to(device)
    got = step(real, case)
    want = reference_step(plain, case)
    if real.exponent_P2GS is not None:
        # A key that is rounded to the next code changes all scores of its head, which softmax amplifies: so outputs are
        # those over the keys that the kernel stored, which are compared by themselves.
        kept = replace(plain, kv_P2SGD=real.kv_P2SGD.cpu(), exponent_P2GS=real.exponent_P2GS.cpu())
        with mock.patch.object(fused, "write_kv", _store_nothing_more):
            want = reference_step(kept, case)
    counts = case.counts or (case.num_columns,) * len(case.starts)
    assert not got[sum(counts) :].any(), (case, "dead rows")
    stored = torch.zeros(real.kv_P2SGD.shape[0], case.page_tokens, dtype=torch.bool)
    for slot, start in enumerate(case.starts):
        columns = slice(sum(counts[:slot]), sum(counts[: slot + 1]))
        if start is None:
            assert not got[columns].any(), (case, slot)
        else:
            assert error(got[columns], want[columns]) < TOLERANCE[case.dtype], (case, slot)
            position = torch.arange(start, start + counts[slot])
            stored[inputs.page_table_BP[slot, position // case.page_tokens].long(), position % case.page_tokens] = True
    pool, before, expected = (each.pool.transpose(1, 2) for each in (real, inputs, plain))
    assert torch.equal(pool[~stored].nan_to_num(77), before[~stored].nan_to_num(77)), (
        case,
        "pool places outside the windows changed",
    )
    if stored.any():
        check_keys(pool[stored][:, 0], expected[stored][:, 0], case.dtype, fp8=case.fp8)
        assert torch.equal(pool[stored][:, 1], expected[stored][:, 1].to(pool.dtype)), (case, "values")


def check_keys(got: Tensor, want: Tensor, dtype: torch.dtype, *, fp8: bool) -> None:
    """Of pages."""
    if not fp8 or dtype == torch.float32:
        assert relative_error(got, want) < (1e-5 if fp8 else TOLERANCE[dtype]), "keys"
        return
    assert relative_error(got, want) <= FP8_STEP, "keys"
    num_rounded = int((got != want).sum())
    assert num_rounded <= MOST_ROUNDED * got.numel(), f"{num_rounded} of {got.numel()} keys differ"


def check_same_bits(device: torch.device, case: Case) -> None:
    """Check that two runs on the same inputs are bitwise equal."""
    inputs = inputs_of(case)
    assert torch.equal(step(inputs.to(device), case), step(inputs.to(device), case)), case


def error(got: Tensor, want: Tensor) -> float:
    """`relative_error`; the largest difference if zeros are expected."""
    return relative_error(got.cpu(), want) if want.any() else float(got.abs().max())


IN_GLUON: dict[str, Any] = {
    "head_dim": 256,
    "page_tokens": 64,
    "fp8": True,
    "dtype": torch.float32 if INTERPRETED else torch.bfloat16,
}
"""What attention_fp8.py takes."""
CASES = {
    "one column": Case(starts=(0, 15, 16, 50), num_columns=1, num_heads=2, head_dim=16, seed=1),
    "window over a page's end": Case(starts=(13, 31, 0), num_columns=4, seed=2),
    "more columns than keys before": Case(starts=(3,), num_columns=8, num_heads=2, seed=3),
    "inert slots": Case(starts=(None, 20, None, None, 5, None), num_columns=3, num_heads=2, head_dim=16, seed=4),
    "only inert slots": Case(starts=(None, None), num_columns=4, seed=5),
    "position 0 hidden": Case(starts=(0, 1, 33), num_columns=2, num_heads=2, first_position=1, seed=6),
    "only position 0, and it hidden": Case(starts=(0, 0), num_columns=1, first_position=1, seed=7),
    "one long slot among short ones": Case(starts=(2, 170, 7), num_columns=2, num_heads=1, num_kv_heads=1, seed=8),
    "more slots than programs": Case(
        starts=(5, 20, 0, 33, 17, 2, 8, 1), num_columns=1, num_heads=2, num_kv_heads=1, head_dim=16, seed=9
    ),
    "pages of 64": Case(starts=(60, 70), num_columns=5, num_heads=2, page_tokens=64, seed=10),
    "no power of two": Case(starts=(20,), num_columns=3, num_heads=6, head_dim=24, half_rope=3, seed=11),
    "32 rows a task": Case(starts=(10, 20), num_columns=7, num_heads=3, num_kv_heads=1, head_dim=16, seed=12),
    "two tasks a head": Case(
        starts=(13,), num_columns=6, num_heads=12, num_kv_heads=1, head_dim=16, half_rope=8, seed=13
    ),
    "half precision": Case(starts=(30, 62), num_columns=4, page_tokens=64, dtype=torch.float16, seed=14),
    "FP8, window over a page's end": Case(starts=(13, 31, 0), num_columns=4, fp8=True, seed=15),
    "FP8, inert slots": Case(starts=(None, 20, None, 5), num_columns=3, num_heads=2, head_dim=16, fp8=True, seed=16),
    "FP8, position 0 hidden": Case(starts=(0, 33), num_columns=2, num_heads=2, first_position=1, fp8=True, seed=17),
    "FP8, no power of two": Case(starts=(20,), num_columns=3, num_heads=6, head_dim=24, half_rope=3, fp8=True, seed=18),
    "FP8, pages of 64": Case(starts=(60, 200), num_columns=5, page_tokens=64, dtype=torch.float16, fp8=True, seed=19),
    "FP8 in Gluon": Case(starts=(60, None, 200, 0), num_columns=5, num_kv_heads=1, **IN_GLUON, seed=26),
    "FP8 in Gluon, position 0 hidden": Case(
        starts=(0, 127), num_columns=2, num_kv_heads=2, first_position=1, **IN_GLUON, seed=27
    ),
    "FP8 in Gluon, two tasks a head": Case(starts=(130,), num_columns=9, num_kv_heads=1, **IN_GLUON, seed=28),
    "FP8 in Gluon, live columns": Case(
        starts=(13, 64, None, 300), num_columns=12, num_kv_heads=1, counts=(9, 1, 0, 3), num_dead=2, **IN_GLUON, seed=29
    ),
    "live columns": Case(starts=(13, 31, 0, 40), num_columns=6, counts=(2, 6, 1, 4), seed=20),
    "live columns, inert slots and dead rows": Case(
        starts=(None, 20, None, 5, None), num_columns=5, counts=(0, 5, 0, 2, 0), num_dead=9, seed=21
    ),
    "live columns of one and of two tasks a head": Case(
        starts=(13, 40, 21), num_columns=6, num_heads=12, num_kv_heads=1, head_dim=16, counts=(6, 5, 2), seed=22
    ),
    "live columns, position 0 hidden": Case(
        starts=(0, 1), num_columns=4, num_heads=2, first_position=1, counts=(1, 4), num_dead=3, seed=23
    ),
    "no live columns": Case(starts=(None, None), num_columns=4, counts=(0, 0), num_dead=8, seed=24),
    "FP8, live columns": Case(starts=(13, 31, 60), num_columns=4, fp8=True, counts=(4, 1, 3), num_dead=2, seed=25),
}


@triton.jit
def _store_nothing(place_MD, x_MD, mask_MD, exponents, exponent_M, is_real_M):  # type: ignore[no-untyped-def]
    tl.static_assert(True)


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel keeps its stores")
@pytest.mark.parametrize("seed", range(4))
def test_fp8_pages_give_the_bits_of_pages_that_hold_the_rounded_numbers(
    device: torch.device, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(seed)
    starts = tuple((torch.rand(3, generator=rng) ** 2 * 120).long().tolist())
    case = Case(starts=starts, num_columns=1 + seed, first_position=seed % 2, fp8=True, seed=seed)
    rounded = inputs_of(case).to(device)
    got = step(rounded, case)
    monkeypatch.setattr(attention, "store_heads", _store_nothing)
    assert torch.equal(got, step(replace(rounded, kv_P2SGD=rounded.pool, exponent_P2GS=None), case)), f"seed {seed}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_step_matches_reference(device: torch.device, case: Case) -> None:
    check_step(device, case)


def test_two_runs_are_bitwise_equal(device: torch.device) -> None:
    check_same_bits(device, CASES["window over a page's end"])


def test_tasks_of_equal_lengths_begin_where_shares_do() -> None:
    """As far as that leaves few programs idle: 264 are two for each multiprocessor of an H100."""
    assert [attention.even_programs(264, tasks) for tasks in (4, 20, 64, 128, 264)] == [264, 260, 256, 256, 264]
    assert [attention.even_programs(264, tasks) for tasks in (40, 100, 265, 512)] == [264] * 4
    for tasks in range(1, 300):
        programs = attention.even_programs(264, tasks)
        assert 264 - programs <= 264 // 16
        assert programs == 264 or programs % tasks == 0


def test_query_without_keys_returns_zeros(device: torch.device) -> None:
    case = Case(starts=(0,), num_columns=2, first_position=1)
    got = step(inputs_of(case).to(device), case)
    assert not got[0].any()
    assert got[1].any()


def test_slot_output_does_not_depend_on_other_slots(device: torch.device) -> None:
    case = Case(starts=(30, 7), num_columns=4, seed=20)
    inputs = inputs_of(case)
    together = step(inputs.to(device), case)
    for slot in range(2):
        tokens = slice(slot * case.num_columns, (slot + 1) * case.num_columns)
        alone = replace(
            inputs,
            projected_NP=inputs.projected_NP[tokens],
            page_table_BP=inputs.page_table_BP[slot : slot + 1],
            start_B=inputs.start_B[slot : slot + 1],
        )
        assert error(step(alone.to(device), case), together[tokens].cpu()) < TOLERANCE[case.dtype], slot
