"""Request bodies of /v1/chat/completions and /v1/completions: every field is known, works, or is refused by name.

Owns the structs and their validation up to SamplingParams, whose ranges the engine checks at its door. Knows nothing of
prompts as tokens, of events or of HTTP. `null` means absent, as everywhere in OpenAI's API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from agentspec.errors import RequestError
from agentspec.types import SamplingParams

Harmless = Mapping[str, tuple[Any, ...]]

CHAT_HARMLESS: Harmless = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Documented fields that agentspec doesn't serve, with the values that ask for nothing. Any other value is refused."""

COMPLETION_HARMLESS: Harmless = {"best_of": (1,), "n": (1,), "suffix": ("",)}


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Common(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take. Ranges are those of types.SamplingParams."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    prompt_cache_key: str | None = None
    """The session, when no x-session-id header names one."""
    cache_salt: str = ""
    """Prefixes are shared only among requests with the same salt."""
    user: str | None = None
    """A label: accepted, without effect, like the two below."""
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=self.seed,
            max_tokens=self.token_limit,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
        )


class FunctionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None
    """True would need constrained decoding, which isn't there yet."""


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionSpec


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str | dict[str, Any]


class ToolCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    """Left over by clients that assemble streamed deltas; without effect."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message as OpenAI's clients send it, with the fields that they return from earlier answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[dict[str, Any]] | None = None
    """Citations that a client may carry along; without effect."""


class ChatRequest(Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    """Checked against Message, kept as sent: text/messages.py brings them into the templates' form."""
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] = []
    """Checked against Tool, kept as sent: the order of keys is part of the prompt."""
    tool_choice: Literal["auto", "none"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Common, frozen=True, kw_only=True):
    prompt: str | list[Any]
    """A text, token ids, or a list of either: each prompt becomes a choice."""
    max_tokens: int | None = 16
    echo: bool = False
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list. Raises RequestError when they aren't texts or lists of token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        given: list[Any] = self.prompt
        if given and all(type(token) is int for token in given):
            return [given]
        for index, prompt in enumerate(given):
            if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)):
                raise RequestError(f"prompt[{index}]", prompt, "must be a text or a non-empty list of token ids")
        if not given:
            raise RequestError("prompt", given, "must not be empty")
        return list(given)


def parse_chat(body: Any) -> ChatRequest:
    """Check a decoded JSON body. Raises RequestError with the first field that is unknown, not supported or wrong."""
    request = _convert(body, ChatRequest, CHAT_HARMLESS)
    _check(request.messages, list[Message], "messages")
    _check(request.tools, list[Tool], "tools")
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise RequestError("max_tokens", request.max_tokens, f"disagrees with max_completion_tokens={request.max_completion_tokens}")
    return request


def parse_completion(body: Any) -> CompletionRequest:
    """Check a decoded JSON body. Raises RequestError like `parse_chat`."""
    request = _convert(body, CompletionRequest, COMPLETION_HARMLESS)
    if request.logprobs is not None:
        if not 0 <= request.logprobs <= 20:
            raise RequestError("logprobs", request.logprobs, "must be between 0 and 20")
        if not request.echo:
            raise RequestError("logprobs", request.logprobs, "is served only with echo=true, to score a prompt")
        if request.stream:
            raise RequestError("stream", True, "can't be joined with logprobs")
    num_prompts = len(request.prompts())
    if request.stream and num_prompts > 1:
        raise RequestError("stream", True, "streams one prompt; send several prompts without stream, or apart")
    return request


_T = TypeVar("_T")
_Request = TypeVar("_Request", bound=Common)


def _convert(body: Any, kind: type[_Request], harmless: Harmless) -> _Request:
    if not isinstance(body, dict):
        raise RequestError("body", body, "must be a JSON object")
    asked: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            if name not in harmless and name not in kind.__struct_fields__:
                raise RequestError(name, value, "is not a field of this endpoint")
        elif name in kind.__struct_fields__:
            asked[name] = value
        elif name not in harmless:
            raise RequestError(name, value, "is not a field of this endpoint")
        elif not any(type(value) is type(idle) and value == idle for idle in harmless[name]):
            raise RequestError(name, value, "is not supported" + _only(harmless[name]))
    for name in ("model", "messages", "prompt"):
        if name in kind.__struct_fields__ and name not in asked:
            raise RequestError(name, None, "is required")
    if "stream_options" in asked and asked.get("stream") is not True:
        raise RequestError("stream_options", asked["stream_options"], "needs stream=true")
    return _check(asked, kind)


def _check(value: Any, kind: type[_T], name: str = "") -> _T:
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at ")
        raise _field_error(value, path.strip("`"), reason, name) from None


def _only(values: tuple[Any, ...]) -> str:
    return f" (only {' or '.join(map(repr, values))})" if values else ""


def _field_error(value: Any, path: str, reason: str, name: str) -> RequestError:
    """Name the field at msgspec's path (`$.messages[1].role`, under `name`) and the value that stands there."""
    for key, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":
            break
        name += (f".{key}" if name else key) if key else f"[{index}]"
        value = value[int(index) if index else key]
    return RequestError(name or "body", value, reason)
