"""Isolation between keys, over HTTP: cached prefixes, turns, stored responses and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from agentspec.config import EngineConfig, ServerConfig
from agentspec.engine.in_process import AsyncEngine
from agentspec.server.app import create_app
from agentspec.server.door import Door
from agentspec.server.pipeline import TextPipeline
from agentspec.server.response_store import ResponseStore, StoredResponse
from agentspec.server.transport import InProcessTransport
from agentspec.wire import EngineClient
from tests.fakes.engine_client import ScriptedEngine, ended, said

KEYS = ("key-of-a", "key-of-b")
A, B = ({"x-api-key": key} for key in KEYS)
THOUGHT = "Nobody else may read this."
CALL_TEXT = (
    f"<think>\n{THOUGHT}\n</think>\n\n"
    "<tool_call>\n<function=look>\n<parameter=at>\nit\n</parameter>\n</function>\n</tool_call>"
)
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
USER: dict[str, Any] = {"role": "user", "content": "Look at it."}
FUNCTION = {"name": "look", "parameters": PARAMETERS}
CHAT: dict[str, Any] = {
    "model": "scripted",
    "tools": [{"type": "function", "function": FUNCTION}],
    "cache_salt": "common",
}

Ask = Callable[[httpx.AsyncClient], Awaitable[None]]


def asked(engine: EngineClient, text: TextPipeline | None, ask: Ask, config: ServerConfig | None = None) -> None:
    """Send requests to a server with two keys, or with those of `config`."""
    door = Door(create_app(engine, text), config or ServerConfig(api_keys=KEYS), max_running=4)

    async def run() -> None:
        async with httpx.AsyncClient(
            transport=InProcessTransport(door), base_url="http://in-process", timeout=None
        ) as client:
            await ask(client)

    asyncio.run(run())


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "scripted", "prompt": [1, 2], "max_tokens": 5},
    "/v1/chat/completions": {"model": "scripted", "messages": [USER]},
    "/v1/responses": {"model": "scripted", "input": "x"},
    "/v1/messages": {"model": "scripted", "messages": [USER], "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
def test_each_key_has_its_own_namespace(path: str, pipeline: TextPipeline) -> None:
    """For any salts that clients choose."""
    engine = ScriptedEngine([*said("x"), ended()])
    salts = ("", "s", "key", "/", "api-key:2", "api-key:2/", "key/api-key:2/", "key/api-key:1/", "\0", "2")

    async def ask(client: httpx.AsyncClient) -> None:
        for headers in (A, B):
            for salt in salts:
                assert (
                    await client.post(path, json=BODIES[path] | {"cache_salt": salt}, headers=headers)
                ).status_code == 200
        assert (await client.post(path, json=BODIES[path], headers=A)).status_code == 200

    asked(engine, pipeline, ask)
    *namespaces, unsalted = [submit.namespace for submit in engine.submits]
    assert len(set(namespaces)) == 2 * len(salts), namespaces
    assert unsalted == namespaces[0]
    assert not any(key in namespace for namespace in namespaces for key in KEYS), (
        "the namespace must not contain the key"
    )


@pytest.mark.parametrize("path", BODIES)
def test_without_keys_the_namespace_is_the_salt(path: str, pipeline: TextPipeline) -> None:
    engine = ScriptedEngine([*said("x"), ended()])

    async def ask(client: httpx.AsyncClient) -> None:
        for headers in ({}, A):
            assert (await client.post(path, json=BODIES[path], headers=headers)).status_code == 200
        assert (
            await client.post(path, json=BODIES[path] | {"cache_salt": "s"}, headers={"x-session-id": "mine"})
        ).status_code == 200

    asked(engine, pipeline, ask, ServerConfig())
    assert [submit.namespace for submit in engine.submits] == ["", "", "s"]
    assert (engine.submits[2].session_id, engine.submits[2].owner) == ("mine", "")


def test_equal_session_ids_of_different_keys_are_separate(pipeline: TextPipeline) -> None:
    """A client that names another key's session neither waits for it nor ends a hold on its prefix."""
    engine = ScriptedEngine([*said("x"), ended()])

    async def ask(client: httpx.AsyncClient) -> None:
        for headers in (A, B, A):
            body = BODIES["/v1/completions"]
            assert (
                await client.post("/v1/completions", json=body, headers={**headers, "x-session-id": "s"})
            ).status_code == 200
        assert (await client.post("/v1/completions", json=body, headers=A)).status_code == 200

    asked(engine, pipeline, ask)
    first, second, third, none = [submit.session_id for submit in engine.submits]
    assert first == third != second
    assert None not in (first, second)
    assert none is None
    owners = [submit.owner for submit in engine.submits]
    assert owners[0] == owners[2] == owners[3] != owners[1]
    assert "" not in owners


async def called(client: httpx.AsyncClient) -> dict[str, Any]:
    """A's turn with a call, without its reasoning, as a client could send it back."""
    answer = (await client.post("/v1/chat/completions", json=CHAT | {"messages": [USER]}, headers=A)).json()
    message: dict[str, Any] = answer["choices"][0]["message"]
    assert message.pop("reasoning_content") == THOUGHT
    assert len(message["tool_calls"]) == 1
    return message


def returned(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Something else."},
        message,
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "seen"},
    ]


