"""The step on the hash chain model: streams equal the reference, and all device state equals a from-scratch prefill."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from agentspec import kernels
from agentspec.kernels.reference import window as window_module
from agentspec.kernels.reference.window import rotate_checkpoints
from agentspec.kernels.slots import OutcomeRows, SlotState
from agentspec.models.protocol import VerifyBatch
from agentspec.mtp.drafter import VerifiedWindow
from agentspec.mtp.mtp_drafter import MtpDrafter
from agentspec.runtime.decode_step import Forward, decode_step
from agentspec.runtime.forcing import Forcing
from agentspec.runtime.plan import MAX_ALTERNATIVES, StepPlan
from agentspec.runtime.step_buffers import StepBuffers
from agentspec.runtime.step_results import read_result, score_result
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, STOP_ID, STOP_LENGTH, STOP_RUNNING, SamplingParams
from tests.fakes.hash_chain import HashChainModel, ReferenceRequest
from tests.fakes.step_driver import StepDriver, greedy

REAL = 48
MODELS = {
    accuracy: HashChainModel(seed=5, draft_accuracy=accuracy, stop_chance=0.03) for accuracy in (0.0, 0.5, 0.9, 1.0)
}
ENDLESS = HashChainModel(seed=5, draft_accuracy=1.0)


def random_prompt(generator: random.Random, max_length: int = 70) -> list[int]:
    return [generator.randrange(REAL - 1) for _ in range(generator.randint(1, max_length))]


def random_sampling(generator: random.Random) -> SamplingParams:
    if generator.random() < 0.25:
        return SamplingParams(temperature=0.0)
    pick = generator.choice
    return SamplingParams(
        temperature=pick([0.0, 0.3, 0.8, 1.0, 1.7]),
        top_k=pick([0, 0, 1, 5, 20]),
        top_p=pick([1.0, 1.0, 0.95, 0.5]),
        min_p=pick([0.0, 0.0, 0.05, 0.3]),
        presence_penalty=pick([0.0, 0.0, 1.0, -0.5]),
        frequency_penalty=pick([0.0, 0.0, 0.7, -0.2]),
        repetition_penalty=pick([1.0, 1.0, 1.2, 0.9]),
        logit_bias=pick([{}, {}, {3: 5.0, 7: -100.0}]),
    )


def random_requests(generator: random.Random, *, sampled: bool, model: HashChainModel) -> list[ReferenceRequest]:
    requests = []
    for _ in range(generator.randint(1, 8)):
        prompt = random_prompt(generator)
        requests.append(
            ReferenceRequest(
                prompt=prompt,
                sampling=random_sampling(generator) if sampled else SamplingParams(temperature=0.0),
                seed=generator.getrandbits(63),
                length_limit=len(prompt) + generator.randint(1, 60),
                stop_ids=generator.choice([model.spec.stop_token_ids, (), (3, 11)]),
            )
        )
    return requests


def run_random_cases(num_cases: int, first_seed: int, *, sampled: bool) -> None:
    for seed in range(first_seed, first_seed + num_cases):
        generator = random.Random(seed)
        model = MODELS[generator.choice(list(MODELS))]
        max_k = generator.randint(1, 7)
        fixed = generator.choice([None, None, max_k, 0])

        def choose_k(generator: random.Random = generator, fixed: int | None = fixed, max_k: int = max_k) -> int:
            return generator.randint(0, max_k) if fixed is None else fixed

        requests = random_requests(generator, sampled=sampled, model=model)
        driver = StepDriver(model, max_running=len(requests), max_draft_tokens=max_k)
        try:
            streams = driver.run(requests, choose_k, check=True)
            assert streams == model.reference_streams(requests)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_greedy_streams_and_states_equal_the_reference() -> None:
    run_random_cases(60, 1000, sampled=False)


def test_sampled_streams_and_states_equal_the_reference() -> None:
    run_random_cases(60, 2000, sampled=True)


@pytest.mark.parametrize("k", range(8))
def test_emitted_tokens_are_independent_of_depth(k: int) -> None:
    generator = random.Random(31)
    model = MODELS[0.9]
    requests = random_requests(generator, sampled=True, model=model) + random_requests(
        generator, sampled=False, model=model
    )
    driver = StepDriver(model, max_running=len(requests), max_draft_tokens=k)
    assert driver.run(requests, lambda: k) == model.reference_streams(requests)


def test_perfect_drafts_fill_every_window() -> None:
    driver = StepDriver(ENDLESS, max_running=1, max_draft_tokens=3)
    request = greedy([1, 2, 3], 3 + 1 + 4 * 20)
    driver.run([request], lambda: 3)
    outcomes = driver.running[0].outcomes
    assert [outcome.num_accepted for outcome in outcomes] == [0] + [3] * 20
    assert [outcome.num_drafted for outcome in outcomes] == [0] + [3] * 20, (
        "the first step has none to verify, the second one is full"
    )


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 48])
def test_first_step_samples_from_the_prompt_without_a_forward(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [place % 40 for place in range(length)]
    driver = StepDriver(ENDLESS, max_running=1, max_draft_tokens=3)
    plan = StepPlan()
    running = driver.plan_join(plan, 0, greedy(prompt, 200))
    prefill, verify = ENDLESS.prefill, ENDLESS.verify
    monkeypatch.setattr(ENDLESS, "verify", None)

    def with_its_own_forward(batch: Any) -> torch.Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(ENDLESS, "verify", verify)
            return prefill(batch)

    monkeypatch.setattr(ENDLESS, "prefill", with_its_own_forward)
    (outcome,) = driver.step(3, plan=plan)
    stream = ENDLESS.reference_stream(greedy(prompt, length + 5))
    assert (outcome.emitted, outcome.length) == (stream[:1], length)
    driver.check(running)
    assert outcome.checkpoints[0][1] == (length if length % ENDLESS.spec.block_tokens == 0 else 0)


def test_drafts_stay_valid_over_a_change_of_depth() -> None:
    """A step verifies the drafts that exist: the minimum of what the previous step and this one ask for."""
    driver = StepDriver(ENDLESS, max_running=1, max_draft_tokens=7)
    plan = StepPlan()
    driver.plan_join(plan, 0, greedy([1, 2, 3], 200))
    offered = []
    for k in (2, 5, 1, 7, 7, 0, 3, 3):
        outcome = driver.step(k, plan=plan)[0]
        plan = StepPlan()
        offered.append(outcome.num_drafted)
        assert outcome.num_accepted == outcome.num_drafted
        driver.check(driver.running[0])
    assert offered == [0, 2, 1, 1, 7, 0, 0, 3]


def test_mtp_does_not_run_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HashChainModel(seed=9, has_mtp=False)
    for name in ("mtp", "mtp_prefill", "draft_head"):
        monkeypatch.setattr(model, name, None)
    driver = StepDriver(model, max_running=2, max_draft_tokens=0)
    requests = [greedy([1, 2, 3], 40), greedy([5], 20)]
    assert driver.run(requests, lambda: 0) == model.reference_streams(requests)
    for running in driver.running.values():
        driver.check(running, with_mtp=False)


def find_stop_inside_window(k: int) -> tuple[list[int], int, int]:
    """A prompt whose greedy stream first contains some token at index 1..k-1 of its second window: (prompt, token,
    index in the stream)."""
    for seed in range(1000):
        prompt = random_prompt(random.Random(seed), 40)
        stream = ENDLESS.reference_stream(greedy(prompt, len(prompt) + 2 * (k + 1)))
        for index in range(2, k + 1):
            if stream[index] not in stream[:index]:
                return prompt, stream[index], index
    raise AssertionError("no such prompt")


def test_stop_inside_a_window_ends_the_request_there() -> None:
    k = 5
    prompt, stop_id, index = find_stop_inside_window(k)
    driver = StepDriver(ENDLESS, max_running=2, max_draft_tokens=k)
    plan = StepPlan()
    stopping = driver.plan_join(plan, 0, greedy(prompt, 200, stop_ids=(stop_id,)))
    going_on = driver.plan_join(plan, 1, greedy(prompt, 200))
    driver.step(k, plan=plan)
    outcome = driver.step(k)[0]
    assert outcome.stop == STOP_ID
    assert outcome.emitted[-1] == stop_id
    assert len(stopping.emitted) == index + 1
    assert outcome.num_accepted == len(outcome.emitted) - 1 < k
    assert outcome.length == len(prompt) + index
    driver.check(stopping)
    assert going_on.outcomes[-1].stop == STOP_RUNNING

    rows, pages = stopping.rows, stopping.pages
    before = ENDLESS.rows_R3[rows].clone(), ENDLESS.attention_PS[pages].clone(), ENDLESS.mtp_PS[pages].clone()
    for _ in range(3):
        inert = driver.step(k)[0]
        assert inert.emitted == []
        assert (inert.num_drafted, inert.num_accepted, inert.stop) == (0, 0, STOP_RUNNING)
        assert inert.length == outcome.length
        assert inert.checkpoints == outcome.checkpoints
    after = ENDLESS.rows_R3[rows], ENDLESS.attention_PS[pages], ENDLESS.mtp_PS[pages]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), (
        "a finished slot wrote to its own rows or pages"
    )
    driver.check(going_on)


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("room", [1, 2, 3, 8, 9, 17])
def test_no_token_is_emitted_beyond_the_length_limit(k: int, room: int) -> None:
    prompt = [4, 5, 6]
    driver = StepDriver(ENDLESS, max_running=1, max_draft_tokens=k)
    request = greedy(prompt, len(prompt) + room)
    streams = driver.run([request], lambda: k)
    assert streams == [ENDLESS.reference_stream(request)]
    assert len(streams[0]) == room
    assert driver.running[0].outcomes[-1].stop == STOP_LENGTH
    assert driver.running[0].outcomes[-1].length == len(prompt) + room - 1
    assert driver.step(k)[0].emitted == []


def test_stop_id_at_the_length_limit_counts_as_stop_id() -> None:
    prompt, stop_id, index = find_stop_inside_window(5)
    driver = StepDriver(ENDLESS, max_running=1, max_draft_tokens=5)
    driver.run([greedy(prompt, len(prompt) + index + 1, stop_ids=(stop_id,))], lambda: 5)
    assert driver.running[0].outcomes[-1].stop == STOP_ID


def test_streams_are_independent_of_slot_order_and_batch() -> None:
    generator = random.Random(41)
    model = MODELS[0.5]
    requests = [r for _ in range(2) for r in random_requests(generator, sampled=True, model=model)][:6]
    alone = [StepDriver(model, max_running=1, max_draft_tokens=4).run([request], lambda: 4)[0] for request in requests]
    assert alone == model.reference_streams(requests)
    for _ in range(5):
        order = generator.sample(range(len(requests)), len(requests))
        driver = StepDriver(model, max_running=len(requests), max_draft_tokens=4)
        plan = StepPlan()
        for slot, index in enumerate(order):
            driver.plan_join(plan, slot, requests[index])
        while not all(running.is_done for running in driver.running.values()):
            slots = generator.sample(range(len(requests)), generator.randint(1, len(requests)))
            driver.step(generator.randint(0, 4), slots=slots, plan=plan)
            plan = StepPlan()
        assert [driver.running[order.index(i)].emitted for i in range(len(requests))] == alone


def test_padding_slots_are_inert_and_may_repeat() -> None:
    model = ENDLESS
    model.allocate(num_rows=4, num_pages=4)
    with torch.inference_mode():
        buffers = StepBuffers.allocate(
            max_running=2,
            max_draft_tokens=2,
            max_pages_per_slot=3,
            vocab_size=model.spec.vocab_size,
            num_model_stop_ids=1,
            block_tokens=model.spec.block_tokens,
            device=torch.device("cpu"),
        )
        table = buffers.sampling
        persistent = (buffers.slots_SF, buffers.page_table_SP, table.limits_SF, table.sampling_SF, table.counts_SV)
        before = [tensor.clone() for tensor in persistent]
        rows = model.rows_R3.clone()
        for sampled in (False, True):
            result = decode_step(
                model, MtpDrafter(model), buffers, torch.tensor([2, 2, 2]), num_drafted=2, sampled=sampled
            )
            outcomes = read_result(result.outcome_BF, None, [2, 2, 2], [None] * 3, max_mtp_drafts=2)
            assert [outcome.emitted for outcome in outcomes] == [[], [], []]
        assert all(map(torch.equal, persistent, before))
        changed = (model.rows_R3 != rows).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {SCRATCH_ROW}
        poisoned = model.attention_PS[[page for page in range(4) if page != SCRATCH_PAGE]]
        assert (poisoned == poisoned[0, 0]).all()


class MetaModel:
    """A model on meta tensors, which raise when a value is read."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        self._hidden_size, self._vocab_size = hidden_size, vocab_size

    def verify(self, batch: VerifyBatch) -> torch.Tensor:
        return torch.empty(*batch.tokens_BT.shape, self._hidden_size, device="meta")

    def read_hidden(self, rows_B: torch.Tensor) -> torch.Tensor:
        return torch.empty(*rows_B.shape, self._hidden_size, device="meta")

    def window_hidden(self, batch: VerifyBatch) -> torch.Tensor:
        return self.verify(batch)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.empty(*hidden.shape[:-1], self._vocab_size, device="meta")

    def mtp(
        self,
        tokens_BT: torch.Tensor,
        hidden_BTH: torch.Tensor,
        start_B: torch.Tensor,
        page_table_BP: torch.Tensor,
        *,
        last_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return torch.empty_like(hidden_BTH if last_B is None else hidden_BTH[:, :1])

    def draft_head(self, m: torch.Tensor) -> torch.Tensor:
        return torch.empty(m.shape[:-1], dtype=torch.int64, device="meta")


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("forward", Forward)
def test_step_has_no_host_reads(
    k: int, sampled: bool, forced: bool, constrained: bool, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meta tensors have shapes but no values: a host read, or a shape that depends on data, raises. With the
    reference's operations."""
    monkeypatch.setattr(kernels, "backend", lambda device: kernels.reference)
    meta = torch.device("meta")
    buffers = StepBuffers.allocate(
        max_running=5,
        max_draft_tokens=4,
        max_pages_per_slot=6,
        vocab_size=99,
        num_model_stop_ids=2,
        block_tokens=16,
        device=meta,
    )
    model = MetaModel(8, 99)
    slots = torch.empty(3, dtype=torch.int64, device=meta)
    step = Forcing(buffers, rates=(0.5,) * 4, allow_output=True).step if forced else decode_step
    variant: dict[str, Any] = {"sampled": sampled, "constrained": constrained, "forward": forward}
    result = step(model, MtpDrafter(model), buffers, slots, num_drafted=k, **variant)  # type: ignore[arg-type]
    rows = OutcomeRows.of(result.outcome_BF)
    assert (result.outcome_BF.device, result.outcome_BF.dtype) == (meta, torch.int64)
    assert rows.tokens_BT.shape == (3, k + 1)
    assert score_result(result).top_ids_NA.shape == (3 * (k + 1), MAX_ALTERNATIVES)


def slow_rotation(
    write_rows: list[int], rows: list[int], lens: list[int], old: int, new: int, block: int
) -> tuple[list[int], list[int], list[int]]:
    for length in range(old + 1, new + 1):
        if length % block == 0:
            write_rows = list(write_rows)
            column = length - old - 1
            write_rows[column], rows, lens = rows[1], [write_rows[column], rows[0]], [length, lens[0]]
    return write_rows, rows, lens


def test_checkpoint_rotation_equals_a_plain_loop() -> None:
    generator = random.Random(51)
    cases = [(old, old + emitted) for old in range(40) for emitted in range(9)]
    write_rows = [generator.sample(range(2, 100), 8) for _ in cases]
    rows = [[100, 101] for _ in cases]
    lens = [generator.choice([[0, 0], [16, 0], [32, 16]]) for _ in cases]
    slot = SlotState.of(torch.zeros(len(cases), SlotState.num_fields(8), dtype=torch.int64))
    slot.length_B.copy_(torch.tensor([old for old, _ in cases]))
    slot.checkpoint_rows_B2.copy_(torch.tensor(rows))
    slot.checkpoint_lens_B2.copy_(torch.tensor(lens))
    slot.write_rows_BW.copy_(torch.tensor(write_rows))
    got = [tensor.tolist() for tensor in rotate_checkpoints(slot, torch.tensor([new for _, new in cases]), 16)]
    for case, (old, new) in enumerate(cases):
        expected = slow_rotation(write_rows[case], rows[case], lens[case], old, new, 16)
        assert tuple(column[case] for column in got) == expected, f"{old} to {new}"


@pytest.mark.parametrize("prompt_length", range(30, 36))
def test_commit_on_a_block_boundary_reads_its_checkpoint_row(prompt_length: int) -> None:
    """The read pointer and the newer checkpoint are then the same row, which the next step must read and not write."""
    generator = random.Random(61)
    prompt = [generator.randrange(REAL - 1) for _ in range(prompt_length)]
    driver = StepDriver(ENDLESS, max_running=1, max_draft_tokens=3)
    plan = StepPlan()
    running = driver.plan_join(plan, 0, greedy(prompt, 200))
    on_boundary = 0
    for _ in range(20):
        outcome = driver.step(3, plan=plan)[0]
        plan = StepPlan()
        driver.check(running)
        on_boundary += outcome.length % ENDLESS.spec.block_tokens == 0
    assert on_boundary >= (5 if prompt_length == 32 else 0)


def accepted_counts(rates: tuple[float, ...], steps: int, *, sampling: SamplingParams, slots: int = 50) -> list[int]:
    """How often a step accepted 0, 1, ... drafts of a drafter that is never right."""
    k = len(rates)
    driver = StepDriver(
        MODELS[0.0], max_running=slots, max_draft_tokens=k, max_length=steps * (k + 1) + 50, force_acceptance=rates
    )
    plan = StepPlan()
    for slot in range(slots):
        driver.plan_join(
            plan, slot, ReferenceRequest(prompt=[slot % 40, 2, 3], sampling=sampling, seed=slot, length_limit=10**6)
        )
    driver.step(k, plan=plan)
    counts = [0] * (k + 1)
    for _ in range(steps):
        for outcome in driver.step(k):
            counts[outcome.num_accepted] += 1
    for running in driver.running.values():
        driver.check(running)
    return counts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_acceptance_matches_its_rates(temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature)
    assert accepted_counts((1.0, 1.0, 0.0), 5, sampling=sampling) == [0, 0, 250, 0]
    counts = accepted_counts((0.8, 0.5), 20, sampling=sampling)
    # 1,000 windows, expected 200, 400, 400; six standard deviations.
    assert all(abs(count - mean) < 95 for count, mean in zip(counts, (200, 400, 400), strict=True))


def plant_no_checkpoint_swap(
    slot: SlotState[torch.Tensor], length_B: torch.Tensor, block: int
) -> tuple[torch.Tensor, ...]:
    _, rows, lens = rotate_checkpoints(slot, length_B, block)
    return slot.write_rows_BW, rows, lens


def plant_checkpoint_of_the_last_column(
    slot: SlotState[torch.Tensor], length_B: torch.Tensor, block: int
) -> tuple[torch.Tensor, ...]:
    write_rows, rows, lens = rotate_checkpoints(slot, length_B, block)
    last = slot.write_rows_BW.gather(1, (length_B - slot.length_B - 1)[:, None])
    return (
        write_rows,
        torch.where(lens[:, :1] > slot.checkpoint_lens_B2[:, :1], torch.cat((last, rows[:, 1:]), 1), rows),
        lens,
    )


def plant_accept_one_more(chosen: torch.Tensor, drafts: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return ((chosen[:, :-1] == drafts).cumprod(1).sum(1) + 1).clamp(max=drafts.shape[1])


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("rotate_checkpoints", plant_no_checkpoint_swap),
        ("rotate_checkpoints", plant_checkpoint_of_the_last_column),
        ("count_matches", plant_accept_one_more),
    ],
)
def test_planted_bugs_in_the_step_are_detected(
    monkeypatch: pytest.MonkeyPatch, name: str, bug: Callable[..., object]
) -> None:
    monkeypatch.setattr(window_module, name, bug)
    with pytest.raises(AssertionError, match="seed"):
        run_random_cases(10, 1000, sampled=False)


def test_drafter_with_one_stale_pair_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MTP layer runs over accepted columns only, one column late: the stream stays right, pages and acceptance do
    not."""
    original = MtpDrafter.draft

    def stale(self: MtpDrafter, window: VerifiedWindow, num_drafted: int) -> torch.Tensor:
        hidden = window.hidden_BTH
        shifted = torch.cat((hidden[:, :1], hidden[:, :-1]), dim=1)
        return original(self, replace(window, hidden_BTH=shifted), num_drafted)

    monkeypatch.setattr(MtpDrafter, "draft", stale)
    driver = StepDriver(ENDLESS, max_running=1, max_draft_tokens=2)
    request = greedy([1, 2, 3], 60)
    assert driver.run([request], lambda: 2) == [ENDLESS.reference_stream(request)]
    outcomes = driver.running[0].outcomes
    assert sum(outcome.num_accepted for outcome in outcomes) < len(outcomes)
    with pytest.raises(AssertionError, match="MTP K/V"):
        driver.check(driver.running[0])


def test_every_planted_storage_fault_changes_the_stream() -> None:
    """One wrong page cell, or one wrong row, changes the stream."""
    request = greedy(list(range(1, 40)), 90)
    expected = ENDLESS.reference_stream(request)
    for fault, when in itertools.product(("row", "page", "mtp"), (1, 4)):
        driver = StepDriver(ENDLESS, max_running=1, max_draft_tokens=3)
        plan = StepPlan()
        running = driver.plan_join(plan, 0, request)
        while not running.is_done:
            driver.step(3, plan=plan)
            plan = StepPlan()
            if len(running.outcomes) == when:
                if fault == "row":
                    ENDLESS.rows_R3[running.rows] += 1 << 55
                elif fault == "page":
                    ENDLESS.attention_PS[running.pages[1], 3] += 1 << 55
                else:
                    ENDLESS.mtp_PS[running.pages[1], 3] += 1 << 55
        if fault == "mtp":
            assert running.emitted == expected
            assert all(outcome.num_accepted == 3 for outcome in running.outcomes[1 : when + 1])
            assert sum(outcome.num_accepted for outcome in running.outcomes[when + 1 :]) < len(running.outcomes) - when
        else:
            assert running.emitted != expected
