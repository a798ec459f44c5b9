"""Runs recorded sessions in closed loops through a step loop, on a virtual clock: turn k+1 of a session is submitted
its recorded wait after turn k ended.

`TimedExecutor` advances the clock like a device that computes one step after another, each taking the time that a
model's costs give, while the host is one step ahead. So order and waits are the same on every run, whether a real model
runs the steps or the dry run, which computes nothing; the caches of both can then be compared. Imports no torch.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from agentspec.runtime.plan import Executor, StepOutcome, StepPlan
from agentspec.runtime.request import new_request
from agentspec.runtime.step_loop import StepLoop
from agentspec.simulate.model_costs import ModelCosts
from agentspec.types import MOST_RIDERS, Breakpoint, FinishReason, ModelSpec, SamplingParams
from agentspec.wire import FinishEvent, Submit


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTurn:
    """One recorded request."""

    prompt: array[int]
    output: array[int]
    breakpoints: list[Breakpoint]
    delay_seconds: float
    """Wait after the previous turn ended."""


Sessions = Iterator[tuple[str, Iterator[RecordedTurn]]]
"""Session ids, each once, and their turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedTurn:
    """The measurements of one ended request."""

    request_id: str
    """Session id and turn number, `a-1/0`."""
    prompt_tokens: int
    cached_tokens: int
    emissions: list[int]
    """Tokens that each of its steps emitted."""
    submitted: float
    """When it was submitted; the scheduler sees it when it plans its next step."""
    times: list[float]
    """When each of its steps was done, the first token's first."""

    @property
    def first_token_seconds(self) -> float:
        return self.times[0] - self.submitted

    @property
    def seconds(self) -> float:
        """Of the whole turn."""
        return self.times[-1] - self.submitted

    @property
    def longest_gap(self) -> float:
        """Between two of its steps; 0 if there was only one."""
        return max((after - before for before, after in pairwise(self.times)), default=0.0)


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the run began; calling it returns the time."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class TimedExecutor:
    """An executor whose steps take as long as a model's costs say.

    Launching takes no time; a step begins when the previous one has ended. Collecting a step advances the clock to its
    end."""

    def __init__(self, executor: Executor, *, costs: ModelCosts, clock: VirtualClock) -> None:
        self._executor = executor
        self._costs = costs
        self._clock = clock
        self._lengths: dict[int, int] = {}
        """Of the sequence in each slot, as far as the host knows."""
        self._free_at = 0.0
        """When the device will have completed everything launched."""

    def launch(self, plan: StepPlan) -> Any:
        self._lengths |= {join.slot: join.length for join in plan.joins}
        costs = self._costs
        prefill = costs.pass_seconds([(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks])
        decode = costs.step_seconds([self._lengths[slot] for slot in plan.decode_slots])
        joins = costs.join_seconds if plan.first_slots else 0.0
        rides = (
            plan.chunks
            and plan.decode_slots
            and costs.ride_seconds
            and (plan.num_drafted + 1) * len(plan.decode_slots) <= MOST_RIDERS
        )
        if rides:
            rest = min(costs.join_seconds, decode)  # a step without its forward, like a first step
            prefill, decode = prefill + max(decode - rest - costs.ride_seconds, 0.0), rest
        self._free_at = max(self._clock.now, self._free_at) + prefill + joins + decode
        return self._executor.launch(plan), prefill, decode, bool(rides), self._free_at

    def collect(self, ticket: Any) -> StepOutcome:
        inner, prefill, decode, rode, end = ticket
        outcome = self._executor.collect(inner)
        outcome.prefill_seconds, outcome.decode_seconds, outcome.rode = prefill, decode, rode
        self._lengths |= {slot.slot: slot.length for slot in outcome.slots}
        self._clock.now = max(self._clock.now, end)
        return outcome


@dataclass(slots=True)
class _Lane:
    """A running session, with its next turn."""

    session_id: str
    number: int
    turn: RecordedTurn
    rest: Iterator[RecordedTurn]
    submitted: float = 0.0
    emissions: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class ClosedLoop:
    """Feeds turns to a loop whose cache and gate use `clock`. Outputs are forced, so histories are the recorded ones,
    whatever is computed."""

    def __init__(
        self,
        loop: StepLoop,
        *,
        clock: VirtualClock,
        turn_seconds: float,
        spec: ModelSpec,
        max_length: int,
        on_submit: Callable[[str, RecordedTurn], None],
    ) -> None:
        """`turn_seconds`: added between two turns of a session, beside recorded waits. `on_submit` gets session and
        turn in order of submission, and may refuse one by raising."""
        self._loop = loop
        self._clock = clock
        self._turn_seconds = turn_seconds
        self._spec = spec
        self._max_length = max_length
        self._on_submit = on_submit
        self._due: list[tuple[float, int, _Lane]] = []
        self._running: dict[str, _Lane] = {}
        self._num_scheduled = 0
        self._num_submitted = 0
        self.num_sessions = 0
        self.ended: list[EndedTurn] = []
        """In the order in which they ended."""

    def run(self, sessions: Sessions, num_lanes: int) -> None:
        """Run all sessions, `num_lanes` at a time, to the end."""
        for _ in range(num_lanes):
            self._start_session(sessions)
        while self._due or self._loop.has_work:
            if not self._loop.has_work:
                self._clock.now = max(self._clock.now, self._due[0][0])
            while self._due and self._due[0][0] <= self._clock.now:
                due, _, lane = heapq.heappop(self._due)
                lane.submitted = due
                self._submit(lane)
            self._step(sessions)

    def _step(self, sessions: Sessions) -> None:
        for event in self._loop.run_once():
            if isinstance(event, FinishEvent):
                self._finish(event, sessions)
            else:
                lane = self._running[event.request_id]
                lane.emissions.append(len(event.token_ids))
                lane.times.append(self._clock.now)

    def _start_session(self, sessions: Sessions) -> None:
        for session_id, turns in sessions:
            rest = iter(turns)
            first = next(rest, None)
            if first is not None:
                self.num_sessions += 1
                self._schedule(_Lane(session_id, 0, first, rest), 0.0)
                return

    def _schedule(self, lane: _Lane, delay_seconds: float) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._due, (self._clock.now + delay_seconds, self._num_scheduled, lane))

    def _submit(self, lane: _Lane) -> None:
        turn = lane.turn
        self._on_submit(lane.session_id, turn)
        submit = Submit(
            request_id=f"{lane.session_id}/{lane.number}",
            prompt_ids=list(turn.prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=len(turn.output), ignore_eos=True),
            breakpoints=turn.breakpoints,
            session_id=lane.session_id,
            forced_output=list(turn.output),
        )
        self._running[submit.request_id] = lane
        request = new_request(
            submit,
            number=self._num_submitted,
            spec=self._spec,
            max_length=self._max_length,
            engine_seed=0,
            token_bytes=None,
            allow_forced_output=True,
        )
        self._num_submitted += 1
        self._loop.submit(request)

    def _finish(self, event: FinishEvent, sessions: Sessions) -> None:
        lane = self._running.pop(event.request_id)
        usage = event.usage
        assert event.reason is FinishReason.LENGTH, f"{event.request_id} ended with {event.reason.value}: {event.error}"
        assert sum(lane.emissions) == len(lane.turn.output), (
            f"{event.request_id} emitted {lane.emissions}, not {len(lane.turn.output)} tokens"
        )
        self.ended.append(
            EndedTurn(
                request_id=event.request_id,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                emissions=lane.emissions,
                submitted=lane.submitted,
                times=lane.times,
            )
        )
        following = next(lane.rest, None)
        if following is None:
            self._start_session(sessions)
        else:
            self._schedule(
                _Lane(lane.session_id, lane.number + 1, following, lane.rest),
                following.delay_seconds + self._turn_seconds,
            )
