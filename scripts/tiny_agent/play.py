"""A running session: its records, the values shown so far, and the gold messages of its turns.

Calls are executed, so every gold trajectory works. Independent of wordings, of the origin of domains and of tasks.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentspec.replay.simulator import Simulator, Tables, changes
from agentspec.replay.world import Calculate, Create, Find, Goal, Record, Replace, Update
from scripts.tiny_agent import answers
from scripts.tiny_agent.domain import Domain, Operation, Split, Turn, Verb
from scripts.tiny_agent.phrases import Tone, listed

SPARE_CALLS = 2
"""Maximum number of calls of a turn beyond the gold ones."""

Call = tuple[Operation, Record]


@dataclass(kw_only=True, slots=True)
class Setting:
    """The initial data of a session."""

    rng: random.Random
    split: Split
    domains: list[Domain]
    tools: list[dict[str, Any]]
    thinking: bool
    tone: Tone
    others: list[Domain] = field(default_factory=list)
    """Domains whose tools the session lacks, for impossible requests."""
    me: str | None = None
    """The user's name, when the system prompt has it."""
    today: str | None = None
    """The date, when the system prompt has it."""
    name: str | None = None
    """The assistant's name, when the system prompt has it."""


class Play:
    """`begin` with the user's words, any number of `call`, then `finish` with the answer: one turn."""

    def __init__(self, setting: Setting, simulator: Simulator) -> None:
        self.setting = setting
        self.rng, self.split, self.domains = setting.rng, setting.split, setting.domains
        self.turns: list[Turn] = []
        self.known: dict[tuple[str, str], Record] = {}
        """Table and key -> columns that results have shown and that still hold."""
        self.focus: tuple[Domain, str] | None = None
        """The one record that the last answer was about."""
        self.asked: list[str] = []
        """Columns of the last question about one record."""
        self.gave_up = False
        """Whether the last turn ended because a tool kept failing."""
        self.last: Any = None
        """The ask of the last turn, to be repeated."""
        self.num_chars = 0
        """Of all turns so far."""
        self._simulator = simulator
        self._tables = simulator.snapshot()
        self._failed: set[str] = set()
        self._domain_of = {operation.name: domain for domain in setting.domains for operation in domain.operations}
        self._user = ""
        self._messages: list[dict[str, Any]] = []
        self._num_calls = 0

    def records(self, domain: Domain) -> list[Record]:
        """The records as they are before this turn."""
        return list(self._tables[domain.table].values()) if domain.data is not None else []

    def record(self, domain: Domain, key: str) -> Record | None:
        return self._tables[domain.table].get(key) if domain.data is not None else None

    def operations(self, *verbs: Verb) -> list[tuple[Domain, Operation]]:
        """All tools that do this, those that are about to fail first in line: a session that has one is about it."""
        found = [
            (domain, operation) for domain in self.domains for operation in domain.operations if operation.verb in verbs
        ]
        failing = [
            (domain, operation)
            for domain, operation in found
            if operation.action.fails is not None and operation.name not in self._failed
        ]
        return failing if failing and self.rng.random() < 0.7 else found

    def domain_of(self, operation: Operation) -> Domain:
        return self._domain_of[operation.name]

    def begin(self, user: str) -> None:
        """Start a turn. By default the next turn has nothing to refer back to."""
        self._user, self._messages, self._num_calls = user, [], 0
        self.focus, self.asked, self.last, self.gave_up = None, [], None, False

    def call(self, thought: str, calls: list[Call]) -> list[Any]:
        """Results of the calls of one message; calls to a busy service are retried once."""
        results = self._run(thought, calls)
        again = [
            i for i, ((operation, _), result) in enumerate(zip(calls, results, strict=True)) if busy(operation, result)
        ]
        if again:
            names = listed([calls[i][0].name for i in again])
            for i, result in zip(
                again, self._run(f"A busy service. I call {names} again.", [calls[i] for i in again]), strict=True
            ):
                results[i] = result
        return results

    def finish(self, thought: str, said: answers.Said, *, may_look_up: bool = False) -> None:
        """The answer in words ends the turn. `may_look_up`: looking up again what an earlier result shows is needless,
        but no mistake."""
        text, says = said
        self._message(thought, text)
        after = self._simulator.snapshot()
        max_calls = self._num_calls + SPARE_CALLS if self._num_calls or may_look_up else 0
        goal = Goal(says=list(dict.fromkeys(says)), changes=changes(self._tables, after), max_calls=max_calls)
        assert all(word.casefold() in text.casefold() for word in goal.says), (text, goal.says)
        self._tables = after
        self.num_chars += len(self._user) + sum(len(str(message)) for message in self._messages)
        self.turns.append(Turn(user=self._user, goal=msgspec.to_builtins(goal), messages=self._messages))

    def _message(self, thought: str, content: str, calls: list[dict[str, Any]] | None = None) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.setting.thinking:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        self._messages.append(message)

    def _run(self, thought: str, calls: list[Call]) -> list[Any]:
        written: list[dict[str, Any]] = []
        for operation, given in calls:
            arguments = json.dumps(
                {name: given[name] for name in operation.params if name in given}, ensure_ascii=False
            )
            function = {"name": operation.name, "arguments": arguments}
            written.append({"id": f"call_{self._num_calls + len(written)}", "type": "function", "function": function})
        self._message(thought, "", written)
        results = []
        for (operation, given), call in zip(calls, written, strict=True):
            outcome = self._simulator.call(operation.name, call["function"]["arguments"])
            assert outcome.problem is None, (operation.name, given, outcome.problem)
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": outcome.text})
            result = json.loads(outcome.text)
            results.append(result)
            if operation.action.fails is not None:
                self._failed.add(operation.name)
            self._learn(operation, result)
        self._num_calls += len(calls)
        return results

    def _learn(self, operation: Operation, result: Any) -> None:
        """Remember the values in a result; a change invalidates older results."""
        if isinstance(operation.action, Calculate) or (isinstance(result, dict) and "error" in result):
            return
        domain = self._domain_of[operation.name]
        if "deleted" in result and isinstance(result, dict) and set(result) == {"deleted"}:
            self.known.pop((domain.table, str(result["deleted"])), None)
            return
        for record in result if isinstance(operation.action, Find) else [result]:
            if domain.key.name not in record:
                continue
            place = (domain.table, str(record[domain.key.name]))
            changed = isinstance(operation.action, (Create, Update, Replace))
            self.known[place] = dict(record) if changed else {**self.known.get(place, {}), **record}

    def tables(self) -> Tables:
        """The records as they are before this turn, by table and key."""
        return self._tables


def busy(operation: Operation, result: Any) -> bool:
    """Whether the tool failed as a busy service does."""
    return (
        operation.action.fails is not None
        and isinstance(result, dict)
        and result.get("error") == operation.action.fails.error
    )


def error_of(result: Any) -> str | None:
    return result["error"] if isinstance(result, dict) and set(result) == {"error"} else None
