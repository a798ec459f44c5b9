"""/v1/responses as clients use it: undocumented fields, and items as they send them back."""

from __future__ import annotations

import asyncio
import base64
import random
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from openai.types.responses import Response

from agentspec.errors import ContextLengthError
from agentspec.server.carried_reasoning import decode_reasoning, encode_reasoning
from agentspec.server.responses_items import Conversation
from agentspec.server.unknown_fields import HEADER
from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.server.test_responses_conversation import read
from tests.server.test_responses_tools import FETCH, PATCH, call_text, post, prompt, streamed

Connect = Callable[..., httpx.AsyncClient]

THINKING: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
ENCRYPTED: dict[str, Any] = THINKING | {"include": ["reasoning.encrypted_content"]}
THOUGHT = [*said("I see ü.</think>\n\nFine."), ended()]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def messages(items: list[Any]) -> list[dict[str, Any]]:
    return Conversation.of(None, read(items)).messages


@pytest.mark.parametrize("seed", range(20))
def test_carried_reasoning_round_trips_and_other_input_is_rejected(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab é\n𝄞") for _ in range(rng.choice([0, 1, 100, 5000]))) * rng.choice([1, 100])
    sealed = encode_reasoning(text)
    assert decode_reasoning(sealed) == text
    for _ in range(20):
        place = rng.randrange(len(sealed))
        other = sealed[:place] + rng.choice("ABCxyz019+/") + sealed[place + 1 :]
        assert decode_reasoning(other) in (None, text), (seed, place)
    assert decode_reasoning(sealed[: rng.randrange(len(sealed))]) is None


def test_carried_reasoning_limits_the_decompression_ratio() -> None:
    text = "x" * 1_000_000
    assert decode_reasoning(encode_reasoning(text)) == text
    bomb = base64.b64encode(
        b"\2" + zlib.crc32(text.encode()).to_bytes(4, "big") + zlib.compress(text.encode())
    ).decode()
    assert decode_reasoning(bomb) is None


def test_encrypted_content_is_returned_on_request(connect: Connect) -> None:
    plain = post(connect, ScriptedEngine(THOUGHT), THINKING).json()
    assert "encrypted_content" not in plain["output"][0]
    whole = post(connect, ScriptedEngine(THOUGHT), ENCRYPTED).json()
    Response.model_validate(whole)
    events = streamed(connect, ScriptedEngine(THOUGHT), ENCRYPTED)
    added, done = [
        event["item"]
        for event in events
        if event["type"] in ("response.output_item.added", "response.output_item.done")
    ][:2]
    assert added["encrypted_content"] is None
    for item in (whole["output"][0], done, events[-1]["response"]["output"][0]):
        assert decode_reasoning(item["encrypted_content"]) == "I see ü."
        assert item["content"][0]["text"] == "I see ü."

    engine = ScriptedEngine()
    reasoning, answer = whole["output"]
    ways = [
        reasoning,
        {name: value for name, value in reasoning.items() if name != "content"},
        reasoning | {"content": None, "status": None},
    ]
    for item in ways:
        assert HEADER not in post(connect, engine, {"input": [user("q"), item, answer, user("more")]}).headers
    assert prompt(engine, 0) == prompt(engine, 1) == prompt(engine, 2)
    assert "I see ü." in prompt(engine)


def test_foreign_encrypted_content_is_left_out_and_noted(connect: Connect) -> None:
    foreign = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAABo"}
    call = {"type": "function_call", "call_id": "c", "name": "fetch", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    engine = ScriptedEngine()
    answer = post(connect, engine, {"input": [user("q"), foreign, call, result]})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "input.encrypted_content")
    post(connect, engine, {"input": [user("q"), call, result]})
    assert prompt(engine, 0) == prompt(engine, 1)
    summed = foreign | {"summary": [{"type": "summary_text", "text": "in short"}]}
    assert messages([user("q"), summed, call])[1]["reasoning_content"] == "in short"
    shown = foreign | {"content": [{"type": "reasoning_text", "text": "all of it"}]}
    assert (
        messages([user("q"), shown | {"encrypted_content": encode_reasoning("other")}, call])[1]["reasoning_content"]
        == "all of it"
    )
    assert HEADER not in post(connect, ScriptedEngine(), {"input": [user("q"), shown, call, result]}).headers
    strict = post(connect, ScriptedEngine(), {"input": [foreign]}, strict_fields=True)
    assert (strict.status_code, strict.json()["error"]["param"]) == (400, "input.encrypted_content")


def test_include_accepts_known_values_and_notes_others(connect: Connect) -> None:
    known = [
        "web_search_call.action.sources",
        "web_search_call.results",
        "code_interpreter_call.outputs",
        "file_search_call.results",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    ]
    answer = post(connect, ScriptedEngine(), {"include": [*known, "message.output_text.logprobs"]})
    assert answer.status_code == 200
    assert HEADER not in answer.headers
    answer = post(connect, ScriptedEngine(), {"include": [*known, "dreams"]})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "include.dreams")
    without = post(connect, ScriptedEngine(), {"include": known, "top_logprobs": 2})
    assert (without.status_code, without.json()["error"]["param"]) == (400, "top_logprobs")


