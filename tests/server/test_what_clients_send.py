"""Undocumented input of all kinds of clients, through the app: the resulting prompt, the notes, and the refusals.

Each case was seen from a client. Cases with more than one request are tested with their endpoint.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.server.pipeline import TextPipeline
from agentspec.server.unknown_fields import HEADER
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]
Body = dict[str, Any]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNTING = {CHAT: "/tokenize", RESPONSES: "/v1/responses/input_tokens", MESSAGES: "/v1/messages/count_tokens"}
"""Where the prompt of such a body is counted without generation."""

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
CALLED = {"name": "f", "arguments": '{"a": "b"}'}


def user(content: Any = "q", **extra: Any) -> Body:
    return {"role": "user", "content": content, **extra}


def assistant(content: Any = None, **extra: Any) -> Body:
    return {"role": "assistant", "content": content, **extra}


def call(**extra: Any) -> Body:
    return {"id": "c", "type": "function", "function": CALLED, **extra}


def text(words: str, kind: str = "text", **extra: Any) -> Body:
    return {"type": kind, "text": words, **extra}


REFUSED_PART, SAID_PART = {"type": "refusal", "refusal": "a"}, text("b", "output_text")
RESULT = {"role": "tool", "tool_call_id": "c", "content": "r"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}
PLAIN_CHAT = [user(), assistant("a", tool_calls=[call()]), RESULT]
LOOPED = [user(), assistant("a", reasoning_content="hm", tool_calls=[call()]), RESULT]


def thought(**form: Any) -> Body:
    return {"messages": [user(), assistant("a", **form, tool_calls=[call()]), RESULT]}


ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "b"}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "r"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
SAID = {"type": "message", "role": "assistant", "content": [text("a", "output_text", annotations=[], logprobs=[])]}
ITEMS = [user(), THOUGHT, SAID, ITEM, OUTPUT]
FUNCTION = {"type": "function", "name": "f", "description": "d", "parameters": PARAMETERS}

USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}
USED = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
THINKING = {"type": "thinking", "thinking": "hm", "signature": "s"}
BLOCKS = [user(), assistant([THINKING, text("a"), USE]), user([USED])]
OWN = {"name": "f", "description": "d", "input_schema": PARAMETERS}
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}

SAME: list[tuple[str, Body, Body]] = [
    # Histories as clients return them
    (CHAT, {"messages": LOOPED}, thought(reasoning="hm")),
    (CHAT, {"messages": LOOPED}, thought(thinking="hm")),
    (
        CHAT,
        {"messages": LOOPED},
        thought(reasoning_details=[{"type": "reasoning.text", "text": "hm", "signature": None, "index": 0}]),
    ),
    (CHAT, {"messages": LOOPED}, thought(thinking_blocks=[THINKING])),
    (
        CHAT,
        {"messages": LOOPED},
        thought(reasoning_content="hm", reasoning="hm", provider_specific_fields={"reasoning_content": "hm"}),
    ),
    (
        CHAT,
        {"messages": PLAIN_CHAT},
        thought(parsed={"x": 1}, images=[], annotations=[], phase="commentary", extra_content={"google": {}}),
    ),
    (
        CHAT,
        {"messages": PLAIN_CHAT},
        thought(refusal=None, audio=None, function_call=None, provider_specific_fields=None, thinking_blocks=None),
    ),
    (
        CHAT,
        {"messages": PLAIN_CHAT},
        {
            "messages": [
                user([text("q", **MARK)], name=None),
                assistant(
                    [text("a")],
                    tool_calls=[call(index=0, extra_content={}, function={**CALLED, "parsed_arguments": {"a": "b"}})],
                ),
                {**RESULT, "content": [text("r", **MARK)], "name": "f"},
            ]
        },
    ),
    (CHAT, {"messages": LOOPED}, {"messages": [user(), assistant([THINKING, text("a")], tool_calls=[call()]), RESULT]}),
    (
        CHAT,
        {"messages": [user(), assistant("ab"), user()]},
        {"messages": [user([text("q", "input_text")]), assistant([REFUSED_PART, SAID_PART]), user()]},
    ),
    (
        RESPONSES,
        {"input": [user(), assistant("ab"), user()]},
        {"input": [user(), assistant([REFUSED_PART, SAID_PART]), user()]},
    ),
    (CHAT, {"messages": PLAIN_CHAT, "tools": [TOOL]}, {"messages": PLAIN_CHAT, "tools": [{**TOOL, **MARK}]}),
    # Roles
    (
        CHAT,
        {"messages": [{"role": "system", "content": "s\n\nt"}, user()]},
        {
            "messages": [{"role": "developer", "content": "s"}, {"role": "system", "content": [text("t")]}, user()],
        },
    ),
    (
        RESPONSES,
        {"instructions": "s\n\nt", "input": "q"},
        {"instructions": "s", "input": [{"role": "developer", "content": "t"}, user()]},
    ),
    (
        MESSAGES,
        {"system": "s\n\nt", "messages": [user()]},
        {"system": "s", "messages": [{"role": "system", "content": "t"}, user()]},
    ),
    # Responses
    (
        RESPONSES,
        {"input": ITEMS},
        {
            "input": [
                user([text("q", "input_text")], type="message", id=None, status=None),
                {**THOUGHT, "id": "rs_1", "status": None, "encrypted_content": None},
                {**SAID, "id": None, "status": "completed", "phase": "commentary", "parsed": None},
                {
                    **ITEM,
                    "id": "fc_1",
                    "status": "completed",
                    "parsed_arguments": {"a": "b"},
                    "namespace": None,
                    "caller": None,
                },
                {**OUTPUT, "id": None, "status": None, "output": [text("r", "input_text")]},
            ]
        },
    ),
    (
        RESPONSES,
        {"input": "q"},
        {
            "input": "q",
            "include": ["reasoning.encrypted_content"],
            "client_metadata": {"a": "b"},
            "prompt_cache_key": "k",
            "safety_identifier": "s",
            "service_tier": "auto",
            "text": {"verbosity": "low"},
            "truncation": "auto",
            "metadata": {},
            "store": False,
        },
    ),
    # Anthropic
    (
        MESSAGES,
        {"messages": BLOCKS, "tools": [OWN]},
        {
            "messages": [
                user([text("q", **MARK, citations=None)]),
                assistant(
                    [
                        {**THINKING, "signature": ""},
                        text("a", citations=[]),
                        {**USE, "caller": {"type": "direct"}, **MARK},
                    ]
                ),
                user([{**USED, "content": [text("r")], "is_error": False}]),
            ],
            "tools": [{**OWN, "type": "custom", "eager_input_streaming": True, "defer_loading": False}],
            "metadata": {"user_id": "u"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "xhigh"},
            "service_tier": "auto",
        },
    ),
    # Chat
    (
        CHAT,
        {"messages": [user()]},
        {
            "messages": [user()],
            "metadata": {},
            "client_metadata": {},
            "service_tier": "flex",
            "safety_identifier": "s",
            "verbosity": "low",
            "store": True,
            "user": "u",
            "reasoning_effort": "xhigh",
            "top_k": -1,
            "skip_special_tokens": True,
            "n": 1,
            "stop": None,
            "tools": None,
            "tool_choice": None,
            "parallel_tool_calls": None,
            "response_format": None,
            "max_tokens": None,
        },
    ),
]
"""By path: two bodies with the same prompt and without notes."""

ASKS_LATER = [
    user(),
    assistant("a"),
    {"role": "system", "content": "s"},
    user("p"),
    {"role": "developer", "content": "t"},
]
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
NOTED: list[tuple[str, Body, str]] = [
    (CHAT, {"messages": [user()], "colour": "red"}, "colour"),
    (RESPONSES, {"input": "q", "tools": [FUNCTION, {"type": "web_search"}]}, "tools.web_search"),
    (
        RESPONSES,
        {"input": [user(), {"type": "web_search_call", "id": "ws_1", "status": "completed"}]},
        "input.web_search_call",
    ),
    (
        RESPONSES,
        {"input": [user(), {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
        "input.encrypted_content",
    ),
    (RESPONSES, {"input": "q", "include": ["dreams"]}, "include.dreams"),
    (
        MESSAGES,
        {"messages": [user()], "tools": [OWN, {"type": "web_search_20250305", "name": "web_search"}]},
        "tools[web_search_20250305]",
    ),
    (MESSAGES, {"messages": [user([text("q"), PDF])]}, "messages[document]"),
]
"""Accepted, and named in the header; refused by strict servers."""

REFUSED: list[tuple[str, Body, str]] = [
    (CHAT, {"messages": [user()], "n": 129}, "n"),
    (CHAT, {"messages": [user()], "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": [user()], "tools": [{"type": "web_search"}]}, "tools[0].type"),
    (
        CHAT,
        {"messages": [user(), assistant("a"), user([{"type": "image_url", "image_url": {"url": "u"}}])]},
        "messages[2].content[0].type",
    ),
    (CHAT, {"messages": [user(), assistant("a")], "add_generation_prompt": False}, "add_generation_prompt"),
    (
        RESPONSES,
        {"input": "q", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice.type",
    ),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    (RESPONSES, {"input": "q", "background": True}, "background"),
    (
        MESSAGES,
        {
            "messages": [user()],
            "tools": [{"type": "web_search_20250305", "name": "w"}],
            "tool_choice": {"type": "tool", "name": "w"},
        },
        "tool_choice.name",
    ),
    (
        MESSAGES,
        {"messages": [user()], "context_management": {"edits": [{"type": "compact_20260112"}]}},
        "context_management.edits[0].type",
    ),
    (MESSAGES, {"messages": [user(), assistant([USE])]}, "messages[1].role"),
]
"""Fields that would change the answer, by name."""


def fields_of(path: str) -> Body:
    return {"model": INFO.model_id, **({"max_tokens": 9} if path == MESSAGES else {})}


def post(connect: Connect, engine: ScriptedEngine, *asked: tuple[str, Body], **settings: Any) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with connect(engine, **settings) as client:
            return [
                await client.post(path, json=body, headers={"anthropic-beta": "some-2025-01-01"})
                for path, body in asked
            ]

    return asyncio.run(run())


@pytest.mark.parametrize(("path", "plain", "sent"), SAME)
def test_both_forms_make_the_same_prompt(connect: Connect, path: str, plain: Body, sent: Body) -> None:
    engine = ScriptedEngine([*said("x"), ended()])
    asked = [(f"{path}?beta=true" if path == MESSAGES else path, fields_of(path) | body) for body in (plain, sent)]
    for answer in post(connect, engine, *asked):
        assert answer.status_code == 200, answer.text
        assert HEADER not in answer.headers
    assert engine.submits[0].prompt_ids == engine.submits[1].prompt_ids
    assert engine.submits[0].sampling == engine.submits[1].sampling


@pytest.mark.parametrize(("path", "plain", "sent"), SAME)
def test_both_forms_have_the_same_count(connect: Connect, path: str, plain: Body, sent: Body) -> None:
    engine = ScriptedEngine([*said("x"), ended()])
    counted = {name: value for name, value in sent.items() if path != CHAT or name in ("messages", "tools")}
    count, answer = post(
        connect, engine, (COUNTING[path], {"model": INFO.model_id} | counted), (path, fields_of(path) | sent)
    )
    assert (count.status_code, answer.status_code) == (200, 200), count.text
    assert HEADER not in count.headers
    assert next(count.json()[name] for name in ("input_tokens", "count") if name in count.json()) == len(
        engine.submits[0].prompt_ids
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": ASKS_LATER}), (MESSAGES, {"messages": ASKS_LATER}), (RESPONSES, {"input": ASKS_LATER})],
)
def test_system_messages_are_accepted_anywhere(connect: Connect, pipeline: TextPipeline, path: str, body: Body) -> None:
    """This template renders them in place; other templates are tested in tests/text/test_system_messages.py."""
    engine = ScriptedEngine()
    (answer,) = post(connect, engine, (path, fields_of(path) | body))
    assert answer.status_code == 200, answer.text
    turns = [("user", "q"), ("assistant", "a"), ("system", "s"), ("user", "p"), ("system", "t")]
    shown = "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns)
    assert pipeline.tokenizer.spell(engine.submits[0].prompt_ids) == shown + "<|im_start|>assistant\n"


@pytest.mark.parametrize(("path", "body", "name"), NOTED)
def test_left_out_fields_are_named_in_the_header(connect: Connect, path: str, body: Body, name: str) -> None:
    count = [(COUNTING[path], {"model": INFO.model_id} | body)]
    for answer in post(connect, ScriptedEngine(), (path, fields_of(path) | body), *count):
        assert (answer.status_code, answer.headers[HEADER]) == (200, name), answer.text
    for answer in post(connect, ScriptedEngine(), (path, fields_of(path) | body), strict_fields=True):
        assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(("path", "body", "field"), REFUSED)
def test_fields_that_would_change_the_answer_are_refused_by_name(
    connect: Connect, path: str, body: Body, field: str
) -> None:
    engine = ScriptedEngine()
    (answer,) = post(connect, engine, (path, fields_of(path) | body))
    assert answer.status_code == (404 if "item_reference" in json.dumps(body) else 400), answer.text
    assert answer.json()["error"]["message"].startswith(f"{field}") or answer.json()["error"].get("param") == field
    assert not engine.submits
