"""Regression tests: requests that once caused failures are refused with the field's name, or answered."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from agentspec.errors import RequestError
from agentspec.server.fields import Notes
from agentspec.server.messages_request import parse_messages
from agentspec.server.openai import parse_chat, parse_completion
from agentspec.server.pipeline import TextPipeline
from agentspec.text.prompt import PromptBuilder
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said

MODEL = INFO.model_id
USER = {"role": "user", "content": "x"}
DEEP = '{"a": ' * 150 + "1" + "}" * 150


def send(
    connect: Callable[..., httpx.AsyncClient],
    method: str,
    path: str,
    body: Any = None,
    *,
    content: bytes | None = None,
    says: str = "x",
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(
            ScriptedEngine([*said(*says), ended()], info=msgspec.structs.replace(INFO, max_context=10**6))
        ) as client:
            return await client.request(method, path, content=json.dumps(body).encode() if content is None else content)

    return asyncio.run(run())


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        b"\xff\xfe{",
        b'{"model": "\\ud800"}',
        b"[" * 10**5,
        b"1" * 5000,
    ],
)
def test_non_utf8_body_is_400(connect: Callable[..., httpx.AsyncClient], content: bytes) -> None:
    refused = send(connect, "POST", "/v1/chat/completions", content=content)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
    refused = send(connect, "POST", "/v1/messages", content=content)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("content", [b"[" * 102 + b"]" * 102, b'{"prompt": ' + b'{"a": [' * 60 + b"]}" * 60 + b"}"])
def test_too_deeply_nested_body_is_refused(connect: Callable[..., httpx.AsyncClient], content: bytes) -> None:
    refused = send(connect, "POST", "/v1/completions", content=content)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
    assert "nested deeper than 100 levels" in refused.json()["error"]["message"]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": MODEL, "messages": [USER], **fields}


def chat_with_call(arguments: str) -> tuple[str, dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}])


def items(*given: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": MODEL, "input": [USER, *given], **fields}


def call_item(arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        pytest.param(chat(guided_json="[" * 10**5), "guided_json", id="a schema's text that exhausts the stack"),
        pytest.param(chat(guided_json=DEEP), "guided_json", id="a deep schema as text"),
        pytest.param(chat(max_completion_tokens=-1), "max_completion_tokens", id="less than no tokens"),
        pytest.param(items({"type": {}}), "input[1].type", id="an item whose type is an object"),
        pytest.param(items({"type": []}), "input[1].type", id="an item whose type is a list"),
        pytest.param(
            items(include=["message.output_text.logprobs"], top_logprobs=21),
            "top_logprobs",
            id="too many likely tokens",
        ),
    ],
)
def test_unreadable_values_are_refused_by_name(
    connect: Callable[..., httpx.AsyncClient], request_: tuple[str, dict[str, Any]], field: str
) -> None:
    refused = send(connect, "POST", *request_)
    assert (refused.status_code, refused.json()["error"].get("param")) == (400, field), refused.text


@pytest.mark.parametrize(
    "arguments",
    [
        DEEP,
        "[" * 10**5,
        "1" * 5000,
        '{"a": "\\ud800"}',
        '{"a": ',
        "[1]",
        "null",
        "ls -la",
        "</tool_call>",
        '{"raw_name_0": 1}',
        "x" * 10**5,
    ],
    ids=lambda text: text[:12],
)
def test_history_with_non_object_arguments_is_accepted(
    connect: Callable[..., httpx.AsyncClient], arguments: str
) -> None:
    """Models write such calls, and clients send them back: the prompt shows them unchanged."""
    path, body = chat_with_call(arguments)
    assert send(connect, "POST", path, body).status_code == 200
    path, body = items(call_item(arguments) | {"status": "incomplete"})
    assert send(connect, "POST", path, body).status_code == 200
    output = {"type": "function_call_output", "call_id": "c", "output": "no"}
    assert send(connect, "POST", path, body | {"input": [*body["input"], output]}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/v1/responses/input_tokens"])
def test_endpoints_without_generation_validate_like_the_engine(
    connect: Callable[..., httpx.AsyncClient], path: str
) -> None:
    body = {"model": MODEL, **({"input": "x"} if "responses" in path else {"messages": [USER]})}
    assert send(connect, "POST", path, body).status_code == 200
    for name, value in {"temperature": -1, "top_p": 0, "top_k": 10**9, "seed": 2**63, "repetition_penalty": 0}.items():
        refused = send(connect, "POST", path, body | {name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", ["seed", "min_tokens", "top_k"])
def test_number_beyond_64_bits_is_out_of_range(connect: Callable[..., httpx.AsyncClient], name: str) -> None:
    """It must not reach the link between server and engine, which carries 64 bits."""
    for path, prompt in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/responses", {"input": "x"}),
    ):
        refused = send(connect, "POST", path, {"model": MODEL, **prompt, name: 10**30})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


def test_many_nulls_are_removed_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each conversion reads the whole body: one conversion per null would allow a denial of service."""
    rounds = []
    convert = msgspec.convert
    monkeypatch.setattr(msgspec, "convert", lambda *given, **how: rounds.append(1) or convert(*given, **how))
    calls = [{"id": None, "type": None, "function": {"name": "f", "arguments": None}} for _ in range(500)]
    thoughts = [
        {"type": "thinking", "thinking": "x", "signature": None},
        {"type": "text", "text": "x", "cache_control": None},
    ] * 500
    parse_chat({"model": "m", "messages": [USER, {"role": "assistant", "tool_calls": calls}]})
    parse_messages({"model": "m", "max_tokens": 1, "messages": [USER, {"role": "assistant", "content": thoughts}]})
    assert len(rounds) < 10


