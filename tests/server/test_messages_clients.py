"""/v1/messages on real engines: Anthropic's own client runs tool loops on the bundled model, and cache marks are where
later prompts hit the cache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentspec.config import EngineConfig
from agentspec.engine.in_process import AsyncEngine
from agentspec.types import BLOCK_TOKENS
from tests.fakes.told import Told, converse

MODEL = "tiny-agent"
MARK = {"cache_control": {"type": "ephemeral"}}
ORDER = '{"order_id": "O-4071", "customer": "Ada Lowell", "item": "lamp", "quantity": 2, "status": "paid"}'
TOOLS: list[dict[str, Any]] = [
    {
        "name": "orders_get",
        "description": "Look up an order.",
        "input_schema": {"type": "object", "properties": {"order_id": {"type": "string"}}, "required": ["order_id"]},
    }
]
QUESTION = {"role": "user", "content": "What is the status of order O-4071?"}


@pytest.fixture(scope="module", autouse=True)
def anthropic() -> Any:
    """Imported by the tests: importing it in every process that collects them takes seconds."""
    return pytest.importorskip("anthropic")


@asynccontextmanager
async def client() -> AsyncIterator[Any]:
    async with AsyncEngine(EngineConfig(device="cpu")) as engine, engine.anthropic_client() as opened:
        yield opened


async def ask(opened: Any, messages: list[Any], *, stream: bool, **extra: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 400, "messages": messages, "extra_body": {"temperature": 0}, **extra}
    if not stream:
        return await opened.messages.create(**body)
    async with opened.messages.stream(**body) as events:
        seen = [event.type async for event in events]
        assert seen[0] == "message_start"
        assert seen[-1] == "message_stop"
        return await events.get_final_message()


def returned(answer: Any, *, with_thinking: bool) -> list[dict[str, Any]]:
    """The answer as the next request contains it, and the results of its calls."""
    blocks = [block.to_dict() for block in answer.content if with_thinking or block.type != "thinking"]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": ORDER}
        for block in answer.content
        if block.type == "tool_use"
    ]
    return [{"role": "assistant", "content": blocks}, *([{"role": "user", "content": results}] if results else [])]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("display", ["shown", "dropped", "omitted"])
def test_sdk_runs_a_tool_loop(stream: bool, display: str) -> None:
    """Two turns. The returned turn is recognized whether the client sends its thinking, drops it, or never saw it."""

    async def run() -> None:
        thinking = (
            {"type": "adaptive", "display": "omitted"}
            if display == "omitted"
            else {"type": "enabled", "budget_tokens": 1024}
        )
        async with client() as opened:
            messages: list[Any] = [QUESTION]
            turn: dict[str, Any] = {"stream": stream, "thinking": thinking, "tools": TOOLS, "max_tokens": 2000}
            asked = await ask(opened, messages, **turn)
            assert asked.stop_reason == "tool_use"
            assert [block.type for block in asked.content] == ["thinking", "tool_use"]
            assert asked.content[1].input == {"order_id": "O-4071"}
            assert bool(asked.content[0].thinking) == (display != "omitted")
            assert asked.content[0].signature
            messages += returned(asked, with_thinking=display != "dropped")
            answered = await ask(opened, messages, **turn)
            assert answered.stop_reason == "end_turn"
            assert "paid" in answered.content[-1].text
            first, second = asked.usage, answered.usage
            assert 0 < first.output_tokens_details.thinking_tokens < first.output_tokens
            generated = first.input_tokens + first.cache_read_input_tokens + first.output_tokens
            assert second.cache_read_input_tokens >= generated // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS

    asyncio.run(run())


def test_sdk_disabled_thinking_counting_and_errors(anthropic: Any) -> None:
    async def run() -> None:
        async with client() as opened:
            asked = await ask(opened, [QUESTION], stream=False, tools=TOOLS, thinking={"type": "disabled"})
            assert [block.type for block in asked.content] == ["tool_use"]
            counted = await opened.messages.count_tokens(
                model=MODEL, messages=[QUESTION], tools=TOOLS, thinking={"type": "disabled"}
            )
            usage = asked.usage
            assert (
                counted.input_tokens
                == usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
            )
            stopped = await ask(opened, [QUESTION], stream=True, tools=TOOLS, stop_sequences=["orders_get"])
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "orders_get")
            cut = await ask(opened, [QUESTION], stream=True, tools=TOOLS, max_tokens=3)
            assert cut.stop_reason == "max_tokens"
            for error, extra in (
                (anthropic.NotFoundError, {"model": "other"}),
                (anthropic.BadRequestError, {"top_k": -2}),
            ):
                with pytest.raises(error) as raised:
                    await ask(opened, [QUESTION], stream=True, extra_body=extra)
                assert raised.value.type in ("not_found_error", "invalid_request_error")

    asyncio.run(run())


def claude_code(**extra: Any) -> dict[str, Any]:
    """Claude Code's body, except for the conversation. top_k makes the answer deterministic; Claude Code doesn't send
    it."""
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 2000,
        "metadata": {"user_id": "user_0_account__session_0"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "tools": [
            {**TOOLS[0], "eager_input_streaming": True, **MARK},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "betas": ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        "extra_headers": {"x-app": "cli"},
        "extra_body": {"temperature": 1, "top_k": 1},
    }
    return body | extra


def remembered(messages: list[Any]) -> list[Any]:
    """As agents send a history back: with the last message marked, and with extra fields in the blocks."""
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for block in message["content"]:
            block["x_internal"] = {"shown": True}
            if block["type"] == "text":
                block["citations"] = None
    copied[-1]["content"][-1] |= MARK
    return list(copied)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_claude_code_tool_loop(stream: bool) -> None:
    async def ask_beta(opened: Any, messages: list[Any], **extra: Any) -> Any:
        if not stream:
            return await opened.beta.messages.create(messages=messages, **claude_code(**extra))
        async with opened.beta.messages.stream(messages=messages, **claude_code(**extra)) as events:
            return await events.get_final_message()

    async def run() -> None:
        async with client() as opened:
            reminder = {"type": "text", "text": "So what is the status of order O-4071?"}
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION["content"]}]}]
            system = [{"type": "text", "text": "You look things up.", **MARK}]
            asked = await ask_beta(opened, remembered(messages), system=system)
            assert [block.type for block in asked.content] == ["thinking", "tool_use"]
            assert asked.context_management.applied_edits == []
            said, results = returned(asked, with_thinking=True)
            said["content"].insert(
                1, {"type": "server_tool_use", "id": "srvtoolu_0", "name": "web_search", "input": {"query": "lamps"}}
            )
            messages += [said, {**results, "content": [reminder, *results["content"]]}]
            answered = await ask_beta(opened, remembered(messages), system=system)
            assert answered.stop_reason == "end_turn"
            assert "paid" in answered.content[-1].text
            messages += [
                *returned(answered, with_thinking=True),
                {"role": "user", "content": [{"type": "text", "text": "And who is the customer?"}]},
            ]
            cleared = {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 0},
                "keep": {"type": "tool_uses", "value": 0},
            }
            edits = {"edits": [{"type": "clear_thinking_20251015"}, cleared]}
            last = await ask_beta(opened, remembered(messages), system=system, context_management=edits)
            kinds = [edit.type for edit in last.context_management.applied_edits]
            assert kinds == ["clear_thinking_20251015", "clear_tool_uses_20250919"]
            body = claude_code(context_management=edits)
            count = {
                name: body[name]
                for name in ("model", "thinking", "tools", "context_management", "betas", "output_config")
            }
            counted = await opened.beta.messages.count_tokens(messages=remembered(messages), system=system, **count)
            usage = last.usage
            assert (
                counted.input_tokens
                == usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
            )
            saved = sum(edit.cleared_input_tokens for edit in last.context_management.applied_edits)
            assert counted.context_management.original_input_tokens == counted.input_tokens + saved

    asyncio.run(run())


DOCUMENT = "".join(f"Line {number} of a long document.\n" for number in range(12))
ASKS, ASKS_ELSE = (
    "And what does it say in line 3, which I can't find? " * 3,
    "Which line is the last, and what is behind it, if anything? " * 3,
)
LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": "Look twice"},
    {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": name, "name": "orders_get", "input": {"order_id": name}} for name in ("a", "b")
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": name, "content": DOCUMENT} for name in ("a", "b")],
    },
]


def marked(messages: list[dict[str, Any]], index: int, block: int) -> list[dict[str, Any]]:
    """With cache_control at one block."""
    copied = json.loads(json.dumps(messages))
    copied[index]["content"][block] |= MARK
    return copied


def text(*words: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": word} for word in words]}


# Each: a body with one mark, and a body that differs from it directly after the mark.
PARTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "inside a question": (
        {"messages": marked([text(DOCUMENT, ASKS)], 0, 0)},
        {"messages": [text(DOCUMENT, ASKS_ELSE)]},
    ),
    "inside the first question of a longer talk": (
        {
            "messages": [
                *marked([text(DOCUMENT, ASKS)], 0, 0),
                {"role": "assistant", "content": "A line."},
                text("Why?"),
            ]
        },
        {"messages": [text(DOCUMENT, ASKS_ELSE), {"role": "assistant", "content": "A line."}, text("Why?")]},
    ),
    "behind a question": (
        {"messages": marked([text(DOCUMENT)], 0, 0)},
        {"messages": [text(DOCUMENT), {"role": "assistant", "content": "Well."}, text("Why?")]},
    ),
    "behind an answer": (
        {
            "messages": [
                text("Hi"),
                *marked([{"role": "assistant", "content": [{"type": "text", "text": DOCUMENT}]}], 0, 0),
                text(ASKS),
            ]
        },
        {"messages": [text("Hi"), {"role": "assistant", "content": DOCUMENT}, text(ASKS_ELSE)]},
    ),
    "behind the first of two results": (
        {"messages": marked(LOOP, 2, 0)},
        {
            "messages": [
                *LOOP[:2],
                {
                    "role": "user",
                    "content": [LOOP[2]["content"][0], {"type": "tool_result", "tool_use_id": "b", "content": "no"}],
                },
            ]
        },
    ),
    "behind the last result": (
        {"messages": marked(LOOP, 2, 1)},
        {
            "messages": [
                *LOOP,
                {"role": "assistant", "content": "Let me see."},
                {"role": "user", "content": "<tool_response>go on</tool_response>"},
            ]
        },
    ),
    "inside the system text": (
        {
            "system": [{"type": "text", "text": DOCUMENT, **MARK}, {"type": "text", "text": ASKS}],
            "messages": [QUESTION],
        },
        {"system": DOCUMENT + ASKS_ELSE, "messages": [QUESTION]},
    ),
    "behind the tools": (
        {"tools": [{**TOOLS[0], "description": DOCUMENT, **MARK}], "system": "One", "messages": [QUESTION]},
        {"tools": [{**TOOLS[0], "description": DOCUMENT}], "system": "Two", "messages": [QUESTION]},
    ),
    "behind the first tool": (
        {"tools": [{**TOOLS[0], "description": DOCUMENT, **MARK}, {**TOOLS[0], "name": "b"}], "messages": [QUESTION]},
        {"tools": [{**TOOLS[0], "description": DOCUMENT}, {**TOOLS[0], "name": "other"}], "messages": [QUESTION]},
    ),
    "automatically": (
        {"messages": [text("Hi"), {"role": "assistant", "content": "Hello."}, text(DOCUMENT)], **MARK},
        {
            "messages": [
                text("Hi"),
                {"role": "assistant", "content": "Hello."},
                text(DOCUMENT),
                {"role": "assistant", "content": "?"},
                text("!"),
            ]
        },
    ),
}


FOUND_ANYWAY = ("behind a question", "behind the last result", "automatically")
"""Places with a checkpoint even without a mark: the template's own breakpoints, or the prompt's end."""


@pytest.mark.parametrize("name", PARTING)
def test_prompt_diverging_after_a_mark_hits_the_cache_at_the_mark(name: str, tmp_path: Path) -> None:
    """Twice, since using a checkpoint must not consume it. Without the mark the second request finds less, or
    nothing."""
    first, second = PARTING[name]

    async def talk(told: Told, opened: httpx.AsyncClient) -> None:
        async def usage(body: dict[str, Any], salt: str) -> dict[str, int]:
            answer = await opened.post(
                "/v1/messages", json={"model": "scripted", "max_tokens": 1, "cache_salt": salt, **body}
            )
            assert answer.status_code == 200, answer.text
            counts: dict[str, int] = answer.json()["usage"]
            return counts

        begun = await usage(first, "marked")
        kept = begun["cache_creation_input_tokens"]
        assert kept >= 4 * BLOCK_TOKENS
        assert kept % BLOCK_TOKENS == 0
        for times in range(2):
            other = json.loads(json.dumps(second))
            last = other["messages"][-1]["content"]
            if times and isinstance(last, list) and "text" in last[-1]:
                last[-1]["text"] += " " + DOCUMENT
            parted = await usage(other, "marked")
            assert parted["cache_read_input_tokens"] >= kept
        plain: dict[str, Any] = json.loads(json.dumps(first).replace(', "cache_control": {"type": "ephemeral"}', ""))
        assert (await usage(plain, "plain"))["cache_creation_input_tokens"] == 0
        without = (await usage(second, "plain"))["cache_read_input_tokens"]
        assert (without < kept) == (name not in FOUND_ANYWAY)

    converse(tmp_path, talk)