PLAIN: list[dict[str, Any]] = [
    user("q"),
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
    {"type": "message", "role": "assistant", "content": "Look."},
    {"type": "function_call", "call_id": "c", "name": "crm__fetch", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "ab"},
]
RETURNED: list[dict[str, Any]] = [
    {
        "type": None,
        "id": None,
        "role": "user",
        "content": [{"type": "input_text", "text": "q", "prompt_cache_breakpoint": {"mode": "explicit"}}],
    },
    {
        "type": "reasoning",
        "id": None,
        "summary": None,
        "content": [{"type": "text", "text": "hm"}],
        "encrypted_content": None,
        "status": None,
    },
    {
        "role": "assistant",
        "id": "msg_1",
        "phase": "commentary",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Look.", "annotations": [], "logprobs": None, "parsed": {"a": 1}}],
    },
    {
        "type": "function_call",
        "id": None,
        "call_id": "c",
        "name": "fetch",
        "namespace": "crm",
        "arguments": "{}",
        "parsed_arguments": {},
        "status": "completed",
        "caller": {"type": "direct"},
        "async": True,
    },
    {
        "type": "function_call_output",
        "id": None,
        "call_id": "c",
        "name": "fetch",
        "output": [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}],
        "status": None,
        "caller": {"type": "direct"},
    },
]


def test_returned_items_make_the_same_prompt(connect: Connect) -> None:
    assert messages(RETURNED) == messages(PLAIN)
    answer = post(connect, ScriptedEngine(), {"input": RETURNED})
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers


