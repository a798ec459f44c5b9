"""Assemble one streamed answer: server-sent events to an assistant message and counters.

Reads the streams of any OpenAI server. A value that the server doesn't report is None, never 0. Knows nothing of time:
the caller timestamps the events.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec

from agentspec.errors import AgentspecError


class ServerError(AgentspecError):
    """The server refused the request, or its answer is not a complete stream."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """Counts of one source's drafts, by the position among those of a step. Both lists have the same length."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class Speculation:
    """Counters of `metrics.speculative_decoding`."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    by_source: dict[str, Positions] = field(default_factory=dict)
    """In the order of their places in a step's drafts."""

    @property
    def drafted_by_position(self) -> list[int]:
        """Of a step's drafts: those of the first source, then those of the next."""
        return [count for positions in self.by_source.values() for count in positions.drafted]

    @property
    def accepted_by_position(self) -> list[int]:
        return [count for positions in self.by_source.values() for count in positions.accepted]

    def add_counters(self, other: Speculation) -> None:
        self.num_steps += other.num_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        for name, positions in other.by_source.items():
            ours = self.by_source.get(name, Positions())
            self.by_source[name] = Positions(
                drafted=_sum(ours.drafted, positions.drafted), accepted=_sum(ours.accepted, positions.accepted)
            )


async def read_events(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of a server-sent event stream, up to `[DONE]` or its end. Raises ServerError for other
    data.

    `parts`: its bytes, split anywhere. Lines end with LF or CRLF only: the other line separators of Python's
    `splitlines` may occur inside a text."""
    data: list[bytes] = []
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data.append(_value(line))
            elif line in (b"", b"\r") and data:
                text, data = b"\n".join(data), []
                if text == b"[DONE]":
                    return
                yield _decode(text)
    if rest.startswith(b"data:"):
        data.append(_value(rest))
    if data and data != [b"[DONE]"]:  # the last event lacks its blank line
        yield _decode(b"\n".join(data))


def _value(line: bytes) -> bytes:
    return line[5:].removesuffix(b"\r").removeprefix(b" ")


def _decode(text: bytes) -> dict[str, Any]:
    try:
        event = _parse(text)
    except ValueError:
        raise ServerError(f"the stream holds an event that is not JSON: {_shown(text)}") from None
    if not isinstance(event, dict):
        raise ServerError(f"the stream holds an event that is no object: {_shown(text)}")
    if "error" in event:
        raise ServerError(error_text(event))
    return event


def _parse(text: bytes) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):  # Python servers may send NaN and incomplete characters
        return json.loads(text.decode(errors="replace"))


def _shown(text: bytes) -> str:
    return repr(text.decode(errors="replace")[:200])


def error_text(body: Any) -> str:
    """Return the message of an error body, in OpenAI's form or another."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)


class Reply:
    """Accumulates the events of one answer."""

    def __init__(self, *, counts_so_far: bool = False) -> None:
        """`counts_so_far`: the usage in an event with a choice is the running usage of that choice, not of the whole
        answer."""
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.speculation: Speculation | None = None
        self.forced_acceptance = False
        self._reasoning_field = "reasoning_content"
        self._counts_so_far = counts_so_far
        self._num_counted: dict[int, int] = {}
        """Choice index -> tokens so far."""

    def add_event(self, event: dict[str, Any]) -> int:
        """Add one event and return its number of tokens. Without running usage that is 1 if the event has any text."""
        num_tokens = 0
        choices = event.get("choices") or []
        usage = event.get("usage")
        so_far = usage if self._counts_so_far and choices else None
        for choice in choices:
            delta = choice.get("delta") or choice  # /v1/completions has `text` in the choice itself
            shows_text = self._take_text(delta) | self._take_calls(delta)
            num_tokens += (
                int(shows_text) if so_far is None else self._count(choice["index"], so_far["completion_tokens"])
            )
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if isinstance(usage, dict) and so_far is None:
            self._take_usage(usage)
        if isinstance(metrics := event.get("metrics"), dict):
            self._take_metrics(metrics)
        return num_tokens

    def message(self) -> dict[str, Any]:
        """Return the answer as an assistant message that can be sent back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.tool_calls else "")}
        if self.reasoning:
            message[self._reasoning_field] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    def _count(self, index: int, so_far: int) -> int:
        """Return the number of new tokens of a choice."""
        new = so_far - self._num_counted.get(index, 0)
        self._num_counted[index] = so_far
        return new

    def _take_text(self, delta: dict[str, Any]) -> bool:
        text = delta.get("content") or delta.get("text") or ""
        self.content += text
        for name in ("reasoning_content", "reasoning"):
            if delta.get(name):
                self.reasoning += delta[name]
                self._reasoning_field = name
                return True
        return bool(text)

    def _take_calls(self, delta: dict[str, Any]) -> bool:
        parts = delta.get("tool_calls") or []
        for part in parts:
            index = part.get("index", len(self.tool_calls))
            while len(self.tool_calls) <= index:
                self.tool_calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
            call, function = self.tool_calls[index], part.get("function") or {}
            call["id"] = part.get("id") or call["id"]
            call["function"]["name"] += function.get("name") or ""
            call["function"]["arguments"] += function.get("arguments") or ""
        return bool(parts)

    def _take_usage(self, usage: dict[str, Any]) -> None:
        self.prompt_tokens = usage.get("prompt_tokens")
        self.completion_tokens = usage.get("completion_tokens")
        self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def _take_metrics(self, metrics: dict[str, Any]) -> None:
        counters = metrics.get("speculative_decoding")
        if not isinstance(counters, dict):
            return
        self.forced_acceptance = bool(counters.get("forced", False))
        self.speculation = Speculation(
            num_steps=counters.get("num_spec_steps") or 0,
            num_drafted=counters.get("num_draft_tokens") or 0,
            num_accepted=counters.get("num_accepted_draft_tokens") or 0,
            by_source={
                name: _positions(source.get("drafted_by_position") or [], source.get("accepted_by_position") or [])
                for name, source in (counters.get("by_source") or {}).items()
            },
        )


def _positions(drafted: list[int], accepted: list[int]) -> Positions:
    nothing = [0] * max(len(drafted), len(accepted))
    return Positions(drafted=_sum(drafted, nothing), accepted=_sum(accepted, nothing))


def _sum(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]
