"""Tool calls in the XML form of Qwen3-Coder and Qwen3.5 and later:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values have no types: the tool's JSON schema gives them. Arguments are streamed. A closing tag is recognised only where
the format continues after it, so that a value may quote single tags. At the end of a complete turn missing closing tags
are tolerated. Knows nothing of reasoning or content.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable

from agentspec.text.events import CallEvent, ToolCall, ToolCallArguments, ToolCallEnd, ToolCallStart
from agentspec.text.holdback import Holdback
from agentspec.text.tool_calls.protocol import CALL_CLOSE, CALL_OPEN, CallParser, CallStatus, CallStep
from agentspec.text.tool_calls.schemas import ToolSchemas, coerce, is_plain_string

_FUNCTION_OPEN = "<function="
_FUNCTION_CLOSE = "</function>"
_PARAMETER_OPEN = "<parameter="
_PARAMETER_CLOSE = "</parameter>"

_FOLLOWERS = {
    _PARAMETER_CLOSE: (_PARAMETER_OPEN, _FUNCTION_CLOSE, CALL_CLOSE),
    _FUNCTION_CLOSE: (CALL_CLOSE,),
    CALL_CLOSE: (CALL_OPEN,),
}
"""Tags one of which must follow a tag (after whitespace) for it to end a value, unless the turn ends there."""

_VALUE_CLOSER = re.compile("\n?(" + "|".join(_FOLLOWERS) + ")")
_VALUE_HOLDBACK = Holdback([*_FOLLOWERS, *("\n" + tag for tag in _FOLLOWERS)])


class Qwen3CoderDialect:
    name = "qwen3_coder"
    keeps_argument_text = True

    def triggers(self, tools: ToolSchemas) -> tuple[str, ...]:
        """Return the triggers. A bare `<function=NAME>` begins a call when NAME is one of the tools."""
        return (CALL_OPEN, *(f"{_FUNCTION_OPEN}{name}>" for name in tools.names))

    def parser(self, index: int, tools: ToolSchemas, new_call_id: Callable[[], str]) -> CallParser:
        return Qwen3CoderParser(index, tools, new_call_id)


class _State(enum.Enum):
    HEAD = enum.auto()
    """Before the end of `<function=NAME>`."""
    BETWEEN = enum.auto()
    """Inside the function, outside any parameter."""
    VALUE = enum.auto()
    """Inside a parameter."""
    TAIL = enum.auto()
    """After `</function>`."""


class Qwen3CoderParser:
    """Reads one call."""

    def __init__(self, index: int, tools: ToolSchemas, new_call_id: Callable[[], str]) -> None:
        self._index = index
        self._tools = tools
        self._new_call_id = new_call_id
        self._state = _State.HEAD
        self._buffer = ""
        self._events: list[CallEvent] = []
        self._status = CallStatus.MORE
        self._id = ""
        self._name = ""
        self._key = ""
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._is_value_new = False
        self._values: dict[str, str] = {}
        self._arguments: list[str] = []

    def push(self, text: str, *, final: bool = False) -> CallStep:
        self._buffer += text
        self._events = []
        steps = {
            _State.HEAD: self._head,
            _State.BETWEEN: self._between,
            _State.VALUE: self._in_value,
            _State.TAIL: self._tail,
        }
        while self._status is CallStatus.MORE and steps[self._state](final):
            pass
        rest = "" if self._status is CallStatus.MORE else self._buffer
        return CallStep(self._events, self._status, rest)

    def cut(self) -> CallStep:
        self._events = []
        if self._state is _State.HEAD:
            return CallStep([], CallStatus.NOT_A_CALL, self._buffer)
        if self._state is _State.VALUE:
            self._values[self._key] = text = "".join(self._value)  # the buffer may hold half a closing tag
            if not is_plain_string(self._types):
                self._write(text)
        return CallStep(self._events, CallStatus.MORE)

    @property
    def call(self) -> ToolCall:
        assert self._id, "the call has not started"
        return ToolCall(id=self._id, name=self._name, arguments="".join(self._arguments), as_written=dict(self._values))

    # Each step reads from the buffer and returns whether another step can follow at once.

    def _head(self, final: bool) -> bool:
        head = self._buffer.removeprefix(CALL_OPEN).lstrip()
        name, close, rest = head.removeprefix(_FUNCTION_OPEN).partition(">")
        is_open = head.startswith(_FUNCTION_OPEN)
        may_open = not final and _FUNCTION_OPEN.startswith(head)
        if not (is_open or may_open) or (
            is_open and ("\n" in name or "<" in name or (close and not name.strip()) or (final and not close))
        ):
            self._status = CallStatus.NOT_A_CALL
            return False
        if not (is_open and close):
            return False
        self._id, self._name = self._new_call_id(), name.strip()
        self._buffer = rest
        self._events.append(ToolCallStart(self._index, self._id, self._name))
        self._state = _State.BETWEEN
        return True

    def _between(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        key, close, rest = text.removeprefix(_PARAMETER_OPEN).partition(">")
        if text.startswith(_PARAMETER_OPEN) and "\n" not in key and "<" not in key and (close or not final):
            if not close:
                return False
            self._buffer = rest
            self._open_value(key.strip())
            return True
        if text.startswith(_FUNCTION_CLOSE):
            self._buffer = text.removeprefix(_FUNCTION_CLOSE)
            self._state = _State.TAIL
            return True
        if (
            not final
            and text != CALL_CLOSE
            and any(tag.startswith(text) for tag in (_PARAMETER_OPEN, _FUNCTION_CLOSE, CALL_CLOSE))
        ):
            return False
        # `</function>` is missing, or the text belongs to no parameter: the call ends here and the rest is content.
        self._state = _State.TAIL
        return True

    def _tail(self, final: bool) -> bool:
        text = self._buffer.lstrip()
        if not final and CALL_CLOSE.startswith(text) and text != CALL_CLOSE:
            return False
        if text.startswith(CALL_CLOSE):
            self._buffer = text.removeprefix(CALL_CLOSE)
        self._write("}" if self._values else "{}")
        self._events.append(ToolCallEnd(self._index))
        self._status = CallStatus.DONE
        return False

    def _in_value(self, final: bool) -> bool:
        closer = _VALUE_CLOSER.search(self._buffer)
        if closer is None:
            kept = 0 if final else _VALUE_HOLDBACK.held(self._buffer)
            self._add_to_value(self._buffer[: len(self._buffer) - kept])
            self._buffer = self._buffer[len(self._buffer) - kept :]
            if final:
                self._close_value()
            return final
        tag, behind = closer.group(1), self._buffer[closer.end() :]
        following = behind.lstrip()
        if following.startswith(_FOLLOWERS[tag]) or (final and not following):
            self._add_to_value(self._buffer[: closer.start()])
            self._buffer = behind if tag == _PARAMETER_CLOSE else tag + behind
            self._close_value()
            return True
        self._add_to_value(self._buffer[: closer.start()])
        if not final and any(follower.startswith(following) for follower in _FOLLOWERS[tag]):
            self._buffer = self._buffer[closer.start() :]
            return False
        self._add_to_value(closer.group())
        self._buffer = behind
        return True

    def _open_value(self, key: str) -> None:
        self._key = key
        self._types = self._tools.types(self._name, key)
        self._value = []
        self._is_value_new = True
        self._state = _State.VALUE
        self._write(", " if self._values else "{")
        self._write(json.dumps(key, ensure_ascii=False) + ": ")
        if is_plain_string(self._types):
            self._write('"')

    def _add_to_value(self, text: str) -> None:
        """Add text to the value. Exactly one leading newline belongs to the format; a trailing one belongs to the
        closing tag."""
        if not text:
            return
        if self._is_value_new:
            self._is_value_new = False
            text = text.removeprefix("\n")
        self._value.append(text)
        if text and is_plain_string(self._types):
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])

    def _close_value(self) -> None:
        text = "".join(self._value)
        self._values[self._key] = text
        if is_plain_string(self._types):
            self._write('"')
        else:
            self._write(json.dumps(coerce(text, self._types), ensure_ascii=False))
        self._state = _State.BETWEEN

    def _write(self, text: str) -> None:
        self._arguments.append(text)
        self._events.append(ToolCallArguments(self._index, text))
