"""`min_tokens` over HTTP on the bundled model."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from agentspec.config import EngineConfig
from agentspec.engine.in_process import AsyncEngine, Engine
from agentspec.errors import RequestError
from agentspec.server.transport import InProcessTransport
from agentspec.types import SamplingParams
from agentspec.wire import Grammar, Submit

CHAT = (
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "return_token_ids": True},
)
COMPLETION = (
    "/v1/completions",
    {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "temperature": 0, "return_token_ids": True},
)
RESPONSE = ("/v1/responses", {"input": "Hi", "temperature": 0})


def post(*asked: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with (
            AsyncEngine(EngineConfig(device="cpu", memory_gib=0.2)) as engine,
            httpx.AsyncClient(
                transport=InProcessTransport(engine.app), base_url="http://in-process", timeout=None
            ) as client,
        ):
            return [await client.post(path, json={"model": "tiny-agent", **body}) for path, body in asked]

    return asyncio.run(run())


def test_an_answer_continues_to_its_minimum_and_may_end_then() -> None:
    limits = {"min_tokens": 60, "max_tokens": 64}
    free, chat, completion, ignoring = post(
        CHAT,
        (CHAT[0], CHAT[1] | limits),
        (COMPLETION[0], COMPLETION[1] | limits),
        (CHAT[0], CHAT[1] | limits | {"ignore_eos": True}),
    )
    natural = free.json()["choices"][0]["token_ids"]
    assert len(natural) < 60, "without a minimum it ends long before"
    for answer in (chat, completion, ignoring):
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        assert 60 <= len(choice["token_ids"]) <= 64
        assert natural[-1] not in choice["token_ids"][:60] or answer is ignoring
        assert choice["token_ids"][: len(natural) - 1] == natural[:-1] or answer is completion, (
            "it is the same up to the suppressed end"
        )


def test_an_impossible_minimum_is_refused_by_name() -> None:
    form = {"min_tokens": 10, "structured_outputs": {"regex": "ab"}, "max_tokens": 30}
    too_large = {"min_tokens": 17}
    answers = post(
        (COMPLETION[0], COMPLETION[1] | form),
        (COMPLETION[0], COMPLETION[1] | too_large),
        (CHAT[0], CHAT[1] | too_large | {"max_tokens": 16}),
        (RESPONSE[0], RESPONSE[1] | too_large | {"max_output_tokens": 16}),
        (CHAT[0], CHAT[1] | {"min_tokens": -1}),
        (COMPLETION[0], COMPLETION[1] | {"min_tokens": 10**30, "max_tokens": None}),
    )
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens"), answer.text
    assert "complete before so many tokens" in answers[0].json()["error"]["message"]
    assert "max_tokens=16" in answers[2].json()["error"]["message"], "the default of completions"


def test_the_embedded_engine_refuses_it_by_name() -> None:
    with Engine(EngineConfig(device="cpu", memory_gib=0.2)) as engine:
        submit = Submit(
            request_id="a",
            prompt_ids=[5, 6, 7],
            sampling=SamplingParams(min_tokens=10, max_tokens=30),
            grammar=Grammar(kind="regex", source="ab"),
        )
        with pytest.raises(RequestError, match="min_tokens=10: can't be kept") as caught:
            engine.generate(submit)
        assert caught.value.field == "min_tokens"
        assert engine.stats()["running"] == 0
