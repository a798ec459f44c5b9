"""Prompts and choices of one request count as separate requests (finding 5 of issue 18)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from tests.fakes.engine_client import ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[1, 2]] * 2048}),
        ("/v1/completions", {"prompt": [[1, 2]] * 3, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 6}),
    ],
)
def test_request_with_more_choices_than_places_is_refused(connect: Connect, path: str, body: dict[str, object]) -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        async with connect(engine, max_open=5) as client:
            answer = await client.post(path, json={"model": engine.info.model_id, **body})
        assert answer.status_code == 429
        assert "may run and wait here, 5" in answer.json()["error"]["message"]
        assert not engine.submits

    asyncio.run(main())


def test_each_prompt_occupies_a_place_while_it_runs_or_waits(connect: Connect) -> None:
    async def main() -> None:
        go_on = asyncio.Event()
        engine = ScriptedEngine([go_on, *said("a"), ended()])
        body = {"model": engine.info.model_id, "prompt": [1, 2]}
        async with connect(engine, max_open=5) as client:
            many = asyncio.create_task(client.post("/v1/completions", json=body | {"prompt": [[1, 2]] * 4}))
            while len(engine.submits) < 4:
                await asyncio.sleep(0)
            one = asyncio.create_task(client.post("/v1/completions", json=body))
            while len(engine.submits) < 5:
                await asyncio.sleep(0)
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "5 prompts and choices run or wait here" in refused.json()["error"]["message"]
            go_on.set()
            assert [(await answer).status_code for answer in (many, one)] == [200, 200]
            assert (await client.post("/v1/completions", json=body)).status_code == 200, "all places are released"

    asyncio.run(main())
