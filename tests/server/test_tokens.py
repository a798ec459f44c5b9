"""/tokenize, /detokenize, /v1/chat/completions/render and /tokenizer_info: exactly the prompt that a chat request would
have."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.engine import bundled
from agentspec.errors import CheckpointError, ConfigError
from agentspec.server.pipeline import TextPipeline
from agentspec.text.tokenizer import Tokenizer
from agentspec.wire import TokensEvent
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said
from tests.fakes.text import TEMPLATE_FILE, byte_backend, write_text_assets

Connect = Callable[..., httpx.AsyncClient]

USER = {"role": "user", "content": "héllo"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get", "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}},
    }
]


def post(
    connect: Connect, *requests: tuple[str, Any], engine: ScriptedEngine | None = None, **overrides: Any
) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with connect(engine or ScriptedEngine(), **overrides) as client:
            return [await client.post(path, json=body) for path, body in requests]

    return asyncio.run(run())


def refused(response: httpx.Response, field: str) -> None:
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


def test_tokenize_and_detokenize_are_inverse(connect: Connect) -> None:
    text = "<|im_start|>user\n<think> naïve 😀<|im_end|>"
    (tokenized,) = post(connect, ("/tokenize", {"prompt": text, "return_token_strs": True}))
    body = tokenized.json()
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), INFO.max_context)
    assert (body["token_strs"][0], body["token_strs"][-1]) == ("<|im_start|>", "<|im_end|>")
    assert body["token_strs"][5] == "Ċ", "as tokenizer.json spells a newline"
    (detokenized,) = post(connect, ("/detokenize", {"tokens": body["tokens"], "model": "scripted"}))
    assert detokenized.json() == {"prompt": text}


def test_padding_ids_have_no_text(connect: Connect) -> None:
    (response,) = post(connect, ("/detokenize", {"tokens": [INFO.vocab_size - 1]}))
    assert response.json() == {"prompt": ""}


def test_tokenize_of_messages_equals_the_chat_prompt(connect: Connect) -> None:
    engine = ScriptedEngine([*said("</think>\n\nok"), ended()])
    chat = {"messages": [USER], "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}, "cache_salt": "s"}
    asked = {**chat, "model": "scripted", "seed": 3, "prompt_cache_key": "p"}
    tokenized, rendered, _ = post(
        connect,
        ("/tokenize", {**chat, "add_generation_prompt": True, "continue_final_message": False}),
        ("/v1/chat/completions/render", asked),
        ("/v1/chat/completions", asked),
        engine=engine,
    )
    (submit,) = engine.submits
    assert tokenized.json()["tokens"] == list(submit.prompt_ids)
    assert tokenized.json()["token_strs"] is None
    body = rendered.json()
    assert body["token_ids"] == list(submit.prompt_ids)
    assert body["prompt"].endswith("<|im_start|>user\nhéllo<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert body["breakpoints"] == [
        {"offset": mark.offset, "kind": mark.kind.name.lower()} for mark in submit.breakpoints
    ]
    assert {mark["kind"] for mark in body["breakpoints"]} == {"system", "user"}
    assert (body["sampling_params"]["seed"], body["session_id"], body["grammar"]) == (3, "p", None)
    assert (body["count"], body["model"]) == (len(submit.prompt_ids), "scripted")


def test_add_generation_prompt_and_continue_final_message_end_the_prompt_as_in_vllm(
    connect: Connect, pipeline: TextPipeline
) -> None:
    """With the tokens that start an answer, after the last message, or inside of it."""
    begun = [USER, {"role": "assistant", "content": "It "}]
    continued = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    engine = ScriptedEngine()
    opened, closed, inside, null, _ = post(
        connect,
        ("/tokenize", {"messages": begun}),
        ("/tokenize", {"messages": begun, "add_generation_prompt": False}),
        ("/tokenize", continued),
        ("/tokenize", {"messages": begun, "add_generation_prompt": None, "continue_final_message": None}),
        ("/v1/chat/completions", {"model": "scripted", **continued}),
        engine=engine,
    )
    history = "<|im_start|>user\nhéllo<|im_end|>\n<|im_start|>assistant\nIt "
    texts = [pipeline.tokenizer.spell(answer.json()["tokens"]) for answer in (opened, closed, inside, null)]
    assert texts == [history + "<|im_end|>\n<|im_start|>assistant\n", history + "<|im_end|>\n", history, texts[0]]
    assert inside.json()["tokens"] == list(engine.submits[0].prompt_ids)


def test_returned_turn_is_counted_with_its_generated_ids(connect: Connect) -> None:
    """The scripted turn contains an added token where templates don't write one; in a client's text it is encoded as
    single bytes."""
    word = "</tool_response>"
    token = Tokenizer(byte_backend()).encode(word)
    engine = ScriptedEngine([TokensEvent(request_id="", token_ids=token, text=word), ended()])
    history = [USER, {"role": "assistant", "content": word}, {"role": "user", "content": "more"}]
    _, plain, salted = post(
        connect,
        ("/v1/chat/completions", {"model": "scripted", "messages": [USER]}),
        ("/tokenize", {"messages": history}),
        ("/tokenize", {"messages": history, "cache_salt": "another"}),
        engine=engine,
    )
    assert plain.json()["count"] == salted.json()["count"] + 1 - len(word)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "tools": TOOLS}, "tools"),
        ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ({"messages": [{"role": "wizard"}]}, "messages[0].role"),
        ({"messages": [USER], "add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "continue_final_message": True, "add_generation_prompt": False}, "messages[0].role"),
        ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ({"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": [USER], "chat_template": "{{ 1 }}"}, "chat_template"),
        ([], "body"),
    ],
)
def test_tokenize_refuses_by_name(connect: Connect, body: Any, field: str) -> None:
    (answer,) = post(connect, ("/tokenize", body))
    refused(answer, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": [1, -1]}, "tokens[1]"),
        ({"tokens": [INFO.vocab_size]}, "tokens[0]"),
        ({"tokens": [1, 2.5]}, "tokens[1]"),
        ({"tokens": [1], "skip_special_tokens": True}, "skip_special_tokens"),
    ],
)
def test_detokenize_refuses_by_name(connect: Connect, body: Any, field: str) -> None:
    (answer,) = post(connect, ("/detokenize", body))
    refused(answer, field)


def test_unknown_model_is_404(connect: Connect) -> None:
    paths = ["/tokenize", "/detokenize", "/v1/chat/completions/render"]
    bodies: list[dict[str, Any]] = [{"prompt": "a"}, {"tokens": [1]}, {"messages": [USER]}]
    for response in post(
        connect, *[(path, {**body, "model": "other"}) for path, body in zip(paths, bodies, strict=True)]
    ):
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_without_a_tokenizer_the_endpoints_refuse(connect: Connect) -> None:
    paths = [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/chat/completions/render", {"model": "scripted", "messages": [USER]}),
    ]
    fields = ["prompt", "tokens", "messages"]
    for response, field in zip(post(connect, *paths, pipeline=None), fields, strict=True):
        refused(response, field)


def info_of(connect: Connect, text: TextPipeline | None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(ScriptedEngine(), pipeline=text) as client:
            return await client.get("/tokenizer_info")

    return asyncio.run(run())


def test_tokenizer_info_returns_the_checkpoints_settings(connect: Connect, tmp_path: Path) -> None:
    write_text_assets(tmp_path)
    end = {"content": "<|im_end|>", "special": True}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": end,
        "bos_token": None,
        "model_max_length": 99,
        "vocab_file": "/somewhere/vocab.json",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    told = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "bos_token": None, "model_max_length": 99}
    tokenizer = Tokenizer.from_directory(tmp_path)
    answer = info_of(connect, TextPipeline.from_checkpoint(tokenizer, tmp_path))
    assert (answer.status_code, answer.json()) == (200, told | {"chat_template": TEMPLATE_FILE.read_text()})
    (tmp_path / "chat_template.jinja").unlink()
    assert info_of(connect, TextPipeline.from_checkpoint(tokenizer, tmp_path)).json() == told


def test_tokenizer_info_is_404_without_a_tokenizer(connect: Connect) -> None:
    answer = info_of(connect, None)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_tokenizer")
    assert answer.json()["error"]["message"] == "this checkpoint has no tokenizer"


def test_chat_template_file_replaces_the_checkpoints_own(connect: Connect, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(
        "{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor %}"
    )
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    text = TextPipeline.from_checkpoint(tokenizer, bundled.DIRECTORY, chat_template=file)
    (rendered,) = post(
        connect, ("/v1/chat/completions/render", {"model": "scripted", "messages": [USER]}), pipeline=text
    )
    assert rendered.json()["prompt"] == "[user] héllo<|im_end|>", "with the checkpoint's own tokens"
    assert info_of(connect, text).json()["chat_template"] == file.read_text()


def test_invalid_chat_template_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for %}")
    with pytest.raises(CheckpointError, match=r"own\.jinja: not a valid chat template"):
        TextPipeline.from_checkpoint(Tokenizer.from_directory(bundled.DIRECTORY), bundled.DIRECTORY, chat_template=file)
    with pytest.raises(ConfigError, match=r"own\.jinja.*no tokenizer"):
        TextPipeline.from_checkpoint(None, bundled.DIRECTORY, chat_template=file)
