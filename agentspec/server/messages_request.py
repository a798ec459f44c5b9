"""Request bodies of /v1/messages and its count_tokens, as tables/messages.py says what is served.

Owns Anthropic's structs of a request and what they mean as a TurnRequest, but for the messages themselves. Knows nothing of events or of HTTP.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec

from agentspec.errors import RequestError
from agentspec.server.fields import Notes, read
from agentspec.server.messages_input import CacheControl, InputMessage, TextBlock, converted
from agentspec.server.tables.messages import COUNT, MESSAGES
from agentspec.server.turn import TurnRequest
from agentspec.text.chat_template import CacheMark, MessageMark, ToolsMark
from agentspec.text.constraints import OutputForm, ToolDemand
from agentspec.types import SamplingParams

MAX_MARKS = 4
"""Places with cache_control in one request, as at Anthropic."""

MIN_THINKING_TOKENS = 1024

_THINKING_SWITCH = "enable_thinking"
_EFFORT = "reasoning_effort"


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of the client's own."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: Literal[True] | None = None
    """Without effect: arguments always stream as they are written."""
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[Any], msgspec.Meta(max_length=0)] | None = None

    def function(self) -> dict[str, Any]:
        """As OpenAI's function tool."""
        described = {} if self.description is None else {"description": self.description}
        strict = {"strict": True} if self.strict else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema, **strict}}


class _Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    disable_parallel_tool_use: bool = False


class AutoChoice(_Choice, frozen=True, kw_only=True, tag="auto"):
    pass


class AnyChoice(_Choice, frozen=True, kw_only=True, tag="any"):
    pass


class NamedChoice(_Choice, frozen=True, kw_only=True, tag="tool"):
    name: str


class NoChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    pass


class _Thinking(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    display: Literal["summarized", "omitted"] | None = None
    """`omitted`: blocks of thinking come without their text. There are no summaries: the text itself is in the answer."""


class EnabledThinking(_Thinking, frozen=True, kw_only=True, tag="enabled"):
    budget_tokens: Annotated[int, msgspec.Meta(ge=MIN_THINKING_TOKENS)]
    """An aim that the model isn't told of: thinking counts towards max_tokens, and only that bounds it."""


class AdaptiveThinking(_Thinking, frozen=True, kw_only=True, tag="adaptive"):
    pass


class DisabledThinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    pass


class JsonFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes the prompt."""

    model: str
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    system: str | list[TextBlock] = ""
    tools: list[Tool] = []
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice = AutoChoice()
    thinking: EnabledThinking | AdaptiveThinking | DisabledThinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = None
    """A mark behind the last message."""
    cache_salt: str = ""
    """Not Anthropic's: prefixes are shared only among requests with the same salt."""


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
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, max_tokens=self.max_tokens, stop=tuple(self.stop_sequences)
        )


def parse_messages(body: Any, notes: Notes | None = None) -> MessagesRequest:
    """Check a decoded JSON body. Raises RequestError with the first field that is not served or wrong. notes: of what nobody knows."""
    _refuse_foreign_tools(body)
    asked = read(body, MessagesRequest, MESSAGES, notes or Notes(), required=("model", "max_tokens", "messages"))
    if isinstance(asked.thinking, EnabledThinking) and asked.thinking.budget_tokens >= asked.max_tokens:
        raise RequestError("thinking.budget_tokens", asked.thinking.budget_tokens, f"must be below max_tokens={asked.max_tokens}")
    return asked


def parse_count(body: Any, notes: Notes | None = None) -> CountRequest:
    """The same for count_tokens."""
    _refuse_foreign_tools(body)
    return read(body, CountRequest, COUNT, notes or Notes(), required=("model", "messages"))


def turn_request(asked: CountRequest, session_id: str | None, template_reads: Collection[str]) -> TurnRequest:
    """The turn that a body asks for. `template_reads`: variables of the checkpoint's chat template.

    Raises RequestError for what doesn't fit together, or what the template can't do."""
    messages, in_messages = converted(asked.system, asked.messages)
    marks: list[CacheMark] = [ToolsMark(number) for number, tool in enumerate(asked.tools, 1) if tool.cache_control is not None]
    marks += in_messages
    if asked.cache_control is not None:
        marks.append(MessageMark(len(messages) - 1))
    if len(marks) > MAX_MARKS:
        raise RequestError("cache_control", len(marks), f"at most {MAX_MARKS} places may have it")
    form = asked.output_config.format
    return TurnRequest(
        messages=messages,
        sampling=asked.sampling() if isinstance(asked, MessagesRequest) else SamplingParams(),
        tools=[tool.function() for tool in asked.tools],
        demand=_demand(asked.tool_choice, [tool.name for tool in asked.tools]),
        output=None if form is None else OutputForm(kind="json_schema", source=form.schema, field="output_config.format.schema"),
        template_kwargs={**_thinking_kwargs(asked.thinking, template_reads), **_effort_kwargs(asked.output_config.effort, template_reads)},
        namespace=asked.cache_salt,
        session_id=session_id,
        marked=marks,
    )


def _refuse_foreign_tools(body: Any) -> None:
    """Anthropic's own tools have other fields than a client's, so that their type is what must be named."""
    tools = body.get("tools") if isinstance(body, dict) else None
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in (None, "custom"):
            raise RequestError(f"tools[{index}].type", kind, "is a tool of Anthropic's own; only custom tools, with an input_schema, are served")


def _demand(choice: AutoChoice | AnyChoice | NamedChoice | NoChoice, names: list[str]) -> ToolDemand:
    if isinstance(choice, NoChoice):
        return ToolDemand(choice="none")
    parallel = not choice.disable_parallel_tool_use
    if isinstance(choice, AutoChoice):
        return ToolDemand(choice="auto", parallel=parallel)
    if isinstance(choice, AnyChoice):
        if not names:
            raise RequestError("tool_choice.type", "any", "needs tools")
        return ToolDemand(choice="required", parallel=parallel)
    if choice.name not in names:
        raise RequestError("tool_choice.name", choice.name, "is not the name of one of the request's tools")
    return ToolDemand(choice="required", name=choice.name, parallel=parallel)


def _thinking_kwargs(thinking: EnabledThinking | AdaptiveThinking | DisabledThinking | None, reads: Collection[str]) -> dict[str, Any]:
    """Without the field the template decides; adaptive thinking is thinking where there is a choice."""
    if thinking is None:
        return {}
    if _THINKING_SWITCH in reads:
        return {_THINKING_SWITCH: not isinstance(thinking, DisabledThinking)}
    if isinstance(thinking, AdaptiveThinking):
        return {}
    kind = "disabled" if isinstance(thinking, DisabledThinking) else "enabled"
    raise RequestError("thinking.type", kind, f"this checkpoint's chat template has no variable {_THINKING_SWITCH}")


def _effort_kwargs(effort: str | None, reads: Collection[str]) -> dict[str, Any]:
    """`high` is Anthropic's default, so it asks for nothing where the template knows no efforts."""
    if effort is None:
        return {}
    if _EFFORT in reads:
        return {_EFFORT: effort}
    if effort == "high":
        return {}
    raise RequestError("output_config.effort", effort, f"this checkpoint's chat template has no variable {_EFFORT}")
