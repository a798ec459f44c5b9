"""Request bodies of /v1/chat/completions and /v1/completions; tables/chat.py and tables/completions.py list the fields.

Owns the structs and their conversion up to SamplingParams, whose ranges the engine checks. Knows nothing of prompts as
tokens, of events or of HTTP. `null` means absent, as everywhere in OpenAI's API.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from agentspec.errors import RequestError
from agentspec.server.demands import (
    Choices,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    ToolChoice,
    output_form,
    tool_demand,
)
from agentspec.server.fields import Checked, Notes, check, read
from agentspec.server.sampling_fields import SamplingFields
from agentspec.server.tables.chat import CHAT
from agentspec.server.tables.completions import COMPLETIONS
from agentspec.text.constraints import OutputForm, ToolDemand
from agentspec.types import SamplingParams, tokens

MAX_CHOICES = 128
"""OpenAI's limit of `n`."""


TokenIds = Annotated[list[int], msgspec.Meta(min_length=1)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """vLLM's: every chunk contains the token counts of its choice so far."""
    include_obfuscation: Literal[False] = False


class Common(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of both endpoints. Ranges are those of types.SamplingParams."""

    model: str
    n: int = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    logit_bias: dict[int, float] = {}
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | Literal["output"] = False
    """output: ids of the answer, without those of the prompt."""
    skip_special_tokens: bool = True
    forced_output: TokenIds | None = None
    """The answer's tokens, for benchmarks: see wire.Submit."""
    prompt_cache_key: str | None = None
    """The session, if no header names one."""
    cache_salt: str = ""
    """Prefixes are shared only among requests with the same salt."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_so_far(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def output(self) -> OutputForm | None:
        """The requested form of the output; None: unconstrained. Raises RequestError for an invalid form, or more than
        one."""
        return self._output(None)

    def _output(self, response_format: ResponseFormat | None) -> OutputForm | None:
        asked = {} if self.structured_outputs is None else msgspec.structs.asdict(self.structured_outputs)
        if asked and all(value is None or value is False for value in asked.values()):
            raise RequestError("structured_outputs", asked, "must hold one of " + ", ".join(asked))
        fields = {f"structured_outputs.{name}": value for name, value in asked.items()}
        guided = {
            name: getattr(self, name) for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
        }
        return output_form(fields | guided, response_format)

    def sampling(self) -> SamplingParams:
        return self.sampling_with(
            logit_bias=self.logit_bias,
            max_tokens=self.token_limit,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
        )


class FunctionSpec(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Calls of the tool must fit its schema."""


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionSpec


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None
    """None: a call without arguments."""


class ToolCall(msgspec.Struct, frozen=True):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class InputTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """A part of /v1/responses, as is OutputTextPart."""

    text: str


class OutputTextPart(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str


class RefusalPart(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    refusal: str


class ThinkingPart(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str


Part = TextPart | InputTextPart | OutputTextPart | RefusalPart | ThinkingPart


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a message that are read. Clients send back whole answers, of other servers too: other fields are
    left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: Any = None
    """Under this name or another, in several forms: see text/returned_reasoning.py."""
    audio: None = None
    """Refused, as is function_call: the model would have to read it."""
    function_call: None = None


class ChatRequest(Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    """Checked against Message, kept as sent: text/messages.py converts them for the templates."""
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    tools: list[dict[str, Any]] = []
    """Checked against Tool, kept as sent: the order of keys is part of the prompt."""
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    reasoning_effort: str | None = None
    """Any text: templates know different ones."""
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    """vLLM's, as is continue_final_message."""
    continue_final_message: bool = False

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_top(self) -> int | None:
        """Number of likely tokens to show with each generated one; None: no log-probabilities."""
        return self.top_logprobs if self.logprobs else None

    def output(self) -> OutputForm | None:
        return self._output(self.response_format)

    def demand(self) -> tuple[ToolDemand, frozenset[str] | None]:
        """The demand for calls, and the tools that may be called (None: all). Raises RequestError if tools that it
        needs are missing."""
        return tool_demand(
            self.tool_choice, [tool["function"]["name"] for tool in self.tools], parallel=self.parallel_tool_calls
        )


class PromptBreakpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A position of the prompt where later prompts may diverge, so a checkpoint of the prefix cache is useful there."""

    offset: int
    """In tokens from the start of the prompt."""
    kind: Literal["system", "user"]
    """system: the end of the part that sessions share. user: the end of the last user message."""


class CompletionRequest(Common, frozen=True, kw_only=True):
    prompt: str | list[Any]
    """A text, token ids, or a list of either: each prompt becomes a choice. A long list of ids in the list may be an
    array of types.tokens."""
    max_tokens: int | None = 16
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    breakpoints: list[PromptBreakpoint] = []
    """Ascending. In chat they come from the template; a prompt of token ids has none by itself."""

    def prompts(self) -> list[str | Sequence[int]]:
        """The prompts as a list. Raises RequestError if they aren't texts or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        given: list[Any] = self.prompt
        if _are_ids(given):
            return [given]
        for index, prompt in enumerate(given):
            if not isinstance(prompt, str | array) and not (isinstance(prompt, list) and _are_ids(prompt)):
                raise RequestError(f"prompt[{index}]", prompt, "must be a text or a non-empty list of token ids")
        if not given:
            raise RequestError("prompt", given, "must not be empty")
        return list(given)


CHAT_CHECKED: Checked = {"messages": (list[Message],), "tools": (list[Tool],)}
COMPLETION_CHECKED: Checked = {"prompt": (str, TokenIds, list[str | TokenIds])}
"""Fields that the structs keep as sent, with the types they are checked against: any one of them."""


def parse_chat(body: Any, notes: Notes | None = None) -> ChatRequest:
    """Check a decoded JSON body. Raises RequestError for the first field that is refused or wrong. notes: collects
    unknown fields."""
    request = read(body, ChatRequest, CHAT, notes or Notes(), required=("model", "messages"))
    check(request.messages, list[Message], "messages", notes=Notes())  # nulls inside of messages are absent, too
    check(request.tools, list[Tool], "tools")
    _check_common(request)
    _check_beginning(request)
    request.demand()
    _check_num_top("top_logprobs", request.top_logprobs)
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs", request.top_logprobs, "needs logprobs=true")
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise RequestError(
            "max_tokens", request.max_tokens, f"disagrees with max_completion_tokens={request.max_completion_tokens}"
        )
    return request


def parse_completion(body: Any, notes: Notes | None = None) -> CompletionRequest:
    """Check a decoded JSON body, like `parse_chat`. Checked token ids become arrays."""
    request = read(body, CompletionRequest, COMPLETIONS, notes or Notes(), required=("model", "prompt"))
    prompts = request.prompts()
    _check_common(request)
    if request.logprobs is not None:
        _check_num_top("logprobs", request.logprobs)
    if request.best_of is not None and request.best_of != request.n:
        raise RequestError(
            "best_of", request.best_of, f"must be n={request.n}: every choice is shown, none is made to be dropped"
        )
    if request.breakpoints and len(prompts) > 1:
        raise RequestError(
            "breakpoints", msgspec.to_builtins(request.breakpoints), "belong to one prompt, and there are several"
        )
    if isinstance(request.prompt, str):
        return request
    return msgspec.structs.replace(request, prompt=[_packed(prompt) for prompt in prompts])


def _packed(prompt: str | Sequence[int]) -> str | Sequence[int]:
    """Ids as an array, which nobody checks again; those that it can't hold stay a list, and the engine refuses them."""
    if isinstance(prompt, str | array):
        return prompt
    try:
        return tokens(prompt)
    except OverflowError:
        return prompt


def _are_ids(given: list[Any]) -> bool:
    try:
        msgspec.convert(given, TokenIds)  # checking a long prompt id by id in Python takes seven times as long
    except msgspec.ValidationError:
        return False
    return True


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A checked tool for the template: the client's order of keys, without keys that don't belong to a tool
    (`cache_control`)."""
    function = {
        name: value
        for name, value in tool["function"].items()
        if name in FunctionSpec.__struct_fields__ and value is not None
    }
    return {
        name: function if name == "function" else value
        for name, value in tool.items()
        if name in Tool.__struct_fields__
    }


def _check_common(request: Common) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options", msgspec.to_builtins(request.stream_options), "needs stream=true")
    if not 1 <= request.n <= MAX_CHOICES:
        raise RequestError("n", request.n, f"must be between 1 and {MAX_CHOICES}")
    request.output()


def _check_beginning(request: ChatRequest) -> None:
    """Check the fields that say whether an answer starts a new message or continues the last one."""
    if request.add_generation_prompt and request.continue_final_message:
        raise RequestError(
            "continue_final_message", True, "needs add_generation_prompt=false: the answer goes on instead of beginning"
        )
    if not request.add_generation_prompt and not request.continue_final_message:
        raise RequestError("add_generation_prompt", False, "is served with continue_final_message=true alone")
    if request.continue_final_message and request.messages:
        last, field = request.messages[-1], f"messages[{len(request.messages) - 1}]"
        if last["role"] != "assistant":
            raise RequestError(f"{field}.role", last["role"], "must be 'assistant' for continue_final_message")
        if last.get("tool_calls"):
            raise RequestError(f"{field}.tool_calls", last["tool_calls"], "can't be continued: only text can")


def _check_num_top(field: str, value: int) -> None:
    if not 0 <= value <= 20:
        raise RequestError(field, value, "must be between 0 and 20")