def test_unknown_fields_in_many_elements_are_refused_after_a_limit() -> None:
    points = [{"offset": number, "kind": "user", "colour": "red"} for number in range(1000)]
    with pytest.raises(RequestError, match="colour") as refused:
        parse_completion({"model": "m", "prompt": "x", "breakpoints": points})
    assert refused.value.field == "breakpoints[63]"


def test_long_list_bounds_the_number_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    convert = msgspec.convert
    monkeypatch.setattr(msgspec, "convert", lambda *given, **how: rounds.append(1) or convert(*given, **how))
    points = [{"offset": 1, "kind": "user"}] * 40_000
    odd = points[0] | {f"unknown_{number}": 1 for number in range(70)}
    with pytest.raises(RequestError, match="unknown_"):
        parse_completion({"model": "m", "prompt": "x", "breakpoints": [*points, odd]})
    assert len(rounds) < 15


class Compared(str):
    """A text that counts its comparisons."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Compared.num_compared += 1
        return str.__eq__(self, other)


def test_many_unknown_fields_cost_linear_time() -> None:
    """Regression: each field was compared with all before it, so 20,000 of them, 300 KB, blocked the server for three
    seconds."""
    names = [Compared(f"field{number}") for number in range(1000)]
    notes = Notes()
    for name in (*names, *names):
        notes.leave_out(name, 1)
    assert notes.unknown == [str(name) for name in names]
    assert Compared.num_compared < 10 * len(names)


@pytest.mark.parametrize("limit", ["9" * 5000, "%C2%B2", "%D9%A3", "1%00"])
def test_malformed_limit_is_refused_by_name(connect: Callable[..., httpx.AsyncClient], limit: str) -> None:
    async def run() -> httpx.Response:
        async with connect(ScriptedEngine([*said("x"), ended()])) as client:
            made = (await client.post("/v1/responses", json={"model": MODEL, "input": "x"})).json()["id"]
            return await client.get(f"/v1/responses/{made}/input_items?limit={limit}")

    refused = asyncio.run(run())
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


TO_ITSELF = {"$ref": "#/properties/a"}


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [TO_ITSELF] * 200},
        {"allOf": [{"oneOf": [TO_ITSELF] * 50}] * 50},
        {"anyOf": 3},
        {"oneOf": {"a": 1}},
        {"type": [{}, "integer"]},
        {"type": {}, "enum": 5},
        {"$ref": "#/properties/a/b/c"},
        TO_ITSELF,
        5,
    ],
    ids=str,
)
def test_call_of_a_tool_with_an_unusual_schema_is_parsed(
    connect: Callable[..., httpx.AsyncClient], schema: Any
) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}},
    }
    says = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    answer = send(connect, "POST", *chat(tools=[tool]), says=says)
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["a"] in (1, "1")


def test_lone_surrogate_in_a_calls_json_is_replaced(connect: Callable[..., httpx.AsyncClient]) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "array"}}}},
    }
    says = (
        '<tool_call>\n<function=f>\n<parameter=a>\n["\\ud83d", "\\ud83d\\ude80"]\n</parameter>\n</function>\n'
        "</tool_call>"
    )
    answer = send(connect, "POST", *chat(tools=[tool]), says=says)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": ["\ufffd", "\U0001f680"]}


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_arguments_never_contain_nan_or_infinity(connect: Callable[..., httpx.AsyncClient], number: str) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
    }
    says = f"<tool_call>\n<function=f>\n<parameter=a>\n{number}\n</parameter>\n</function>\n</tool_call>"
    answer = send(connect, "POST", *chat(tools=[tool]), says=says)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"], parse_constant=pytest.fail) == {"a": number}


def test_prompts_are_built_one_at_a_time_even_after_disconnects(
    connect: Callable[..., httpx.AsyncClient], pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A builder is not thread-safe: two concurrent builds would corrupt its memory of turns for all later requests."""
    assert isinstance(pipeline.prompts, PromptBuilder)
    rng, build = random.Random(1), pipeline.prompts.build
    at_work, most, num_built = 0, 0, 0
    entered, may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def watched(*arguments: Any, **keywords: Any) -> Any:
        nonlocal at_work, most, num_built
        at_work, num_built = at_work + 1, num_built + 1
        most = max(most, at_work)
        entered.release()
        assert may_go_on.acquire(timeout=60)
        at_work -= 1
        return build(*arguments, **keywords)

    monkeypatch.setattr(pipeline.prompts, "build", watched)

    async def run() -> int:
        async with connect(ScriptedEngine([*said("x"), ended()])) as client:

            def ask() -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/v1/chat/completions", json=chat()[1]))

            for _ in range(20):
                asked = [ask() for _ in range(rng.randrange(1, 4))]
                assert await asyncio.to_thread(entered.acquire, timeout=60)
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
                last = ask()
                may_go_on.release()
                assert await asyncio.to_thread(entered.acquire, timeout=60)
                may_go_on.release()
                assert (await last).status_code == 200
        return num_built

    assert asyncio.run(run()) == 40, "a prompt not yet started is not built after a disconnect"
    assert most == 1


@pytest.mark.parametrize(("length", "status"), [(1024, 200), (1025, 400)])
def test_too_long_stop_string_is_refused(connect: Callable[..., httpx.AsyncClient], length: int, status: int) -> None:
    answer = send(connect, "POST", *chat(stop="s" * length))
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["error"]["param"] == "stop"


def test_text_that_the_tokenizer_fails_on_is_refused(
    connect: Callable[..., httpx.AsyncClient], pipeline: TextPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    class Backend:
        def encode_batch_fast(self, *_: Any, **__: Any) -> Any:
            raise panic("Onig: Regex search error: retry-limit-in-match over")

    monkeypatch.setattr(pipeline.tokenizer, "_without_added", Backend())
    refused = send(connect, "POST", *chat())
    assert refused.status_code == 400
    assert "can't be tokenised" in refused.json()["error"]["message"]
