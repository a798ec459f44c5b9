"""Who has waited for longer than an equal share of the device explains, and how much may be lost to let them in.

A *flow* is a session; an owner's requests without one are one flow. Beside the real device, an imagined one serves all
flows at once that have something to do: each owner gets the same share of its seconds, and each flow the same share of
its owner's. It takes a flow's requests in order of arrival, behind all that the flow was ever served. The wait until it
has done a request's prompt is F. A request that still waits after 2 F and a grace is *late*, and goes ahead of others
(admission.py). So a flow that was served more than its share waits for the others to catch up, a new one doesn't, and a
thousand requests of one flow are one flow.

Whoever goes ahead may push the state of other sessions out of the memory. What sessions compute again when they come
back is a *debt* of those who went ahead last: of first turns, or of turns of sessions that had one before. Both are
worked off with one share of the time, that of first turns first. Late first turns wait for theirs, a pause at most,
which ends after some seconds or some turns of others, whatever comes first. Other late turns wait for both. Debts are
bounded, so nobody waits for ever: a newcomer finds its place at once, a crowd of them one after the other, a pause
apart at most. Requests without a session wait for no debt: they need room once, and all of an owner's are one flow.
Where the share is 1 there are no debts: who is late goes ahead, whatever that costs.

Times are measured: a step's seconds are those of its prompts by their tokens, and those of its windows by their number.
Knows seconds, tokens and names; knows nothing of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from agentspec.fair_queue import Flow
from agentspec.runtime.flight import Flight
from agentspec.runtime.plan import StepOutcome
from agentspec.runtime.request import Request
from agentspec.types import FAIR_COST

_LONGEST_DEBT = 120.0
"""Seconds that it takes to work off one of the two, at most."""
_PAUSE_SECONDS = 15.0
"""After a first turn that went ahead until the next one may, whatever the debt; or, if these end sooner:"""
_PAUSE_TURNS = 40
"""Turns. So the bound is the same on fast and on slow devices. In ten runs of the densest recorded set 20 took 2 % more
time than 40, with more late requests; with 80 there were more of them, too, in the same time."""
_GRACE_SHARE = 0.5
"""Of the largest pass and the longest turn, lately: it takes a turn's end to let somebody in."""
_GRACE_SECONDS = (0.1, 5.0)
"""At least, at most."""
_TIMINGS = 64
"""Turns and passes that are lately."""
_RATE_TOKENS = 65_536
"""Prompt tokens behind the estimate of what one takes."""


@dataclass(slots=True)
class _Wait:
    arrived: float
    num_tokens: int
    """Of the prompt that are to be computed, as far as is known."""
    num_lost: int = 0
    """Of those: computed before."""
    share: float | None = None
    """Seconds until equal sharing had done its prompt: F. None: it hasn't yet."""


@dataclass(slots=True)
class _FlowState:
    done_at: float
    """The owner's virtual time at which equal sharing has done all that the flow was served."""
    running: dict[str, float] = field(default_factory=dict)
    """When they were let in."""
    waiting: dict[str, _Wait] = field(default_factory=dict)
    """In order of arrival."""


@dataclass(slots=True)
class _Owner:
    virtual: float = 0.0
    """Seconds that equal sharing has given to each of its flows."""
    flows: dict[str, _FlowState] = field(default_factory=dict)


