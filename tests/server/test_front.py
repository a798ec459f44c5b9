"""The outermost layers: normalized requests (HEAD, trailing slashes), probes, CORS, and host names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from agentspec.config import ServerConfig
from agentspec.server.app import ROUTES, create_app
from agentspec.server.door import Door
from agentspec.server.front import in_front_of
from agentspec.server.pipeline import TextPipeline
from agentspec.server.transport import InProcessTransport
from agentspec.server.waiting_room import WaitingRoom
from tests.fakes.engine_client import ScriptedEngine, ended, said

COMPLETION: dict[str, Any] = {"model": "scripted", "prompt": [1, 2], "max_tokens": 5}
CHAT: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}
ORIGIN = "http://localhost:3000"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-session-id",
}


def served(text: TextPipeline | None, config: ServerConfig, engine: ScriptedEngine | None = None) -> Any:
    """Layered as in `serve`."""
    engine = engine or ScriptedEngine([*said("well"), ended()])
    return in_front_of(Door(create_app(engine, text, root_path=config.root_path), config, max_running=1), config)


def loading(config: ServerConfig) -> Any:
    return in_front_of(WaitingRoom(lambda: "loading weights", lambda: 1.0), config)


def asked(app: Any, ask: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with httpx.AsyncClient(
            transport=InProcessTransport(app), base_url="http://localhost", timeout=None
        ) as client:
            return await ask(client)

    return asyncio.run(run())


@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.method == "GET"])
def test_head_has_the_headers_of_get_and_no_body(path: str, pipeline: TextPipeline) -> None:
    path = path.replace("{model:path}", "scripted").replace("{name}", "main.js").replace("{response_id}", "resp_1")

    async def both(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        client.headers["x-request-id"] = "one"
        return await client.get(path), await client.head(path)

    get, head = asked(served(pipeline, ServerConfig()), both)
    assert (head.status_code, head.headers, head.content) == (get.status_code, get.headers, b"")
    assert get.content
    if "responses" not in path:
        assert get.status_code == 200


def test_head_of_a_post_route_is_405(pipeline: TextPipeline) -> None:
    assert asked(served(pipeline, ServerConfig()), lambda client: client.head("/v1/completions")).status_code == 405


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/scripted", "/health", "/version", "/openapi.json", "/metrics"]
)
def test_trailing_slashes_are_ignored(path: str, pipeline: TextPipeline) -> None:
    async def three(client: httpx.AsyncClient) -> list[tuple[int, bytes]]:
        return [
            (answer.status_code, answer.content) for answer in [await client.get(path + end) for end in ("", "/", "//")]
        ]

    first, *others = asked(served(pipeline, ServerConfig()), three)
    assert first[0] == 200
    assert others == [first, first]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions/", COMPLETION), ("/v1/chat/completions/", CHAT), ("/tokenize/", {"prompt": "x"})],
)
def test_post_with_a_trailing_slash_is_not_redirected(path: str, body: dict[str, Any], pipeline: TextPipeline) -> None:
    assert asked(served(pipeline, ServerConfig()), lambda client: client.post(path, json=body)).status_code == 200


def test_errors_with_a_trailing_slash_have_the_shape_of_their_api(pipeline: TextPipeline) -> None:
    answer = asked(served(pipeline, ServerConfig()), lambda client: client.post("/v1/messages/", json={}))
    assert (answer.status_code, answer.json()["type"]) == (400, "error")


def test_trailing_slash_does_not_bypass_admission(pipeline: TextPipeline) -> None:
    config = ServerConfig(api_keys=("key",), max_queue=0)

    async def ask(client: httpx.AsyncClient) -> None:
        assert [(await client.get(path)).status_code for path in ("/v1/models/", "/health/", "/ping/", "/ready/")] == [
            401,
            200,
            200,
            200,
        ]
        assert (await client.head("/v1/models")).status_code == 401
        client.headers["authorization"] = "Bearer key"
        request = client.build_request("POST", "/v1/completions/", json=COMPLETION | {"stream": True})
        running = await client.send(request, stream=True)
        assert (await client.post("/v1/completions/", json=COMPLETION)).status_code == 429
        await running.aclose()

    asked(served(pipeline, config, ScriptedEngine([*said("well"), asyncio.Event()])), ask)


def test_live_is_200_while_loading_and_draining(pipeline: TextPipeline) -> None:
    """While it loads and while it drains, the server is alive but not ready."""
    engine = ScriptedEngine()
    door = Door(create_app(engine, pipeline), ServerConfig(), max_running=1)
    answer = asked(loading(ServerConfig()), lambda client: client.get("/live/"))
    assert (answer.status_code, answer.json()["status"]) == (200, "loading")

    async def ask(client: httpx.AsyncClient) -> None:
        await door.drain()
        assert [(await client.get(path)).status_code for path in ("/live", "/ready", "/health")] == [200, 503, 503]
        assert (await client.delete("/ready")).status_code == 405
        engine.alive = False
        assert (await client.get("/live")).status_code == 503

    asked(in_front_of(door, ServerConfig()), ask)


def test_full_server_is_live_but_not_ready(pipeline: TextPipeline) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        request = client.build_request("POST", "/v1/completions", json=COMPLETION | {"stream": True})
        running = await client.send(request, stream=True)
        assert [(await client.get(path)).status_code for path in ("/live", "/ready", "/health")] == [200, 503, 200]
        assert (await client.put("/ready")).status_code == 405
        assert (await client.head("/ready")).status_code == 503
        await running.aclose()
        assert (await client.get("/ready")).status_code == 200

    asked(served(pipeline, ServerConfig(max_queue=0), ScriptedEngine([*said("well"), asyncio.Event()])), ask)


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
def test_probe_status_follows_the_engine_and_loading(path: str, pipeline: TextPipeline) -> None:
    engine = ScriptedEngine()
    app = served(pipeline, ServerConfig(), engine)
    answer = asked(app, lambda client: client.get(path))
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    engine.alive = False
    assert asked(app, lambda client: client.get(path)).status_code == 503
    answer = asked(loading(ServerConfig()), lambda client: client.get(path + "/"))
    assert (answer.status_code, answer.json()) == (
        503,
        {"status": "loading", "stage": "loading weights", "seconds": 1.0},
    )
    head = asked(loading(ServerConfig()), lambda client: client.head(path))
    assert (head.status_code, head.headers["retry-after"], head.content) == (503, "2", b"")


def test_no_cors_headers_without_configured_origins(pipeline: TextPipeline) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        assert "access-control-allow-origin" not in (await client.get("/v1/models", headers={"origin": ORIGIN})).headers
        assert (await client.options("/v1/models", headers=PREFLIGHT)).status_code == 405

    asked(served(pipeline, ServerConfig()), ask)


@pytest.mark.parametrize(("origins", "told"), [(("*",), "*"), ((ORIGIN,), ORIGIN), (("http://a", ORIGIN), ORIGIN)])
def test_configured_origin_gets_cors_headers(origins: tuple[str, ...], told: str, pipeline: TextPipeline) -> None:
    """A browser sends preflights without a key. Every answer after that has CORS headers: a success, a stream, any
    error."""
    config = ServerConfig(api_keys=("key",), cors_origins=origins)
    page, key = {"origin": ORIGIN}, {"authorization": "Bearer key"}

    async def ask(client: httpx.AsyncClient) -> None:
        preflight = await client.options("/v1/chat/completions", headers=PREFLIGHT)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, told)
        assert preflight.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        answers = [
            await client.get("/v1/models", headers=page),
            *[
                await client.post("/v1/completions", json=body, headers=page | key)
                for body in (COMPLETION, COMPLETION | {"stream": True}, COMPLETION | {"temperature": "warm"}, {})
            ],
            await client.get("/nothing", headers=page | key),
        ]
        assert [answer.status_code for answer in answers] == [401, 200, 200, 400, 400, 404]
        assert answers[2].text.endswith("[DONE]\n\n")
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == told
            assert (
                answer.headers["access-control-expose-headers"]
                == "retry-after, x-agentspec-ignored-fields, x-agentspec-max-tokens, x-request-id"
            )

    asked(served(pipeline, config), ask)
    answer = asked(loading(config), lambda client: client.get("/health", headers=page))
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (503, told)


def test_other_origins_get_no_cors_headers(pipeline: TextPipeline) -> None:
    async def ask(client: httpx.AsyncClient) -> None:
        other = {"origin": "http://localhost:3001"}
        assert (await client.options("/v1/models", headers=PREFLIGHT | other)).status_code == 400
        answer = await client.get("/v1/models", headers=other)
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (200, False)
        assert json.loads(answer.content)["object"] == "list"

    asked(served(pipeline, ServerConfig(cors_origins=(ORIGIN,))), ask)


LOCAL = ServerConfig(allowed_hosts=())
PUBLIC = ServerConfig(host="0.0.0.0")
NAMED = ServerConfig(allowed_hosts=("Models.example",))


@pytest.mark.parametrize(
    ("config", "headers", "refused"),
    [
        (LOCAL, {"host": "localhost:8000"}, None),
        (LOCAL, {"host": "LOCALHOST"}, None),
        (LOCAL, {"host": "127.0.0.1:8000"}, None),
        (LOCAL, {"host": "[::1]:8000"}, None),
        (LOCAL, {"host": "rebound.example:8000"}, "host"),
        (LOCAL, {"host": "localhost.rebound.example"}, "host"),
        (LOCAL, {"host": "localhost:8000@rebound.example"}, "host"),
        (LOCAL, {"host": ""}, "host"),
        (LOCAL, {"origin": "http://localhost:8000"}, None),
        (LOCAL, {"origin": "http://rebound.example"}, "origin"),
        (LOCAL, {"origin": "null"}, "origin"),
        (ServerConfig(host="127.0.0.2"), {"host": "127.0.0.2:8000"}, None),
        (ServerConfig(cors_origins=("https://notes.example",)), {"origin": "https://notes.example"}, None),
        (ServerConfig(cors_origins=("https://notes.example",)), {"origin": "https://other.example"}, "origin"),
        (ServerConfig(cors_origins=("*",)), {"origin": "null"}, None),
        (NAMED, {"host": "models.EXAMPLE."}, None),
        (NAMED, {"host": "localhost"}, None),
        (NAMED, {"host": "other.example"}, "host"),
        (ServerConfig(allowed_hosts=("*",)), {"host": "other.example", "origin": "http://rebound.example"}, None),
        (PUBLIC, {"host": "other.example", "origin": "http://rebound.example"}, None),
    ],
    ids=str,
)
def test_unknown_host_names_and_origins_are_refused(
    config: ServerConfig, headers: dict[str, str], refused: str | None, pipeline: TextPipeline
) -> None:
    """From the start, a page with DNS rebinding, or one that posts blindly, has no effect."""
    engine = ScriptedEngine([*said("well"), ended()])
    answers = [
        asked(
            served(pipeline, config, engine),
            lambda client: client.post("/v1/completions", json=COMPLETION, headers=headers),
        ),
        asked(loading(config), lambda client: client.get("/health", headers=headers)),
    ]
    if refused is None:
        assert [answer.status_code for answer in answers] == [200, 503]
        return
    for answer in answers:
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (403, refused, f"{refused}_not_allowed")
    assert not engine.submits
