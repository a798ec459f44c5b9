"""Names of the model in requests and answers: one name, several, or any."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.fakes.engine_client import ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9},
    "/v1/chat/completions/render": {"messages": MESSAGES},
}
UNNAMED: dict[str, dict[str, Any]] = {
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
}
"""Answers of these endpoints contain no name."""


def answers(connect: Connect, names: tuple[str, ...], *requests: tuple[str, str, Any]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with connect(ScriptedEngine([*said("well"), ended()]), names=names) as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(run())


def model_of(chunk: dict[str, Any]) -> str:
    """In a chunk, or in the response or message within an event."""
    carrier = chunk if "model" in chunk else chunk.get("response", chunk.get("message"))
    assert isinstance(carrier, dict)
    return str(carrier["model"])


@pytest.mark.parametrize(
    ("names", "asked", "carried"),
    [
        ((), "scripted", "scripted"),
        (("gpt-x",), "gpt-x", "gpt-x"),
        (("gpt-x", "org/other"), "org/other", "gpt-x"),
        (("*",), "org/whatever", "org/whatever"),
        (("gpt-x", "*"), "whatever", "whatever"),
        (("gpt-x", "other", "*"), "other", "other"),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_answers_contain_the_served_model_name(
    path: str, names: tuple[str, ...], asked: str, carried: str, connect: Connect
) -> None:
    body = BODIES[path] | {"model": asked}
    whole, streamed = answers(connect, names, ("POST", path, body), ("POST", path, body | {"stream": True}))
    assert whole.json()["model"] == carried
    lines = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    named = {model_of(line) for line in lines if line.keys() & {"choices", "response", "message"}}
    assert named == (set() if path.endswith("/render") else {carried})


@pytest.mark.parametrize("names", [(), ("gpt-x", "other"), ("*",)])
def test_unserved_model_names_are_404(names: tuple[str, ...], connect: Connect) -> None:
    bodies = BODIES | UNNAMED
    found = answers(
        connect, names, *[("POST", path, body | {"model": "someone/else"}) for path, body in bodies.items()]
    )
    if "*" in names:
        assert {answer.status_code for answer in found} == {200}
        return
    for path, answer in zip(bodies, found, strict=True):
        assert answer.status_code == 404, path
        message = answer.json()["error"]["message"]
        assert (
            message
            == f"model='someone/else': not served here; this server has {', '.join(map(repr, names or ('scripted',)))}"
        )


@pytest.mark.parametrize(
    ("names", "listed"),
    [((), ["scripted"]), (("a", "org/b"), ["a", "org/b"]), (("*",), ["scripted"]), (("*", "a"), ["a"])],
)
def test_model_list_contains_the_served_names(names: tuple[str, ...], listed: list[str], connect: Connect) -> None:
    (models,) = answers(connect, names, ("GET", "/v1/models", None))
    assert [model["id"] for model in models.json()["data"]] == listed
    for answer, model in zip(
        answers(connect, names, *[("GET", f"/v1/models/{name}", None) for name in listed]),
        models.json()["data"],
        strict=True,
    ):
        assert answer.json() == model
    (unknown,) = answers(connect, names, ("GET", "/v1/models/org/unknown", None))
    if "*" in names:
        assert unknown.json()["id"] == "org/unknown"
    else:
        assert (unknown.status_code, unknown.json()["error"]["code"], unknown.json()["error"]["param"]) == (
            404,
            "model_not_found",
            "model",
        )


@pytest.mark.parametrize(("names", "label"), [((), "scripted"), (("a", "b"), "a"), (("*",), "scripted")])
def test_metrics_are_labelled_with_the_first_served_name(names: tuple[str, ...], label: str, connect: Connect) -> None:
    (metrics,) = answers(connect, names, ("GET", "/metrics", None))
    assert f'agentspec_engine_alive{{model_name="{label}"}} 1' in metrics.text
