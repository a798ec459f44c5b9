"""Missed turns of played sessions: the first difference of each from its gold trajectory, and a listing of both."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from agentspec.replay.outcomes import CallOutcome, UserTurn
from scripts.tiny_agent.domain import Turn
from scripts.tiny_agent.held_out import Message, Played

MAX_SHOWN = 700
"""Characters of one text in a listing."""

Arguments = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Miss:
    """A user's turn that missed its goal."""

    played: Played
    place: int
    """Of the turn in its session, from 0."""
    kind: str
    """The first difference from the gold trajectory, without names and values."""
    difference: str
    """The same with them."""
    is_first: bool
    """No turn of the session missed before; what follows a miss may be its consequence."""

    @property
    def gold(self) -> Turn:
        return self.played.example.turns[self.place]

    @property
    def entry(self) -> UserTurn:
        return self.played.outcome.turns[self.place]


def find_misses(sessions: Sequence[Played]) -> list[Miss]:
    """All misses, those that are the first of their session before the others."""
    misses = []
    for played in sessions:
        places = [place for place, entry in enumerate(played.outcome.turns) if entry.reached is False]
        for place in places:
            kind, difference = _difference(played, place)
            misses.append(
                Miss(played=played, place=place, kind=kind, difference=difference, is_first=place == places[0])
            )
    return sorted(misses, key=lambda miss: not miss.is_first)


def count_kinds(misses: Sequence[Miss]) -> list[tuple[str, int, int]]:
    """(kind, turns whose session had not missed before, turns after a miss), most frequent first."""
    first = Counter(miss.kind for miss in misses if miss.is_first)
    later = Counter(miss.kind for miss in misses if not miss.is_first)
    kinds = sorted(first | later, key=lambda kind: (-first[kind], -later[kind], kind))
    return [(kind, first[kind], later[kind]) for kind in kinds]


def gold_calls(turn: Turn) -> list[tuple[str, Arguments]]:
    """Name and arguments of each call of the gold trajectory."""
    calls = (call["function"] for message in turn.messages for call in message.get("tool_calls", []))
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def _difference(played: Played, place: int) -> tuple[str, str]:
    """Kind and text of the first difference between what the model did in a turn and the gold trajectory."""
    entry = played.outcome.turns[place]
    if entry.ending == "not begun":
        return "never begun", "a request before it failed"
    for number, (gold, made) in enumerate(zip_longest(gold_calls(played.example.turns[place]), entry.calls), start=1):
        found = _call_difference(played, place, number, gold, made)
        if found is not None:
            return found[0], f"call {number}: {found[1]}"
    if entry.ending != "answered":
        return f"right calls, then no answer: {entry.ending}", entry.missed[0]
    return "right calls, wrong answer", "; ".join(entry.missed)


def _call_difference(
    played: Played, place: int, number: int, gold: tuple[str, Arguments] | None, made: CallOutcome | None
) -> tuple[str, str] | None:
    """None when call `number` of the turn, counted from 1, is the one that the gold trajectory makes."""
    if made is None:
        assert gold is not None
        ending = played.outcome.turns[place].ending
        why = "" if ending == "answered" else f": {ending}"
        return f"a call is missing{why}", f"{gold[0]} was not called"
    if made.problem is not None:
        return f"invalid call: {made.kind}", made.problem
    if gold is None:
        return "a call too many", f"{made.name} was called"
    name, wanted = gold
    if made.name != name:
        return "another tool", f"{made.name} was called, not {name}"
    given: Arguments = json.loads(made.arguments)
    if wanted.keys() - given.keys():
        missing = next(key for key in wanted if key not in given)
        return "an argument is missing", f"{missing} = {_text(wanted[missing])} was not given"
    if given.keys() - wanted.keys():
        extra = next(key for key in given if key not in wanted)
        return "an argument too many", f"{extra} = {_text(given[extra])} was given"
    wrong = next((key for key in wanted if given[key] != wanted[key]), None)
    if wrong is None:
        return None
    kind = _value_kind(wanted[wrong], given[wrong], _context(played, place, number - 1))
    return kind, f"{wrong} is {_text(given[wrong])}, not {_text(wanted[wrong])}"


def _value_kind(wanted: Any, given: Any, context: str) -> str:
    """Whether a wrong value was copied from the wrong place, or copied incorrectly."""
    if isinstance(wanted, (bool, int, float)) and isinstance(given, (bool, int, float)):
        return f"wrong argument: {'true or false' if isinstance(wanted, bool) else 'number'}"
    values = given if isinstance(given, list) else [given]
    if all(str(value).casefold() in context for value in values):
        return "wrong argument: another text of the context"
    return "wrong argument: a text that stands nowhere in the context"


