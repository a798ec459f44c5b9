"""Split generated text into reasoning, content and tool calls, independent of how the text is chunked.

Owns the reasoning tags and the whitespace between segments; the dialect parses the inside of a call. Knows nothing of
tokens, templates or HTTP.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Container, Mapping

from agentspec.text.events import AssistantTurn, ContentDelta, ReasoningDelta, TextEvent, ToolCall
from agentspec.text.holdback import Holdback
from agentspec.text.tool_calls import CallParser, CallStatus, CallStep, Dialect, ToolSchemas
from agentspec.text.tool_calls.protocol import CALL_OPEN

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


def new_call_id() -> str:
    """Return a new tool call id. It is unguessable, because it is also a key of the turn memory."""
    return f"call_{secrets.token_hex(12)}"


class _Segment(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


class Segmenter:
    """Splits one turn. Call `push` for each piece of text, then `finish` once; `turn` is the result.

    - `</think>` ends reasoning; elsewhere it is dropped. `<think>` opens reasoning as the first text of a turn; inside
      reasoning it is dropped.
    - A call inside reasoning ends reasoning.
    - Whitespace between segments belongs to the format and is dropped; at the end of the turn it is kept.
    - Text that looks like a call but is not one stays text of its segment.
    - Calls are parsed only when the request has tools and the checkpoint has a dialect.
    - A tag that is an added token is recognised only where that token was generated (`places`). Other tokens that spell
      the tag are plain text.
    - Content in a requested form (`has_form`) is passed on unchanged. Only a call in its place is recognised.
    """

    def __init__(
        self,
        *,
        reasoning_open: bool,
        dialect: Dialect | None = None,
        tools: ToolSchemas | None = None,
        new_call_id: Callable[[], str] = new_call_id,
        has_form: bool = False,
        is_mid_text: bool = False,
        places: Mapping[str, Container[int]] | None = None,
    ) -> None:
        """`reasoning_open`: the prompt ends inside a think block. `has_form`: a grammar constrains the content.
        `is_mid_text`: the prompt ends within the text of the first segment. `places`: for each tag that is an added
        token, the character offsets at which it was generated; they must be set before the text is pushed."""
        self._dialect = dialect if tools is not None and tools.names else None
        self._tools = tools or ToolSchemas(None)
        self._new_call_id = new_call_id
        self._has_form = has_form
        self._places = places or {}
        self._segment = _Segment.REASONING if reasoning_open else _Segment.CONTENT
        self._return_to = self._segment
        self._parser: CallParser | None = None
        self._buffer = ""
        self._space = ""
        self._is_segment_new = not is_mid_text
        self._trim_start = reasoning_open
        self._may_think = not reasoning_open and not is_mid_text
        self._events: list[TextEvent] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._is_call_cut = False
        self._cut_call: ToolCall | None = None
        self._num_pushed = 0
        self._call_start = 0
        self.reasoning_end = 0
        """Character offset of the end of reasoning, including `</think>`; 0 without reasoning. Valid after `finish`."""
        self._tags: tuple[str, ...] = ()
        self._set_tags()

    @property
    def turn(self) -> AssistantTurn:
        """The turn so far."""
        return AssistantTurn(
            reasoning="".join(self._reasoning),
            content="".join(self._content),
            calls=tuple(self._calls),
            is_call_cut=self._is_call_cut,
            cut_call=self._cut_call,
        )

    def push(self, text: str) -> list[TextEvent]:
        """Add a piece of text and return its events. Text that may be the prefix of a tag is held back."""
        self._events = []
        self._num_pushed += len(text)
        self._buffer += text
        self._run(final=False)
        return self._events

    def finish(self, *, is_cut: bool = False) -> list[TextEvent]:
        """End the text. `is_cut`: the model did not end it (token limit, stop string, abort), so an open call stays
        open."""
        self._events = []
        if is_cut and self._parser is not None:
            self._is_call_cut = True
            parser, self._parser = self._parser, None
            step = parser.cut()
            self._events += step.events
            self._segment = self._return_to
            if step.status is CallStatus.NOT_A_CALL:
                self._pass_on(step.rest)
            else:
                self._cut_call = parser.call
                self._leave_for_call()
        else:
            self._run(final=True)
        text, self._buffer = self._buffer, ""
        self._pass_on(text)
        text, self._space = self._space, ""
        self._emit(text)
        if self._segment is _Segment.REASONING:
            self.reasoning_end = self._num_pushed
        return self._events

    def _run(self, *, final: bool) -> None:
        while self._read_call(final) if self._segment is _Segment.CALL else self._read_text(final):
            pass

    def _read_text(self, final: bool) -> bool:
        """Emit text up to the next tag and enter the segment that the tag begins. Returns whether there is more to
        read."""
        if self._has_form and self._segment is _Segment.CONTENT and self._tags:
            head = self._buffer.lstrip()
            if CALL_OPEN.startswith(head) and head != CALL_OPEN and not final:
                return False
            if not head.startswith(CALL_OPEN):
                self._tags, self._holdback = (), Holdback(())
        start, tag = min(((at, tag) for tag in self._tags if (at := self._find(tag)) >= 0), default=(-1, ""))
        if start < 0:
            start = len(self._buffer) - (0 if final else self._holdback.held(self._buffer))
        text, self._buffer = self._buffer[:start], self._buffer[start:]
        self._pass_on(text)
        behind = self._buffer[len(tag) :]
        if not tag:
            return False
        if tag == THINK_CLOSE:
            self._buffer = behind
            self._close_reasoning()
        elif tag == THINK_OPEN:
            self._buffer = behind
            if self._may_think:
                self._enter(_Segment.REASONING)
            elif self._segment is not _Segment.REASONING:
                self._pass_on(tag)
        else:
            assert self._dialect is not None
            self._parser = self._dialect.parser(len(self._calls), self._tools, self._new_call_id)
            self._return_to, self._segment = self._segment, _Segment.CALL
            self._call_start = self._num_pushed - len(self._buffer)
        return True

    def _find(self, tag: str) -> int:
        """Return the buffer index of the first recognised occurrence of a tag; -1 without one."""
        at = self._buffer.find(tag)
        if tag in self._places:
            before = self._num_pushed - len(self._buffer)
            while at >= 0 and before + at not in self._places[tag]:
                at = self._buffer.find(tag, at + 1)
        return at

    def _read_call(self, final: bool) -> bool:
        assert self._parser is not None
        text, self._buffer = self._buffer, ""
        step = self._parser.push(text, final=final)
        self._events += step.events
        if step.status is CallStatus.MORE:
            return False
        if step.status is CallStatus.NOT_A_CALL:
            self._refuse_call(step)
        else:
            self._calls.append(self._parser.call)
            self._buffer = step.rest
            self._leave_for_call()
        self._parser = None
        return True

    def _refuse_call(self, step: CallStep) -> None:
        """Return to the trigger's segment and resume after the trigger's first character, so that the trigger becomes
        text."""
        self._segment = self._return_to
        self._buffer = step.rest[1:]
        self._pass_on(step.rest[:1])

    def _leave_for_call(self) -> None:
        """Leave a complete or truncated call. Reasoning that contained it ended where the call began."""
        if self._return_to is _Segment.REASONING:
            self.reasoning_end = self._call_start
        self._enter(_Segment.CONTENT)

    def _close_reasoning(self) -> None:
        if self._segment is _Segment.REASONING:
            self.reasoning_end = self._num_pushed - len(self._buffer)
            self._enter(_Segment.CONTENT)
        elif self._is_segment_new:
            self._trim_start, self._may_think = True, False

    def _enter(self, segment: _Segment) -> None:
        self._space = ""
        self._segment = segment
        self._is_segment_new = self._trim_start = True
        self._may_think = False
        self._set_tags()

    def _pass_on(self, text: str) -> None:
        """Emit text, which ends where the buffer begins. Trailing whitespace is held back until the segment
        continues."""
        text = self._space + text
        if self._is_segment_new and self._trim_start:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._is_segment_new = self._may_think = False
            self._emit(shown)

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._segment is _Segment.REASONING:
            self._reasoning.append(text)
            self._events.append(ReasoningDelta(text))
        else:
            self._content.append(text)
            self._events.append(ContentDelta(text, self._num_pushed - len(self._buffer) - len(self._space) - len(text)))

    def _set_tags(self) -> None:
        """Set the tags that may end the segment. Inside reasoning, or when `<tool_call>` is a token, only `<tool_call>`
        begins a call: a bare `<function=` is then reasoning text or a quotation."""
        triggers: tuple[str, ...] = ()
        if self._dialect is not None:
            is_strict = self._segment is _Segment.REASONING or self._has_form or CALL_OPEN in self._places
            triggers = (CALL_OPEN,) if is_strict else self._dialect.triggers(self._tools)
        in_form = self._has_form and self._segment is _Segment.CONTENT
        self._tags = triggers if in_form else (THINK_CLOSE, THINK_OPEN, *triggers)
        self._holdback = Holdback(self._tags)
