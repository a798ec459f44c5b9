"""Waiting times of first tokens compared with equal sharing, by dry runs on measured costs: `python -m
benchmarks.fairness FILE... --costs 4b --lanes 8 32`.

A request's F is the time of its first token if all present flows shared the device's time equally: with n owners
present, each gets 1/n, divided equally among its flows. A flow is a session; an owner's requests without a session are
one flow. Arrivals and each request's work are those of the run. The work is the device seconds that the run spent on
the request: its part of the cost of passes, and its slot's part of decode steps. Within a flow, earlier requests come
first. B is the largest pass of the run plus the longest turn, from its admission to its end.

Memory is given as a number of sessions: n means the memory of the n largest final working sets of the file.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentspec.commands.dry_run import DEFAULT_DRAFTS
from agentspec.replay.options import ReplayOptions
from agentspec.runtime.plan import Executor, StepOutcome, StepPlan
from agentspec.runtime.scheduler import SESSION_CHECKPOINTS
from agentspec.simulate.closed_loop import VirtualClock
from agentspec.simulate.dry_run import DryMemory, DryRun, DryRunResult
from agentspec.simulate.model_costs import ModelCosts, model_costs
from agentspec.types import BLOCK_TOKENS, FAIR_COST
from benchmarks.policy import HOLD_SECONDS, RecordedFile, read
from benchmarks.timed_copies import TimedCopies, host_memory

HOST_BYTES_PER_SECOND = 25e9
"""Transfer rate in each direction, in parallel to steps: half of PCIe 5's nominal rate."""


@dataclass(slots=True)
class Served:
    """Device seconds that one request got."""

    first: float = 0.0
    """Until its first token."""
    rest: float = 0.0
    began: float | None = None
    """Time of the launch of its first piece."""
    has_joined: bool = False

    def add(self, seconds: float) -> None:
        if self.has_joined:
            self.rest += seconds
        else:
            self.first += seconds


class ServiceLog:
    """An executor that wraps a timed one and records each request's share of every step."""

    def __init__(self, executor: Executor, costs: ModelCosts, clock: VirtualClock) -> None:
        self._executor = executor
        self._costs = costs
        self._clock = clock
        self._in_slot: dict[int, str] = {}
        self._steps: deque[tuple[StepPlan, dict[int, str]]] = deque()
        self.served: dict[str, Served] = {}
        self.largest_pass = 0.0

    def launch(self, plan: StepPlan) -> Any:
        self._in_slot |= {join.slot: join.request_id for join in plan.joins}
        self._steps.append((plan, dict(self._in_slot)))
        return self._executor.launch(plan)

    def collect(self, ticket: Any) -> StepOutcome:
        outcome = self._executor.collect(ticket)
        plan, in_slot = self._steps.popleft()
        parts = [self._costs.pass_seconds([(chunk.start, len(chunk.token_ids))]) for chunk in plan.chunks]
        for chunk, part in zip(plan.chunks, parts, strict=True):
            served = self.served.setdefault(chunk.request_id, Served())
            if served.began is None:
                served.began = self._clock.now
            served.add(outcome.prefill_seconds * part / sum(parts))
        self.largest_pass = max(self.largest_pass, outcome.prefill_seconds)
        for slot in plan.first_slots:
            served = self.served[in_slot[slot]]
            served.add(self._costs.join_seconds / len(plan.first_slots))
            served.has_joined = True
        for slot in plan.decode_slots:
            self.served[in_slot[slot]].add(outcome.decode_seconds / len(plan.decode_slots))
        return outcome


@dataclass(frozen=True, slots=True)
class Asked:
    """One request in the model of equal sharing."""

    at: float
    flow: tuple[str, str]
    """Owner, and session."""
    first: float
    """Device seconds until its first token."""
    rest: float


def fluid_waits(asked: Sequence[Asked]) -> list[float]:
    """F of each request, in seconds. `asked`: in order of arrival."""
    waits = [0.0] * len(asked)
    queues: dict[tuple[str, str], deque[tuple[int, bool, float]]] = {}
    now = 0.0
    for index, one in enumerate([*asked, None]):
        now = _drain(queues, waits, asked, now, float("inf") if one is None else one.at)
        if one is not None:
            queues.setdefault(one.flow, deque()).extend([(index, True, one.first), (index, False, one.rest)])
    return waits