class FairShare:
    """Equal sharing, imagined beside what happens."""

    def __init__(self, clock: Callable[[], float], *, cost: float = FAIR_COST) -> None:
        """clock: seconds. cost: share of the time that may go into computing again what late requests pushed out."""
        self._clock = clock
        self._cost = cost
        self._now = clock()
        self._owners: dict[str, _Owner] = {}
        self._prefill_seconds = 0.0
        self._prefill_tokens = 0.0
        self._decode_seconds = 0.0
        self._num_ended = 0
        self._turn_seconds: deque[float] = deque(maxlen=_TIMINGS)
        self._pass_seconds: deque[float] = deque(maxlen=_TIMINGS)
        self._debts = {False: 0.0, True: 0.0}
        """Of turns of sessions that had one before, and of first turns."""
        self._at_once = {False: 1, True: 1}
        """Late sessions that may go ahead together. They are more and more until something is lost to them."""
        self._first_at, self._ended_at_first = float("-inf"), 0
        """When a first turn went ahead last, and how many turns had ended by then."""
        self._was_first = False
        """What went ahead last was a first turn: what is lost then is lost to it."""

    def arrive(self, request: Request) -> None:
        """A request waits to be admitted, for the first time or again."""
        self._advance()
        owner_name, name = request.flow
        owner = self._owners.setdefault(owner_name, _Owner())
        flow = owner.flows.setdefault(name, _FlowState(owner.virtual))
        if not flow.running and not flow.waiting:
            flow.done_at = max(flow.done_at, owner.virtual)
        flow.running.pop(request.request_id, None)
        flow.waiting[request.request_id] = _Wait(self._now, len(request.sequence))

    def expect(self, request: Request, num_tokens: int, num_lost: int) -> None:
        """The cache has all of a waiting request's prompt but so many tokens, of which its session had `num_lost`
        computed before."""
        wait = self._flow(request.flow).waiting[request.request_id]
        wait.num_tokens = num_tokens
        if num_lost > wait.num_lost:
            if self._cost < 1:
                debt = self._debts[self._was_first] + (num_lost - wait.num_lost) * self._token_seconds
                self._debts[self._was_first] = min(debt, _LONGEST_DEBT * self._cost)
            self._at_once[self._was_first] = 1
            wait.num_lost = num_lost

    def enter(self, request: Request, *, goes_ahead: bool, is_first: bool) -> None:
        """A waiting request is admitted. goes_ahead: of others, to whom it may cost their state. is_first: its session
        has had no turn yet."""
        flow = self._flow(request.flow)
        del flow.waiting[request.request_id]
        flow.running[request.request_id] = self._clock()
        if goes_ahead:
            self._was_first = is_first
            self._at_once[is_first] += 1
        if goes_ahead and is_first:
            self._first_at, self._ended_at_first = self._clock(), self._num_ended

    def leave(self, request: Request) -> None:
        """A request has ended."""
        flow = self._flow(request.flow)
        if flow.waiting.pop(request.request_id, None) is None:
            self._turn_seconds.append(self._clock() - flow.running.pop(request.request_id))
            self._num_ended += 1

    def serve(self, flight: Flight, outcome: StepOutcome) -> None:
        """What a step did, whose requests have not ended before."""
        self._advance()
        tokens = [
            (request.flow, len(chunk.token_ids))
            for (request, _), chunk in zip(flight.chunks, flight.plan.chunks, strict=True)
        ]
        num_tokens = sum(count for _, count in tokens)
        for flow, count in tokens:
            self._count(flow, outcome.prefill_seconds * count / num_tokens)
        for slot in flight.plan.decode_slots:
            self._count(flight.occupants[slot].flow, outcome.decode_seconds / len(flight.plan.decode_slots))
        if num_tokens:
            kept = max(0.0, 1.0 - num_tokens / _RATE_TOKENS)
            self._prefill_seconds = kept * self._prefill_seconds + outcome.prefill_seconds
            self._prefill_tokens = kept * self._prefill_tokens + num_tokens
            self._pass_seconds.append(outcome.prefill_seconds)
        self._decode_seconds += outcome.decode_seconds

    def late(self) -> list[str]:
        """The requests that have waited for too long: owners by turns, those of whom the fewest run first; of an
        owner's the longest overdue."""
        self._advance()
        if not self._num_ended:
            return []  # nobody knows yet what a request takes
        least, most = _GRACE_SECONDS
        lately = max(self._turn_seconds, default=0.0) + max(self._pass_seconds, default=0.0)
        grace = min(max(_GRACE_SHARE * lately, least), most) if self._cost < 1 else least
        answer_seconds = self._answer_seconds
        found: list[tuple[int, float, str]] = []
        for owner in self._owners.values():
            overdue = []
            for flow in owner.flows.values():
                reached = flow.done_at
                for request_id, wait in flow.waiting.items():
                    reached += wait.num_tokens * self._token_seconds
                    if wait.share is None and reached > owner.virtual:
                        break
                    if wait.share is None:
                        wait.share = self._now - wait.arrived
                    reached += answer_seconds  # before the flow's next request
                    due = wait.arrived + 2 * wait.share + grace
                    if due <= self._now:
                        overdue.append((due, request_id))
            num_running = sum(len(flow.running) for flow in owner.flows.values())
            found += [(place, due, request_id) for place, (due, request_id) in enumerate(sorted(overdue), num_running)]
        return [request_id for _, _, request_id in sorted(found)]

    @property
    def may_go_ahead(self) -> dict[bool, int]:
        """Sessions without a turn behind them (True), and with one (False), that may be ahead of others at the same
        time. None while they wait for a debt; then one, and more while nothing is lost to them."""
        num_since = self._num_ended - self._ended_at_first
        is_over = self._now - self._first_at >= _PAUSE_SECONDS or num_since >= _PAUSE_TURNS
        first_owe, later_owe = self._debts[True] > 0.0, self._debts[False] > 0.0
        return {
            True: 0 if first_owe and not is_over else self._at_once[True],
            False: 0 if first_owe or later_owe else self._at_once[False],
        }

    @property
    def _token_seconds(self) -> float:
        return self._prefill_seconds / self._prefill_tokens if self._prefill_tokens else 0.0

    @property
    def _answer_seconds(self) -> float:
        return self._decode_seconds / self._num_ended if self._num_ended else 0.0

    def _flow(self, flow: Flow) -> _FlowState:
        return self._owners[flow[0]].flows[flow[1]]

    def _count(self, flow: Flow, seconds: float) -> None:
        owner = self._owners.get(flow[0])
        if owner is not None and flow[1] in owner.flows:  # the device goes on for a step with what has ended
            owner.flows[flow[1]].done_at += seconds

    def _advance(self) -> None:
        """Let equal sharing catch up with the clock."""
        now = self._clock()
        seconds, self._now = now - self._now, now
        worked = self._cost * seconds
        for is_first in (True, False):
            part = min(worked, self._debts[is_first])
            self._debts[is_first] -= part
            worked -= part
        shares = []
        for owner_name, owner in list(self._owners.items()):
            for name in [
                name
                for name, flow in owner.flows.items()
                if not (flow.running or flow.waiting or flow.done_at > owner.virtual)
            ]:
                del owner.flows[name]
            if not owner.flows:
                del self._owners[owner_name]
            elif num_busy := sum(self._is_busy(flow, owner.virtual) for flow in owner.flows.values()):
                shares.append((owner, num_busy))
        for owner, num_busy in shares:
            owner.virtual += seconds / (len(shares) * num_busy)

    def _is_busy(self, flow: _FlowState, virtual: float) -> bool:
        """Equal sharing hasn't done all that the flow was served or asks for, as far as that is known: what still runs
        may take any time."""
        if flow.running or flow.done_at > virtual:
            return True
        reached = flow.done_at
        for wait in flow.waiting.values():
            reached += wait.num_tokens * self._token_seconds + self._answer_seconds
            if reached > virtual:
                return True
        return False
