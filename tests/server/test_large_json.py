"""Large bodies are decoded in slices, between which others run, and become the same values as decoded at once."""

from __future__ import annotations

import asyncio
import json
import random
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
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

LETTERS = (
    *(b"a", b"[", b"}", b",", b":", b" ", b"\x7f", b"\\u0041", b"\\u0000", b"\\n", b"\\/", b'\\"', b"\\\\"),
    *(b"\\ud83d\\ude00", b"\\uD83D\\uDE00", b"\\uffff", "\u00e9".encode(), "\u4e2d".encode(), "\U0001f600".encode()),
)
WRONG_LETTERS = (
    *(b"\\ud83d", b"\\ude00", b"\\ud83d\\u0041", b"\\x", b"\\u00", b"\\u00g0", b"\x01", b"\n", b'"', b"\\"),
    *(b"\xff", b"\xc3", b"\x80", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf0\x9f\x98"),
)
SPELLED_NUMBERS = (
    *(
        b"0",
        b"-0",
        b"-0.0",
        b"1E5",
        b"1e-5",
        b"1e-400",
        b"0.1",
        b"1.0",
        b"2147483648",
        b"-2147483649",
        b"9007199254740993",
    ),
    *(b"18446744073709551616", b"9" * 300, b"9" * 4300, b"0." + b"3" * 300, b"true", b"false", b"null"),
)
WRONG_NUMBERS = (
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e400",
        b"9" * 4301,
        b"01",
        b"+1",
        b"1.",
        b".5",
        b"-",
        b"1e",
        b"0x1",
        b"1 1",
    ),
    *(b"True", b"nul", b"", b"1,", b",1", b"]", b"{", b"\xef\xbb\xbf1"),
)


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


class Spelling:
    """Random JSON as clients may write it. Either names come again in an object, or some pieces are wrong: of equal
    names, the values before the last one are not decoded in slices."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._repeats_names = rng.random() < 0.5
        self._wrong = 0.0 if self._repeats_names else rng.choice((0.0, 0.03, 0.1))

    def value(self, depth: int) -> bytes:
        kind = self._rng.randrange(8 if depth else 3)
        if kind == 0:
            return self._blanks(self._text())
        if kind == 1:
            return self._blanks(self._one_of(SPELLED_NUMBERS, WRONG_NUMBERS))
        if kind == 2:
            ids = [self._blanks(b"%d" % self._rng.randrange(-9, 99)) for _ in range(self._rng.randrange(30))]
            return self._blanks(b"[" + b",".join(ids) + b"]")
        size = self._rng.randrange(5)
        if kind < 6:
            fields = [self._blanks(self._name(number)) + b":" + self.value(depth - 1) for number in range(size)]
            return self._blanks(b"{" + b",".join(fields) + b"}")
        return self._blanks(b"[" + b",".join(self.value(depth - 1) for _ in range(size)) + b"]")

    def _name(self, number: int) -> bytes:
        if self._repeats_names:
            return self._rng.choice((b'"prompt"', b'"a"', b'"\\u0061"', b'""'))
        return b'"prompt"' if not number else self._text()[:-1] + b'%d"' % number

    def _text(self) -> bytes:
        size = self._rng.choice((1, 5, 50))
        return b'"' + b"".join(self._one_of(LETTERS, WRONG_LETTERS) for _ in range(self._rng.randrange(size))) + b'"'

    def _one_of(self, right: Sequence[bytes], wrong: Sequence[bytes]) -> bytes:
        return self._rng.choice(wrong if self._rng.random() < self._wrong else right)

    def _blanks(self, text: bytes) -> bytes:
        before, after = (b" \t\r\n" * self._rng.randrange(9) if self._rng.random() < 0.1 else b"" for _ in "ab")
        return before + text + after


async def compare(text: bytes, where: str) -> None:
    """Decode in slices and at once."""
    try:
        expected = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        with pytest.raises(ApiError, match="not valid JSON") as refused:
            await LargeJson().decode(bytearray(text), ("prompt",))
        assert not re.search(r"\(byte|position|at `", str(refused.value)), where
        return
    found = await LargeJson().decode(bytearray(text), ())
    assert found == expected, where
    assert msgspec.json.encode(found) == msgspec.json.encode(expected), where  # 1 equals True and 1.0
    ids = await LargeJson().decode(bytearray(text), ("prompt",))
    if isinstance(ids, dict) and isinstance(ids.get("prompt"), list):
        [first, *rest] = ids["prompt"] or [None]
        if isinstance(first, array) and not rest and expected["prompt"] == first.tolist():
            ids["prompt"] = first
        ids["prompt"] = without_arrays(ids["prompt"])
    assert msgspec.json.encode(ids) == msgspec.json.encode(expected), where


def without_arrays(value: Any) -> Any:
    if isinstance(value, array):
        return value.tolist()
    return [*map(without_arrays, value)] if isinstance(value, list) else value


def cut_anywhere(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the next texts decoded in very small slices, and with other limits."""
    monkeypatch.setattr(large_json, "SLICE_BYTES", rng.choice((16, 17, 23, 40, 100)))
    monkeypatch.setattr(large_json, "_MAX_LEVELS", rng.choice((1, 2, 8)))
    monkeypatch.setattr(large_json, "_MAX_ELEMENTS", rng.choice((5, 400_000)))
    monkeypatch.setattr(json_count, "_STEP", rng.choice((1, 7, 64)))


def some_spelling(rng: random.Random) -> bytes:
    return Spelling(rng).value(6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("texts", "num_texts"), [(some_text, 1000), (some_spelling, 500)])