def _drain(
    queues: dict[tuple[str, str], deque[tuple[int, bool, float]]],
    waits: list[float],
    asked: Sequence[Asked],
    now: float,
    until: float,
) -> float:
    """Serve from `now` until no work is left, or until `until`; return that time."""
    while queues and now < until:
        flows_of: dict[str, int] = {}
        for owner, _ in queues:
            flows_of[owner] = flows_of.get(owner, 0) + 1
        slowness = {flow: len(flows_of) * flows_of[flow[0]] for flow in queues}
        step = min(until - now, min(queue[0][2] * slowness[flow] for flow, queue in queues.items()))
        now += step
        for flow, queue in list(queues.items()):
            index, is_first, left = queue[0]
            left -= step / slowness[flow]
            if left > 1e-12:
                queue[0] = index, is_first, left
                continue
            queue.popleft()
            if is_first:
                waits[index] = now - asked[index].at
            if not queue:
                del queues[flow]
    return max(now, until) if until < float("inf") else now


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one run."""

    hit_share: float
    wall: float
    longest_wait: float
    """Seconds."""
    excess: float
    """The largest wait over its 2 F + B."""
    num_late: int
    """Requests that waited for longer than 2 F + B."""
    num_requests: int
    chunk: float
    quantum: float


def judge(result: DryRunResult, log: ServiceLog) -> Outcome:
    turns = sorted(result.ended, key=lambda turn: turn.submitted)
    asked = []
    for turn in turns:
        served = log.served[turn.request_id]
        asked.append(Asked(turn.submitted, ("", turn.request_id.rpartition("/")[0]), served.first, served.rest))
    quantum = max(turn.times[-1] - (log.served[turn.request_id].began or 0.0) for turn in turns)
    beside = log.largest_pass + quantum
    excess = [
        turn.first_token_seconds / (2 * fluid + beside) for turn, fluid in zip(turns, fluid_waits(asked), strict=True)
    ]
    return Outcome(
        hit_share=result.hit_share,
        wall=result.virtual_seconds,
        longest_wait=max(turn.first_token_seconds for turn in turns),
        excess=max(excess),
        num_late=sum(one > 1 for one in excess),
        num_requests=len(turns),
        chunk=log.largest_pass,
        quantum=quantum,
    )


def run(
    sessions: RecordedFile,
    costs: ModelCosts,
    lanes: int,
    num_fitting: int | None,
    *,
    fair_cost: float = FAIR_COST,
    host_gib: float = 0.0,
) -> Outcome:
    """num_fitting: number of sessions whose working sets fit; None: no bound. fair_cost: as `--fair-cost` of `serve`.
    host_gib: size of the host tier; 0: none."""
    gib = None
    if num_fitting is not None:
        gib = (
            num_fitting
            * (largest_session(sessions) * costs.kv_bytes_per_token + SESSION_CHECKPOINTS * costs.row_bytes)
            / 2**30
        )
    dry = DryRun(
        costs=costs,
        memory=DryMemory.bounded(gib, costs=costs, max_running=lanes, num_drafted=DEFAULT_DRAFTS),
        max_running=lanes,
        num_drafted=DEFAULT_DRAFTS,
        prefill_budget="auto",
        fair_cost=fair_cost,
        hold_seconds=HOLD_SECONDS,
        seed=0,
        on_submit=lambda turn: None,
        host_memory=host_memory(host_gib, costs) if host_gib else None,
        copier=partial(TimedCopies, costs=costs, bytes_per_second=HOST_BYTES_PER_SECOND) if host_gib else None,
    )
    log = dry.loop.executor = ServiceLog(dry.loop.executor, costs, dry.clock)
    return judge(dry.run(((name, iter(turns)) for name, turns in sessions), lanes), log)


def largest_session(sessions: RecordedFile) -> int:
    """Tokens."""
    return max(len(turn.prompt) + len(turn.output) for _, turns in sessions for turn in turns) + 3 * BLOCK_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fairness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="recorded sessions")
    parser.add_argument("--costs", nargs="+", default=["4b", "27b-fp8"])
    parser.add_argument("--lanes", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument(
        "--fitting",
        type=int,
        nargs="*",
        default=[2, 4, 8],
        help="memory, as sessions that fit; the last run has no bound",
    )
    parser.add_argument("--fair-cost", type=float, default=FAIR_COST, metavar="SHARE", help="as that of serve")
    parser.add_argument("--host", type=float, default=0.0, metavar="GIB", help="of a host tier, at 25 GB/s each way")
    parser.add_argument("--sessions", type=int, help="the first so many of each file")
    options = parser.parse_args()
    print(
        "| set | costs | lanes | sessions that fit | late of requests | longest wait, s | largest wait / (2 F + B) "
        "| B, s | hit share | wall, s |"
    )
    print("|---" * 10 + "|", flush=True)
    for path in options.files:
        sessions = read(path, ReplayOptions(output="forced", sessions=options.sessions))
        for name in options.costs:
            for lanes in options.lanes:
                for fitting in (*options.fitting, None):
                    if fitting is not None and fitting >= lanes:
                        continue
                    found = run(
                        sessions, model_costs(name), lanes, fitting, fair_cost=options.fair_cost, host_gib=options.host
                    )
                    print(
                        f"| {path.name.split('.')[0]} | {name} | {lanes} | {fitting or 'all'} | {found.num_late} of "
                        f"{found.num_requests} | "
                        f"{found.longest_wait:.1f} | {found.excess:.2f} | {found.chunk:.2f} + {found.quantum:.1f} | "
                        f"{found.hit_share:.2%} | "
                        f"{found.wall:.1f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
