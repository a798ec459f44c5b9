"""Bodies with too many values to process are refused before they are decoded."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from agentspec.server import json_count
from agentspec.server.json_count import JsonCount
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said

TEXTS = ("", "a,b", '"', "\\", '\\"', "[{", "é\n", "\\\\", '"]},', "x" * 50)


def some_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(5 if depth else 2)
    if kind == 0:
        return rng.choice(TEXTS)
    if kind == 1:
        return rng.choice((1, -2.5, True, None))
    size = rng.randrange(4)
    if kind == 2:
        return {rng.choice(TEXTS) + str(number): some_value(rng, depth - 1) for number in range(size)}
    return [some_value(rng, depth - 1) for _ in range(size)]


def walked(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from walked(one)
    elif isinstance(value, list):
        for one in value:
            yield from walked(one)


def levels(value: Any) -> int:
    """Of arrays and objects in each other."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(levels, value.values() if isinstance(value, dict) else value), default=0)


def test_values_and_levels_are_counted_in_any_chunking(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    for trial in range(500):
        value = some_value(rng, 5)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1))).encode()
        monkeypatch.setattr(json_count, "_STEP", rng.choice((1, 2, 7, 1000)))
        count, start = JsonCount(), 0
        while start < len(text):
            end = start + rng.randrange(1, 30)
            count.feed(text[start:end])
            start = end
        parts = sum(isinstance(one, str | list | dict) for one in walked(value))
        found = (count.num_parts, count.num_levels)
        assert found == (parts, levels(value)), f"seed 3, trial {trial}: {text!r}"


def refusal(connect: Callable[..., httpx.AsyncClient], content: bytes) -> tuple[int, str]:
    async def run() -> httpx.Response:
        async with connect(ScriptedEngine([*said("x"), ended()])) as client:
            return await client.post("/v1/completions", content=content)

    answer = asyncio.run(run())
    return answer.status_code, answer.json().get("error", {}).get("message", "")


@pytest.mark.parametrize("part", ["[]", "{}", '"a"', '{"a":[]}'])
def test_body_with_too_many_values_is_not_decoded(
    connect: Callable[..., httpx.AsyncClient], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    monkeypatch.setattr(msgspec.json, "decode", lambda body: decoded.append(body))
    status, message = refusal(connect, b'{"messages": [' + b",".join([part.encode()] * 400_000) + b"]}")
    assert (status, message) == (413, "the body holds more than 200,000 texts, arrays and objects")
    assert not decoded


def test_body_with_too_many_numbers_is_not_decoded(connect: Callable[..., httpx.AsyncClient]) -> None:
    status, message = refusal(connect, b'{"prompt": [' + b"1," * 2_000_001 + b"1]}")
    assert (status, message) == (413, "the body holds more than 2,000,000 values")


def test_long_id_prompt_and_long_text_are_accepted(connect: Callable[..., httpx.AsyncClient]) -> None:
    ids = ",".join(["123"] * 900_000)
    body = f'{{"model": "{INFO.model_id}", "prompt": [{ids}], "max_tokens": 1}}'
    assert refusal(connect, body.encode())[0] == 200
    text = '[{\\"a\\": 1, ' * 300_000
    status, message = refusal(connect, f'{{"model": "{INFO.model_id}", "prompt": "{text}"}}'.encode())
    assert (status, "context limit" in message) == (400, True)
