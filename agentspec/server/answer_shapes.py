"""The types of the answers, for the OpenAPI document (openapi.py): the fields that every answer of a kind has, and some
optional ones.

Types only: the answers themselves are plain dicts, made elsewhere. Knows no endpoint.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class ErrorFields(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """An error in OpenAI's shape."""

    error: ErrorFields


class AnthropicErrorFields(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorFields


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]
    max_tokens_clamped_to: NotRequired[int]


class Metrics(TypedDict):
    speculative_decoding: dict[str, Any]


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]


class _Answer(TypedDict):
    id: str
    created: int
    model: str
    service_tier: None
    system_fingerprint: None
    usage: Usage
    metrics: Metrics


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: dict[str, list[Any]] | None
    finish_reason: FinishReason
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int
    max_tokens_clamped_to: NotRequired[int]


class ResponseObject(TypedDict):
    """A response also repeats fields of its request, which are not listed here."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    previous_response_id: str | None
    output: list[dict[str, Any]]
    usage: ResponseUsage
    metrics: Metrics


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseInputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]
    service_tier: Literal["standard"]
    max_tokens_clamped_to: NotRequired[int]


class MessageObject(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "tool_use", "stop_sequence", "max_tokens"]
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Metrics
    context_management: NotRequired[dict[str, Any]]


class InputTokens(TypedDict):
    input_tokens: int


class CountedMessages(InputTokens):
    context_management: NotRequired[dict[str, int]]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class Text(TypedDict):
    prompt: str


class RenderedChat(TypedDict):
    model: str
    prompt: str
    token_ids: list[int]
    count: int
    max_model_len: int
    breakpoints: list[dict[str, Any]]
    sampling_params: dict[str, Any]
    grammar: dict[str, Any] | None
    session_id: str | None


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Version(TypedDict):
    version: str


class Health(TypedDict):
    status: Literal["ok"]
