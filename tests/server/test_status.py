"""Model list, version, health and stats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httpx
import msgspec
import openai
import pytest

from agentspec import version
from tests.fakes.engine_client import INFO, ScriptedEngine

Connect = Callable[..., httpx.AsyncClient]


def get(connect: Connect, path: str, engine: ScriptedEngine | None = None) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine or ScriptedEngine()) as client:
            return await client.get(path)

    return asyncio.run(run())


def test_models_and_version(connect: Connect) -> None:
    (listed,) = get(connect, "/v1/models").json()["data"]
    assert listed == {
        "id": "scripted",
        "object": "model",
        "created": 0,
        "owned_by": "agentspec",
        "max_model_len": INFO.max_context,
    }
    assert get(connect, "/v1/models/scripted").json() == listed
    assert get(connect, "/version").json() == {"version": version()}


@pytest.mark.parametrize("name", ["scripted", "someone/model-4B"])
def test_sdk_retrieves_models_of_any_name(connect: Connect, name: str) -> None:
    engine = ScriptedEngine(info=msgspec.structs.replace(INFO, model_id=name))

    async def run() -> str:
        async with openai.AsyncOpenAI(
            api_key="none", base_url="http://in-process/v1", http_client=cast(Any, connect(engine))
        ) as client:
            with pytest.raises(openai.NotFoundError, match="not served here"):
                await client.models.retrieve("other")
            return (await client.models.retrieve(name)).id

    assert asyncio.run(run()) == name


def test_health_reports_the_engines_state(connect: Connect) -> None:
    engine = ScriptedEngine()
    assert (get(connect, "/health", engine).status_code, get(connect, "/health", engine).json()) == (
        200,
        {"status": "ok"},
    )
    engine.alive = False
    assert get(connect, "/health", engine).status_code == 503


def test_stats_returns_the_engines_counters(connect: Connect) -> None:
    engine = ScriptedEngine()
    assert get(connect, "/stats", engine).json() == asyncio.run(engine.stats())
