"""Recorded turns in an engine that is forced to give their answers, each step written down.

The target "chooses" the recorded tokens. An MTP draft is the recorded token as often as given rates say, drawn by
position, and a wrong token otherwise. Copies are made by the engine, and stand where they equal the recorded tokens: by
the rule alone, so `check_copies` knows every step's number from the text.

Shape letters: N tokens of a turn's text.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from agentspec.config import EngineConfig
from agentspec.engine.assembly import build
from agentspec.replay.encoders import Encoder
from agentspec.replay.render import TraceRenderer
from agentspec.replay.schema import load
from agentspec.runtime.plan import Executor, StepOutcome, StepPlan
from agentspec.runtime.request import new_request
from agentspec.types import MIN_COPY_MATCH, has_copies
from agentspec.wire import FinishEvent, Submit
from benchmarks.copies_offline import Matches
from benchmarks.decode_checks import CheckFailedError
from benchmarks.published import PrefilledModel
from benchmarks.running_engine import GREEDY, Case, kernels_ahead, memory_for

WARM_UP = 20
"""Steps of an engine that are not timed."""


@dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """A prompt with its recorded answer."""

    session_id: str
    prompt: list[int]
    answer: list[int]
    most_copies: int

    @cached_property
    def matches(self) -> Matches:
        return Matches.of(np.array(self.prompt + self.answer, np.int64), max(self.most_copies, 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The turns of a file that are decoded."""

    name: str
    turns: list[RecordedTurn]
    num_sessions: int
    """Sessions that the turns are of."""
    num_cut: int
    """Sessions of the file with turns that don't fit the context, which are left out."""
    num_all: int
    """Sessions of the file."""

    @property
    def num_tokens(self) -> int:
        """Of all answers."""
        return sum(len(turn.answer) for turn in self.turns)

    @property
    def context(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return max(len(turn.prompt) + len(turn.answer) for turn in self.turns)

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.turns)} turns of {self.num_sessions} sessions (of {self.num_all}, of which "
            f"{self.num_cut} were cut to fit), {self.num_tokens:,} answer tokens, contexts of up to {self.context:,}"
        )


