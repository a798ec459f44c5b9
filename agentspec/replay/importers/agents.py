"""Import trajectories of agents: tau-bench, mini-swe-agent and SWE-agent.

A trajectory is split before every answer of the model, which becomes the recorded one. Messages after the last answer
were never sent, so they are dropped. These files contain no tools; mini-swe-agent's only tool is added. Message fields
that no prompt shows are dropped; an unknown field is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentspec.replay.importers.documents import convert, read_sessions
from agentspec.replay.schema import (
    AssistantMessage,
    Expect,
    InputMessage,
    RecordedUsage,
    ReplayFile,
    Session,
    Turn,
)

_SHOWN = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")
_HIDDEN = (
    *(
        "function_call",
        "refusal",
        "annotations",
        "audio",
        "images",
        "provider_specific_fields",
        "thinking_blocks",
        "cache_control",
    ),
    *("agent", "message_type", "thought", "action", "tool_call_ids", "is_demo", "tags", "extra"),
)
"""Message fields that no prompt shows, or that repeat another field."""

_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """One message of a trajectory."""

    message: dict[str, Any]
    took_ms: float | None = None
    """Of a client's message: milliseconds since the model's last answer."""
    latency_ms: float | None = None
    """Of an answer: milliseconds since the previous message."""
    usage: RecordedUsage | None = None
    finish_reason: str | None = None


def read_tau_bench(path: str | Path) -> ReplayFile:
    """Read results of tau-bench runs: a list of {"task_id", "trial", "traj"}. No times are recorded."""

    def convert_item(item: Any, number: int) -> Iterator[Session]:
        run = convert("", item, _TauRun)
        steps = [_Step(message=message) for message in run.traj]
        yield _session(f"task-{run.task_id}-{run.trial}", steps, group=f"task-{run.task_id}", has_user=True)

    return read_sessions(path, "tau-bench", convert_item)


def read_mini_swe_agent(path: str | Path) -> ReplayFile:
    """Read trajectories of mini-swe-agent (`*.traj.json`). Tool time is the result's timestamp minus the previous
    answer's."""

    def convert_item(item: Any, number: int) -> Iterator[Session]:
        run = convert("", item, _MiniRun)
        name = run.instance_id or Path(path).name.partition(".")[0] + (f"-{number}" if number > 1 else "")
        steps = list(_timed(message for message in run.messages if message.get("role") != "exit"))
        calls = any(step.message.get("tool_calls") for step in steps)
        yield _session(name, steps, group=run.instance_id, has_user=False, tools=[_BASH] if calls else None)

    return read_sessions(path, "mini-swe-agent", convert_item)


def read_swe_agent(path: str | Path) -> ReplayFile:
    """Read trajectories of SWE-agent (`*.traj`). Tool times are those of the steps, if there is one step per answer."""

    def convert_item(item: Any, number: int) -> Iterator[Session]:
        run = convert("", item, _SweRun)
        name = Path(path).name.partition(".")[0] + (f"-{number}" if number > 1 else "")
        times = [step.get("execution_time") for step in run.trajectory]
        if len(times) != sum(
            message.get("role") == "assistant" and not message.get("is_demo") for message in run.history
        ):
            times = []
        yield _session(name, list(_with_tool_times(run.history, iter(times))), group=None, has_user=False)

    return read_sessions(path, "swe-agent", convert_item)


class _TauRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    task_id: int | str
    traj: list[dict[str, Any]]
    trial: int = 0
    reward: float | None = None
    info: Any = None


class _MiniRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[dict[str, Any]]
    trajectory_format: str
    info: Any = None
    instance_id: str | None = None


class _SweRun(msgspec.Struct, frozen=True, kw_only=True):
    """Further fields of the file, mostly configuration, are ignored."""

    history: list[dict[str, Any]]
    trajectory: list[dict[str, Any]]


def _timed(messages: Iterator[dict[str, Any]]) -> Iterator[_Step]:
    answered: float | None = None
    before: float | None = None
    for message in messages:
        extra = message.get("extra") or {}
        at = extra.get("timestamp")
        if message.get("role") == "assistant":
            response = extra.get("response") or {}
            choices = response.get("choices") or [{}]
            yield _Step(
                message=message,
                latency_ms=_milliseconds(before, at),
                usage=_usage(response.get("usage")),
                finish_reason=choices[0].get("finish_reason"),
            )
            answered = at
        else:
            yield _Step(message=message, took_ms=_milliseconds(answered, at))
        before = at


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, round((end - start) * 1000, 3))


def _usage(usage: dict[str, Any] | None) -> RecordedUsage | None:
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return RecordedUsage(
        prompt_tokens=usage.get("prompt_tokens"), completion_tokens=usage.get("completion_tokens"), cached_tokens=cached
    )


def _with_tool_times(history: list[dict[str, Any]], times: Iterator[float | None]) -> Iterator[_Step]:
    seconds: float | None = None
    for message in history:
        if message.get("role") == "assistant":
            seconds = None if message.get("is_demo") else next(times, None)
            yield _Step(message=message)
        else:
            call_ids = message.get("tool_call_ids") or [None]
            message = message if call_ids[0] is None else message | {"tool_call_id": call_ids[0]}
            yield _Step(message=message, took_ms=None if seconds is None else seconds * 1000)


def _session(
    name: str, steps: list[_Step], *, group: str | None, has_user: bool, tools: list[dict[str, Any]] | None = None
) -> Session:
    """Build a session. `has_user`: user messages, not only tool results, may come between answers."""
    turns: list[Turn] = []
    new: list[InputMessage] = []
    took_ms = 0.0
    for index, step in enumerate(steps):
        where = f"messages[{index}]"
        message = _shown(where, step.message)
        if message.get("role") != "assistant":
            new.append(convert(where, {"content": ""} | message, InputMessage))
            took_ms = step.took_ms or 0.0
            continue
        if not new:
            raise ValueError(f"{where}: an answer needs another message before it")
        kind: Literal["start", "tool", "user"] = (
            "start" if not turns else "user" if has_user and new[-1].role == "user" else "tool"
        )
        answer = convert(where, {"content": None} | message, AssistantMessage)
        expect = Expect(message=answer, finish_reason=step.finish_reason, usage=step.usage, latency_ms=step.latency_ms)
        turns.append(Turn(messages=new, delay_ms=took_ms if turns else 0.0, delay_kind=kind, expect=expect))
        new = []
    return Session(session_id=name, group=group, tools=tools, turns=turns)


def _shown(where: str, message: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name, value in message.items() if value is not None and name not in _SHOWN + _HIDDEN]
    if unknown:
        raise ValueError(f"{where}.{unknown[0]}: is no field of a message that we know")
    shown = {name: message[name] for name in _SHOWN if message.get(name) is not None}
    if shown.get("role") == "assistant":
        shown.pop("name", None)
    if isinstance(shown.get("content"), list):
        shown["content"] = [
            {name: value for name, value in part.items() if name != "cache_control"} if isinstance(part, dict) else part
            for part in shown["content"]
        ]
    if "tool_calls" in shown:
        names = ("id", "type", "function")
        shown["tool_calls"] = [{name: call[name] for name in names if name in call} for call in shown["tool_calls"]]
    return shown
