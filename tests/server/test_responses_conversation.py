"""/v1/responses over several turns: items as messages, and conversations stored by the client or by the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.config import EngineConfig
from agentspec.engine.in_process import AsyncEngine
from agentspec.server.fields import Notes
from agentspec.server.response_store import ResponseStore, StoredResponse
from agentspec.server.responses_items import Conversation, Item, read_items
from agentspec.types import FinishReason
from tests.fakes.engine_client import ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "orders_get",
    "description": "Get one order by its number.",
    "parameters": {
        "type": "object",
        "properties": {"order_id": {"type": "string", "description": "Order number"}},
        "required": ["order_id"],
    },
}
CALL_TEXT = "<tool_call>\n<function=orders_get>\n<parameter=order_id>\nO-1\n</parameter>\n</function>\n</tool_call>"


def read(items: Any) -> list[tuple[str, Item]]:
    """Items of a request without stored items."""

    def find(item_id: str, field: str) -> Item:
        raise KeyError(field, item_id)

    return read_items(items, Notes(), find)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": arguments}


def result(call_id: str, output: Any = "done") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def answer(text: str) -> dict[str, Any]:
    return {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    }


def chat_call(call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [user("hi")]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [user("ab")],
        ),
        (
            [
                user("q"),
                thought("hm"),
                answer("Look: "),
                call("1"),
                answer("and "),
                call("2"),
                result("1"),
                result("2", [{"type": "input_text", "text": "x"}]),
            ],
            [
                user("q"),
                {
                    "role": "assistant",
                    "content": "Look: and ",
                    "reasoning_content": "hm",
                    "tool_calls": [chat_call("1"), chat_call("2")],
                },
                {"role": "tool", "tool_call_id": "1", "content": "done"},
                {"role": "tool", "tool_call_id": "2", "content": "x"},
            ],
        ),
        (
            [user("q"), answer("one"), answer("two"), thought("hm"), answer("three")],
            [
                user("q"),
                {"role": "assistant", "content": "one"},
                {"role": "assistant", "content": "two"},
                {"role": "assistant", "content": "three", "reasoning_content": "hm"},
            ],
        ),
        (
            [user("q"), {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}, call("1")],
            [
                user("q"),
                {"role": "assistant", "content": "", "reasoning_content": "in short", "tool_calls": [chat_call("1")]},
            ],
        ),
        (
            [user("q"), call("1") | {"status": "incomplete"}, result("1")],
            [
                user("q"),
                {"role": "assistant", "content": "", "tool_calls": [chat_call("1")]},
                {"role": "tool", "tool_call_id": "1", "content": "done"},
            ],
        ),
        (
            [
                {"role": "developer", "content": "b"},
                {"role": "system", "content": "c"},
                user("q"),
                {"role": "system", "content": "d"},
            ],
            [{"role": "system", "content": text} for text in "bc"] + [user("q"), {"role": "system", "content": "d"}],
        ),
        (
            [
                {"type": None, "role": "user", "content": None, "id": None, "status": None},
                {"type": "reasoning", "id": None, "summary": None, "content": None, "encrypted_content": None},
                call("1") | {"arguments": None, "namespace": None, "id": None},
                {"type": "message", "role": "assistant", "content": None},
                result("1", None),
            ],
            [
                user(""),
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [chat_call("1") | {"function": {"name": "f", "arguments": ""}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": ""},
            ],
        ),
    ],
    ids=["text", "parts", "one turn", "turns in a row", "summary", "cut", "system", "nulls"],
)
def test_items_are_converted_to_messages(items: Any, messages: list[dict[str, Any]]) -> None:
    named = read(items)
    assert Conversation.of(None, named).messages == messages
    kept = read([item for _, item in named])
    assert Conversation.of(None, kept).messages == messages, "items in stored form have the same meaning"
    with_instructions = Conversation.of("Be short.", named).messages
    assert with_instructions == [{"role": "system", "content": "Be short."}, *messages]


def test_items_get_generated_ids() -> None:
    items = [item for _, item in read([user("a"), user("b"), thought("c"), call("1"), result("1")])]
    assert [item["id"].partition("_")[0] for item in items] == ["msg", "msg", "rs", "fc", "fco"]
    assert len({item["id"] for item in items}) == 5
    assert [item for _, item in read(items)] == items


def run_turns(
    connect: Connect, engine: ScriptedEngine, turns: list[Callable[[list[dict[str, Any]]], dict[str, Any]]]
) -> list[httpx.Response]:
    """Each turn's body is built from the answers so far."""

    async def run() -> list[httpx.Response]:
        responses: list[httpx.Response] = []
        async with connect(engine) as client:
            for turn in turns:
                body = {"model": "scripted", "tools": [TOOL]} | turn([response.json() for response in responses])
                responses.append(await client.post("/v1/responses", json=body))
        return responses

    return asyncio.run(run())


