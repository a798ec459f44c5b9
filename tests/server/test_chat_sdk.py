"""The official client parses the server's answers: whole, streamed, and assembled by its own stream helper."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from agentspec.server.pipeline import TextPipeline
from agentspec.types import FinishReason
from tests.fakes.engine_client import ScriptedEngine, ended
from tests.fakes.generated import generated

Connect = Callable[..., httpx.AsyncClient]

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
CALL = "<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n</tool_call>"


def sdk(http: httpx.AsyncClient) -> AsyncOpenAI:
    return AsyncOpenAI(api_key="none", base_url="http://in-process/v1", http_client=cast(Any, http), max_retries=0)


def script(pipeline: TextPipeline, text: str) -> list[Any]:
    return [*generated(pipeline.tokenizer, pipeline.tokenizer.encode(text), random.Random(3)), ended()]


def check(answer: ChatCompletion, content: str) -> None:
    """Two choices: content with its log-probabilities, and a call."""
    said, called = answer.choices
    assert (said.message.content, said.finish_reason, called.finish_reason) == (content, "stop", "tool_calls")
    assert said.logprobs is not None
    assert said.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in said.logprobs.content).decode() == content
    (call,) = called.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("look", '{"at": "it"}')
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_sdk_parses_choices_calls_and_log_probabilities(connect: Connect, pipeline: TextPipeline) -> None:
    async def run() -> None:
        engine = ScriptedEngine(
            script(pipeline, "Héllo"), script(pipeline, CALL), script(pipeline, "Héllo"), script(pipeline, CALL)
        )
        asked: dict[str, Any] = {
            "model": "scripted",
            "messages": MESSAGES,
            "tools": [TOOL],
            "n": 2,
            "logprobs": True,
            "top_logprobs": 1,
        }
        async with connect(engine) as http:
            client = sdk(http)
            check(await client.chat.completions.create(**asked), "Héllo")
            async with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                async for _ in stream:
                    pass
                check(await stream.get_final_completion(), "Héllo")

    asyncio.run(run())


def test_sdk_parses_structured_output(connect: Connect, pipeline: TextPipeline) -> None:
    class Place(BaseModel):
        at: str

    async def run() -> None:
        async with connect(ScriptedEngine(script(pipeline, '{"at": "it"}'))) as http:
            answer = await sdk(http).chat.completions.parse(model="scripted", messages=MESSAGES, response_format=Place)
            assert answer.choices[0].message.parsed == Place(at="it")

    asyncio.run(run())


def test_sdk_parses_completions_and_errors(connect: Connect, pipeline: TextPipeline) -> None:
    async def run() -> None:
        one = [
            *generated(pipeline.tokenizer, pipeline.tokenizer.encode("b"), random.Random(3)),
            ended(FinishReason.LENGTH, stop_match=None, scores=[]),
        ]
        async with connect(ScriptedEngine(one)) as http:
            client = sdk(http)
            answer = await client.completions.create(
                model="scripted", prompt="a", n=2, echo=True, logprobs=1, max_tokens=1
            )
            assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [("ab", "length")] * 2
            assert answer.choices[0].logprobs is not None
            assert answer.choices[0].logprobs.tokens == ["a", "b"]
            with pytest.raises(BadRequestError) as raised:
                await client.completions.create(model="scripted", prompt="a", suffix="c")
            assert raised.value.param == "suffix"

    asyncio.run(run())
