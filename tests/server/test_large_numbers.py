"""Numbers too large for a message to the engine, in every numeric field: refused with the field's name, clamped, or
without effect."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from agentspec.engine.remote import _framed
from agentspec.runtime.request import new_request
from agentspec.types import ModelSpec
from agentspec.wire import Event, Submit
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said

LARGE = (2**63, 2**64, -(2**63) - 1, 10**30, 10**400)

USER = {"role": "user", "content": "x"}
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/chat/completions/render": {"messages": [USER]},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": {"max_tokens": 9, "messages": [USER]},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/tokenize": {"messages": [USER]},
    "/detokenize": {"tokens": [1]},
}
CHATS = ("/v1/chat/completions", "/v1/chat/completions/render")
OPENAIS = ("/v1/completions", *CHATS)
RESPONSES = ("/v1/responses", "/v1/responses/input_tokens")
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")

Make = Callable[[int], dict[str, Any]]

SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "min_tokens",
)
LOGPROBS = ["message.output_text.logprobs"]
THOUGHTS, USES = "clear_thinking_20251015", "clear_tool_uses_20250919"


def bounded(number: int) -> dict[str, Any]:
    """A schema that strict tools may have."""
    return {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": number}},
        "required": ["a"],
        "additionalProperties": False,
    }


def plain(name: str) -> Make:
    return lambda number: {name: number}


def edits(edit: Make) -> Make:
    return lambda number: {"context_management": {"edits": [edit(number)]}}


REFUSED: list[tuple[tuple[str, ...], str, Make]] = [
    *((OPENAIS + RESPONSES, name, plain(name)) for name in SAMPLING),
    (OPENAIS, "n", plain("n")),
    (OPENAIS, "stop_token_ids", lambda number: {"stop_token_ids": [number]}),
    (OPENAIS, "logit_bias", lambda number: {"logit_bias": {"1": number}}),
    (OPENAIS, "logit_bias", lambda number: {"logit_bias": {str(number): 1}}),
    (OPENAIS[:2], "forced_output", lambda number: {"forced_output": [number]}),
    (OPENAIS[:1], "prompt", lambda number: {"prompt": [1, number]}),
    (OPENAIS[:1], "prompt", lambda number: {"prompt": [[1], [number]]}),
    (OPENAIS[:1], "logprobs", plain("logprobs")),
    (OPENAIS[:1], "best_of", plain("best_of")),
    (OPENAIS[:1], "breakpoints", lambda number: {"breakpoints": [{"offset": number, "kind": "user"}]}),
    (CHATS, "top_logprobs", lambda number: {"logprobs": True, "top_logprobs": number}),
    (RESPONSES, "top_logprobs", lambda number: {"include": LOGPROBS, "top_logprobs": number}),
    *((MESSAGES[:1], name, plain(name)) for name in ("temperature", "top_p", "top_k")),
    (("/detokenize",), "tokens[1]", lambda number: {"tokens": [1, number]}),
]
"""By path: the field named by the refusal, and a body with the number there."""

LIMITS: list[tuple[tuple[str, ...], str]] = [
    (OPENAIS, "max_tokens"),
    (CHATS, "max_completion_tokens"),
    (RESPONSES, "max_output_tokens"),
    (MESSAGES[:1], "max_tokens"),
]
"""Clamped to the context if too large, refused if negative."""

AIMS: list[tuple[tuple[str, ...], Make]] = [
    (MESSAGES, lambda number: {"thinking": {"type": "enabled", "budget_tokens": number}}),
    (MESSAGES, edits(lambda number: {"type": THOUGHTS, "keep": {"type": "thinking_turns", "value": number}})),
    (MESSAGES, edits(lambda number: {"type": USES, "trigger": {"type": "input_tokens", "value": number}})),
    (MESSAGES, edits(lambda number: {"type": USES, "trigger": {"type": "tool_uses", "value": number}})),
    (MESSAGES, edits(lambda number: {"type": USES, "keep": {"type": "tool_uses", "value": number}})),
    (MESSAGES, edits(lambda number: {"type": USES, "clear_at_least": {"type": "input_tokens", "value": number}})),
    *((MESSAGES[1:], plain(name)) for name in ("max_tokens", "temperature", "top_p", "top_k")),
    ((*CHATS, *RESPONSES, "/tokenize"), lambda number: {"chat_template_kwargs": {"some": number}}),
    (MESSAGES, lambda number: {"tools": [{"name": "f", "strict": True, "input_schema": bounded(number)}]}),
    (
        CHATS,
        lambda number: {
            "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": bounded(number)}}]
        },
    ),
    (
        RESPONSES,
        lambda number: {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": bounded(number)}]},
    ),
    (
        CHATS,
        lambda number: {
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": bounded(number)}}
        },
    ),
    (OPENAIS, lambda number: {"guided_json": {"type": "number", "maximum": number}}),
    (OPENAIS, lambda number: {"guided_json": {"type": "string", "minLength": 0, "maxLength": abs(number)}}),
    (OPENAIS, lambda number: {"guided_json": {"type": "array", "maxItems": abs(number), "items": {"type": "null"}}}),
]
"""Limits and values of other kinds: accepted, or refused with the field's name."""


