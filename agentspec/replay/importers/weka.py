"""Import Claude Code sessions in Weka's trace format (kv-cache-tester, InferenceX AgentX): one object per session,
requests by their lengths and block hashes.

With hash_id_scope "local", equal hashes of two sessions are different blocks. A partial block at the end of a prompt
that has no hash becomes a unique block.

Subagents become sessions with a parent. One starts after the request before it in the list (without one, the session's
first), and is joined by the first later request that was sent after it ended; without one no turn waits for it. aiperf
reads the traces in the same way, except that it drops subagents before the first request.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentspec.replay.importers.documents import convert, read_sessions
from agentspec.replay.importers.runs import BlockRequest
from agentspec.replay.schema import Parent, ReplayFile, Session, Turn

_LOCAL_IDS = 2**32
"""Number of block ids that are reserved for one session."""
_TAIL_IDS = 2**62
"""First id of blocks without a hash."""
_EPSILON = 1e-6
"""Tolerance for comparing times of a trace, in seconds."""


class _Request(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"num_in": "in", "num_out": "out"}
):
    t: float
    """Seconds from the session's start; in some traces a subagent's requests count from the subagent's start."""
    type: Literal["n", "s"]
    model: str
    num_in: int
    num_out: int
    hash_ids: list[int] = []
    input_types: list[str] = []
    output_types: list[str] = []
    stop: str = ""
    api_time: float | None = None
    think_time: float | None = None
    ttft: float | None = None

    @property
    def end(self) -> float:
        return self.t + max(0.0, self.api_time or 0.0)


class _Subagent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    t: float
    type: Literal["subagent"]
    agent_id: str
    requests: list[_Request]
    subagent_type: str = ""
    duration_ms: float | None = None
    total_tokens: int | None = None
    tool_use_count: int | None = None
    status: str = ""
    models: list[str] = []
    tool_tokens: int = 0
    system_tokens: int = 0


class _Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    id: str
    block_size: int
    hash_id_scope: Literal["local", "global"]
    requests: list[dict[str, Any]]
    models: list[str] = []
    tool_tokens: int = 0
    system_tokens: int = 0
    totals: dict[str, Any] | None = None


def read(path: str | Path) -> ReplayFile:
    """Read the traces as sessions. Raises ReplayFileError naming the first invalid object."""
    tails = itertools.count(_TAIL_IDS)
    return read_sessions(
        path, "weka", lambda item, number: _Reader(convert("", item, _Trace), number, tails).sessions()
    )


class _Reader:
    """Converts one trace."""

    def __init__(self, trace: _Trace, number: int, tails: Iterator[int]) -> None:
        if trace.block_size < 1:
            raise ValueError(f"block_size: {trace.block_size} must be at least 1")
        self._trace = trace
        self._offset = number * _LOCAL_IDS if trace.hash_id_scope == "local" else 0
        self._tails = tails
        self._names: Counter[str] = Counter()

    def sessions(self) -> list[Session]:
        """Return the main session, then its subagents."""
        calls: list[tuple[str, _Request]] = []
        spawned: list[tuple[int, str, _Subagent]] = []
        for index, item in enumerate(self._trace.requests):
            where = f"requests[{index}]"
            if item.get("type") == "subagent":
                spawned.append((len(calls), where, convert(where, item, _Subagent)))
            else:
                calls.append((where, convert(where, item, _Request)))
        if not calls:
            raise ValueError("requests: the session itself has none")
        are_relative = any(call.t < agent.t - _EPSILON for _, _, agent in spawned for call in agent.requests)
        main = [call for _, call in calls]
        ends = [call.end for call in main]
        subagents = []
        for num_before, where, agent in spawned:
            if agent.requests:
                requests = (
                    [msgspec.structs.replace(call, t=call.t + agent.t) for call in agent.requests]
                    if are_relative
                    else agent.requests
                )
                parent, end = self._place(main, max(0, num_before - 1), agent, requests)
                if parent.join_turn is not None:
                    ends[parent.join_turn - 1] = max(ends[parent.join_turn - 1], end)
                turns = self._turns(
                    [(f"{where}.requests[{index}]", call) for index, call in enumerate(requests)],
                    behind=main[parent.turn].end,
                )
                subagents.append(Session(session_id=self._name(agent), turns=turns, parent=parent))
        return [Session(session_id=self._trace.id, turns=self._turns(calls, ends=ends)), *subagents]

    def _place(
        self, main: list[_Request], turn: int, agent: _Subagent, requests: list[_Request]
    ) -> tuple[Parent, float]:
        """Return the link of a subagent that starts after a turn, and when the subagent ended: by its recorded
        duration, else with its last request."""
        end = (
            max(call.end for call in requests)
            if agent.duration_ms is None
            else agent.t + max(0.0, agent.duration_ms / 1000)
        )
        join_turn = next((place for place in range(turn + 1, len(main)) if main[place].t >= end - _EPSILON), None)
        return Parent(session_id=self._trace.id, turn=turn, join_turn=join_turn), end

    def _name(self, agent: _Subagent) -> str:
        """Return a unique session id: agent ids may repeat in a trace."""
        name = f"{self._trace.id}/{agent.agent_id}"
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name}/{self._names[name]}"

    def _turns(
        self, calls: list[tuple[str, _Request]], *, behind: float | None = None, ends: list[float] | None = None
    ) -> list[Turn]:
        """Convert consecutive requests to turns. `behind`: end of the request after which a subagent starts. `ends`:
        for each request, when everything that the next one waits for had ended; default: its own end."""
        turns: list[Turn] = []
        for index, (where, call) in enumerate(calls):
            kind: Literal["start", "tool", "user"] = "start"
            wait = 0.0 if behind is None else call.t - behind
            if index:
                before = calls[index - 1][1]
                end = before.end if ends is None else ends[index - 1]
                wait = call.t - end
                if call.think_time is not None:  # counts from the previous request; joined subagents may end later
                    wait = call.think_time if end == before.end else min(wait, call.think_time)
                kind = "tool" if before.stop == "tool_use" else "user"
            request = self._request(where, call)
            turns.append(request.turn(self._trace.block_size, delay_ms=max(0.0, wait * 1000), delay_kind=kind))
        return turns

    def _request(self, where: str, call: _Request) -> BlockRequest:
        num_blocks = -(-call.num_in // self._trace.block_size)
        if (
            call.num_in < 1
            or len(call.hash_ids) > num_blocks
            or any(not 0 <= block < _LOCAL_IDS for block in call.hash_ids)
        ):
            raise ValueError(
                f"{where}.hash_ids: {len(call.hash_ids)} ids don't fit {call.num_in} tokens "
                f"in blocks of {self._trace.block_size}"
            )
        known = [self._offset + block for block in call.hash_ids]
        unknown = list(itertools.islice(self._tails, num_blocks - len(known)))
        return BlockRequest(
            at_ms=call.t * 1000, input_length=call.num_in, output_length=call.num_out, hash_ids=known + unknown
        )
