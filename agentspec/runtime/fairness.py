"""Which requests have waited longer than fair sharing explains, and how much cached state may be lost to admit them.

A *flow* is a session; an owner's requests without a session are one flow. Beside the real device, a virtual one serves
all active flows at once: each owner gets the same share of its time, and each flow the same share of its owner's. It
serves a flow's requests in order of arrival, after all the work that the flow was ever served. F is the wait until the
virtual device has computed a request's prompt. A request that still waits after 2 F and a grace period is *late*, and
goes ahead of others (admission.py). So a flow that was served more than its share waits for the others to catch up, a
new flow doesn't, and a thousand requests of one flow count as one flow.

A request that goes ahead may evict other sessions' state. What those sessions must compute again is a *debt* of the
kind of turn that went ahead last: first turns, or later turns of a session. A share of the time pays off both debts,
that of first turns first. A late first turn waits only for the first turns' debt, and at most for a pause, which ends
after some seconds or some turns of others, whichever comes first. Other late turns wait for both debts. Debts are
bounded, so no wait is endless: a single newcomer is admitted at once, many newcomers one after another, at most a pause
apart. Requests without a session wait for no debt: they need memory only once, and all of an owner's are one flow. With
a share of 1 there are no debts: late requests go ahead whatever that costs, and a request is late a little before 2 F.

Times are measured: a step's prompt time is split by tokens, its decode time equally among its slots. Knows seconds,
tokens and names; knows nothing of memory.
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
"""Most seconds that paying off one of the two debts may take."""
_PAUSE_SECONDS = 15.0
"""After a first turn went ahead, seconds until the next one may, whatever the debt; or, if this comes sooner:"""
_PAUSE_TURNS = 40
"""Ended turns. So the bound is the same on fast and on slow devices. In ten runs of the densest recorded set, 20 took 1
% more time than 40, and 80 took 0.6 % less, with as many late requests."""
_GRACE_SHARE = 0.5
"""Grace as a share of the largest recent pass plus the longest recent turn: a request can only be admitted when a turn
ends."""
_GRACE_SECONDS = (0.1, 5.0)
"""Least and most grace."""
_AHEAD_SHARE = 0.1
"""With a share of 1 there is no grace: a request is late before 2 F, by this share of the same times, at most by the
most grace, since several may be late at once and a turn has to end for each."""
_TIMINGS = 64
"""How many turns and passes count as recent."""
_RATE_TOKENS = 65_536
"""Prompt tokens over which the estimate of a token's time is averaged."""


@dataclass(slots=True)
class _Wait:
    arrived: float
    num_tokens: int
    """Prompt tokens to be computed, as far as is known."""
    num_lost: int = 0
    """Those of them that were computed before and evicted."""
    share: float | None = None
    """F: seconds until the virtual device had computed its prompt. None: it hasn't yet."""


@dataclass(slots=True)
class _FlowState:
    done_at: float
    """The owner's virtual time at which the virtual device has done all the work that the flow was served."""
    running: dict[str, float] = field(default_factory=dict)
    """When each was admitted, by request id."""
    waiting: dict[str, _Wait] = field(default_factory=dict)
    """By request id, in order of arrival."""


@dataclass(slots=True)
class _Owner:
    virtual: float = 0.0
    """Seconds of service that the virtual device has given to each of its flows."""
    flows: dict[str, _FlowState] = field(default_factory=dict)


class FairShare:
    """Fair sharing on a virtual device, beside what really happens."""

    def __init__(self, clock: Callable[[], float], *, cost: float = FAIR_COST) -> None:
        """clock: seconds. cost: share of the time that may be spent on computing again what late requests evicted."""
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
        """By whether first turns caused it: seconds of lost work."""
        self._at_once = {False: 1, True: 1}
        """How many late sessions may go ahead at the same time, by whether it is their first turn. Rises until they
        cause a loss."""
        self._first_at, self._ended_at_first = float("-inf"), 0
        """When a first turn last went ahead, and how many turns had ended by then."""
        self._was_first = False
        """Whether the last turn that went ahead was a first one: a loss is attributed to that kind."""

    def arrive(self, request: Request) -> None:
        """A request starts to wait for admission, for the first time or again."""
        self._advance()
        owner_name, name = request.flow
        owner = self._owners.setdefault(owner_name, _Owner())
        flow = owner.flows.setdefault(name, _FlowState(owner.virtual))
        if not flow.running and not flow.waiting:
            flow.done_at = max(flow.done_at, owner.virtual)
        flow.running.pop(request.request_id, None)
        flow.waiting[request.request_id] = _Wait(self._now, len(request.sequence))

    def expect(self, request: Request, num_tokens: int, num_lost: int) -> None:
        """Update a waiting request: the cache lacks num_tokens of its prompt, of which its session had `num_lost`
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
        """A waiting request is admitted. goes_ahead: of others, whose state may be evicted for it. is_first: its
        session has had no turn yet."""
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
        """Account a step's times to the flows of its requests. Call before requests of the step end."""
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
        """Ids of the late requests. Owners take turns, those with the fewest running requests first; within an owner,
        the longest overdue first."""
        self._advance()
        if not self._num_ended:
            return []  # no request has ended, so a request's time is unknown
        least, most = _GRACE_SECONDS
        lately = max(self._turn_seconds, default=0.0) + max(self._pass_seconds, default=0.0)
        grace = min(max(_GRACE_SHARE * lately, least), most) if self._cost < 1 else -min(_AHEAD_SHARE * lately, most)
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
                    reached += answer_seconds  # the flow's next request starts after this answer
                    due = wait.arrived + 2 * wait.share + grace
                    if due <= self._now:
                        overdue.append((due, request_id))
            num_running = sum(len(flow.running) for flow in owner.flows.values())
            found += [(place, due, request_id) for place, (due, request_id) in enumerate(sorted(overdue), num_running)]
        return [request_id for _, _, request_id in sorted(found)]

    @property
    def may_go_ahead(self) -> dict[bool, int]:
        """How many late sessions may be ahead of others at the same time: on their first turn (True), and on later ones
        (False). 0 while they wait for a debt; then 1, and more as long as nothing is lost to them."""
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
        if owner is not None and flow[1] in owner.flows:  # the device may run one more step after a flow has ended
            owner.flows[flow[1]].done_at += seconds

    def _advance(self) -> None:
        """Advance the virtual device to the current time, and pay off debts."""
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
        """Whether the virtual device still has work of the flow, as far as is known. A running request's end is
        unknown, so it counts as busy."""
        if flow.running or flow.done_at > virtual:
            return True
        reached = flow.done_at
        for wait in flow.waiting.values():
            reached += wait.num_tokens * self._token_seconds + self._answer_seconds
            if reached > virtual:
                return True
        return False
