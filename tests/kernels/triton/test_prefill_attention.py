"""attention_prefill and store_keys_values in Triton against the reference, with NaN in every place that must not be
read, permuted pages, padding and odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels import reference
from agentspec.kernels.backend import AttentionWeights, Norm, RopeTable
from agentspec.kernels.prefill_batch import COUNT, NUM_BLOCK_FIELDS, NUM_SPAN_FIELDS, OFFSET, START, PrefillBatch
from agentspec.kernels.triton import prefill_attention
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.prefill_attention import AttendPlan, attention_prefill, store_keys_values
from agentspec.types import SCRATCH_PAGE
from tests.fakes import fp8_pool
from tests.fakes.compare import relative_error
from tests.kernels.triton.gluon_in_interpreter import interpreted_hopper
from tests.kernels.triton.gluon_warp_groups import AttentionGroups
from tests.kernels.triton.test_attention import FP8_TOLERANCE, check_keys, rope_on, weights_on

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Against the reference in float32 on the same inputs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    spans: tuple[tuple[int, int], ...]
    """(position of the first token, tokens) of every span."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    half_rope: int = 4
    page_tokens: int = 16
    padding: tuple[int, int] = (0, 0)
    """(tokens, spans) of padding in the tables."""
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    """Keys and values are in FP8."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Inputs:
    projected_NP: Tensor
    weights: AttentionWeights
    rope: RopeTable
    kv_P2SGD: Tensor
    batch: PrefillBatch
    exponent_P2GS: Tensor | None = None

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Inputs:
        return Inputs(
            projected_NP=self.projected_NP.to(device, dtype),
            weights=weights_on(device, self.weights, dtype),
            rope=rope_on(device, self.rope),
            kv_P2SGD=self.kv_P2SGD.to(device, dtype if self.exponent_P2GS is None else None, copy=True),
            exponent_P2GS=None if self.exponent_P2GS is None else self.exponent_P2GS.to(device, copy=True),
            batch=PrefillBatch(**{name: getattr(self.batch, name).to(device) for name in PrefillBatch.__slots__}),
        )

    @property
    def pool(self) -> Tensor:
        """The pool's numbers, on the CPU, whatever its form."""
        return fp8_pool.plain(self.kv_P2SGD, self.exponent_P2GS)