def _context(played: Played, place: int, num_calls: int) -> str:
    """All text that the model could copy from in a turn after the given number of calls, casefolded."""
    example = played.example
    users = [turn.user for turn in example.turns[: place + 1]]
    before = [call for entry in played.outcome.turns[:place] for call in entry.calls]
    results = [call.result or "" for call in (*before, *played.outcome.turns[place].calls[:num_calls])]
    return "\n".join([example.system or "", json.dumps(example.tools, ensure_ascii=False), *users, *results]).casefold()


def listing(miss: Miss) -> str:
    """A missed turn with all details needed to find the reason."""
    example, entry = miss.played.example, miss.entry
    lines = [
        f"=== {example.session_id}  turn {miss.place + 1} of {len(example.turns)}  thinking "
        f"{'on' if example.thinking else 'off'}"
        + ("" if miss.is_first else "  (an earlier turn of the session missed, too)"),
        f"TASKS  {', '.join(miss.played.held_out.tasks)}",
        *(f"TOOL   {_signature(tool)}" for tool in example.tools),
        *_labelled("SYSTEM", example.system or "(none)"),
    ]
    for place in range(miss.place):
        before = miss.played.outcome.turns[place]
        lines += _labelled(f"{place + 1} USER", example.turns[place].user)
        lines += [
            f"{place + 1} CALL {call.name} {call.arguments} -> {_cut(call.result or '(not executed)', 200)}"
            for call in before.calls
        ]
        lines += _labelled(f"{place + 1} SAYS", before.answer + ("   [MISSED]" if before.reached is False else ""))
    lines += ["", *_labelled("USER", miss.gold.user), "", "model:", *_made(miss), "", "gold:", *_gold(miss.gold), ""]
    lines += [
        f"ENDED  {entry.ending}, after {entry.num_requests} requests",
        *(f"MISSED {_cut(reason, 300)}" for reason in entry.missed),
    ]
    lines += [
        f"FIRST DIFFERENCE  {miss.kind}: {miss.difference}",
        f"GOAL   {_cut(json.dumps(miss.gold.goal, ensure_ascii=False))}",
    ]
    return "\n".join(lines)


def _made(miss: Miss) -> Iterator[str]:
    """What the model did. The messages know the order and the reasoning, the outcome knows the calls as they were
    judged."""
    entry = miss.entry
    calls = deque(entry.calls)
    answers = [message for message in _turn_messages(miss) if message["role"] == "assistant"]
    for message in answers:
        yield from _words(message)
        for _ in message.get("tool_calls", []):
            while calls and calls[0].name is None:
                yield from _call(calls.popleft())
            if calls:
                yield from _call(calls.popleft())
    # The answer that ended the session is in no later request; a failed request has none.
    if entry.num_requests > len(answers) and entry.ending != "failed":
        yield from _words({"content": entry.answer, "reasoning_content": entry.reasoning})
    for call in calls:
        yield from _call(call)


def _turn_messages(miss: Miss) -> list[Message]:
    """Those of the turn that the session's last request holds, the user's not included."""
    starts = [index for index, message in enumerate(miss.played.messages) if message["role"] == "user"]
    if miss.place >= len(starts):
        return []
    end = starts[miss.place + 1] if miss.place + 1 < len(starts) else None
    return miss.played.messages[starts[miss.place] + 1 : end]


def _gold(turn: Turn) -> Iterator[str]:
    for message in turn.messages:
        if message["role"] == "tool":
            yield f"  RESULT {_cut(message['content'])}"
            continue
        yield from _words(message)
        for call in message.get("tool_calls", []):
            yield f"  CALL   {call['function']['name']} {call['function']['arguments']}"


def _words(message: Message) -> Iterator[str]:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        yield from _labelled("  THINK", reasoning)
    if message.get("content"):
        yield from _labelled("  SAYS", message["content"])


def _call(call: CallOutcome) -> Iterator[str]:
    yield f"  CALL   {call.name or '(unreadable)'} {_cut(call.arguments)}"
    if call.problem is not None:
        yield f"  INVALID {call.problem}"
    yield f"  RESULT {_cut(call.result) if call.result is not None else '(not executed)'}"


def _signature(tool: dict[str, Any]) -> str:
    """`name(required*, choice: a|b)  what it does`."""
    function = tool["function"]
    schema = function.get("parameters") or {}
    required = schema.get("required", [])
    parts = []
    for name, part in schema.get("properties", {}).items():
        kind = "|".join(str(choice) for choice in part["enum"]) if "enum" in part else part.get("type", "any")
        parts.append(f"{name}{'*' if name in required else ''}: {kind}")
    return f"{function['name']}({', '.join(parts)})  {function.get('description', '')}"


def _labelled(label: str, text: str) -> list[str]:
    """The text behind its label, further lines under its beginning."""
    width = max(7, len(label) + 1)
    return [f"{label if index == 0 else '':<{width}}{line}" for index, line in enumerate(_cut(text).split("\n"))]


def _cut(text: str, length: int = MAX_SHOWN) -> str:
    return text if len(text) <= length else f"{text[:length]} ... ({len(text) - length} more characters)"


def _text(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False), 120)
