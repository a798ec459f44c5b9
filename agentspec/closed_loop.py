"""Recorded sessions in closed loops through a step loop, on a virtual clock: turn k+1 of a session is due its recorded wait after turn k ended.

A named model's costs move the clock by what each step computed, so that order and waits are the same on every run, whoever executes the steps: nobody
(the dry run) or a real model, whose cache is then compared with the dry run's. Imports no torch.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from agentspec.model_costs import ModelCosts
from agentspec.runtime.request import new_request
from agentspec.runtime.step_loop import StepLoop
from agentspec.types import Breakpoint, FinishReason, ModelSpec, SamplingParams
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
    """What became of one request."""

    request_id: str
    """Session id and number of the turn, `a-1/0`."""
    prompt_tokens: int
    cached_tokens: int
    emissions: list[int]
    """Tokens that each of its steps emitted."""


@dataclass(slots=True)
class VirtualClock:
    """Seconds since the run began; call it for the time."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class _Lane:
    """A session on its way, with its next turn."""

    session_id: str
    number: int
    turn: RecordedTurn
    rest: Iterator[RecordedTurn]
    emissions: list[int] = field(default_factory=list)


class ClosedLoop:
    """Feeds turns to a loop whose cache and gate go by `clock`. Outputs are forced: histories are the recorded ones, whatever is computed."""

    def __init__(
        self,
        loop: StepLoop,
        *,
        clock: VirtualClock,
        costs: ModelCosts,
        spec: ModelSpec,
        max_length: int,
        on_submit: Callable[[str, RecordedTurn], None],
    ) -> None:
        """`on_submit` sees session and turn in the order of submission, and may refuse one by raising."""
        self._loop = loop
        self._clock = clock
        self._costs = costs
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
        """Run all sessions, `num_lanes` of them at the same time, to the end."""
        for _ in range(num_lanes):
            self._start_session(sessions)
        while self._due or self._loop.has_work:
            if not self._loop.has_work:
                self._clock.now = max(self._clock.now, self._due[0][0])
            while self._due and self._due[0][0] <= self._clock.now:
                self._submit(heapq.heappop(self._due)[-1])
            self._step(sessions)

    def _step(self, sessions: Sessions) -> None:
        metrics = self._loop.metrics
        prefilled, decoded = metrics.prefill_tokens, metrics.decode_steps
        events = self._loop.run_once()
        self._clock.now += (metrics.prefill_tokens - prefilled) * self._costs.prefill_seconds_per_token
        self._clock.now += (metrics.decode_steps - decoded) * self._costs.step_seconds
        for event in events:
            if isinstance(event, FinishEvent):
                self._finish(event, sessions)
            else:
                self._running[event.request_id].emissions.append(len(event.token_ids))

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
        assert sum(lane.emissions) == len(lane.turn.output), f"{event.request_id} emitted {lane.emissions}, not {len(lane.turn.output)} tokens"
        ended = EndedTurn(request_id=event.request_id, prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, emissions=lane.emissions)
        self.ended.append(ended)
        following = next(lane.rest, None)
        if following is None:
            self._start_session(sessions)
        else:
            self._schedule(_Lane(lane.session_id, lane.number + 1, following, lane.rest), following.delay_seconds)
