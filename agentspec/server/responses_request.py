"""Request bodies of /v1/responses; tables/responses.py lists the fields.

Owns the struct, the fields that an answer repeats, and the conversion to a TurnRequest. Knows nothing of items'
meaning, of events or of HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from agentspec.errors import RequestError
from agentspec.server.demands import JsonObjectFormat, NamedSchema, TextFormat
from agentspec.server.fields import Checked, Notes, read
from agentspec.server.responses_items import ITEM_KINDS
from agentspec.server.responses_tools import TOOL_KINDS, Choice, Toolset, is_hosted, refuse_hosted_choice
from agentspec.server.sampling_fields import SamplingFields
from agentspec.server.tables.responses import RESPONSES
from agentspec.server.turn import TurnRequest
from agentspec.text.constraints import OutputForm

_MAX_LABELS, _MAX_LABEL_NAME, _MAX_LABEL = 16, 64, 512
"""OpenAI's limits of metadata."""


LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Values of `include` with an effect."""
_OF_HOSTED = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
"""Values of `include` for items that no answer here contains."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    """Treated as false."""


class Reasoning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    """Any text, as in chat."""
    summary: str | None = None
    """Without effect, as is generate_summary: answers contain the reasoning itself instead of summaries."""
    generate_summary: str | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class SchemaFormat(NamedSchema, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """As in chat, but without the nested object."""


class Text(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: str | None = None
    """Without effect."""


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
    include: list[str] = []
    """LOGPROBS, ENCRYPTED or one of _OF_HOSTED; others are left out."""
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] = 0
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    tools: list[dict[str, Any]] = []
    """Checked in responses_tools.py, kept as sent: the order of keys is part of the prompt."""
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: Text | None = None
    metadata: dict[str, str] = {}
    prompt_cache_key: str | None = None
    """The session, if no header names one."""
    safety_identifier: str | None = None
    """A label, without effect, as is user."""
    user: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    """Not OpenAI's, as is cache_salt: the same as in /v1/chat/completions."""
    cache_salt: str = ""

    def echo(self) -> dict[str, Any]:
        """The fields of the request that a response repeats, in OpenAI's shape."""
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
            "tools": [_echoed(tool) for tool in self.tools if not is_hosted(tool)],
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "user": self.user,
        }

    def turn_request(self, messages: list[dict[str, Any]], toolset: Toolset, session_id: str | None) -> TurnRequest:
        """Convert to a turn. toolset: of this request's tools. Raises RequestError for an unsupported choice of
        tools."""
        demand, callable_names = toolset.demand(self.tool_choice, parallel=self.parallel_tool_calls)
        return TurnRequest(
            messages=messages,
            sampling=self.sampling_with(max_tokens=self.max_output_tokens),
            tools=toolset.functions,
            demand=demand,
            callable_names=callable_names,
            output=self._output(),
            effort=None if self.reasoning is None else self.reasoning.effort,
            template_kwargs=self.chat_template_kwargs,
            namespace=self.cache_salt,
            session_id=session_id,
            logprobs=self.top_logprobs if LOGPROBS in self.include else None,
        )

    def _output(self) -> OutputForm | None:
        form = None if self.text is None else self.text.format
        if isinstance(form, SchemaFormat):
            return OutputForm(kind="json_schema", source=form.schema, field="text.format.schema")
        return (
            OutputForm(kind="json_object", source=None, field="text.format")
            if isinstance(form, JsonObjectFormat)
            else None
        )


CHECKED: Checked = {"input": (str,), "input[]": ITEM_KINDS, "tools[]": TOOL_KINDS}


def parse(body: Any, notes: Notes) -> ResponsesRequest:
    """Check a decoded JSON body. Raises RequestError for the first field that is refused or wrong. notes: collects
    unknown fields."""
    refuse_hosted_choice(body.get("tool_choice") if isinstance(body, dict) else None)
    request = read(body, ResponsesRequest, RESPONSES, notes, required=("model", "input"))
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options", body["stream_options"], "needs stream=true")
    for name in request.include:
        if name not in (LOGPROBS, ENCRYPTED, *_OF_HOSTED):
            notes.leave_out(f"include.{name}", name, "is nothing that an answer here could include")
    if request.top_logprobs and LOGPROBS not in request.include:
        raise RequestError("top_logprobs", request.top_logprobs, "needs include=['message.output_text.logprobs']")
    _check_metadata(request.metadata)
    return request


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_LABELS:
        raise RequestError("metadata", f"{len(metadata)} pairs", f"at most {_MAX_LABELS}")
    for name, label in metadata.items():
        if len(name) > _MAX_LABEL_NAME or len(label) > _MAX_LABEL:
            raise RequestError(
                f"metadata.{name}", label, f"names have at most {_MAX_LABEL_NAME} characters, values {_MAX_LABEL}"
            )


def _echoed(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "strict": bool(tool.get("strict"))} if tool["type"] == "function" else tool
