"""The Triton sampler and argmax against the reference: equal tokens over random rows of every kind of request."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels import slots as layout
from agentspec.kernels.reference import sampling as reference
from agentspec.kernels.slots import NUM_FLOATS, LiveColumns, SamplingTable, SlotLimits
from agentspec.kernels.triton import sampling as triton_sampling
from tests.fakes.live_columns import live_columns
from tests.kernels.triton.poison import poison

NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": math.inf,
    "min_p": 0.0,
    "repetition": 1.0,
    "frequency": 0.0,
    "presence": 0.0,
}
"""Parameters of a slot; top_k 0: keep all."""
TOP_P_TOLERANCE = 1e-6
"""Tolerance: probability masses are rounded differently from the reference's."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Arguments of one `sample`."""

    logits_BTV: Tensor
    tokens_BT: Tensor
    position_BT: Tensor
    slot_ids_B: Tensor
    table: SamplingTable

    @classmethod
    def random(
        cls, seed: int, vocab_size: int, num_columns: int, slots: list[dict[str, Any]], spread: float = 3.0
    ) -> Batch:
        """One slot per row of `slots`, at permuted places of a larger table whose other rows, and stale counts, are
        poison."""
        generator, table_size, width = torch.Generator().manual_seed(seed), len(slots) + 2, max(num_columns, 3)
        slot_ids_B = torch.randperm(table_size, generator=generator)[: len(slots)]
        table = SamplingTable(
            limits_SF=poison(torch.empty(table_size, SlotLimits.num_fields(2), dtype=torch.int64)),
            sampling_SF=poison(torch.empty(table_size, NUM_FLOATS)),
            counts_SV=poison(torch.empty(table_size, vocab_size, dtype=torch.int32)),
            prompt_seen_SV=poison(torch.empty(table_size, vocab_size, dtype=torch.bool)),
            bias_SV=poison(torch.empty(table_size, vocab_size)),
            mask_SWX=poison(torch.empty(table_size, width, -(-vocab_size // 32), dtype=torch.int32)),
        )
        limits = SlotLimits.of(table.limits_SF)
        for slot, given in zip(slot_ids_B.tolist(), slots, strict=True):
            chosen = {**NEUTRAL, **given}
            for name in ("temperature", "top_p", "repetition", "frequency", "presence"):
                table.sampling_SF[slot, getattr(layout, name.upper())] = chosen[name]
            table.sampling_SF[slot, layout.LOG_MIN_P] = math.log(chosen["min_p"]) if chosen["min_p"] else -math.inf
            limits.top_k_B[slot] = min(chosen["top_k"] or vocab_size, vocab_size)
            limits.seed_B[slot] = torch.randint(2**62, (), generator=generator) * 2 + 1
            table.counts_SV[slot] = torch.randint(-3, 3, (vocab_size,), generator=generator).clamp(min=0)
            table.prompt_seen_SV[slot] = torch.rand(vocab_size, generator=generator) < 0.2
            table.bias_SV[slot] = torch.randn(vocab_size, generator=generator) * (
                torch.rand(vocab_size, generator=generator) < 0.1
            )
            table.mask_SWX[slot] = torch.randint(-(2**31), 2**31, table.mask_SWX[slot].shape, generator=generator)
        logits_BTV = torch.randn(len(slots), num_columns, vocab_size, generator=generator) * spread
        is_rounded = torch.rand(logits_BTV.shape[:2], generator=generator) < 0.5
        logits_BTV[is_rounded] = logits_BTV[is_rounded].round(decimals=1)  # ties
        logits_BTV[..., vocab_size - vocab_size // 20 :] = -torch.inf
        return cls(
            logits_BTV=logits_BTV,
            tokens_BT=torch.randint(min(vocab_size, 7), (len(slots), num_columns), generator=generator),
            position_BT=torch.randint(2**31, (len(slots), num_columns), generator=generator),
            slot_ids_B=slot_ids_B,
            table=table,
        )

    def to(self, device: torch.device) -> Batch:
        fields = {
            name: getattr(self, name).to(device) for name in ("logits_BTV", "tokens_BT", "position_BT", "slot_ids_B")
        }
        table = SamplingTable(
            **{name: getattr(self.table, name).to(device) for name in SamplingTable.__dataclass_fields__}
        )
        return Batch(**fields, table=table)

    def row(self, b: int) -> Batch:
        """One row by itself, over the whole table."""
        fields = {
            name: getattr(self, name)[b : b + 1].contiguous()
            for name in ("logits_BTV", "tokens_BT", "position_BT", "slot_ids_B")
        }
        return Batch(**fields, table=self.table)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, SamplingTable]:
        return self.logits_BTV, self.tokens_BT, self.position_BT, self.slot_ids_B, self.table


def check_sample(batch: Batch, constrained: bool, device: torch.device, what: str) -> None:
    expected_BT = reference.sample(*batch.arguments(), constrained=constrained)
    moved = batch.to(device)
    before_BTV = moved.logits_BTV.clone()
    got_BT = triton_sampling.sample(*moved.arguments(), constrained=constrained)
    assert got_BT.dtype == torch.int64
    assert torch.equal(moved.logits_BTV, before_BTV), f"{what}: sample modified the logits"
    assert torch.equal(got_BT.cpu(), expected_BT), f"{what}: {got_BT.tolist()} for {expected_BT.tolist()}"


def check_live_columns(batch: Batch, counts: list[int], num_dead: int, constrained: bool, device: torch.device) -> None:
    """Check that the live columns of each slot get the tokens that they get where all are live."""
    num_slots, num_columns, vocab_size = batch.logits_BTV.shape
    all_BT = reference.sample(*batch.arguments(), constrained=constrained)
    live = live_columns(counts, num_columns=num_columns, num_rows=sum(counts) + num_dead)
    logits_1NV = torch.full((1, sum(counts) + num_dead, vocab_size), torch.nan)
    cells = live.cell_N[: sum(counts)]
    logits_1NV[0, : sum(counts)] = batch.logits_BTV.flatten(0, 1)[cells]
    packed = replace(batch, logits_BTV=logits_1NV)
    on_device = LiveColumns(**{name: getattr(live, name).to(device) for name in LiveColumns.__slots__})
    for name, sample, given, columns in (
        ("reference", reference.sample, packed, live),
        ("triton", triton_sampling.sample, packed.to(device), on_device),
    ):
        got_BT = sample(*given.arguments(), constrained=constrained, live=columns).cpu()
        assert got_BT.shape == (num_slots, num_columns)
        assert torch.equal(got_BT.flatten()[cells], all_BT.flatten()[cells]), (name, counts)


def random_slot(generator: random.Random, vocab_size: int) -> dict[str, Any]:
    slot: dict[str, Any] = {
        "temperature": generator.choice([0.0, 0.6, 1.0, 1.0, 2.5, 1e-20]),
        "top_k": generator.choice([0, 0, 1, 2, 5, 20, vocab_size - 1, generator.randint(1, vocab_size)]),
        "top_p": generator.choice([math.inf, 0.95, 0.8, 0.3, 1e-6, 0.9999]),
        "min_p": generator.choice([0.0, 0.0, 0.01, 0.3, 1.0]),
    }
    if generator.random() < 0.5:
        slot |= {
            "repetition": generator.choice([1.0, 1.3, 0.7, 1e-20]),
            "frequency": generator.choice([0.0, 0.4]),
            "presence": generator.choice([0.0, -1.5]),
        }
    return slot


def check_kept_tokens(batch: Batch, device: torch.device, what: str) -> None:
    """Compare the whole set that the filters keep, except tokens within TOP_P_TOLERANCE of a top-p cut: draws would
    rarely reveal a wrong threshold."""
    table, slots = batch.table, batch.slot_ids_B
    sampling_BF, limits = table.sampling_SF[slots], SlotLimits.of(table.limits_SF[slots])
    inputs = reference.DrawInputs(
        temperature_B=sampling_BF[:, layout.TEMPERATURE],
        top_k_B=limits.top_k_B,
        top_p_B=sampling_BF[:, layout.TOP_P],
        log_min_p_B=sampling_BF[:, layout.LOG_MIN_P],
        seed_B=limits.seed_B,
    )
    tempered_BTV = (batch.logits_BTV + table.bias_SV[slots][:, None]) / inputs.temperature_B[:, None, None]
    on_device = batch.to(device)
    launch = triton_sampling._Launch.of(
        on_device.logits_BTV, on_device.tokens_BT, on_device.slot_ids_B, on_device.table, constrained=False
    )
    bounds_BT3 = triton_sampling._find_bounds(launch)[1].cpu().view(*batch.tokens_BT.shape, 3)
    is_kept_BTV = tempered_BTV >= bounds_BT3[..., 1:2]
    least_BTV, most_BTV = (
        tempered_BTV
        >= reference.keep_threshold(tempered_BTV, replace(inputs, top_p_B=inputs.top_p_B.double() + offset))
        for offset in (-TOP_P_TOLERANCE, TOP_P_TOLERANCE)
    )
    counts = [is_kept.sum(-1).tolist() for is_kept in (is_kept_BTV, least_BTV, most_BTV)]
    assert (least_BTV <= is_kept_BTV).all(), f"{what}: {counts[0]} kept for at least {counts[1]}"
    assert (is_kept_BTV <= most_BTV).all(), f"{what}: {counts[0]} kept for at most {counts[2]}"


def check_argmax(num_rows: int, vocab_size: int, seed: int, device: torch.device) -> None:
    logits_NV = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)).round(decimals=1)
    logits_NV[:, vocab_size - vocab_size // 20 :] = -torch.inf
    logits_NV[0] = -torch.inf
    logits_NV[-1] = torch.where(torch.arange(vocab_size) % 3 == 2, 0.0, -0.0)
    got_N = triton_sampling.argmax(logits_NV.to(device))
    assert got_N.dtype == torch.int64
    assert torch.equal(got_N.cpu(), logits_NV.argmax(-1)), f"{seed=} N={num_rows} V={vocab_size}"


def set_tiles(monkeypatch: pytest.MonkeyPatch, *, span: int, programs: int, chunk: int) -> None:
    """Use small tiles, so that a small vocabulary has many."""
    for name, value in (("SPAN", span), ("PROGRAMS", programs), ("SELECT_CHUNK", chunk)):
        monkeypatch.setattr(triton_sampling, name, value)


@pytest.mark.parametrize("seed", range(6))
def test_sample_matches_reference(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(seed)
    set_tiles(
        monkeypatch,
        span=generator.choice([8, 16, 64]),
        programs=generator.choice([1, 12]),
        chunk=generator.choice([16, 64]),
    )
    vocab_size, num_columns = generator.choice([5, 37, 130]), generator.randint(1, 3)
    slots = [random_slot(generator, vocab_size) for _ in range(generator.randint(1, 3))]
    batch = Batch.random(seed, vocab_size, num_columns, slots, spread=generator.choice([0.3, 3.0]))
    check_sample(batch, generator.random() < 0.3, device, f"{seed=} V={vocab_size} T={num_columns} {slots}")


FILTERS: dict[str, dict[str, Any]] = {
    "top-k below the number of spans": {"top_k": 9},
    "top-k beyond it": {"top_k": 100},
    "top-p alone, with a tail that is not listed": {"top_p": 0.6},
    "top-p and min-p": {"top_p": 0.9, "min_p": 0.05},
    "top-k beyond it and top-p": {"top_k": 40, "top_p": 0.999},
    "all": {"top_k": 20, "top_p": 0.95, "min_p": 0.001, "temperature": 0.6},
    "min-p alone": {"min_p": 0.2},
    "none": {"temperature": 2.0},
    "top-p of nearly all": {"top_p": 0.9999},
    "top-p of one": {"top_p": 1e-6},
}


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("kind", FILTERS)
def test_filters_keep_same_tokens_as_reference(
    kind: str, spread: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tiles(monkeypatch, span=16, programs=4, chunk=64)
    check_kept_tokens(Batch.random(len(kind), 301, 2, [FILTERS[kind]], spread), device, f"{kind}, {spread=}")


def test_live_columns_get_the_tokens_that_they_get_among_all(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_tiles(monkeypatch, span=16, programs=6, chunk=64)
    for seed in range(3):
        generator = random.Random(seed)
        batch = Batch.random(seed, 60, 4, [random_slot(generator, 60) for _ in range(4)])
        counts = [generator.randint(0, 4) for _ in range(4)]
        check_live_columns(batch, counts, 1 + seed, bool(seed % 2), device)


def test_unlisted_tokens_count_toward_top_p_mass(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masses 1, 0.37 and 0.32, the last summed over 290 tokens below the list's bound: without these the first token
    would have more than 0.6 of the mass."""
    set_tiles(monkeypatch, span=16, programs=4, chunk=64)
    batch = Batch.random(8, 301, 1, [{"top_p": 0.6}])
    batch.table.bias_SV[batch.slot_ids_B] = 0.0
    batch.logits_BTV[:] = torch.tensor([0.0, -1.0, *[-6.8] * 290, *[-math.inf] * 9])[
        torch.randperm(301, generator=torch.Generator().manual_seed(8))
    ]
    check_kept_tokens(batch, device, "two of a long tail")


def test_draft_is_in_context_from_its_column_on(device: torch.device) -> None:
    batch = Batch.random(2, 20, 4, [{"temperature": 0.0, "presence": 50.0}])
    slot = batch.slot_ids_B
    batch.table.counts_SV[slot], batch.table.bias_SV[slot] = 0, 0.0
    batch.logits_BTV[:] = -torch.arange(20.0)
    batch.tokens_BT[0] = torch.tensor([3, 0, 1, 2])
    chosen_BT = triton_sampling.sample(*batch.to(device).arguments(), constrained=False)
    assert chosen_BT.tolist() == [[0, 1, 2, 3]]


def test_noise_can_lift_unlikely_tokens_above_largest(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """599 tokens, 6 temperatures below the largest, together win more often than it does."""
    set_tiles(monkeypatch, span=64, programs=4, chunk=64)
    batch = Batch.random(7, 600, 6, [{"temperature": 0.5}])
    batch.table.bias_SV[batch.slot_ids_B] = 0.0
    batch.logits_BTV[:] = -3.0
    batch.logits_BTV[..., 333] = 0.0
    check_sample(batch, False, device, "one of 600")
    assert len(set(reference.sample(*batch.arguments(), constrained=False).flatten().tolist()) - {333}) > 1


def test_served_tile_sizes_match_reference(device: torch.device) -> None:
    batch = Batch.random(3, 1100, 1, [{"top_k": 2}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.9}])
    check_sample(batch, False, device, "as served")


def test_sample_is_batch_invariant(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    set_tiles(monkeypatch, span=16, programs=6, chunk=64)
    batch = Batch.random(6, 60, 3, [{"top_k": 4}, {"top_p": 0.7}, {"frequency": 1.0}]).to(device)
    together_BT = triton_sampling.sample(*batch.arguments(), constrained=False)
    for b in (2, 0):
        alone = batch.row(b)
        assert torch.equal(triton_sampling.sample(*alone.arguments(), constrained=False)[0], together_BT[b])


def test_row_without_finite_scores_returns_valid_token(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """For minus infinities the lowest token, as argmax; with a NaN any valid token: later kernels index with it."""
    set_tiles(monkeypatch, span=16, programs=4, chunk=64)
    batch = Batch.random(
        4, 40, 4, [{"top_k": 5, "min_p": 0.1}, {}, {"temperature": 0.0}, {"top_p": 0.5, "min_p": 0.1}]
    ).to(device)
    batch.table.bias_SV[batch.slot_ids_B] = 0.0
    batch.logits_BTV[:, 0] = -torch.inf
    assert (triton_sampling.sample(*batch.arguments(), constrained=False)[:, 0] == 0).all()
    batch.logits_BTV[:3, 1, 30] = torch.nan
    batch.logits_BTV[:3, 2, 3] = -torch.tensor(torch.nan)
    batch.logits_BTV[:3, 3] = torch.nan
    drawn_BT = triton_sampling.sample(*batch.arguments(), constrained=False)
    assert ((drawn_BT >= 0) & (drawn_BT < 40)).all(), drawn_BT
    chosen_N = triton_sampling.argmax(batch.logits_BTV.flatten(0, 1))
    assert ((chosen_N >= 0) & (chosen_N < 40)).all(), chosen_N


def test_argmax_matches_reference(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_argmax(3, 5000, 0, device)
    monkeypatch.setattr(triton_sampling, "ARGMAX_BLOCK", 16)
    for seed, vocab_size in enumerate((1, 15, 16, 17, 100)):
        check_argmax(4, vocab_size, seed, device)
