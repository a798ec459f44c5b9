"""Request ids: the client's or a new one, in every answer and in every log line."""

from __future__ import annotations

import logging
import re
from typing import Any

import httpx
import pytest

from agentspec.config import ServerConfig
from agentspec.server.pipeline import TextPipeline
from agentspec.types import FinishReason
from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.server.test_front import COMPLETION, PREFLIGHT, asked, loading, served

NEW = re.compile(r"[0-9a-f]{32}")


@pytest.mark.parametrize(
    ("sent", "is_taken"),
    [
        ("req-7/a:b", True),
        ("~" * 128, True),
        (None, False),
        ("", False),
        ("~" * 129, False),
        ("two words", False),
        ("caf\u00e9", False),
        ("a\tb", False),
    ],
)
def test_valid_request_id_is_kept_and_any_other_replaced(
    sent: str | None, is_taken: bool, pipeline: TextPipeline
) -> None:
    headers: dict[bytes, bytes] = {} if sent is None else {b"x-request-id": sent.encode("latin-1")}
    answer = asked(served(pipeline, ServerConfig()), lambda client: client.get("/v1/models", headers=headers))
    told = answer.headers.get_list("x-request-id")
    assert len(told) == 1
    assert told[0] == sent if is_taken else NEW.fullmatch(told[0])


def test_every_answer_has_a_request_id_header(pipeline: TextPipeline) -> None:
    config = ServerConfig(api_keys=("key",), cors_origins=("*",), root_path="/models")

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        key = {"x-api-key": "key"}
        return [
            await client.get("/v1/models"),
            await client.get("/models"),
            await client.get("/nothing", headers=key),
            await client.options("/v1/models", headers=PREFLIGHT),
            await client.get("/health", headers={"host": "elsewhere"}),
            *[
                await client.post("/v1/completions", json=body, headers=key)
                for body in (COMPLETION, COMPLETION | {"stream": True}, {})
            ],
        ]

    answers = [*asked(served(pipeline, config), ask), asked(loading(config), lambda client: client.get("/health"))]
    assert [answer.status_code for answer in answers] == [401, 308, 404, 200, 403, 200, 200, 400, 503]
    assert len({answer.headers["x-request-id"] for answer in answers}) == len(answers)


def test_log_lines_end_with_the_request_id(pipeline: TextPipeline, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine([*said("abc"), ended(FinishReason.ERROR, error="out of memory")])
    bodies: list[dict[str, Any]] = [COMPLETION | {"stream": True}, COMPLETION | {"temperature": "secret words"}]

    async def ask(client: httpx.AsyncClient) -> None:
        for number, body in enumerate(bodies):
            await client.post("/v1/completions", json=body, headers={"x-request-id": f"number-{number}"})

    with caplog.at_level(logging.INFO, "agentspec"):
        asked(served(pipeline, ServerConfig(), engine), ask)
    failure, streamed, refusal, refused = caplog.messages
    assert failure == "a stream ended early: 500 out of memory id=number-0"
    assert streamed.startswith("POST /v1/completions 200 ")
    assert streamed.endswith(" id=number-0")
    assert refusal == "POST /v1/completions refused: 400 temperature: Expected `float`, got `str` id=number-1"
    assert refused.endswith(" id=number-1")
    assert "secret" not in caplog.text
