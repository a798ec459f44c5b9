"""Writes one scripted session in the replay format `agentspec.replay/1` (docs/replay.md)."""

from __future__ import annotations

import json
import random
from typing import Any

CHARACTERS_PER_TOKEN = 4
"""Assumed characters per token, to plan lengths without a tokenizer."""

LIMITS = (32, 48, 64, 80, 96)
"""`max_tokens` of a turn is the first of these that leaves room for the recorded answer."""

Json = dict[str, Any]


class Script:
    """One session. A scenario alternates inputs (`user`, `results`) and answers (`say`, `call`)."""

    def __init__(self, session_id: str, *, group: str, toolset: str, system: str, rng: random.Random) -> None:
        self._line: Json = {
            "type": "session",
            "session_id": session_id,
            "group": group,
            "toolset": toolset,
            "turns": [],
        }
        self._new: list[Json] = [{"role": "system", "content": system}]
        self._delay: tuple[str, int] = ("start", 0)
        self._open_calls: list[str] = []
        self._num_calls = 0
        self._rng = rng

    def user(self, text: str) -> None:
        self._new.append({"role": "user", "content": text})
        if self._line["turns"]:
            self._delay = ("user", self._rng.randrange(120, 420, 10))

    def results(self, *results: Any) -> None:
        """The results of the last `call`'s tools, in order; values other than text become JSON."""
        assert len(results) == len(self._open_calls), "one result for each call"
        for call_id, result in zip(self._open_calls, results, strict=True):
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            self._new.append({"role": "tool", "tool_call_id": call_id, "content": text})
        self._open_calls = []
        self._delay = ("tool", self._rng.choice((5, 10, 20, 30, 50, 80, 120, 250)))

    def say(self, text: str) -> None:
        self._answer({"role": "assistant", "content": text}, "stop", len(text))

    def call(self, text: str | None, *calls: tuple[str, Json]) -> None:
        made, length = [], len(text or "")
        for name, arguments in calls:
            self._num_calls += 1
            call_id = f"call_{self._num_calls}"
            self._open_calls.append(call_id)
            encoded = json.dumps(arguments, ensure_ascii=False)
            length += len(name) + len(encoded) + 60  # the markup around a call
            made.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": encoded}})
        self._answer({"role": "assistant", "content": text, "tool_calls": made}, "tool_calls", length)

    def line(self) -> Json:
        """The session as a line of the file."""
        assert not self._new, "every message needs an answer"
        assert not self._open_calls, "every call needs a result"
        return self._line

    def _answer(self, message: Json, finish_reason: str, length: int) -> None:
        assert self._new, "an answer needs something to answer"
        num_tokens = -(-length // CHARACTERS_PER_TOKEN)
        kind, delay = self._delay
        self._line["turns"].append(
            {
                "messages": self._new,
                "delay_ms": delay,
                "delay_kind": kind,
                "max_tokens": next(limit for limit in LIMITS if limit >= num_tokens),
                "expect": {"message": message, "finish_reason": finish_reason, "output_tokens": num_tokens},
            }
        )
        self._new = []


def tool(name: str, description: str, required: list[str], **properties: Json | str) -> Json:
    """An OpenAI function tool; a property given as text is a string with that description."""
    shapes = {
        key: {"type": "string", "description": shape} if isinstance(shape, str) else shape
        for key, shape in properties.items()
    }
    parameters = {"type": "object", "properties": shapes, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
