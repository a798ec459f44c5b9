"""The client's side of one session with a world: executes the calls that the model makes, holds the messages, and
judges each turn of the user.

Pure: knows nothing of HTTP or time. run.py asks and waits.
"""

from __future__ import annotations

from typing import Any

from agentspec.replay.conversation import Message, input_message
from agentspec.replay.outcomes import CallOutcome, Ending, SessionOutcome, UserTurn
from agentspec.replay.schema import Turn
from agentspec.replay.simulator import Simulator, Tables
from agentspec.replay.world import World

_CALL_MARKS = ("<tool_call>", "<function=")
"""In an answer's text they are a call that the server could not read."""


class LiveSession:
    """`begin()` at each turn of the user, then `prompt()` and `take(...)` around each request, for as long as `take`
    asks for one more."""

    def __init__(self, turns: list[Turn], world: World, tools: list[dict[str, Any]]) -> None:
        """`turns` are those that will be replayed."""
        self.outcome = SessionOutcome(turns=[UserTurn(has_goal=turn.goal is not None) for turn in turns])
        for entry in self.outcome.turns:
            if entry.has_goal:
                entry.missed = ["the session ended before this turn"]
        self._turns = turns
        self._place = -1
        self._simulator = Simulator(world, tools)
        self._before: Tables = {}
        self._messages: list[Message] = []

    def begin(self) -> None:
        """The next turn of the user begins."""
        self._place += 1
        self._before = self._simulator.snapshot()
        self._messages += [input_message(message, None) for message in self._turn.messages or []]

    def prompt(self) -> list[Message]:
        """All messages of the next request."""
        return list(self._messages)

    def take(self, message: Message, finish_reason: str | None) -> bool:
        """The answer to the last prompt, as an assistant message. True: its calls have been executed, and their results
        are the next request."""
        entry = self._entry
        entry.num_requests += 1
        entry.answer = str(message.get("content") or "")
        entry.reasoning = str(message.get("reasoning_content") or message.get("reasoning") or "")
        is_unread = any(mark in entry.answer for mark in _CALL_MARKS)
        if is_unread:
            entry.calls.append(_unread(entry.answer))
        if finish_reason == "length":
            self._take_cut(message)
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
        """The last request failed, and with it the session."""
        self._entry.num_requests += 1
        self._end("failed", f"the request failed: {error}")

    @property
    def _turn(self) -> Turn:
        return self._turns[self._place]

    @property
    def _entry(self) -> UserTurn:
        return self.outcome.turns[self._place]

    def _take_cut(self, message: Message) -> None:
        """An answer that max_tokens cut off. Its calls are judged and not executed; they leave the history, since calls
        there need results."""
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
        """`reason`: why the turn has no answer in words; None when it may have one."""
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
