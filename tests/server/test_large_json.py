"""Large bodies are decoded in slices, between which others run, and become the same values as decoded at once."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import msgspec
import pytest

from agentspec.server import json_count, large_json
from agentspec.server.errors import ApiError
from agentspec.server.large_json import LARGE_BYTES, SLICE_BYTES, VALUE_BYTES, LargeJson
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said

Connect = Callable[..., httpx.AsyncClient]

TEXTS = (
    "",
    "a,b",
    '"',
    "\\",
    '\\"',
    "[{",
    "é\n",
    "\\\\",
    '"]},',
    "x" * 50,
    "\U0001f600" * 9,
    "a\u0301" * 20,
    "\\u0041",
)
NUMBERS = (1, -2.5, True, None, 2**40, 10**25, 1e300)
BROKEN = b'",\\[]{}:u \xff\xc3d8 1'


def some_value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(7 if depth else 3)
    if kind == 0:
        return rng.choice(TEXTS) * rng.randrange(1, 4)
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind == 2:
        return [rng.randrange(9) for _ in range(rng.randrange(30))]
    size = rng.randrange(5)
    if kind < 5:
        return {rng.choice(TEXTS) + str(number): some_value(rng, depth - 1) for number in range(size)}
    return [some_value(rng, depth - 1) for _ in range(size)]


def some_text(rng: random.Random) -> bytes:
    """JSON; half of it broken at one place."""
    value = some_value(rng, 6)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1))).encode()
    if rng.random() < 0.5:
        place = rng.randrange(len(text))
        put = rng.choice((b"", bytes([rng.choice(BROKEN)])))
        text = text[:place] + put + text[place + rng.randrange(2) :]
    return b" " * rng.randrange(3) + text + b" " * rng.randrange(3)


@pytest.mark.parametrize("seed", range(4))
def test_values_and_refusals_are_those_of_decoding_at_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)

    async def compare(text: bytes, where: str) -> None:
        try:
            expected = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            with pytest.raises(ApiError, match="not valid JSON") as refused:
                await LargeJson().decode(bytearray(text), ())
            assert "(byte" not in str(refused.value), where
            return
        found = await LargeJson().decode(bytearray(text), ())
        assert found == expected, where
        assert msgspec.json.encode(found) == msgspec.json.encode(expected), where  # 1 equals True and 1.0

    for trial in range(1000):
        monkeypatch.setattr(large_json, "SLICE_BYTES", rng.choice((16, 17, 23, 40, 100)))
        monkeypatch.setattr(json_count, "_STEP", rng.choice((1, 7, 64)))
        text = some_text(rng)
        asyncio.run(compare(text, f"seed {seed}, trial {trial}: {text!r}"))


def decoded(value: Any) -> Any:
    return asyncio.run(LargeJson().decode(json.dumps(value).encode(), {"prompt"}))


@pytest.mark.parametrize("extreme", [0, -(2**31), 2**31 - 1])
def test_long_lists_of_token_ids_are_arrays(extreme: int) -> None:
    ids = [extreme, *range(100_000)]
    assert decoded({"prompt": ids, "other": ids}) == {"prompt": [array("i", ids)], "other": ids}
    assert decoded({"prompt": [ids, [1, 2], ids]}) == {"prompt": [array("i", ids), [1, 2], array("i", ids)]}
    assert decoded([ids]) == [ids]


@pytest.mark.parametrize("other", [2**31, 2**70, 0.5, True, None, "1", [1], {"a": 1}])
@pytest.mark.parametrize("place", [0, 50_000, 100_000])
def test_long_lists_that_hold_something_else_stay_lists(other: Any, place: int) -> None:
    values: list[Any] = list(range(100_000))
    values.insert(place, other)
    found = decoded({"prompt": values})["prompt"]
    assert found == values
    assert [type(found), type(found[place])] == [list, type(other)]


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_refused_before_anything_is_decoded(opening: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(msgspec.json, "decode", None)
    text = opening * 101 + "1" + {"[": "]", '{"a":': "}"}[opening] * 101
    with pytest.raises(ApiError, match="nested deeper than 100 levels"):
        asyncio.run(LargeJson().decode(text.encode(), ()))


def message(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


LONG = "some words \u00e9\n " * (3 * 2**20 // 13)
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": ("/v1/chat/completions", {"messages": [message(LONG)]}),
    "a part": ("/v1/chat/completions", {"messages": [message([{"type": "text", "text": LONG}])]}),
    "many messages": ("/v1/chat/completions", {"messages": [message("x" * 100)] * 20_000}),
    "a tool": (
        "/v1/chat/completions",
        {"messages": [], "tools": [{"type": "function", "function": {"name": "f", "description": LONG}}]},
    ),
    "a system text": ("/v1/messages", {"max_tokens": 1, "messages": [message("x")], "system": LONG}),
    "input": ("/v1/responses", {"input": LONG}),
    "a prompt": ("/v1/completions", {"prompt": LONG}),
    "ids": ("/v1/completions", {"prompt": [123456] * 400_000}),
    "many fields": ("/tokenize", {f"field{number}": LONG[:2] for number in range(90_000)} | {"prompt": "x"}),
    "lists of ids": ("/v1/completions", {"prompt": [[123456] * 150_000] * 2}),
}


@pytest.mark.parametrize("name", BODIES)
def test_others_run_between_slices_of_a_large_body(
    connect: Connect, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No single call decodes more than a slice, and the event loop comes round before another slice is decoded."""
    decode, rounds, by_round, calls = msgspec.json.decode, [0], Counter[int](), Counter[int]()

    def counted(data: Any, *, type: Any = Any) -> Any:
        if type is Any:
            size = len(memoryview(data))
            assert size <= SLICE_BYTES + 2
            by_round[rounds[0]] += size
            calls[rounds[0]] += 1
        else:  # the values' places
            assert type in (dict[str, msgspec.Raw], list[msgspec.Raw])
        return decode(data, type=type)

    async def count() -> None:
        while True:
            rounds[0] += 1
            await asyncio.sleep(0)

    async def run() -> None:
        counting = asyncio.create_task(count())
        path, fields = BODIES[name]
        content = json.dumps({"model": INFO.model_id} | fields, ensure_ascii=False).encode()
        assert len(content) > LARGE_BYTES
        async with connect(ScriptedEngine([*said("x"), ended()])) as client:
            with monkeypatch.context() as patched:
                patched.setattr(msgspec.json, "decode", counted)
                await client.post(path, content=content)
        counting.cancel()
        assert sum(by_round.values()) > LARGE_BYTES / 4

    asyncio.run(run())
    assert max(by_round.values()) <= SLICE_BYTES + 2
    assert max(calls.values()) <= SLICE_BYTES // VALUE_BYTES