def inputs_of(case: Case) -> Inputs:
    """Inputs on the CPU. Positions before a span's start are written, all others NaN; pages are in random order;
    unused table entries are the scratch page."""
    rng = torch.Generator().manual_seed(case.seed)
    num_tokens, num_spans = sum(count for _, count in case.spans), len(case.spans)
    used = [-(-(start + count) // case.page_tokens) for start, count in case.spans]
    pool = torch.full(
        (2 + sum(used), 2, case.page_tokens, case.num_kv_heads, case.head_dim), torch.nan, dtype=case.dtype
    )
    table = torch.full((num_spans + case.padding[1], max(used) + 1), SCRATCH_PAGE, dtype=torch.int32)
    free = iter((torch.randperm(len(pool) - 1, generator=rng) + 1).tolist())
    spans_UF = torch.zeros(num_spans + case.padding[1], NUM_SPAN_FIELDS, dtype=torch.int64)
    position_N = torch.zeros(num_tokens + case.padding[0], dtype=torch.int64)
    offset = 0
    for u, (start, count) in enumerate(case.spans):
        table[u, : used[u]] = torch.tensor([next(free) for _ in range(used[u])])
        position = torch.arange(start)
        written = torch.randn(start, 2, case.num_kv_heads, case.head_dim, generator=rng).to(case.dtype)
        pool[table[u, position // case.page_tokens].long(), :, position % case.page_tokens] = written
        spans_UF[u, [OFFSET, COUNT, START]] = torch.tensor([offset, count, start])
        position_N[offset : offset + count] = torch.arange(start, start + count)
        offset += count
    width = 2 * (case.num_heads + case.num_kv_heads) * case.head_dim
    wide = torch.full((len(position_N), width + 16), torch.nan, dtype=case.dtype)
    wide[:num_tokens, :width] = torch.randn(num_tokens, width, generator=rng)
    norms = [Norm(weight=torch.randn(case.head_dim, generator=rng).mul(0.3).to(case.dtype), eps=1e-6) for _ in range(2)]
    angles = torch.arange(max(sum(span) for span in case.spans))[:, None] * torch.rand(case.half_rope, generator=rng)
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
        exponent_P2GS=pools[1],
        batch=PrefillBatch(
            token_ids_N=torch.zeros_like(position_N),
            position_N=position_N,
            previous_N=torch.zeros_like(position_N),
            spans_UF=spans_UF,
            blocks_MF=torch.zeros(num_spans, NUM_BLOCK_FIELDS, dtype=torch.int64),
            page_table_UP=table,
        ),
    )


def run(inputs: Inputs) -> Tensor:
    return attend(attention_prefill, inputs)


def attend(prefill: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    """A backend's `attention_prefill` of the inputs."""
    rest = inputs.weights, inputs.rope, inputs.kv_P2SGD, inputs.batch
    return prefill(inputs.projected_NP, *rest, exponent_P2GS=inputs.exponent_P2GS)


def check_prefill(device: torch.device, case: Case) -> None:
    """Check that outputs and stores match the reference, and that no other place of the pool changes."""
    inputs = inputs_of(case)
    plain, real = inputs.to("cpu", torch.float32), inputs.to(device)
    num_tokens = sum(count for _, count in case.spans)
    got = run(real)[:num_tokens].cpu()
    want = attend(reference.attention_prefill, plain)[:num_tokens]
    assert relative_error(got, want) < (FP8_TOLERANCE if case.fp8 else TOLERANCE)[case.dtype], case
    check_stores(case, inputs.pool, real.pool, plain.pool, inputs.batch)


def check_stores(case: Case, before: Tensor, got: Tensor, want: Tensor, batch: PrefillBatch) -> None:
    stored = torch.zeros(before.shape[0], case.page_tokens, dtype=torch.bool)
    for u, (start, count) in enumerate(case.spans):
        position = torch.arange(start, start + count)
        stored[batch.page_table_UP[u, position // case.page_tokens].long(), position % case.page_tokens] = True
    before, got, want = (pool.transpose(1, 2) for pool in (before, got, want))
    assert torch.equal(got[~stored].nan_to_num(77), before[~stored].nan_to_num(77)), (
        case,
        "pool places outside the spans changed",
    )
    check_keys(got[stored][:, 0], want[stored][:, 0], case.dtype, fp8=case.fp8)
    assert torch.equal(got[stored][:, 1], want[stored][:, 1].to(got.dtype)), (case, "values")


def check_same_bits(device: torch.device, case: Case) -> None:
    """Check that two runs on the same inputs are bitwise equal."""
    inputs = inputs_of(case)
    num_tokens = sum(count for _, count in case.spans)
    assert torch.equal(run(inputs.to(device))[:num_tokens], run(inputs.to(device))[:num_tokens]), case


def check_store_keys_values(device: torch.device, case: Case) -> None:
    """Check that store_keys_values of the projection's last columns stores the same as attention_prefill."""
    inputs = inputs_of(case)
    whole, alone = inputs.to(device), inputs.to(device)
    run(whole)
    keys_values_NK = alone.projected_NP[:, 2 * case.num_heads * case.head_dim :]
    rest = alone.weights, alone.rope, alone.kv_P2SGD, alone.batch
    store_keys_values(keys_values_NK, *rest, exponent_P2GS=alone.exponent_P2GS)
    assert torch.equal(alone.pool.nan_to_num(77), whole.pool.nan_to_num(77)), case


CASES = {
    "one token": Case(spans=((0, 1),), seed=1),
    "from zero": Case(spans=((0, 41),), seed=2),
    "short append to a long context": Case(spans=((150, 5),), seed=3),
    "one tile that all programs share": Case(spans=((333, 3),), num_heads=1, num_kv_heads=1, seed=4),
    "append over pages' ends": Case(spans=((30, 20),), seed=5),
    "tiles shorter than the least share": Case(spans=((0, 3), (5, 2), (14, 4)), num_heads=2, num_kv_heads=1, seed=6),
    "long among short": Case(spans=((0, 7), (200, 9), (16, 1), (31, 17)), num_heads=2, num_kv_heads=1, seed=7),
    "padding": Case(spans=((20, 11), (0, 6)), padding=(19, 3), seed=8),
    "many tiles a program": Case(spans=((0, 90),), num_heads=4, num_kv_heads=1, seed=9),
    "three heads share": Case(spans=((10, 13), (47, 6)), num_heads=6, num_kv_heads=2, half_rope=8, seed=10),
    "no power of two": Case(spans=((20, 9),), num_heads=3, num_kv_heads=1, head_dim=24, half_rope=3, seed=11),
    "a head of its own": Case(spans=((12, 37),), num_heads=2, num_kv_heads=2, seed=12),
    "pages of 64": Case(spans=((60, 10), (130, 3)), num_heads=2, page_tokens=64, seed=13),
    "FP8, short append to a long context": Case(spans=((150, 5),), fp8=True, seed=15),
    "FP8, append over pages' ends": Case(spans=((30, 20),), fp8=True, seed=16),
    "FP8, long among short": Case(
        spans=((0, 7), (200, 9), (16, 1), (31, 17)), num_heads=2, num_kv_heads=1, fp8=True, seed=17
    ),
    "FP8, padding": Case(spans=((20, 11), (0, 6)), padding=(19, 3), fp8=True, seed=18),
    "FP8, no power of two": Case(spans=((20, 9),), num_heads=3, num_kv_heads=1, head_dim=24, fp8=True, seed=19),
    "half precision": Case(spans=((70, 12),), num_heads=2, num_kv_heads=1, head_dim=32, dtype=torch.float16, seed=14),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_prefill_matches_reference(device: torch.device, case: Case) -> None:
    check_prefill(device, case)


@pytest.mark.parametrize("name", ["long among short", "padding"])
def test_two_runs_are_bitwise_equal(device: torch.device, name: str) -> None:
    check_same_bits(device, CASES[name])


@pytest.mark.parametrize("name", ["padding", "no power of two", "FP8, padding"])
def test_store_keys_values_stores_same_as_attention_prefill(device: torch.device, name: str) -> None:
    check_store_keys_values(device, CASES[name])


@pytest.mark.parametrize("seed", range(3))
def test_random_spans_match_reference(device: torch.device, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 25, (4,), generator=rng).tolist()
    starts = (torch.rand(4, generator=rng) ** 3 * 150).long().tolist()
    check_prefill(
        device,
        Case(spans=tuple(zip(starts, counts, strict=True)), num_heads=3, num_kv_heads=1, padding=(5, 2), seed=seed),
    )


HOPPER_CASES = {
    "one page": Case(spans=((0, 3),), seed=21),
    "all pages masked": Case(spans=((0, 40),), num_heads=2, num_kv_heads=1, seed=22),
    "shares inside a tile": Case(spans=((333, 3),), num_heads=1, num_kv_heads=1, seed=23),
    "heads, tails and whole tiles": Case(
        spans=((0, 7), (200, 9), (16, 1), (31, 17)), num_heads=3, num_kv_heads=1, padding=(5, 2), seed=24
    ),
    "ends with a page": Case(spans=((90, 6), (32, 16)), num_heads=4, num_kv_heads=2, seed=25),
}
HOPPER_CASES |= {f"FP8, {name}": replace(case, fp8=True) for name, case in HOPPER_CASES.items()}
HOPPER_CASES["FP8, spans with and without a place in the scratch pool"] = Case(
    spans=((70, 20), (0, 5), (100, 30), (3, 17), (40, 16)),
    num_heads=3,
    num_kv_heads=1,
    padding=(4, 2),
    fp8=True,
    seed=26,
)


@pytest.mark.skipif(not INTERPRETED, reason="on a device the kernel itself runs")
@pytest.mark.parametrize("case", HOPPER_CASES.values(), ids=HOPPER_CASES.keys())
def test_hopper_kernel_matches_reference(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Checks its waits, buffers and masks, but not its layouts: the compile check covers those."""
    monkeypatch.setattr(
        prefill_attention,
        "attend_plan",
        lambda *_, **__: AttendPlan(block_rows=16 if case.fp8 else 32, num_warps=8, num_stages=1, is_hopper=True),
    )
    groups = AttentionGroups(seed=case.seed)
    monkeypatch.setattr(prefill_attention, "groups", groups)
    monkeypatch.setattr(prefill_attention, "hopper", interpreted_hopper() if case.fp8 else groups)
    check_prefill(torch.device("cpu"), replace(case, dtype=torch.float16))


SERVED_CASES: dict[str, dict[str, Any]] = {
    "from zero": {"spans": ((0, 300),)},
    "append": {"spans": ((5003, 130),)},
    "long shares": {"spans": ((20_001, 40),)},
    "long among short": {"spans": ((0, 70), (6000, 90), (64, 1), (127, 200), (63, 2)), "padding": (37, 3)},
    "24 heads": {"spans": ((1000, 150), (10, 3)), "num_heads": 24},
    "heads of 128": {"spans": ((700, 100), (0, 64)), "head_dim": 128},
    "whole pages": {"spans": ((640, 64), (0, 128))},
}


@pytest.mark.skipif(INTERPRETED, reason="large shapes, and Hopper's own instructions")
@pytest.mark.parametrize("name", SERVED_CASES)
def test_served_head_sizes_match_reference(device: torch.device, name: str) -> None:
    sizes: dict[str, Any] = {
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 256,
        "half_rope": 32,
        "page_tokens": 64,
        "dtype": torch.bfloat16,
    }
    case = Case(**(sizes | SERVED_CASES[name]), seed=31)
    check_prefill(device, case)
    check_same_bits(device, case)