def read_recording(
    path: Path, encoder: Encoder, *, max_context: int, num_tokens: int, most_copies: int, seed: int
) -> Recording:
    """Choose turns of a file at random until their answers have num_tokens tokens.

    A prompt costs nothing here, so a turn needs none of those before it. max_context: of prompt and answer. Raises
    ValueError if no recorded answer fits."""
    file, renderer = load(path), TraceRenderer(encoder, "stable")
    fitting, num_cut = [], 0
    for session in file.sessions:
        rendered = [turn for turn in renderer.turns(file, session) if len(turn.output_ids) > 1]
        short = [turn for turn in rendered if len(turn.prompt_ids) + len(turn.output_ids) <= max_context]
        num_cut += len(short) < len(rendered)
        fitting += [(session.session_id, turn) for turn in short]
    random.Random(seed).shuffle(fitting)
    turns: list[RecordedTurn] = []
    missing = num_tokens
    for session_id, turn in fitting:
        if missing <= 0:
            break
        turns.append(
            RecordedTurn(
                session_id=session_id,
                prompt=turn.prompt_ids.tolist(),
                answer=turn.output_ids.tolist(),
                most_copies=most_copies,
            )
        )
        missing -= len(turn.output_ids)
    if not turns:
        raise ValueError(f"{path}: no recorded answer fits {max_context} tokens")
    sessions = {turn.session_id for turn in turns}
    return Recording(
        name=path.name, turns=turns, num_sessions=len(sessions), num_cut=num_cut, num_all=len(file.sessions)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One slot's window in one step."""

    turn: int
    last: int
    """Place of the last emitted token before it, in prompt and answer."""
    offered: int
    accepted: int
    """Of all drafts. One more token is emitted: the target's, or the last one of the answer."""


@dataclass(kw_only=True, slots=True)
class Step:
    """A launched plan."""

    num_drafted: int
    is_plain: bool
    """Every user decodes, and nothing else happens."""
    occupants: dict[int, int] = field(default_factory=dict)
    """The turn of each slot that decodes or joins."""
    without_copies: set[int] = field(default_factory=set)
    """Turns for whose next windows no copies are looked for, because so many slots decode that none have any."""
    windows: list[Window] = field(default_factory=list)
    end: float = 0.0
    """When the host had its results, on time.perf_counter's clock."""


class Recorder(Executor):
    """An executor that writes down its steps."""

    def __init__(self, executor: Executor, turns: Sequence[RecordedTurn], *, num_users: int, num_mtp: int) -> None:
        self.steps: list[Step] = []
        self.emitted: list[list[int]] = [[] for _ in turns]
        self._executor, self._turns, self._num_users, self._num_mtp = executor, turns, num_users, num_mtp
        self._occupants: dict[int, int] = {}

    def launch(self, plan: StepPlan) -> tuple[Step, Any]:
        self._occupants |= {join.slot: int(join.request_id) for join in plan.joins}
        slots = (*plan.first_slots, *plan.decode_slots)
        step = Step(
            num_drafted=plan.num_drafted,
            is_plain=len(plan.decode_slots) == self._num_users and not (plan.chunks or plan.joins or plan.leaves),
            occupants={slot: self._occupants[slot] for slot in slots},
        )
        for group, num_drafted in ((plan.first_slots, 0), (plan.decode_slots, plan.num_drafted)):
            if num_drafted <= self._num_mtp and not has_copies(len(group), self._num_mtp):
                step.without_copies |= {self._occupants[slot] for slot in group}
        self.steps.append(step)
        return step, self._executor.launch(plan)

    def collect(self, ticket: tuple[Step, Any]) -> StepOutcome:
        step, inner = ticket
        outcome = self._executor.collect(inner)
        step.end = time.perf_counter()
        for slot in outcome.slots:
            turn = step.occupants[slot.slot]
            so_far = self.emitted[turn]
            if so_far and slot.emitted:  # the first token comes with the prompt
                window = Window(
                    turn=turn,
                    last=len(self._turns[turn].prompt) + len(so_far) - 1,
                    offered=slot.num_drafted,
                    accepted=slot.num_accepted,
                )
                assert len(slot.emitted) == slot.num_accepted + 1
                step.windows.append(window)
            so_far.extend(slot.emitted)
        return outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What an engine did."""

    steps: list[Step]
    num_turns: int
    """Turns that were decoded to their end."""
    start_seconds: float
    """Duration of building the engine."""

    @property
    def windows(self) -> list[tuple[Step, Window]]:
        return [(step, window) for step in self.steps for window in step.windows]

    @property
    def timed(self) -> list[tuple[Step, float]]:
        """Steps in which every user decodes, between two others of that kind, with their seconds: from the results of
        the step before to their own. While the device runs a step, the host plans the next one, so all three count. A
        step with a slot whose turn has just ended, which the host did not know, is left out."""
        triples = zip(pairwise(self.steps), self.steps[2:], strict=False)
        return [
            (step, step.end - before.end)
            for (before, step), after in list(triples)[WARM_UP:]
            if before.is_plain and step.is_plain and after.is_plain and len(step.windows) == len(step.occupants)
        ]


def play(
    case: Case,
    turns: Sequence[RecordedTurn],
    model: PrefilledModel,
    device: torch.device,
    *,
    rates: Sequence[float],
    time_is_up: Callable[[], bool],
    widest: Case | None = None,
) -> Played:
    """Decode all turns in order, case.batch at a time. case.context: of the longest turn. rates: of the MTP drafts.
    widest: compile the kernels of an engine for this case in parallel first; None: they are compiled at their first
    launch.

    Raises CheckFailedError if an answer isn't the recorded one."""
    began = time.perf_counter()
    memory = memory_for(case, model.spec, num_steps=1)
    config = EngineConfig(
        draft_tokens=len(rates),
        state_form=case.state_form,
        copy_drafts=case.copies,
        max_running=case.batch,
        prefill_budget=case.batch * (case.context + model.spec.block_tokens),
        force_acceptance=tuple(rates),
        allow_forced_output=True,
    )
    with ExitStack() as stack:
        ahead = None
        if widest is not None:
            compiled = replace(
                config, copy_drafts=widest.copies, max_running=widest.batch, state_form=widest.state_form
            )
            ahead = stack.enter_context(kernels_ahead(case.model, compiled, device))
        # Prompts are not computed. So windows that ride in their passes save nothing, and their graphs would cost time.
        loop = build(model, config=config, memory=memory, device=device, ahead=ahead, most_riders=0).loop
    recorder = Recorder(loop.executor, turns, num_users=case.batch, num_mtp=len(rates))
    loop.executor = recorder
    start_seconds = time.perf_counter() - began
    left, num_done = deque(enumerate(turns)), 0

    def submit_next() -> None:
        if not left or time_is_up():
            return
        number, turn = left.popleft()
        submit = Submit(
            request_id=str(number),
            prompt_ids=turn.prompt,
            sampling=msgspec.structs.replace(GREEDY, max_tokens=len(turn.answer), seed=number),
            forced_output=turn.answer,
        )
        loop.submit(
            new_request(
                submit,
                number=number,
                spec=model.spec,
                max_length=memory.max_length,
                engine_seed=0,
                token_bytes=None,
                allow_forced_output=True,
                forces_acceptance=True,
            )
        )

    for _ in range(case.batch):
        submit_next()
    while loop.has_work:
        for event in loop.run_once():
            if isinstance(event, FinishEvent):
                number = int(event.request_id)
                if event.error is not None or recorder.emitted[number] != turns[number].answer:
                    raise CheckFailedError(_difference(number, turns[number], recorder.emitted[number], event))
                num_done += 1
                submit_next()
    return Played(steps=recorder.steps, num_turns=num_done, start_seconds=start_seconds)


def _difference(number: int, turn: RecordedTurn, emitted: list[int], event: FinishEvent) -> str:
    pairs = zip(emitted, turn.answer, strict=False)
    place = next((place for place, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(emitted), len(turn.answer)))
    return (
        f"turn {number} of session {turn.session_id}, {event.reason} {event.error or ''}: token {place} is "
        f"{emitted[place : place + 1]}, recorded is {turn.answer[place : place + 1]}"
    )


def check_copies(
    played: Played,
    turns: Sequence[RecordedTurn],
    num_mtp: int,
    most_copies: int,
    *,
    min_match: int = MIN_COPY_MATCH,
    shares: bool = True,
) -> int:
    """Compare the copies of every window, behind MTP drafts that are all right, with the rule on the recorded text: how
    many were offered, and how many accepted. Returns the number of windows compared. most_copies: of one window.
    min_match: of the model. shares: as in Case.

    A window may have fewer copies than were made only where the windows of its step have all that it has rows for.
    Raises CheckFailedError at the first difference."""
    num_compared = 0
    without_copies: set[int] = set()
    for step in played.steps:
        num_copies = step.num_drafted - num_mtp
        most = (most_copies if shares else num_copies) if num_copies > 0 else 0
        num_shared = sum(max(window.offered - num_mtp, 0) for window in step.windows)
        for window in step.windows if most else ():
            if window.accepted < num_mtp:
                continue
            turn, final = turns[window.turn], window.last + num_mtp
            has_match = window.turn not in without_copies and turn.matches.length_N[final] >= min_match
            offered = most if has_match else 0
            found = (window.offered - num_mtp, window.accepted - num_mtp)
            if 0 <= found[0] < offered and num_shared >= len(step.windows) * num_copies:
                offered = found[0]
            room = len(turn.prompt) + len(turn.answer) - 2 - final
            expected = (offered, min(int(turn.matches.run_N[final]), offered, room))
            if found != expected:
                raise CheckFailedError(
                    f"turn {window.turn} of session {turn.session_id}: behind token {window.last} {found} copies are "
                    f"offered and accepted, by the rule {expected}"
                )
            num_compared += 1
        without_copies = without_copies - set(step.occupants.values()) | step.without_copies
    return num_compared
