"""The client side of one session with a world: executes the model's calls, keeps the messages, and judges each user
turn.

Pure: knows nothing of HTTP or time, which run.py handles.
"""

from __future__ import annotations

from typing import Any

from agentspec.replay.conversation import Message, input_message
from agentspec.replay.outcomes import CallOutcome, Ending, SessionOutcome, UserTurn
from agentspec.replay.schema import Turn
from agentspec.replay.simulator import Simulator, Tables
from agentspec.replay.world import World

_CALL_MARKS = ("<tool_call>", "<function=")
"""In an answer's text they mark a call that the server could not parse."""


class LiveSession:
    """Call `begin_turn()` at each user turn, then `prompt()` and `add_answer(...)` around each request while it returns
    True."""

    def __init__(self, turns: list[Turn], world: World, tools: list[dict[str, Any]]) -> None:
        """`turns`: those that will be replayed."""
        self.outcome = SessionOutcome(turns=[UserTurn(has_goal=turn.goal is not None) for turn in turns])
        for entry in self.outcome.turns:
            if entry.has_goal:
                entry.missed = ["the session ended before this turn"]
        self._turns = turns
        self._place = -1
        self._simulator = Simulator(world, tools)
        self._before: Tables = {}
        self._messages: list[Message] = []

    def begin_turn(self) -> None:
        """Begin the next user turn."""
        self._place += 1
        self._before = self._simulator.snapshot()
        self._messages += [input_message(message, None) for message in self._turn.messages or []]

    def prompt(self) -> list[Message]:
        """Return all messages of the next request."""
        return list(self._messages)

    def add_answer(self, message: Message, finish_reason: str | None) -> bool:
        """Add the answer to the last prompt, an assistant message, and execute its calls. Returns whether another
        request follows, with their results."""
        entry = self._entry
        entry.num_requests += 1
        entry.answer = str(message.get("content") or "")
        entry.reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
        is_unread = any(mark in entry.answer for mark in _CALL_MARKS)
        if is_unread:
            entry.calls.append(_unread(entry.answer))
        if finish_reason == "length":
            self._add_truncated(message)
            return False
        calls = message.get("tool_calls", [])
        self._messages.append(message)
        if not calls:
            self._end("answered", "the answer holds a tool call that the server could not read" if is_unread else None)
            return False
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            outcome = self._simulator.call(name, arguments)
            entry.calls.append(
                CallOutcome(
                    name=name, arguments=arguments, result=outcome.text, problem=outcome.problem, kind=outcome.kind
                )
            )
            self._messages.append({"role": "tool", "content": outcome.text, "tool_call_id": call["id"]})
        if entry.num_requests < self._turn.max_requests:
            return True
        self._end("limit", f"no answer within {self._turn.max_requests} requests")
        return False

    def fail(self, error: str) -> None:
        """Record that the last request failed, and with it the session."""
        self._entry.num_requests += 1
        self._end("failed", f"the request failed: {error}")

    @property
    def _turn(self) -> Turn:
        return self._turns[self._place]

    @property
    def _entry(self) -> UserTurn:
        return self.outcome.turns[self._place]

    def _add_truncated(self, message: Message) -> None:
        """Add an answer that max_tokens truncated. Its calls are judged but not executed, and are removed from the
        history, where calls need results."""
        for call in message.get("tool_calls", []):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            kind, problem = self._simulator.problem(name, arguments) or (None, None)
            self._entry.calls.append(
                CallOutcome(name=name, arguments=arguments, result=None, problem=problem, kind=kind)
            )
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        self._messages.append(kept | {"content": message.get("content") or ""})
        self._end("cut", "the answer was cut off at max_tokens")

    def _end(self, ending: Ending, reason: str | None) -> None:
        """End the user turn. `reason`: why it has no text answer; None when it may have one."""
        entry, goal = self._entry, self._turn.goal
        entry.ending = ending
        if goal is None:
            return
        answer = entry.answer if reason is None else None
        misses = self._simulator.misses(goal, self._before, answer=answer, num_calls=len(entry.calls))
        entry.missed = ([reason] if reason is not None else []) + misses


def _unread(answer: str) -> CallOutcome:
    return CallOutcome(
        name=None, arguments=answer, result=None, problem="the server could not read the call", kind="not read"
    )