def test_results_of_left_out_calls_are_left_out(connect: Connect) -> None:
    engine = ScriptedEngine()
    shell = {
        "type": "local_shell_call",
        "id": None,
        "call_id": "c",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"]},
    }
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    answer = post(connect, engine, {"input": [user("q"), shell, result]})
    assert (answer.status_code, answer.headers[HEADER]) == (200, "input.local_shell_call, input.function_call_output")
    post(connect, engine, {"input": [user("q")]})
    assert prompt(engine, 0) == prompt(engine, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_cache_key": "conversation-1"},
        {"safety_identifier": "someone"},
        {"service_tier": "flex"},
        {"verbosity": "low"},
        {"text": {"verbosity": "high"}},
        {"client_metadata": {"x-codex-installation-id": "1"}},
        {"truncation": "auto"},
        {"metadata": {"a": "b"}},
        {"reasoning": {"effort": None, "summary": "detailed", "generate_summary": "auto"}},
        {"max_tool_calls": 3},
        {"store": False},
        {"background": False},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_fields_that_do_not_change_the_answer_are_accepted(connect: Connect, change: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    answer = post(connect, engine, change)
    assert answer.status_code == 200, answer.text
    assert HEADER not in answer.headers
    assert "obfuscation" not in answer.text
    post(connect, engine, {})
    assert engine.submits[0].prompt_ids == engine.submits[1].prompt_ids
    assert engine.submits[0].sampling == engine.submits[1].sampling


def test_truncation_auto_does_not_shorten_the_conversation(connect: Connect) -> None:
    too_long = ContextLengthError("prompt_ids", "9 tokens", "is too long")
    answer = post(connect, ScriptedEngine([too_long]), {"truncation": "auto"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def ask(
    connect: Connect, engine: ScriptedEngine, *bodies: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> list[httpx.Response]:
    """Each body is built from the answers so far."""

    async def run() -> list[httpx.Response]:
        answers: list[httpx.Response] = []
        async with connect(engine) as client:
            for body in bodies:
                asked = {"model": "scripted", **THINKING, **body([answer.json() for answer in answers])}
                answers.append(await client.post("/v1/responses", json=asked))
        return answers

    return asyncio.run(run())


def references(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item["id"]} for item in items]


def test_item_references_resolve_to_stored_items(connect: Connect) -> None:
    """As the AI SDK sends a conversation back: the server's items by id, the rest in full."""
    tools = {"tools": [FETCH, PATCH]}
    first = [*said("Hm.</think>\n\n" + call_text("fetch") + "\n" + call_text("apply_patch", input="x")), ended()]

    def results(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "ok"}
            for item in items
            if "call_id" in item
        ]

    engine = ScriptedEngine(first, THOUGHT)
    answers = ask(
        connect,
        engine,
        lambda _: tools | {"input": [user("q")]},
        lambda done: tools | {"input": [user("q"), *references(done[0]["output"]), *results(done[0]["output"])]},
        lambda done: tools | {"input": [user("q"), *done[0]["output"], *results(done[0]["output"])]},
        lambda done: tools | {"input": [*references(done[0]["output"]), {"id": done[0]["output"][0]["id"]}, user("q")]},
    )
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [item["type"] for item in answers[0].json()["output"]] == ["reasoning", "function_call", "custom_tool_call"]
    assert prompt(engine, 1) == prompt(engine, 2)
    sessions = [submit.session_id for submit in engine.submits]
    assert sessions[0] == sessions[1] == sessions[3] is not None
    assert sessions[2] != sessions[0]


def test_item_references_resolve_to_input_items(connect: Connect) -> None:
    async def run() -> None:
        engine = ScriptedEngine([*said("x"), ended()])
        async with connect(engine) as client:
            made = (
                await client.post(
                    "/v1/responses", json={"model": "scripted", "input": [user("q"), user("r") | {"id": "mine"}]}
                )
            ).json()
            (mine, asked) = (await client.get(f"/v1/responses/{made['id']}/input_items")).json()["data"]
            assert (mine["id"], asked["content"][0]["text"]) == ("mine", "q")
            invented = await client.post("/v1/responses", json={"model": "scripted", "input": references([mine])})
            assert invented.status_code == 404, "another client may have invented the same id"
            again = await client.post("/v1/responses", json={"model": "scripted", "input": references([asked])})
            assert again.status_code == 200, again.text
            assert prompt(engine).startswith("user\nq\n")
            assert (await client.delete(f"/v1/responses/{made['id']}")).status_code == 200
            still = await client.post("/v1/responses", json={"model": "scripted", "input": references([asked])})
            assert still.status_code == 200, "the second response contains it, too"
            for gone in (made["output"][0]["id"], "msg_unknown"):
                answer = await client.post(
                    "/v1/responses", json={"model": "scripted", "input": [user("q"), *references([{"id": gone}])]}
                )
                assert (answer.status_code, answer.json()["error"]["param"]) == (404, "input[1].id")

    asyncio.run(run())


def test_references_to_unstored_items_are_404(connect: Connect) -> None:
    answers = ask(
        connect,
        ScriptedEngine([*said("</think>x"), ended()]),
        lambda _: {"input": "q", "store": False},
        lambda done: {"input": references(done[0]["output"])},
        lambda _: {"input": [{"type": "item_reference"}]},
    )
    assert [(answer.status_code, answer.json()["error"]["param"]) for answer in answers[1:]] == [
        (404, "input[0].id"),
        (400, "input[0]"),
    ]


CODEX: dict[str, Any] = {
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be careful."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": encode_reasoning("I see.")},
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "c1",
            "name": "apply_patch",
            "input": "*** Begin Patch",
        },
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done!"},
        {"type": "function_call", "name": "search", "namespace": "mcp__docs__", "arguments": "{}", "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "nothing"}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs.",
            "strict": False,
            "parameters": {"type": "object", "properties": {}},
        },
        PATCH | {"format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch hunk+ end_patch"}},
        {
            "type": "namespace",
            "name": "mcp__docs__",
            "description": "Documents.",
            "tools": [FETCH | {"name": "search", "defer_loading": True}],
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": None, "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "service_tier": "auto",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "1"},
}


def test_codex_body_is_accepted(connect: Connect) -> None:
    engine = ScriptedEngine([*said(call_text("mcp__docs__search")), ended()])
    answer = post(connect, engine, CODEX)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "tools.format.lark, tools.web_search, tools.tool_search, input.web_search_call"
    assert engine.submits[0].session_id == "0199"
    assert engine.submits[0].grammar is None
    assert "I see." in prompt(engine)
    (item,) = streamed(connect, engine, CODEX)[-1]["response"]["output"]
    assert (item["type"], item["name"], item["namespace"], item["arguments"]) == (
        "function_call",
        "search",
        "mcp__docs__",
        "{}",
    )