def test_values_and_refusals_are_those_of_decoding_at_once(
    monkeypatch: pytest.MonkeyPatch, texts: Callable[[random.Random], bytes], num_texts: int, seed: int
) -> None:
    async def run() -> None:
        rng = random.Random(seed)
        for trial in range(num_texts):
            cut_anywhere(rng, monkeypatch)
            text = texts(rng)
            await compare(text, f"seed {seed}, trial {trial}: {text!r}")

    asyncio.run(run())


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


def test_the_most_levels_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "SLICE_BYTES", 16)
    text = b'["[[[[", ' + 98 * b'{"a": ' + b"[1]" + 98 * b"}" + b"]"
    assert asyncio.run(LargeJson().decode(text, ())) == msgspec.json.decode(text)


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


async def count_into(rounds: list[int]) -> None:
    """Count the turns of the event loop."""
    while True:
        rounds[0] += 1
        await asyncio.sleep(0)


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

    async def run() -> None:
        counting = asyncio.create_task(count_into(rounds))
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


def test_a_short_request_passes_between_two_looks_at_all_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs several turns of the event loop. With one after each look it would wait for as many looks."""
    decode, rounds, looks = msgspec.json.decode, [0], list[int]()

    def noted(data: Any, *, type: Any = Any) -> Any:
        if type is not Any:
            looks.append(rounds[0])
        return decode(data, type=type)

    async def run() -> None:
        counting = asyncio.create_task(count_into(rounds))
        body = msgspec.json.encode({"messages": [message([{"image_url": {"url": "A" * (1 << 21)}}])]})
        with monkeypatch.context() as patched:
            patched.setattr(msgspec.json, "decode", noted)
            await LargeJson().decode(body, ())
        counting.cancel()

    asyncio.run(run())
    assert len(looks) == 6, "object, messages, message, content, part, image"
    assert min(after - before for before, after in pairwise(looks)) >= 5


def test_memory_is_returned_when_no_large_body_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    num_returned = 0

    def noted() -> None:
        nonlocal num_returned
        num_returned += 1

    monkeypatch.setattr(large_json, "return_free_memory", noted)
    monkeypatch.setattr(large_json, "_IDLE_SECONDS", 0.0)

    async def run() -> None:
        large = LargeJson()
        for num_rounds in range(1, 4):
            await asyncio.gather(*(large.decode(b'{"a": 1}', ()) for _ in range(5)))
            while num_returned < num_rounds:
                await asyncio.sleep(0)

    asyncio.run(run())
    assert num_returned == 3, "once for the five bodies of each round"


@pytest.mark.parametrize("body", [b" " * 6400, b" " * 6400 + b"1", b"1" + b"\n" * 6400])
def test_others_run_between_slices_of_blanks(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_json, "SLICE_BYTES", 64)
    rounds = [0]

    async def run() -> None:
        counting = asyncio.create_task(count_into(rounds))
        with suppress(ApiError):  # nothing but blanks
            assert await LargeJson().decode(body, ()) == 1
        counting.cancel()

    asyncio.run(run())
    assert rounds[0] >= 200, "100 slices are counted, and then trimmed"


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


def of_bytes(name: str, num_bytes: int) -> bytes:
    return json.dumps(name * (num_bytes - 2)).encode()


def test_api_keys_take_turns() -> None:
    """A key with one large body waits for one body of a key with many."""
    order = list[str]()

    async def decode(large: LargeJson, name: str) -> None:
        await large.decode(of_bytes(name, 2**19), (), owner=name)
        order.append(name)

    async def run() -> None:
        large = LargeJson()
        await asyncio.gather(*[decode(large, name) for name in 8 * "a" + "b"])

    asyncio.run(run())
    assert order.index("b") <= 2, order


def test_large_bodies_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.fair_queue.MAX_OWNER_BYTES", 250)
    monkeypatch.setattr("agentspec.fair_queue.MAX_WAITING_BYTES", 350)

    async def run() -> list[str]:
        large = LargeJson()
        asked = [large.decode(of_bytes("x", 100), (), owner=owner) for owner in "aaaabb"]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert await large.decode(of_bytes("x", 1000), ()) == "x" * 998  # nothing is left, and one may always wait
        return ["" if isinstance(one, str) else str(one) for one in found]

    assert asyncio.run(run()) == [
        *3 * [""],
        "200 bytes of this client wait to be decoded here, and 100 more would exceed 250",
        "",
        "300 bytes of all clients wait to be decoded here, and 100 more would exceed 350",
    ]


def test_a_large_body_beyond_what_may_wait_is_answered_with_429(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentspec.fair_queue.MAX_OWNER_BYTES", 0)
    body = {"model": INFO.model_id, "messages": [message("x" * 2 * LARGE_BYTES)], "max_tokens": 1}

    async def run() -> list[httpx.Response]:
        async with connect(ScriptedEngine([*said("x"), ended()])) as client:
            return await asyncio.gather(*[client.post("/v1/chat/completions", json=body) for _ in range(3)])

    refused = [answer for answer in asyncio.run(run()) if answer.status_code == 429]
    assert len(refused) == 1, "one is decoded, one waits"
    assert refused[0].headers["retry-after"] == "2"
    assert "wait to be decoded" in refused[0].json()["error"]["message"]


@pytest.mark.parametrize("seed", range(3))
def test_bodies_of_clients_that_leave_at_any_time_pass_on_their_turn(seed: int) -> None:
    rng = random.Random(seed)

    async def run() -> None:
        large = LargeJson()
        tasks = [
            asyncio.create_task(large.decode(of_bytes("x", rng.choice((10, 2**19))), (), owner=rng.choice("abc")))
            for _ in range(60)
        ]
        for _ in range(200):
            await asyncio.sleep(0)
            for task in rng.sample(tasks, rng.randrange(3)):
                task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        assert await asyncio.wait_for(large.decode(b"1", ()), 60) == 1, f"seed {seed}"

    asyncio.run(run())


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
