"""context_management of /v1/messages over HTTP: the edited prompt, the answer's report, and the token count's
report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.server.pipeline import TextPipeline
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.context_edits import CLEARED
from agentspec.text.prompt import PromptBuilder
from agentspec.text.turn_memory import TurnMemory
from tests.fakes.engine_client import ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

LONG = "There is a lamp under it. " * 9


def use(name: str) -> list[dict[str, Any]]:
    called = {"type": "tool_use", "id": name, "name": "look", "input": {"where": name}}
    return [
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": f"Thought {name}.", "signature": "s"}, called],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": name, "content": [{"type": "text", "text": LONG}]}],
        },
    ]


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Look"},
    *use("a"),
    *use("b"),
    {"role": "user", "content": "Well?"},
    *use("c"),
]
BODY: dict[str, Any] = {"model": "scripted", "max_tokens": 9, "messages": MESSAGES}
ALL: dict[str, Any] = {"type": "clear_thinking_20251015", "keep": "all"}
THINKING: dict[str, Any] = {"type": "clear_thinking_20251015"}
TOOLS: dict[str, Any] = {"type": "clear_tool_uses_20250919"}
ABOVE_1: dict[str, Any] = {"trigger": {"type": "tool_uses", "value": 1}, "keep": {"type": "tool_uses", "value": 1}}


def asked(
    connect: Connect, pipeline: TextPipeline, edits: list[dict[str, Any]], *, stream: bool = False
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """`context_management` of the answer and of the count, which agree, and the prompt's text."""
    engine = ScriptedEngine([*said("well"), ended()])
    body = {**BODY, "context_management": {"edits": edits}, "stream": stream}

    async def run() -> tuple[httpx.Response, httpx.Response]:
        async with connect(engine) as client:
            return await client.post("/v1/messages?beta=true", json=body), await client.post(
                "/v1/messages/count_tokens?beta=true", json=body
            )

    answer, count = asyncio.run(run())
    assert (answer.status_code, count.status_code) == (200, 200), answer.text
    (submit,) = engine.submits
    counted = count.json()
    assert counted["input_tokens"] == len(submit.prompt_ids)
    if stream:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        (told,) = [event["context_management"] for event in events if "context_management" in event]
        assert next(event for event in events if event["type"] == "message_delta")["context_management"] == told
    else:
        told = answer.json()["context_management"]
    saved = sum(edit["cleared_input_tokens"] for edit in told["applied_edits"])
    assert counted["context_management"] == {"original_input_tokens": len(submit.prompt_ids) + saved}
    return told, counted, pipeline.tokenizer.spell(submit.prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_applied_edits_are_reported(connect: Connect, pipeline: TextPipeline, stream: bool) -> None:
    told, _, prompt = asked(connect, pipeline, [THINKING, {**TOOLS, **ABOVE_1}], stream=stream)
    thinking, tools = told["applied_edits"]
    assert thinking["type"] == THINKING["type"]
    assert (thinking["cleared_thinking_turns"], thinking["cleared_input_tokens"] > 0) == (1, True)
    assert (tools["type"], tools["cleared_tool_uses"]) == (TOOLS["type"], 2)
    assert tools["cleared_input_tokens"] == 2 * (len(LONG) - len(CLEARED)), "a token is a byte here"
    assert (prompt.count("Thought"), prompt.count(CLEARED), prompt.count(LONG)) == (1, 2, 1)


@pytest.mark.parametrize(
    "edits",
    [
        [],
        [ALL],
        [{**THINKING, "keep": {"type": "all"}}],
        [{**THINKING, "keep": {"type": "thinking_turns", "value": 2}}],
        [TOOLS],
        [{**TOOLS, "trigger": {"type": "input_tokens", "value": 50_000}, "keep": {"type": "tool_uses", "value": 0}}],
        [{**TOOLS, **ABOVE_1, "exclude_tools": ["look"]}],
        [{**TOOLS, **ABOVE_1, "clear_at_least": {"type": "input_tokens", "value": 5000}, "clear_tool_inputs": None}],
    ],
    ids=str,
)
def test_edits_without_effect_are_not_reported(
    connect: Connect, pipeline: TextPipeline, edits: list[dict[str, Any]]
) -> None:
    told, _, prompt = asked(connect, pipeline, edits)
    assert told == {"applied_edits": []}
    assert (prompt.count("Thought"), prompt.count(CLEARED), prompt.count(LONG)) == (3, 0, 3)


def test_input_tokens_trigger_clears_tool_uses(connect: Connect, pipeline: TextPipeline) -> None:
    told, counted, prompt = asked(
        connect,
        pipeline,
        [{**TOOLS, "trigger": {"type": "input_tokens", "value": 500}, "keep": {"type": "tool_uses", "value": 2}}],
    )
    assert [edit["cleared_tool_uses"] for edit in told["applied_edits"]] == [1]
    assert (prompt.count(CLEARED), counted["context_management"]["original_input_tokens"] > 500) == (1, True)


def test_answers_without_requested_edits_have_no_report(connect: Connect) -> None:
    async def run() -> list[httpx.Response]:
        async with connect(ScriptedEngine([*said("well"), ended()])) as client:
            return [await client.post(path, json=BODY) for path in ("/v1/messages", "/v1/messages/count_tokens")]

    assert not any("context_management" in answer.json() for answer in asyncio.run(run()))


def test_unknown_edits_are_refused_by_name(connect: Connect) -> None:
    async def run() -> httpx.Response:
        async with connect(ScriptedEngine()) as client:
            return await client.post(
                "/v1/messages", json={**BODY, "context_management": {"edits": [{"type": "compact_20260112"}]}}
            )

    refused = asyncio.run(run())
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "context_management.edits[0].type='compact_20260112'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    ("ending", "statuses"),
    [("<think>\n", {"disabled": 400}), ("", {}), ("{% if enable_thinking is not false %}<think>{% endif %}", {})],
)
def test_disabled_thinking_is_refused_only_if_the_template_starts_it(
    connect: Connect, pipeline: TextPipeline, path: str, ending: str, statuses: dict[str, int]
) -> None:
    source = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    template = ChatTemplate(source + "{% if add_generation_prompt %}<|im_start|>assistant\n" + ending + "{% endif %}")
    other = TextPipeline(pipeline.tokenizer, PromptBuilder(pipeline.tokenizer, template, TurnMemory()))

    async def run() -> None:
        async with connect(ScriptedEngine([*said("well"), ended()]), pipeline=other) as client:
            for kind in ("enabled", "adaptive", "disabled"):
                thinking = {"type": kind, **({"budget_tokens": 31999} if kind == "enabled" else {})}
                answer = await client.post(path, json={**BODY, "messages": MESSAGES[:1], "thinking": thinking})
                assert answer.status_code == statuses.get(kind, 200), (kind, answer.text)
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"].startswith("thinking.type='disabled'")

    asyncio.run(run())