def test_large_bodies_are_decoded_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    decode, order = msgspec.json.decode, list[str]()

    def noted(data: Any, *, type: Any = Any) -> Any:
        if type is Any:
            order.extend(name for name in "abc" if 10 * name.encode() in bytes(data))
        return decode(data, type=type)

    async def run() -> None:
        large = LargeJson()
        bodies = [json.dumps({"text": name * 2**20}).encode() for name in "abc"]
        tasks = [asyncio.create_task(large.decode(body, ())) for body in bodies]
        await asyncio.sleep(0)
        tasks[1].cancel()  # its client leaves
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [found[0], found[2]] == [{"text": name * 2**20} for name in "ac"]
        assert isinstance(found[1], asyncio.CancelledError)

    monkeypatch.setattr(msgspec.json, "decode", noted)
    asyncio.run(run())
    assert sorted(order) == order
    assert set(order) == {"a", "c"}


def test_a_long_prompt_of_ids_reaches_the_engine(connect: Connect) -> None:
    ids = [*range(INFO.vocab_size)] * (2 * LARGE_BYTES // (4 * INFO.vocab_size))
    engine = ScriptedEngine([*said("x"), ended()])

    async def ask(prompt: Any, **fields: Any) -> httpx.Response:
        async with connect(engine) as client:
            body = {"model": INFO.model_id, "prompt": prompt, "max_tokens": 1, **fields}
            return await client.post("/v1/completions", json=body)

    answer = asyncio.run(ask(ids, return_token_ids=True))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["prompt_token_ids"] == ids
    assert asyncio.run(ask([ids, [1, 2]])).status_code == 200
    assert list(map(list, [submit.prompt_ids for submit in engine.submits])) == [ids, ids, [1, 2]]
    assert isinstance(engine.submits[0].prompt_ids, array)
