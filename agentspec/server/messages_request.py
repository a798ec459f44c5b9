"""Request bodies of /v1/messages and its count_tokens; tables/messages.py lists the fields.

Owns Anthropic's request structs and their conversion to a TurnRequest, except for the messages. Knows nothing of events
or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from agentspec.errors import RequestError
from agentspec.server.fields import FieldTable, Notes, read
from agentspec.server.messages_blocks import readable
from agentspec.server.messages_deferred import deferred, definitions
from agentspec.server.messages_edits import ClearThinkingEdit, ContextManagement
from agentspec.server.messages_input import CacheControl, InputMessage, TextBlock, begins_answer, converted, found_tools
from agentspec.server.messages_tools import AutoChoice, Choice, Tool, demand, known_tools, own_names
from agentspec.server.sampling_fields import top_k_of
from agentspec.server.tables.messages import COUNT, MESSAGES
from agentspec.server.turn import TurnRequest
from agentspec.text.chat_template import CacheMark, MessageMark, ToolsMark
from agentspec.text.constraints import OutputForm
from agentspec.types import SamplingParams

MAX_MARKS = 4
"""Maximum number of places with cache_control in one request, as in Anthropic's API."""

_THINKING_SWITCH = "enable_thinking"
_KEEPS_THINKING = "preserve_thinking"


class _Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: thinking blocks have no text. There are no summaries: by default the answer contains the whole
    thinking."""


class EnabledThinking(_Thinking, frozen=True, kw_only=True, tag="enabled"):
    budget_tokens: int
    """Without effect, so any number is accepted. Thinking counts towards max_tokens, which is its only limit."""


class AdaptiveThinking(_Thinking, frozen=True, kw_only=True, tag="adaptive"):
    pass


class DisabledThinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    pass


class JsonFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    """Any text, as in chat."""
    format: JsonFormat | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that determine the prompt."""

    model: str
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] = ""
    tools: list[Tool] = []
    tool_choice: Choice = AutoChoice()
    thinking: EnabledThinking | AdaptiveThinking | DisabledThinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: JsonFormat | None = None
    """The older name of output_config.format."""
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    """A cache mark at the end of the last message."""
    cache_salt: str = ""
    """Not Anthropic's: prefixes are shared only among requests with the same salt."""

    def form(self) -> OutputForm | None:
        """The requested form of the output. Raises RequestError for two different ones."""
        name = "output_config.format" if self.output_format is None else "output_format"
        asked = self.output_format or self.output_config.format
        if self.output_config.format not in (None, asked):
            raise RequestError(
                "output_format", msgspec.to_builtins(self.output_format), "disagrees with output_config.format"
            )
        return None if asked is None else OutputForm(kind="json_schema", source=asked.schema, field=f"{name}.schema")


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """Ranges are those of types.SamplingParams."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] = []
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @property
    def omits_thinking(self) -> bool:
        return isinstance(self.thinking, _Thinking) and self.thinking.display == "omitted"

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=top_k_of(self.top_k),
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences),
        )


_Request = TypeVar("_Request", bound=CountRequest)


def parse_messages(body: Any, notes: Notes | None = None) -> MessagesRequest:
    """Check a decoded JSON body. Raises RequestError for the first field that is refused or wrong. notes: collects
    unknown fields."""
    return _parsed(body, MessagesRequest, MESSAGES, notes or Notes(), required=("model", "max_tokens", "messages"))


def parse_count(body: Any, notes: Notes | None = None) -> CountRequest:
    """The same for count_tokens."""
    return _parsed(body, CountRequest, COUNT, notes or Notes(), required=("model", "messages"))


def turn_request(asked: CountRequest, session_id: str | None, template_reads: Collection[str]) -> TurnRequest:
    """Convert a body to a turn. template_reads: the variables that the checkpoint's chat template uses.

    Raises RequestError for fields that contradict each other, or that the template doesn't support."""
    messages, in_messages = converted(asked.system, asked.messages, definitions(asked.tools))
    own = [tool for tool in asked.tools if tool.is_own]
    hidden = deferred(asked.tools)
    marks: list[CacheMark] = [*_tool_marks([tool for tool in asked.tools if tool.name not in hidden]), *in_messages]
    if asked.cache_control is not None:
        marks.append(MessageMark(len(messages) - 1))
    if len(marks) > MAX_MARKS:
        raise RequestError("cache_control", len(marks), f"at most {MAX_MARKS} places may have it")
    continues = begins_answer(messages, asked.messages)
    thinking = _thinking_kwargs(asked.thinking, template_reads, continues=continues)
    edits = [] if asked.context_management is None else asked.context_management.edits
    wanted = demand(asked.tool_choice, asked.tools)
    unknown = (
        hidden - found_tools(asked.messages) if wanted.choice == "required" and wanted.name is None else frozenset()
    )
    return TurnRequest(
        messages=messages,
        sampling=asked.sampling() if isinstance(asked, MessagesRequest) else SamplingParams(),
        tools=[tool.function() for tool in own],
        hidden_tools=hidden,
        demand=wanted,
        callable_names=frozenset(tool.name for tool in own) - unknown if unknown else None,
        output=asked.form(),
        effort=asked.output_config.effort,
        template_kwargs={**thinking, **_keeping_kwargs(edits, template_reads)},
        namespace=asked.cache_salt,
        session_id=session_id,
        marked=marks,
        edits=[edit.edit() for edit in edits],
        continues=continues,
    )


def _parsed(body: Any, kind: type[_Request], table: FieldTable, notes: Notes, *, required: tuple[str, ...]) -> _Request:
    if isinstance(body, dict):
        made: dict[str, Callable[[Any, Notes], Any]] = {
            "messages": partial(readable, tools=own_names(body.get("tools"))),
            "tools": known_tools,
        }
        body = {**body, **{name: make(body[name], notes) for name, make in made.items() if name in body}}
    return read(body, kind, table, notes, required=required)


def _tool_marks(tools: Sequence[Tool]) -> list[CacheMark]:
    """Cache marks among the tools that the model is shown."""
    marks: list[CacheMark] = []
    num_shown = 0
    for tool in tools:
        num_shown += tool.is_own
        if tool.cache_control is not None and num_shown:
            marks.append(ToolsMark(num_shown))
    return marks


def _thinking_kwargs(
    thinking: EnabledThinking | AdaptiveThinking | DisabledThinking | None, reads: Collection[str], *, continues: bool
) -> dict[str, Any]:
    """Template variables for `thinking`. An answer that continues a message is past its thinking. Otherwise, without
    the field or without the variable, the template decides; adaptive thinking counts as enabled."""
    if continues and isinstance(thinking, EnabledThinking):
        raise RequestError(
            "thinking.type",
            "enabled",
            "can't go together with a last message of the assistant's, whose text the answer goes on from",
        )
    if _THINKING_SWITCH not in reads or (thinking is None and not continues):
        return {}
    return {_THINKING_SWITCH: not (continues or isinstance(thinking, DisabledThinking))}


def _keeping_kwargs(edits: Sequence[object], reads: Collection[str]) -> dict[str, Any]:
    """A request that says which thinking to clear wants the rest to be kept, so the template must not drop thinking by
    its own rules."""
    return (
        {_KEEPS_THINKING: True}
        if _KEEPS_THINKING in reads and any(isinstance(edit, ClearThinkingEdit) for edit in edits)
        else {}
    )
