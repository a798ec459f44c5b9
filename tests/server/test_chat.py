"""/v1/chat/completions over HTTP: shapes, deltas, finish reasons, and the same answer for any chunking."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.server.pipeline import TextPipeline
from agentspec.types import Breakpoint, CheckpointKind, FinishReason
from agentspec.wire import Event, FinishEvent, TokensEvent
from tests.fakes.engine_client import ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}, "deep": {"type": "boolean"}}},
    },
}
CALL_TEXT = (
    "<tool_call>\n<function=look>\n<parameter=where>\nunder it\n</parameter>\n<parameter=deep>\ntrue\n</parameter>\n"
    "</function>\n</tool_call>"
)


def post(connect: Connect, engine: ScriptedEngine, body: dict[str, Any], **headers: str) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine) as client:
            return await client.post("/v1/chat/completions", json=body, headers=headers)

    return asyncio.run(run())


def frames(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    *events, done = frames(response)
    assert done == "[DONE]"
    return [json.loads(event) for event in events]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client assembles from the deltas, and the finish reason."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning": "", "calls": []}
    reasons = []
    for chunk in parts:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["role"] = delta.get("role", message["role"])
            message["content"] += delta.get("content", "")
            message["reasoning"] += delta.get("reasoning_content", "")
            for part in delta.get("tool_calls", []):
                if part["index"] == len(message["calls"]):
                    assert part["type"] == "function"
                    assert part["id"]
                    message["calls"].append([part["function"]["name"], ""])
                message["calls"][part["index"]][1] += part["function"]["arguments"]
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    assert len(reasons) == 1
    return {**message, "finish": reasons[0]}


def split(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.randint(0, 12))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_whole_answer_has_the_documented_shape(connect: Connect) -> None:
    engine = ScriptedEngine([*said("Hel", "lo"), ended(text="!")])
    response = post(connect, engine, CHAT)
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "scripted"
    message = {"role": "assistant", "content": "Hello!", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert (answer["service_tier"], answer["system_fingerprint"]) == (None, None)
    assert answer["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 6,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 4,
        },
    }
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 4
    assert "prompt_token_ids" not in answer


@pytest.mark.parametrize("stream", [False, True])
def test_answer_continues_the_assistants_text(connect: Connect, pipeline: TextPipeline, stream: bool) -> None:
    engine = ScriptedEngine([*said(" is 4", "2"), ended(text=".")])
    begun = [*CHAT["messages"], {"role": "assistant", "content": "It"}]
    asked = {
        "continue_final_message": True,
        "add_generation_prompt": False,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    response = post(connect, engine, {**CHAT, "messages": begun, "stream": stream, **asked})
    answer = joined(chunks(response)) if stream else response.json()["choices"][0]["message"]
    assert answer["content"] == " is 42.", "it contains only the new text"
    assert pipeline.tokenizer.spell(engine.submits[0].prompt_ids).endswith("<|im_start|>assistant\nIt")


def test_submit_has_prompt_session_and_namespace(connect: Connect) -> None:
    engine = ScriptedEngine()
    post(
        connect,
        engine,
        {**CHAT, "max_tokens": 5, "prompt_cache_key": "by-body", "cache_salt": "s"},
        **{"x-session-id": "by-header"},
    )
    post(connect, engine, {**CHAT, "prompt_cache_key": "by-body"})
    post(connect, engine, {**CHAT, "forced_output": [3, 4]})
    first, second, third = engine.submits
    assert [submit.forced_output for submit in engine.submits] == [None, None, [3, 4]]
    assert [submit.session_id for submit in engine.submits] == ["by-header", "by-body", None]
    assert (first.namespace, second.namespace) == ("s", "")
    assert first.sampling.max_tokens == 5
    assert len({submit.request_id for submit in engine.submits}) == 3
    assert third.breakpoints[-1] == Breakpoint(offset=len(third.prompt_ids), kind=CheckpointKind.USER)


def test_stream_starts_with_the_role_and_ends_with_usage(connect: Connect) -> None:
    script = [*said("Hel", "lo"), ended(text="!")]
    plain = chunks(post(connect, ScriptedEngine(script), {**CHAT, "stream": True}))
    assert [choice["delta"] for chunk in plain for choice in chunk["choices"]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {"content": "!"},
        {},
    ]
    assert len({chunk["id"] for chunk in plain}) == 1
    assert {chunk["object"] for chunk in plain} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in plain)
    assert ["metrics" in chunk for chunk in plain] == [False] * 4 + [True]

    counted = chunks(
        post(connect, ScriptedEngine(script), {**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert [chunk["usage"] is None for chunk in counted] == [True] * 5 + [False]
    assert counted[-1]["choices"] == []
    assert counted[-1]["usage"]["completion_tokens"] == 6
    assert ["metrics" in chunk for chunk in counted] == [False] * 5 + [True]
    assert counted[-2]["choices"][0]["finish_reason"] == "stop"


def test_continuous_usage_stats_count_the_tokens_so_far(connect: Connect) -> None:
    """Every step has a chunk then, even if its text is held back."""
    script = [*said("Hel", "</thi", "nk>b"), ended(text="!")]
    body = {**CHAT, "stream": True, "chat_template_kwargs": {"enable_thinking": True}}
    engine = ScriptedEngine(script)
    parts = chunks(
        post(connect, engine, {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    )
    prompt_tokens = len(engine.submits[0].prompt_ids)
    counts = [0, 3, 4, 5, 5, 5]
    assert [chunk["usage"] for chunk in parts[:-1]] == [
        {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
        for count in counts
    ]
    assert [chunk["choices"][0]["delta"] for chunk in parts[1:4]] == [
        {"reasoning_content": "Hel"},
        {},
        {"content": "b"},
    ]
    assert (parts[-1]["choices"], parts[-1]["usage"]["prompt_tokens_details"]) == ([], {"cached_tokens": 4})
    alone = chunks(post(connect, ScriptedEngine(script), {**body, "stream_options": {"continuous_usage_stats": True}}))
    assert [chunk["usage"]["completion_tokens"] for chunk in alone] == counts


@pytest.mark.parametrize("seed", range(40))
def test_any_chunking_gives_the_same_answer_streamed_or_whole(connect: Connect, seed: int) -> None:
    rng = random.Random(seed)
    text = f"I think so.\n</think>\n\nLooking.\n\n{CALL_TEXT}\n{CALL_TEXT}"
    body = {**CHAT, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": True}}
    script = [*said(*split(text, rng)), ended()]
    arguments = '{"where": "under it", "deep": true}'
    streamed = joined(chunks(post(connect, ScriptedEngine(script), {**body, "stream": True})))
    assert streamed["role"] == "assistant", seed
    assert (streamed["reasoning"], streamed["content"]) == ("I think so.", "Looking."), seed
    assert [(name, json.loads(given)) for name, given in streamed["calls"]] == [("look", json.loads(arguments))] * 2, (
        seed
    )
    assert streamed["finish"] == "tool_calls", seed

    choice = post(connect, ScriptedEngine(script), body).json()["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (
        "I think so.",
        "Looking.",
        "tool_calls",
    ), seed
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == list(
        map(tuple, streamed["calls"])
    ), seed
    assert len({call["id"] for call in message["tool_calls"]}) == 2, seed
    assert all(set(call) == {"id", "type", "function"} for call in message["tool_calls"]), seed


@pytest.mark.parametrize(
    ("end", "text", "finish"),
    [
        (ended(), CALL_TEXT, "tool_calls"),
        (ended(FinishReason.LENGTH, stop_match=None), CALL_TEXT[:60], "length"),
        (ended(FinishReason.LENGTH, stop_match=None), CALL_TEXT, "length"),
        (ended(FinishReason.LENGTH, stop_match=None), CALL_TEXT + CALL_TEXT[:60], "length"),
        (ended(stop_match="under"), CALL_TEXT[:60], "stop"),
        (ended(FinishReason.ABORT, stop_match=None), CALL_TEXT[:60], "abort"),
        (ended(), "no call", "stop"),
    ],
    ids=[
        "whole call",
        "cut call",
        "whole call at the limit",
        "second call cut",
        "stop string in a call",
        "abort",
        "text",
    ],
)
def test_finish_reason_tool_calls_requires_complete_calls(
    connect: Connect, end: FinishEvent, text: str, finish: str
) -> None:
    body = {**CHAT, "tools": [TOOL]}
    assert post(connect, ScriptedEngine([*said(text), end]), body).json()["choices"][0]["finish_reason"] == finish
    streamed = chunks(post(connect, ScriptedEngine([*said(text), end]), {**body, "stream": True}))
    assert joined(streamed)["finish"] == finish


@pytest.mark.parametrize("extra", [{}, {"tools": [TOOL], "tool_choice": "none"}], ids=["no tools", "tool_choice none"])
def test_without_tools_calls_are_not_parsed(connect: Connect, extra: dict[str, Any]) -> None:
    engine = ScriptedEngine([*said(CALL_TEXT), ended()])
    choice = post(connect, engine, {**CHAT, **extra}).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": CALL_TEXT, "refusal": None}
    like = ScriptedEngine()
    post(connect, like, CHAT | {"tools": extra.get("tools", [])})
    assert engine.submits[0].prompt_ids == like.submits[0].prompt_ids, (
        "the prompt is that of the turns around it, which may call"
    )


def test_call_opening_token_is_banned_when_calls_are_forbidden(connect: Connect, pipeline: TextPipeline) -> None:
    opening = pipeline.tokenizer.id_of("<tool_call>")
    engine = ScriptedEngine()
    for extra in ({"tool_choice": "none"}, {}, {"tool_choice": "none", "tools": []}):
        post(connect, engine, {**CHAT, "tools": [TOOL], "logit_bias": {"5": 1}, **extra})
    assert [submit.sampling.logit_bias for submit in engine.submits] == [{5: 1.0, opening: -100.0}, {5: 1.0}, {5: 1.0}]


def test_token_ids_stay_with_their_text(connect: Connect) -> None:
    script: list[Event] = [*said("a", "</thi", "nk>b"), ended()]
    body = {**CHAT, "return_token_ids": True, "chat_template_kwargs": {"enable_thinking": True}}
    engine = ScriptedEngine(script)
    parts = chunks(post(connect, engine, {**body, "stream": True}))
    expected = [event.token_ids for event in said("a", "</thi", "nk>b")]
    assert parts[0]["prompt_token_ids"] == list(engine.submits[0].prompt_ids)
    assert [chunk["choices"][0]["token_ids"] for chunk in parts] == [[], *expected, []]
    assert [chunk["choices"][0]["delta"] for chunk in parts[1:4]] == [{"reasoning_content": "a"}, {}, {"content": "b"}]

    answer = post(connect, ScriptedEngine(script), body).json()
    assert answer["choices"][0]["token_ids"] == [token for ids in expected for token in ids]
    assert answer["prompt_token_ids"] == list(engine.submits[0].prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_return_token_ids_of_the_output_only(connect: Connect, stream: bool) -> None:
    response = post(
        connect, ScriptedEngine([*said("ab"), ended()]), {**CHAT, "return_token_ids": "output", "stream": stream}
    )
    bodies = chunks(response) if stream else [response.json()]
    assert [token for body in bodies for token in body["choices"][0]["token_ids"]] == said("ab")[0].token_ids
    assert all("prompt_token_ids" not in body for body in bodies)


def test_control_tokens_of_an_answer_keep_their_ids(connect: Connect, pipeline: TextPipeline) -> None:
    """Their ids are in the next prompt if the client returns the text that shows them."""
    ids = pipeline.tokenizer.encode("a<|endoftext|>b")
    script = [TokensEvent(request_id="", token_ids=ids, text="a<|endoftext|>b"), ended()]

    async def run() -> list[list[int]]:
        engine = ScriptedEngine(script)
        async with connect(engine) as client:
            asked = {**CHAT, "skip_special_tokens": False, "logprobs": True}
            first = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["message"]
            assert first["content"] == "a<|endoftext|>b"
            await client.post(
                "/v1/chat/completions", json={**CHAT, "messages": [*CHAT["messages"], first, CHAT["messages"][0]]}
            )
        assert [submit.skip_special_tokens for submit in engine.submits] == [False, True]
        assert pipeline.prompts is not None
        assert pipeline.prompts.num_spliced == 1
        return [list(submit.prompt_ids) for submit in engine.submits]

    before, after = asyncio.run(run())
    assert after[: len(before) + len(ids)] == [*before, *ids]


def test_returned_turn_is_encoded_with_its_generated_ids(connect: Connect) -> None:
    """The engine's ids differ from those of the encoded text, as a real model's may, and are reused all the same."""

    async def run() -> None:
        generated = said("yes")[0]
        odd = type(generated)(request_id="", token_ids=[121, 121], text="yy")
        engine = ScriptedEngine([odd, ended()], [ended()])
        async with connect(engine) as client:
            first = (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"]
            again = {**CHAT, "messages": [*CHAT["messages"], first, {"role": "user", "content": "and?"}]}
            await client.post("/v1/chat/completions", json=again)
        before, after = (submit.prompt_ids for submit in engine.submits)
        assert after[: len(before)] == before

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({**CHAT, "model": "other"}, 404, "model", "'other'"),
        ({**CHAT, "n": 200}, 400, "n", "n=200"),
        ({"model": "scripted"}, 400, "messages", "is required"),
        (
            {**CHAT, "messages": [{"role": "tool", "tool_call_id": "x", "content": "r"}]},
            400,
            "messages[0].tool_call_id",
            "'x'",
        ),
        ({**CHAT, "stream": True, "stop": ["a"] * 17}, 400, "stop", "at most 16"),
    ],
)
def test_request_errors_name_the_field(
    connect: Connect, body: dict[str, Any], status: int, param: str, words: str
) -> None:
    class Strict(ScriptedEngine):
        async def stream(self, submit: Any) -> Any:
            submit.sampling.validate(vocab_size=self.info.vocab_size)
            async for event in super().stream(submit):
                yield event

    response = post(connect, Strict(), body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert words in error["message"]


def test_chat_is_refused_without_tokenizer_or_template(connect: Connect, pipeline: TextPipeline) -> None:
    async def run() -> None:
        for bundle, words in ((None, "no tokenizer"), (TextPipeline(pipeline.tokenizer, None), "no chat template")):
            async with connect(ScriptedEngine(), pipeline=bundle) as client:
                response = await client.post("/v1/chat/completions", json=CHAT)
            assert response.status_code == 400
            assert words in response.json()["error"]["message"]

    asyncio.run(run())
