"""Unknown fields are left out and reported: to the client, in the log and in /metrics. And docs/api.md agrees with the
tables."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentspec.server.unknown_fields import HEADER, OTHER, UnknownFields
from scripts import field_docs
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]
CHAT: dict[str, Any] = {"model": INFO.model_id, "messages": [{"role": "user", "content": "hi"}]}


def post(
    connect: Connect, *bodies: dict[str, Any], path: str = "/v1/chat/completions", **options: Any
) -> tuple[list[httpx.Response], str]:
    """The answers, and /metrics afterwards."""

    async def run() -> tuple[list[httpx.Response], str]:
        async with connect(ScriptedEngine([*said("well"), ended()]), **options) as client:
            answers = [await client.post(path, json=body, headers={"user-agent": "tool/1.2"}) for body in bodies]
            return answers, (await client.get("/metrics")).text

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_fields_header_lists_unknown_fields(connect: Connect, stream: bool) -> None:
    (plain, odd), metrics = post(
        connect, {**CHAT, "stream": stream}, {**CHAT, "stream": stream, "colour": "red", "mood": None}
    )
    assert (plain.status_code, odd.status_code) == (200, 200)
    assert HEADER not in plain.headers
    assert odd.headers[HEADER] == "colour, mood"
    assert f'agentspec_ignored_fields_total{{model_name="{INFO.model_id}",field="colour"}} 1' in metrics


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": INFO.model_id, "prompt": "x"}),
        ("/v1/messages", {**CHAT, "max_tokens": 9}),
        ("/v1/messages/count_tokens", CHAT),
        ("/v1/responses", {"model": INFO.model_id, "input": "x"}),
        ("/tokenize", {"prompt": "x"}),
    ],
)
def test_every_endpoint_reports_unknown_fields(connect: Connect, path: str, body: dict[str, Any]) -> None:
    (answer,), _ = post(connect, {**body, "colour": "red"}, path=path)
    assert (answer.status_code, answer.headers[HEADER]) == (200, "colour"), answer.text


def test_strict_server_refuses_unknown_fields(connect: Connect) -> None:
    (answer,), _ = post(connect, {**CHAT, "colour": "red"}, strict_fields=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "colour")


def test_log_names_a_field_once_per_client(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    with caplog.at_level(logging.WARNING, "agentspec"):
        for client in ("tool/1", "tool/2", "other/1"):
            unknown.note_fields(["colour"], path="/p", client=client)
    assert [record.args for record in caplog.records] == [("/p", "colour", "tool"), ("/p", "colour", "other")]
    assert unknown.counts == {"colour": 3}


def test_unknown_names_are_bounded_and_sanitized() -> None:
    unknown = UnknownFields()
    assert unknown.note_fields(["a\r\nset-cookie: b", "x" * 65, "é"], path="/p", client="") == OTHER
    for number in range(200):
        unknown.note_fields([f"field{number}"], path="/p", client=f"client{number}")
    assert len(unknown.counts) <= 65
    assert sum(unknown.counts.values()) == 201
    assert unknown.note_fields([f"n{number}" for number in range(99)], path="/p", client="").count(",") == 15


def test_api_document_matches_the_tables() -> None:
    page = field_docs.PAGE.read_text(encoding="utf-8")
    assert page == field_docs.printed(page), "run python -m scripts.field_docs"
