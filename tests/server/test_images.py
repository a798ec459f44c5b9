"""Images: refused with the field's name, or replaced by a text if the server is configured so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.server.images import WORDS, without_images
from agentspec.server.pipeline import TextPipeline
from tests.fakes.engine_client import ScriptedEngine

Connect = Callable[..., httpx.AsyncClient]

URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    "cache_control": {"type": "ephemeral"},
}
ITEM = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
FUNCTION = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CUSTOM = {"type": "custom_tool_call", "call_id": "c1", "name": "look", "input": ""}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": words}


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [user(text("What is"), URL, text("this?"))]},
        "messages[0].content[1].type",
    ),
    "chat, a result": (
        "/v1/chat/completions",
        {
            "messages": [
                user(text("What is this?")),
                {"role": "assistant", "tool_calls": [FUNCTION]},
                {"role": "tool", "tool_call_id": "c1", "content": [URL]},
            ]
        },
        "messages[2].content[0].type",
    ),
    "chat, a later turn": (
        "/v1/chat/completions",
        {"messages": [user(text("What is")), {"role": "assistant", "content": "What?"}, user(URL)]},
        "messages[2].content[0].type",
    ),
    "chat, the system's": (
        "/v1/chat/completions",
        {"messages": [{"role": "developer", "content": [text("What is"), URL]}, user(text("x"))]},
        "messages[0].content[1].type",
    ),
    "messages, a later turn": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [user(text("What is")), {"role": "assistant", "content": "What?"}, user(BLOCK)]},
        "messages[2].content[0].type",
    ),
    "responses, a later turn": (
        "/v1/responses",
        {"input": [user(text("What is", "input_text")), {"role": "assistant", "content": "What?"}, user(ITEM)]},
        "input[2].content[0].type",
    ),
    "responses, a custom tool's": (
        "/v1/responses",
        {
            "input": [
                user(text("What is", "input_text")),
                CUSTOM,
                {"type": "custom_tool_call_output", "call_id": "c1", "output": [ITEM]},
            ]
        },
        "input[2].output[0].type",
    ),
    "messages": (
        "/v1/messages",
        {"max_tokens": 9, "messages": [user(text("What is"), BLOCK, text("this?"))]},
        "messages[0].content[1].type",
    ),
    "messages, a result": (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                user(text("What is this?")),
                {"role": "assistant", "content": [USE]},
                user({"type": "tool_result", "tool_use_id": "c1", "content": [BLOCK]}),
            ],
        },
        "messages[2].content[0].content[0].type",
    ),
    "responses": (
        "/v1/responses",
        {"input": [user(text("What is this?", "input_text"), ITEM)]},
        "input[0].content[1].type",
    ),
    "responses, a result": (
        "/v1/responses",
        {
            "input": [
                user(text("What is this?", "input_text")),
                CALL,
                {"type": "function_call_output", "call_id": "c1", "output": [ITEM]},
            ]
        },
        "input[2].output[0].type",
    ),
}


def post(connect: Connect, engine: ScriptedEngine, path: str, body: dict[str, Any], **settings: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine, **settings) as client:
            return await client.post(path, json={"model": "scripted", **body})

    return asyncio.run(run())


@pytest.mark.parametrize("name", CASES)
def test_images_are_refused_or_replaced(connect: Connect, pipeline: TextPipeline, name: str) -> None:
    path, body, field = CASES[name]
    engine = ScriptedEngine()
    refused = post(connect, engine, path, body)
    assert refused.status_code == 400
    assert field in refused.text
    assert not engine.submits
    assert post(connect, engine, path, body, drops_images=True).status_code == 200
    prompt = pipeline.tokenizer.spell(engine.submits[0].prompt_ids)
    assert prompt.count(WORDS) == 1
    assert prompt.index("What is") < prompt.index(WORDS)
    assert "AAAA" not in prompt


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": [user(text("x"), URL)]}),
        ("/v1/chat/completions/render", {"messages": [user(text("x"), URL)]}),
        ("/v1/messages/count_tokens", {"messages": [user(text("x"), BLOCK)]}),
        ("/v1/responses/input_tokens", {"input": [user(text("x", "input_text"), ITEM)]}),
    ],
)
def test_token_counts_treat_images_the_same(connect: Connect, path: str, body: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    assert post(connect, engine, path, body).status_code == 400
    said = post(connect, engine, path, body, drops_images=True).json()
    assert (said.get("count") or said["input_tokens"]) > len(WORDS), "a token is a byte here"


@pytest.mark.parametrize(
    "part", [{"type": "input_audio", "input_audio": {}}, {"type": "file", "file": {}}], ids=lambda part: part["type"]
)
def test_audio_and_files_are_always_refused(connect: Connect, part: dict[str, Any]) -> None:
    for settings in ({}, {"drops_images": True}):
        answer = post(connect, ScriptedEngine(), "/v1/chat/completions", {"messages": [user(part)]}, **settings)
        assert answer.json()["error"]["param"] == "messages[0].content[0].type"


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "image",
        {"messages": 3},
        {"messages": [3, {"content": "x"}, {"content": [3, {"type": []}]}]},
        {"input": "x"},
    ],
)
def test_body_without_images_is_unchanged(body: Any) -> None:
    assert without_images(body) == body


def test_cache_control_of_an_image_is_kept() -> None:
    (message,) = without_images({"messages": [user(BLOCK)]})["messages"]
    assert message == user({"type": "text", "text": WORDS, "cache_control": {"type": "ephemeral"}})
