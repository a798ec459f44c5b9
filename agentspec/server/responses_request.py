"""Request bodies of /v1/responses, as tables/responses.py says what is served.

Owns the struct, what an answer repeats of it, and the way to a TurnRequest. Knows nothing of items' meaning, of events or of HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from agentspec.errors import RequestError
from agentspec.server.demands import (
    AllowedTools,
    AllowedToolsChoice,
    FunctionName,
    JsonObjectFormat,
    NamedSchema,
    NamedTool,
    TextFormat,
    ToolChoice,
    tool_demand,
)
from agentspec.server.fields import Checked, Notes, check, read
from agentspec.server.responses_items import ITEM_KINDS
from agentspec.server.sampling_fields import SamplingFields
from agentspec.server.tables.responses import RESPONSES
from agentspec.server.turn import TurnRequest
from agentspec.text.constraints import OutputForm, ToolDemand

_MAX_LABELS, _MAX_LABEL_NAME, _MAX_LABEL = 16, 64, 512
"""OpenAI's limits of metadata."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    """Without effect: there are no summaries, the reasoning itself is in the answer."""
    generate_summary: None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class SchemaFormat(NamedSchema, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """As in chat, without the level between."""


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: str | None = None
    """Without effect."""


class Tool(msgspec.Struct, frozen=True, rename={"is_async": "async"}):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: None = None
    defer_loading: Literal[False] | None = None
    is_async: Literal[False] | None = None
    output_schema: None = None


class ToolName(FunctionName, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """As in chat, without the level between, like the next."""


class SomeTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolName], msgspec.Meta(min_length=1)]


class ResponsesRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranges are those of types.SamplingParams."""

    model: str
    input: str | list[Any]
    """Checked in responses_items.py."""
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    store: bool = True
    include: list[Literal["message.output_text.logprobs"]] = []
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tools: list[dict[str, Any]] = []
    """Checked against Tool, kept as sent: the order of keys is part of the prompt."""
    tool_choice: Literal["auto", "none", "required"] | ToolName | SomeTools = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: Text | None = None
    metadata: dict[str, str] = {}
    prompt_cache_key: str | None = None
    """The session, when no header names one."""
    safety_identifier: str | None = None
    """A label, without effect, like the next."""
    user: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    """Not OpenAI's, like the next: as in /v1/chat/completions."""
    cache_salt: str = ""

    def echo(self) -> dict[str, Any]:
        """What a response repeats of its request, in OpenAI's shape."""
        reasoning, text = self.reasoning or Reasoning(), self.text or Text()
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata,
            "model": self.model,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": self.store,
            "temperature": self.temperature,
            "text": {"format": text.format or TextFormat(), "verbosity": "medium"},
            "tool_choice": self.tool_choice,
            "tools": [{**tool, "strict": bool(tool.get("strict"))} for tool in self.tools],
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    def turn_request(self, messages: list[dict[str, Any]], session_id: str | None) -> TurnRequest:
        """Raises RequestError, with the field as chat names it, for a choice of tools that isn't served."""
        demand, callable_names = self._demand()
        return TurnRequest(
            messages=messages,
            sampling=self.sampling_with(max_tokens=self.max_output_tokens),
            tools=[_chat_tool(tool) for tool in self.tools],
            demand=demand,
            callable_names=callable_names,
            output=self._output(),
            effort=None if self.reasoning is None else self.reasoning.effort,
            template_kwargs=self.chat_template_kwargs,
            namespace=self.cache_salt,
            session_id=session_id,
            logprobs=self.top_logprobs if self.include else None,
        )

    def _demand(self) -> tuple[ToolDemand, frozenset[str] | None]:
        choice = self.tool_choice
        asked: ToolChoice = choice if isinstance(choice, str) else _named(choice) if isinstance(choice, ToolName) else _allowed(choice)
        return tool_demand(asked, [tool["name"] for tool in self.tools], parallel=self.parallel_tool_calls)

    def _output(self) -> OutputForm | None:
        form = None if self.text is None else self.text.format
        if isinstance(form, SchemaFormat):
            return OutputForm(kind="json_schema", source=form.schema, field="text.format.schema")
        return OutputForm(kind="json_object", source=None, field="text.format") if isinstance(form, JsonObjectFormat) else None


CHECKED: Checked = {"input": (str,), "input[]": ITEM_KINDS, "tools": (list[Tool],)}


def parse(body: Any, notes: Notes | None = None) -> ResponsesRequest:
    """Check a decoded JSON body. Raises RequestError with the first field that is not served or wrong. notes: of what nobody knows."""
    request = read(body, ResponsesRequest, RESPONSES, notes or Notes(), required=("model", "input"))
    check(request.tools, list[Tool], "tools")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options", body["stream_options"], "needs stream=true")
    if request.top_logprobs and not request.include:
        raise RequestError("top_logprobs", request.top_logprobs, "needs include=['message.output_text.logprobs']")
    _check_metadata(request.metadata)
    return request


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_LABELS:
        raise RequestError("metadata", f"{len(metadata)} pairs", f"at most {_MAX_LABELS}")
    for name, label in metadata.items():
        if len(name) > _MAX_LABEL_NAME or len(label) > _MAX_LABEL:
            raise RequestError(f"metadata.{name}", label, f"names have at most {_MAX_LABEL_NAME} characters, values {_MAX_LABEL}")


def _named(tool: ToolName) -> NamedTool:
    return NamedTool(FunctionName(tool.name))


def _allowed(choice: SomeTools) -> AllowedToolsChoice:
    return AllowedToolsChoice(AllowedTools(choice.mode, [_named(tool) for tool in choice.tools]))


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as /v1/chat/completions has it, so that both make the same prompt of it."""
    shown = ("name", "description", "parameters", *(("strict",) if tool.get("strict") else ()))
    return {"type": "function", "function": {name: value for name, value in tool.items() if name in shown and value is not None}}