def test_call_ids_do_not_reveal_another_keys_reasoning(pipeline: TextPipeline) -> None:
    engine = ScriptedEngine([*said(CALL_TEXT), ended()])

    async def ask(client: httpx.AsyncClient) -> None:
        message = await called(client)
        shown = {}
        for name, headers in (("A", A), ("B", B)):
            rendered = await client.post(
                "/v1/chat/completions/render", json=CHAT | {"messages": returned(message)}, headers=headers
            )
            shown[name] = rendered.json()["prompt"]
        assert THOUGHT in shown["A"], "the client's own turn has its reasoning again"
        assert THOUGHT not in shown["B"]
        counted = [
            (
                await client.post(
                    "/tokenize", json={"messages": returned(message), "tools": CHAT["tools"]} | salt, headers=headers
                )
            ).json()["count"]
            for headers, salt in ((A, {"cache_salt": "common"}), (B, {"cache_salt": "common"}), (B, {}))
        ]
        assert counted[0] > counted[1] == counted[2], "the number of tokens doesn't reveal it either"

    asked(engine, pipeline, ask)


def test_call_ids_do_not_reveal_reasoning_of_another_salt(pipeline: TextPipeline) -> None:
    engine = ScriptedEngine([*said(CALL_TEXT), ended()])

    async def ask(client: httpx.AsyncClient) -> None:
        messages = returned(await called(client))
        shown = [
            (
                await client.post("/v1/chat/completions/render", json=CHAT | {"messages": messages, "cache_salt": salt})
            ).json()["prompt"]
            for salt in ("common", "other")
        ]
        assert [THOUGHT in prompt for prompt in shown] == [True, False]

    asked(engine, pipeline, ask, ServerConfig())


def test_stored_responses_are_visible_to_their_key_only(pipeline: TextPipeline) -> None:
    """To other keys an id of A's looks like one that never existed."""
    engine = ScriptedEngine([*said("x"), ended()])

    async def ask(client: httpx.AsyncClient) -> None:
        made = (await client.post("/v1/responses", json=BODIES["/v1/responses"], headers=A)).json()
        item = made["output"][0]["id"]

        async def tried(response_id: str, item_id: str, headers: dict[str, str]) -> list[tuple[int, str]]:
            path = f"/v1/responses/{response_id}"
            following = BODIES["/v1/responses"] | {"previous_response_id": response_id}
            naming = BODIES["/v1/responses"] | {
                "input": [{"type": "item_reference", "id": item_id}, {"role": "user", "content": "y"}]
            }
            answers = [
                await client.get(path, headers=headers),
                await client.get(f"{path}/input_items", headers=headers),
                await client.post("/v1/responses", json=following, headers=headers),
                await client.post("/v1/responses/input_tokens", json=following, headers=headers),
                await client.post("/v1/responses", json=naming, headers=headers),
                await client.delete(path, headers=headers),
            ]
            return [
                (answer.status_code, answer.text.replace(response_id, "ID").replace(item_id, "ID"))
                for answer in answers
            ]

        unknown = await tried("resp_unknown", "msg_unknown", B)
        assert {status for status, _ in unknown} == {404}
        assert await tried(made["id"], item, B) == unknown
        assert {status for status, _ in await tried(made["id"], item, A)} == {200}

    asked(engine, pipeline, ask)


def record(size: int) -> StoredResponse:
    return StoredResponse(response=b"x" * size, input_items=b"", previous_id=None, session_id=None)


@pytest.mark.parametrize("bounds", [{"max_bytes": 60_000}, {"max_responses": 12}])
def test_eviction_takes_responses_of_the_key_that_stores_most(bounds: dict[str, Any]) -> None:
    store = ResponseStore(**bounds)
    for number in range(3):
        store.of("quiet").put(f"q{number}", record(4000))
    for number in range(100):
        store.of("loud").put(f"l{number}", record(4000))
    assert [f"q{number}" in store.of("quiet") for number in range(3)] == [True] * 3
    assert len(store.of("loud")) == 9
    assert "l99" in store.of("loud")
    store.of("loud").put("huge", record(200_000 if "max_bytes" in bounds else 1))
    assert len(store.of("quiet")) == 3, "a record over the limit by itself evicts only its owner's records"
    for number in range(100):
        store.of("third").put(f"t{number}", record(4000))
    assert len(store.of("quiet")) == 3
    assert store.of("quiet").get("t99") is None


def test_cached_prefixes_are_not_shared_between_keys() -> None:
    """With the real engine and cache: measured by usage, which determines timing."""
    body = {
        "model": "tiny-agent",
        "messages": [{"role": "user", "content": "What is the status of order O-4071? " * 4}],
        "max_tokens": 3,
    }

    async def ask(client: httpx.AsyncClient) -> None:
        cached = []
        for headers in (A, A, B, B):
            answer = (await client.post("/v1/chat/completions", json=body, headers=headers)).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached[0] == cached[2] == 0
        assert cached[1] == cached[3] > 0

    async def run() -> None:
        async with AsyncEngine(EngineConfig()) as engine:
            door = Door(engine.app, ServerConfig(api_keys=KEYS), max_running=4)
            async with httpx.AsyncClient(
                transport=InProcessTransport(door), base_url="http://in-process", timeout=None
            ) as client:
                await ask(client)

    asyncio.run(run())