def outputs(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [result(item["call_id"], "paid") for item in response["output"] if item["type"] == "function_call"]


def test_stored_conversation_equals_a_client_side_one(connect: Connect) -> None:
    script = [*said(f"Let me see.\n\n{CALL_TEXT}"), ended()], [*said("It is paid."), ended()], [*said("Yes."), ended()]
    stored = ScriptedEngine(*script)
    responses = run_turns(
        connect,
        stored,
        [
            lambda _: {"input": "O-1?", "instructions": "Be short."},
            lambda done: {
                "input": outputs(done[0]),
                "previous_response_id": done[0]["id"],
                "instructions": "Be short.",
            },
            lambda done: {"input": "Sure?", "previous_response_id": done[1]["id"]},
        ],
    )
    sent = ScriptedEngine(*script)
    first = [user("O-1?")]
    run_turns(
        connect,
        sent,
        [
            lambda _: {"input": first, "instructions": "Be short.", "store": False},
            lambda done: {
                "input": [*first, *done[0]["output"], *outputs(done[0])],
                "instructions": "Be short.",
                "store": False,
            },
            lambda done: {
                "input": [*first, *done[0]["output"], *outputs(done[0]), *done[1]["output"], user("Sure?")],
                "store": False,
            },
        ],
    )
    assert [response.status_code for response in responses] == [200] * 3
    assert [submit.prompt_ids for submit in stored.submits] == [submit.prompt_ids for submit in sent.submits]
    assert len({submit.session_id for submit in stored.submits}) == 1
    assert stored.submits[0].session_id is not None
    assert [submit.session_id for submit in sent.submits] == [None] * 3


def test_chat_and_responses_make_the_same_prompt(connect: Connect) -> None:
    engine = ScriptedEngine()
    items = [user("q"), thought("hm"), answer("Look."), call("1"), result("1")]
    function = {name: value for name, value in TOOL.items() if name != "type"}
    messages = [
        {"role": "system", "content": "Be short."},
        user("q"),
        {"role": "assistant", "content": "Look.", "reasoning_content": "hm", "tool_calls": [chat_call("1")]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]

    async def run() -> None:
        async with connect(engine) as client:
            body = {
                "model": "scripted",
                "input": items,
                "instructions": "Be short.",
                "tools": [TOOL | {"strict": False}],
            }
            assert (await client.post("/v1/responses", json=body)).status_code == 200
            chat = {"model": "scripted", "messages": messages, "tools": [{"type": "function", "function": function}]}
            assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200

    asyncio.run(run())
    assert engine.submits[0].prompt_ids == engine.submits[1].prompt_ids


def test_session_named_by_the_client_takes_precedence(connect: Connect) -> None:
    engine = ScriptedEngine()
    run_turns(
        connect,
        engine,
        [
            lambda _: {"input": "a", "prompt_cache_key": "mine", "cache_salt": "s"},
            lambda done: {"input": "b", "previous_response_id": done[0]["id"]},
            lambda done: {"input": "c", "previous_response_id": done[0]["id"], "prompt_cache_key": "other"},
        ],
    )
    assert [submit.session_id for submit in engine.submits] == ["mine", "mine", "other"]
    assert engine.submits[0].namespace == "s"


def test_stored_conversation_gets_a_session_when_it_may_continue(connect: Connect) -> None:
    engine = ScriptedEngine()
    run_turns(
        connect,
        engine,
        [
            lambda _: {"input": "a", "tools": []},
            lambda done: {"input": "b", "tools": [], "previous_response_id": done[0]["id"]},
            lambda done: {"input": "c", "tools": [], "previous_response_id": done[1]["id"]},
            lambda _: {"input": "d"},
        ],
    )
    first, second, third, fourth = [submit.session_id for submit in engine.submits]
    assert first is None
    assert second == third is not None
    assert fourth not in (None, second)


def test_missing_responses_can_not_be_continued(connect: Connect) -> None:
    cut = [*said(CALL_TEXT[:60]), ended(FinishReason.LENGTH, stop_match=None)]
    responses = run_turns(
        connect,
        ScriptedEngine(cut, [*said("x"), ended()]),
        [
            lambda _: {"input": "a"},
            lambda done: {"input": "a call that was cut is no obstacle", "previous_response_id": done[0]["id"]},
            lambda _: {"input": "c", "store": False},
            lambda done: {"input": "d", "previous_response_id": done[2]["id"]},
            lambda _: {"input": "e", "previous_response_id": "resp_unknown"},
        ],
    )
    assert [response.status_code for response in responses] == [200, 200, 200, 404, 404]
    assert {response.json()["error"]["param"] for response in responses if response.status_code != 200} == {
        "previous_response_id"
    }


def test_stored_responses_can_be_read_and_deleted(connect: Connect) -> None:
    async def run() -> None:
        async with connect(ScriptedEngine([*said("x"), ended()])) as client:
            body = {"model": "scripted", "input": [user(str(number)) for number in range(5)]}
            made = (await client.post("/v1/responses", json=body)).json()
            path = f"/v1/responses/{made['id']}"
            after = (
                await client.post(
                    "/v1/responses", json={"model": "scripted", "input": "y", "previous_response_id": made["id"]}
                )
            ).json()
            assert (await client.get(path)).json() == made

            async def page(**query: Any) -> tuple[list[str], bool, dict[str, Any]]:
                listed = (await client.get(f"{path}/input_items", params=query)).json()
                return [item["content"][0]["text"] for item in listed["data"]], listed["has_more"], listed

            assert (await page())[:2] == (list("43210"), False)
            texts, has_more, listed = await page(order="asc", limit=2)
            assert (texts, has_more) == (list("01"), True)
            assert (listed["first_id"], listed["last_id"]) == (listed["data"][0]["id"], listed["data"][1]["id"])
            assert (await page(order="asc", limit=3, after=listed["last_id"]))[:2] == (list("234"), False)
            assert (await page(after=(await page())[2]["last_id"]))[:2] == ([], False)

            for query, name in (
                ({"limit": 0}, "limit"),
                ({"limit": "x"}, "limit"),
                ({"order": "up"}, "order"),
                ({"after": "x"}, "after"),
            ):
                assert (await client.get(f"{path}/input_items", params=query)).json()["error"]["param"] == name
            for query, name in (
                ({"stream": "true"}, "stream"),
                ({"include[]": "x"}, "include[]"),
                ({"starting_after": 1}, "starting_after"),
            ):
                assert (await client.get(path, params=query)).json()["error"]["param"] == name
            assert (await client.get(path, params={"stream": "false"})).status_code == 200

            assert (await client.delete(path)).json() == {"id": made["id"], "object": "response", "deleted": True}
            for request in (client.get(path), client.delete(path), client.get(f"{path}/input_items")):
                response = await request
                assert (response.status_code, response.json()["error"]["param"]) == (404, "response_id")
            assert (await client.get(f"/v1/responses/{after['id']}")).status_code == 200
            gone = await client.post(
                "/v1/responses", json={"model": "scripted", "input": "z", "previous_response_id": after["id"]}
            )
            assert gone.status_code == 404, "a conversation can't continue after a deleted response"

    asyncio.run(run())


def record(size: int, previous: str | None = None, item_ids: tuple[str, ...] = ()) -> StoredResponse:
    return StoredResponse(
        response=b"x" * size, input_items=b"", item_ids=item_ids, previous_id=previous, session_id=None
    )


ITEMS = ["i1", "i2", "i3", "i4", "i5"]


@pytest.mark.parametrize("seed", range(20))
def test_store_keeps_its_limits_and_complete_conversations(seed: int) -> None:
    """Random chains, compared with a simple list in order of last use."""
    rng = random.Random(seed)
    max_bytes, max_responses = rng.choice([(30_000, 100), (10**9, 12)])
    store = ResponseStore(max_bytes=max_bytes, max_responses=max_responses)
    made: dict[str, StoredResponse] = {}
    for step in range(200):
        alive = [name for name in made if name in store]
        if alive and rng.random() < 0.3:
            name = rng.choice(alive)
            assert (store.get(name) if rng.random() < 0.5 else store.conversation(name)) is not None, (seed, step)
        else:
            name, before = f"r{step}", rng.choice(alive) if alive and rng.random() < 0.7 else None
            made[name] = record(rng.randint(1, 4000), before, tuple(rng.sample(ITEMS, rng.randrange(4))))
            store.put(name, made[name])
        assert len(store) <= max_responses, (seed, step)
        assert store.num_bytes <= max_bytes, (seed, step)
        kept = {name: one for name, one in made.items() if name in store}
        assert store.num_bytes == sum(one.num_bytes for one in kept.values()), (seed, step)
        assert all(one.previous_id in (None, *kept) for one in kept.values()), (
            seed,
            step,
            "a response outlived what it continues",
        )
    for item_id in ITEMS:  # a lookup counts as a use, but evicts nothing
        assert store.holder(item_id) is next((one for one in kept.values() if item_id in one.item_ids), None), (
            seed,
            item_id,
        )


def test_store_evicts_the_least_recently_used_conversation() -> None:
    store = ResponseStore(max_responses=4)
    for name, before in (("a", None), ("a2", "a"), ("b", None), ("b2", "b")):
        store.put(name, record(1, before))
    assert store.get("a2") is not None
    store.put("c", record(1))
    assert [name for name in ("a", "a2", "b", "b2", "c") if store.get(name)] == ["a", "a2", "b", "c"]
    assert store.conversation("b2") is None
    small = ResponseStore(max_bytes=2000)
    small.put("large", record(5000))
    assert (len(small), small.num_bytes) == (0, 0)


def test_tool_loops_with_the_bundled_model() -> None:
    """Streamed and not, stored by the client and by the server: the same texts, and the prefix cache is hit."""

    async def respond(client: Any, asked: dict[str, Any], *, stream: bool) -> Any:
        if not stream:
            return await client.responses.create(**asked)
        async with client.responses.stream(**asked) as events:
            return await events.get_final_response()

    async def loop(client: Any, *, stream: bool, store: bool) -> tuple[list[list[str]], list[int]]:
        said_words, cached, sent = [], [], []
        previous: str | None = None
        order = {"order_id": "O-4071", "customer": "Ada Lowell", "item": "lamp", "quantity": 2, "status": "paid"}
        for question in ("What is the status of order O-4071?", "Who is the customer of order O-4071?"):
            given: list[Any] = [user(question)]
            while given:
                sent += given
                asked = {
                    "model": "tiny-agent",
                    "input": given if store else sent,
                    "tools": [TOOL],
                    "temperature": 0,
                    "store": store,
                }
                asked |= {"previous_response_id": previous} if previous else {}
                response = await respond(client, asked, stream=stream)
                assert response.status == "completed"
                said_words.append(
                    [getattr(item, "arguments", None) or item.content[0].text for item in response.output]
                )
                assert response.output[0].type == "reasoning"
                cached.append(response.usage.input_tokens_details.cached_tokens)
                assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
                previous = response.id if store else None
                sent += [item.to_dict() for item in response.output]
                given = [
                    result(item.call_id, json.dumps(order)) for item in response.output if item.type == "function_call"
                ]
        return said_words, cached

    async def run() -> None:
        async with AsyncEngine(EngineConfig()) as engine:
            client = engine.openai_client()
            loops = [
                await loop(client, stream=stream, store=store) for stream in (False, True) for store in (False, True)
            ]
        words, cached = loops[0]
        assert "paid" in words[1][-1]
        assert len(words) >= 3
        for other_words, other_cached in loops[1:]:
            assert other_words == words
            assert all(other >= first for other, first in zip(other_cached, cached, strict=True))
        assert all(later > 0 for later in cached[1:]), cached

    asyncio.run(run())
