"""Whole runs of command-line agents, recorded by scripts/clients/record.py: every request is answered, and its unknown
fields are listed here.

tests/data/clients holds one run of each, with its default tools; its texts are replaced (scripts/clients/reworded.py).
A new recording may need a change of these tables, never of a body.
"""

from __future__ import annotations

import asyncio
import json
import lzma
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from agentspec.server.pipeline import TextPipeline
from agentspec.server.unknown_fields import HEADER
from scripts.clients.agents import AGENTS, MODEL
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

RECORDINGS = Path(__file__).parents[1] / "data" / "clients"
SIZES = {"claude-code": 5, "codex": 4, "opencode": 5, "qwen-code": 4, "pi": 4}
"""Requests of each run."""

LEFT_OUT: dict[tuple[str, int], str] = {
    **{("codex", number): "tools.web_search" for number in range(4)},
}
"""Unknown fields, as in the answers' header, and the numbers of the requests with them. Other requests have none."""

REFUSED: dict[tuple[str, int], str] = {}
"""Requests that are still refused, and the end of the error message."""

LONG = msgspec.structs.replace(INFO, model_id=MODEL, max_context=262144)


def recording(client: str) -> dict[str, Any]:
    whole: dict[str, Any] = json.loads(lzma.decompress((RECORDINGS / f"{client}.json.xz").read_bytes()))
    return whole


def posted(
    connect: Connect, text: TextPipeline, request: dict[str, Any], engine: ScriptedEngine | None = None
) -> httpx.Response:
    async def run() -> httpx.Response:
        async with connect(engine or ScriptedEngine([*said("ok"), ended()], info=LONG), pipeline=text) as client:
            return await client.request(
                request["method"], request["path"], json=request["body"], headers=request["headers"]
            )

    return asyncio.run(run())


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_each_agent_has_a_recording_of_its_pinned_version(agent: Any) -> None:
    whole = recording(agent.name)
    assert (whole["package"], whole["version"], len(whole["requests"])) == (
        agent.package,
        agent.version,
        SIZES[agent.name],
    )
    assert {request["status"] for request in whole["requests"]} == {200}


@pytest.mark.parametrize(
    ("client", "number"), [(client, number) for client, size in SIZES.items() for number in range(size)]
)
def test_recorded_requests_are_answered(connect: Connect, bundled_text: TextPipeline, client: str, number: int) -> None:
    answer = posted(connect, bundled_text, recording(client)["requests"][number])
    if (client, number) in REFUSED:
        assert answer.status_code == 400, "this request is answered now: remove it from REFUSED"
        assert answer.json()["error"]["message"].endswith(REFUSED[client, number])
        pytest.xfail(REFUSED[client, number])
    assert answer.status_code == 200, answer.text
    assert "ok" in answer.text
    assert '"error":{' not in answer.text
    assert answer.headers.get(HEADER, "") == LEFT_OUT.get((client, number), "")


@pytest.mark.parametrize("client", SIZES)
def test_each_prompt_extends_the_previous_one(connect: Connect, bundled_text: TextPipeline, client: str) -> None:
    """Each prompt starts with the previous one up to the start of its answer, so clients make no cached prefix useless.

    opencode's first request is for a title of the session."""
    prompts: list[str] = []
    for request in recording(client)["requests"][int(client == "opencode") :]:
        engine = ScriptedEngine([*said("ok"), ended()], info=LONG)
        assert posted(connect, bundled_text, request, engine).status_code == 200
        prompts.append(bundled_text.tokenizer.spell(engine.submits[0].prompt_ids))
    assert len(prompts) >= 4
    for before, after in pairwise(prompts):
        assert after.startswith(before[: before.rindex("<|im_start|>assistant\n")])