SPEC = ModelSpec(
    name="scripted",
    vocab_size=INFO.vocab_size,
    num_real_tokens=INFO.vocab_size,
    max_context=INFO.max_context,
    hidden_size=1,
    has_mtp=False,
    stop_token_ids=INFO.stop_token_ids,
    row_bytes=1,
    page_bytes=1,
)


class LinkedEngine(ScriptedEngine):
    """As strict as an engine process: a submit must fit into a message, and is validated."""

    async def stream(self, submit: Submit) -> AsyncGenerator[Event, None]:
        _framed(submit, self.info)
        new_request(
            submit,
            number=0,
            spec=SPEC,
            max_length=INFO.max_context,
            engine_seed=0,
            token_bytes=[b""],
            allow_forced_output=True,
        )
        async for event in super().stream(submit):
            yield event


def cases(given: list[Any]) -> list[Any]:
    return [
        pytest.param(path, *rest, id=f"{path} {json.dumps(rest[-1](0)) if callable(rest[-1]) else rest[-1]}")
        for paths, *rest in given
        for path in paths
    ]


def post(connect: Callable[..., httpx.AsyncClient], path: str, *fields: dict[str, Any]) -> list[httpx.Response]:
    model = {} if path.endswith("tokenize") else {"model": INFO.model_id}

    async def run() -> list[httpx.Response]:
        async with connect(LinkedEngine([*said("x"), ended()])) as client:
            return [
                await client.post(path, content=json.dumps(model | BASE[path] | given).encode()) for given in fields
            ]

    return asyncio.run(run())


def message_of(answer: httpx.Response) -> str:
    message: str = answer.json()["error"]["message"]
    return message


@pytest.mark.parametrize(("path", "field", "make"), cases(REFUSED))
def test_large_number_is_refused_by_name(
    connect: Callable[..., httpx.AsyncClient], path: str, field: str, make: Make
) -> None:
    streams = (
        (False, True) if path.count("/") < 4 and path.startswith("/v1") and "input_tokens" not in path else (False,)
    )
    for stream in streams:
        extra = {"stream": True} if stream else {}
        for answer in post(connect, path, *(make(number) | extra for number in LARGE)):
            assert answer.status_code == 400, answer.text
            assert re.match(rf"{re.escape(field)}(\[\d+\])?=", message_of(answer)), answer.text


@pytest.mark.parametrize(("path", "name"), cases(LIMITS))
def test_large_limits_are_clamped(connect: Callable[..., httpx.AsyncClient], path: str, name: str) -> None:
    for number, answer in zip(LARGE, post(connect, path, *({name: number} for number in LARGE)), strict=True):
        assert answer.status_code == (200 if number > 0 else 400), answer.text
        if number < 0:
            assert message_of(answer).startswith(f"{name}=")
        elif not path.endswith(("render", "input_tokens")):
            assert answer.headers["x-agentspec-max-tokens"] == str(answer.json()["usage"]["max_tokens_clamped_to"])


@pytest.mark.parametrize(("path", "make"), cases(AIMS))
def test_other_large_numbers_are_accepted_or_refused_by_name(
    connect: Callable[..., httpx.AsyncClient], path: str, make: Make
) -> None:
    for answer in post(connect, path, *map(make, LARGE)):
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert message_of(answer).startswith(tuple(make(0))), answer.text
