"""Two executors that get the same plans and must end with the same bits, in their results and in every buffer.

The plans are random and varied: requests join and leave, windows of every depth, any batch, greedy and sampled, with
penalties, masks and scores. Results of the second twin are collected one step late.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.runtime.executor import ModelExecutor, StepTicket
from agentspec.runtime.plan import SlotOutcome, StepPlan
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, SamplingParams
from tests.fakes.automaton import pack
from tests.fakes.hash_chain import HashChainModel, ReferenceRequest
from tests.fakes.sequence_driver import poison
from tests.fakes.step_driver import StepDriver

_MAX_LENGTH = 256


def run_twins(
    make_model: Callable[[], HashChainModel | Qwen3_5Model],
    prepare_first: Callable[[ModelExecutor], Any],
    prepare_second: Callable[[ModelExecutor], Any],
    *,
    seed: int,
    max_running: int,
    max_draft_tokens: int,
    num_steps: int,
    device: torch.device | str = "cpu",
) -> None:
    """prepare: applied to an executor before its first plan. Raises AssertionError naming the seed, the step and the
    buffer."""
    rng = random.Random(seed)
    first, second = (
        StepDriver(
            make_model(),
            max_running=max_running,
            max_draft_tokens=max_draft_tokens,
            max_length=_MAX_LENGTH,
            device=device,
        )
        for _ in range(2)
    )
    for driver, prepare in ((first, prepare_first), (second, prepare_second)):
        if isinstance(driver.model, Qwen3_5Model):
            poison(driver.model)
        before = _copies(driver)
        prepare(driver.executor)
        _compare(before, buffers_of(driver), f"seed {seed}, at the start")
    host = _Host(first, rng, max_running)
    late: tuple[StepTicket, list[SlotOutcome], str] | None = None
    for step in range(num_steps):
        context = f"seed {seed}, step {step}"
        plan = host.random_plan()
        outcomes = first.step(plan.num_drafted, slots=plan.decode_slots, plan=plan)
        ticket = second.executor.launch(plan)
        if late is not None:
            _compare_outcomes(late[1], second.executor.collect(late[0]).slots, late[2])
        late = ticket, outcomes, context
        _compare(_copies(first, host.without_penalties), _copies(second, host.without_penalties), context)
    padding = first.executor._buffers.slots_SF[-1]
    assert torch.equal(padding, before["slots_SF"][-1]), f"seed {seed}: the padding slot has changed"


class _Host:
    """Makes random plans; `driver.running` follows them."""

    def __init__(self, driver: StepDriver, rng: random.Random, max_running: int) -> None:
        self._driver, self._rng = driver, rng
        self.without_penalties = set(range(max_running))
        """Slots whose counts mean nothing."""
        self._constrained: set[int] = set()
        self._num_slots = max_running

    def random_plan(self) -> StepPlan:
        driver, rng = self._driver, self._rng
        plan = StepPlan(num_drafted=rng.randint(0, driver.max_draft_tokens))
        spec = driver.model.spec
        for slot in range(self._num_slots):
            running = driver.running.get(slot)
            if running is not None and (running.is_done or rng.random() < 0.05):
                plan.leaves.append(slot)
                del driver.running[slot]
            if slot not in driver.running and rng.random() < 0.5:
                self._join(plan, slot)
        slots = list(driver.running)
        plan.decode_slots = rng.sample(slots, rng.randint(min(1, len(slots)), len(slots)))
        for slot in self._constrained.intersection(plan.decode_slots):
            allowed = np.random.default_rng(rng.randrange(2**31)).random((plan.num_drafted + 1, spec.vocab_size)) < 0.5
            allowed[:, rng.randrange(spec.num_real_tokens)] = True
            plan.masks[slot] = np.stack([pack(row) for row in allowed])
        return plan

    def _join(self, plan: StepPlan, slot: int) -> None:
        rng = self._rng
        request = _random_request(rng, self._driver.model.spec.num_real_tokens)
        self._driver.plan_join(plan, slot, request)
        self.without_penalties.discard(slot)
        self._constrained.discard(slot)
        if not request.sampling.has_penalties:
            self.without_penalties.add(slot)
        if rng.random() < 0.2:
            self._constrained.add(slot)
        plan.joins[-1] = dataclasses.replace(
            plan.joins[-1], constrained=slot in self._constrained, logprobs=rng.choice([None, None, 0, 3])
        )


def _random_request(rng: random.Random, vocab: int) -> ReferenceRequest:
    prompt = [rng.randrange(3, vocab - 1) for _ in range(rng.choice([1, 2, 30, 65, 100]))]
    sampling = SamplingParams(temperature=0.0)
    if rng.random() < 0.4:
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_k=rng.choice([0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.05]),
            presence_penalty=rng.choice([0.0, 0.6]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=rng.choice([{}, {5: 2.0}]),
        )
    return ReferenceRequest(
        prompt=prompt, sampling=sampling, seed=rng.getrandbits(63), length_limit=len(prompt) + rng.randint(1, 90)
    )


def buffers_of(driver: StepDriver) -> dict[str, Tensor]:
    """Everything that outlives a step, by name, except the storage that inert slots write to: its content depends on
    races."""
    buffers: Any = driver.executor._buffers
    fields = [(part, field.name) for part in (buffers, buffers.sampling) for field in dataclasses.fields(part)]
    tensors = {name: getattr(part, name) for part, name in fields if isinstance(getattr(part, name), Tensor)}
    model = driver.model
    if isinstance(model, HashChainModel):
        rows, pages = {"rows": (model.rows_R3, 0)}, {"attention": (model.attention_PS, 0), "mtp": (model.mtp_PS, 0)}
    else:
        assert isinstance(model, Qwen3_5Model)
        pools = model.pools
        rows = {"ssm": (pools["ssm_LRVDK"], 1), "conv": (pools["conv_LR3C"], 1), "hidden": (pools.hidden_RH, 0)}
        pages = {"kv": (pools["kv_AP2SGD"], 1)}
    return tensors | {
        name: tensor.narrow(dim, scratch + 1, tensor.shape[dim] - scratch - 1)
        for stored, scratch in ((rows, SCRATCH_ROW), (pages, SCRATCH_PAGE))
        for name, (tensor, dim) in stored.items()
    }


@torch.inference_mode()
def _copies(driver: StepDriver, stale_counts: Iterable[int] = ()) -> dict[str, Tensor]:
    copies = {name: tensor.clone() for name, tensor in buffers_of(driver).items()}
    copies["counts_SV"][list(stale_counts)] = 0
    return copies


def _compare(expected: Mapping[str, Tensor], got: Mapping[str, Tensor], context: str) -> None:
    for name, tensor in expected.items():
        # By bits, so that NaN, which never-written storage holds, equals itself.
        same = torch.equal(tensor.contiguous().view(torch.uint8), got[name].contiguous().view(torch.uint8))
        assert same, f"{context}: {name} differs in {int((tensor != got[name]).sum())} of {tensor.numel()} values"


def _compare_outcomes(expected: list[SlotOutcome], got: list[SlotOutcome], context: str) -> None:
    for wanted, outcome in zip(expected, got, strict=True):
        if not wanted.emitted:  # an inert slot's drafts depend on the scratch page
            wanted, outcome = (dataclasses.replace(one, drafts=[]) for one in (wanted, outcome))
        assert outcome == wanted, context
