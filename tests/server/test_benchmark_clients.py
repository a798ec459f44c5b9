"""Requests as benchmark clients send them, field by field and header by header: each is accepted, with the intended
meaning.

MLPerf Endpoints at ea33275 (August 2026) and aiperf 0.13.0; tests/frameworks/test_aiperf.py runs the latter itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.server.pipeline import TextPipeline
from agentspec.wire import Submit
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run it",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}


def call(number: int, arguments: str) -> dict[str, Any]:
    return {"id": f"functions.bash:{number}", "type": "function", "function": {"name": "bash", "arguments": arguments}}


MLPERF: dict[str, Any] = {
    "model": INFO.model_id,
    "messages": [
        {"role": "system", "content": "[salt: 4461]\n\nYou are a shell.\n\n[salt: 510c]"},
        {"role": "user", "content": "Fix it."},
        {
            "role": "assistant",
            "tool_calls": [call(0, '{"command": "ls"}'), call(1, '{"command": "ls')],
            "reasoning_content": "First, look.",
        },
        {"role": "tool", "content": "<returncode>0</returncode>", "tool_call_id": "functions.bash:0"},
        {"role": "tool", "content": "no JSON", "tool_call_id": "functions.bash:1"},
        {"role": "user", "content": "Go on."},
    ],
    "temperature": 1.0,
    "max_completion_tokens": 256,
    "stream": True,
    "top_p": 0.95,
    "top_k": 20,
    "repetition_penalty": 1.0,
    "presence_penalty": 1.5,
    "chat_template_kwargs": {"preserve_thinking": True},
    "tools": [BASH],
}
"""Its client's request with the configuration for Qwen3.6-35B-A3B, in the middle of a conversation."""

AIPERF: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "text of blocks"},
        {"role": "user", "content": "[rid:eb0db374f171]\n\nmore text"},
        {"role": "assistant", "content": "recorded"},
        {"role": "user", "content": "and more"},
    ],
    "model": INFO.model_id,
    "stream": True,
    "max_completion_tokens": 12,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
"""Its request for a recorded Claude Code session, with cache-bust markers, as in AgentX."""

AIPERF_HEADERS = ("X-Session-Affinity", "X-Session-ID", "X-SMG-Routing-Key", "X-Dynamo-Session-ID")
"""Each holds the conversation's id. The first is always sent, the others depending on its environment."""


def submitted(
    connect: Connect, text: TextPipeline, body: dict[str, Any], headers: dict[str, str]
) -> tuple[Submit, str]:
    """The submit and its prompt as text."""
    engine = ScriptedEngine([*said("ok"), ended()])

    async def run() -> httpx.Response:
        async with connect(engine, pipeline=text) as client:
            return await client.post("/v1/chat/completions", json=body, headers=headers)

    answer = asyncio.run(run())
    assert answer.status_code == 200, answer.text
    (submit,) = engine.submits
    return submit, text.tokenizer.decode(submit.prompt_ids)


def test_mlperf_endpoints_agentic_client_request_is_accepted(connect: Connect, bundled_text: TextPipeline) -> None:
    submit, prompt = submitted(connect, bundled_text, MLPERF, {"X-Session-ID": "django__django-11133__repeat_2"})
    assert submit.session_id == "django__django-11133__repeat_2"
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 0.95, 20, 256)
    assert (sampling.presence_penalty, sampling.repetition_penalty) == (1.5, 1.0)
    assert "[salt: 4461]\n\nYou are a shell.\n\n[salt: 510c]" in prompt
    assert "First, look." in prompt, "preserve_thinking keeps the reasoning of turns before the last question"
    _, without = submitted(connect, bundled_text, MLPERF | {"chat_template_kwargs": {}}, {})
    assert "First, look." not in without


@pytest.mark.parametrize("header", AIPERF_HEADERS)
def test_aiperf_request_on_recorded_sessions_is_accepted(
    connect: Connect, bundled_text: TextPipeline, header: str
) -> None:
    one_each = {"X-Request-ID": "4f33e69f", "X-Correlation-ID": "d50d3bcf"}
    submit, prompt = submitted(connect, bundled_text, AIPERF, one_each | {header: "d50d3bcf"})
    assert submit.session_id == "d50d3bcf"
    assert (submit.sampling.ignore_eos, submit.sampling.max_tokens) == (True, 12)
    assert "[rid:eb0db374f171]\n\nmore text" in prompt
