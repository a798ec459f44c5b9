"""A server before its engine is loaded: 503 with the stage of the start, in the shape of each API, then the real
app."""

from __future__ import annotations

import asyncio

import httpx

from agentspec.server.app import create_app
from agentspec.server.transport import InProcessTransport
from agentspec.server.waiting_room import WaitingRoom
from tests.fakes.engine_client import ScriptedEngine


def test_answers_are_503_until_the_app_is_set() -> None:
    async def run() -> None:
        room = WaitingRoom(lambda: "compiling kernels (3 of 134)", lambda: 4.21)
        async with httpx.AsyncClient(
            transport=InProcessTransport(room), base_url="http://in-process", timeout=None
        ) as client:
            health = await client.get("/health")
            assert (health.status_code, health.headers["retry-after"]) == (503, "2")
            assert health.json() == {"status": "loading", "stage": "compiling kernels (3 of 134)", "seconds": 4.2}
            chat = await client.post("/v1/chat/completions", content=b"x" * 5000)
            assert (chat.status_code, chat.headers["retry-after"]) == (503, "2")
            error = chat.json()["error"]
            assert (error["code"], error["type"]) == ("loading", "server_error")
            assert error["message"] == "the model is being loaded: compiling kernels (3 of 134)"
            message = (await client.post("/v1/messages", json={})).json()
            assert (message["type"], message["error"]["type"]) == ("error", "api_error")
            room.enter(create_app(ScriptedEngine(), None))
            assert (await client.get("/health")).json() == {"status": "ok"}

    asyncio.run(run())
