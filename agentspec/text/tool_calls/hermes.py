"""Tool calls as JSON: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Qwen3-Next-Instruct, Hermes).

A call is emitted as a whole, because only complete JSON shows that it is a call. Knows nothing of reasoning or content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from agentspec.text.events import CallEvent, ToolCall, ToolCallArguments, ToolCallEnd, ToolCallStart
from agentspec.text.tool_calls.protocol import CALL_CLOSE, CALL_OPEN, CallParser, CallStatus, CallStep
from agentspec.text.tool_calls.schemas import ToolSchemas, read_json

_MARK = re.compile(r'["\\]|' + CALL_CLOSE)


class HermesDialect:
    name = "hermes"
    keeps_argument_text = False

    def triggers(self, tools: ToolSchemas) -> tuple[str, ...]:
        return (CALL_OPEN,)

    def parser(self, index: int, tools: ToolSchemas, new_call_id: Callable[[], str]) -> CallParser:
        return HermesParser(index, new_call_id)


class HermesParser:
    """Collects one call up to the first `</tool_call>` that isn't inside a JSON string."""

    def __init__(self, index: int, new_call_id: Callable[[], str]) -> None:
        self._index = index
        self._new_call_id = new_call_id
        self._text = ""
        self._scanned = len(CALL_OPEN)
        self._in_string = False
        self._call: ToolCall | None = None

    def push(self, text: str, *, final: bool = False) -> CallStep:
        self._text += text
        close = self._find_close()
        if close is None and not final:
            return CallStep([], CallStatus.MORE)
        end = len(self._text) if close is None else close
        call = self._read(self._text[len(CALL_OPEN) : end])
        if call is None:
            return CallStep([], CallStatus.NOT_A_CALL, self._text)
        self._call = call
        events: list[CallEvent] = [
            ToolCallStart(self._index, call.id, call.name),
            ToolCallArguments(self._index, call.arguments),
            ToolCallEnd(self._index),
        ]
        return CallStep(events, CallStatus.DONE, self._text[end + len(CALL_CLOSE) :])

    def cut(self) -> CallStep:
        return CallStep([], CallStatus.NOT_A_CALL, self._text)

    @property
    def call(self) -> ToolCall:
        assert self._call is not None
        return self._call

    def _find_close(self) -> int | None:
        """Return the offset of the closing tag. Each character is scanned once, except an incomplete tag at the end."""
        while mark := _MARK.search(self._text, self._scanned):
            if mark.group() == CALL_CLOSE and not self._in_string:
                return mark.start()
            if mark.group() == "\\":
                if mark.end() == len(self._text):
                    self._scanned = mark.start()
                    return None
                self._scanned = mark.end() + 1
                continue
            if mark.group() == '"':
                self._in_string = not self._in_string
            self._scanned = mark.end()
        self._scanned = max(self._scanned, len(self._text) - len(CALL_CLOSE) + 1)
        return None

    def _read(self, body: str) -> ToolCall | None:
        try:
            value: Any = read_json(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        text = json.dumps(arguments, ensure_ascii=False)
        return ToolCall(id=self._new_call_id(), name=value["name"], arguments=text, as_written=arguments)
