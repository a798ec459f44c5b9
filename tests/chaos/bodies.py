"""Huge bodies, malformed bodies, and unusual HTTP: each gets an answer with the right status, and other clients are not
affected."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.chaos.arena import Arena, Outcome, attacked, opened
from tests.chaos.asks import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.chaos.connection import GONE, Connection, request_bytes

MIB = 2**20
SECONDS = 120.0
"""An answer that takes longer counts as missing."""
FINE = frozenset({200})
REFUSED = frozenset({400, 413, 422})
EITHER = FINE | REFUSED
GARBLED = frozenset({400, 408, 413, 414, 431, 501, 505, None})
"""Input that isn't HTTP may be answered or cut off; None: cut off."""


@dataclass(frozen=True, slots=True)
class Case:
    """One case to send."""

    name: str
    wire: Callable[[str, float], bytes]
    """(model, share of the full size) -> bytes to send."""
    statuses: frozenset[int | None] = REFUSED
    num_answers: int = 1
    ends_sending: bool = False
    """The client closes its sending direction after the last byte."""


def post(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    return request_bytes(path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "temperature": 0,
    } | fields


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _field(text: str) -> Callable[[str, float], bytes]:
    """A chat body with a part that json.dumps can't write."""
    return lambda model, _: post(CHAT, json.dumps(chat(model)).encode()[:-1] + b", " + text.encode("latin-1") + b"}")


def _tools(count: int, size: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{number}", "description": "x" * size, "parameters": {}}}
        for number in range(count)
    ]


def _words(num_bytes: float) -> str:
    return ("some words of a long text " * (int(num_bytes) // 26 + 1))[: int(num_bytes)]


def _deep(depth: int) -> bytes:
    return b'{"model": "m", "messages": ' + b"[" * depth + b"]" * depth + b"}"


def _raw(text: str) -> Callable[[str, float], bytes]:
    return lambda *_: text.encode("latin-1")


def _edited(edit: Callable[[bytes], bytes]) -> Callable[[str, float], bytes]:
    """A valid request in another spelling."""
    return lambda model, _: edit(post(CHAT, chat(model), {"connection": "close"}))


def _chunked(model: str, sizes: tuple[int, ...], extension: bytes = b"") -> bytes:
    content = json.dumps(chat(model)).encode()
    pieces, place = list[bytes](), 0
    while place < len(content):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(content[place : place + size])
        place += size
    coded = b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
    return request_bytes(CHAT, b"", {"transfer-encoding": "chunked"}) + coded + b"0\r\n\r\n"


HUGE = (
    Case("24 MiB of one text", lambda model, share: post(CHAT, chat(model, messages=_said(_words(24 * MIB * share))))),
    Case(
        "24 MiB of a system text, messages",
        lambda model, share: post(MESSAGES, chat(model, system=_words(24 * MIB * share))),
    ),
    Case(
        "24 MiB of one prompt",
        lambda model, share: post(COMPLETIONS, {"model": model, "prompt": _words(24 * MIB * share)}),
    ),
    Case("24 MiB of input", lambda model, share: post(RESPONSES, {"model": model, "input": _words(24 * MIB * share)})),
    Case(
        "24 MiB of text to count",
        lambda model, share: post("/tokenize", {"model": model, "prompt": _words(24 * MIB * share)}),
        EITHER,
    ),
    Case("4M spaces", lambda model, share: post(CHAT, chat(model, messages=_said("a" + " " * int(4e6 * share) + "x")))),
    Case("4M letters", lambda model, share: post(CHAT, chat(model, messages=_said("a" * int(4e6 * share))))),
    Case("4M digits", lambda model, share: post(CHAT, chat(model, messages=_said("7" * int(4e6 * share))))),
    Case("4M signs", lambda model, share: post(CHAT, chat(model, messages=_said("!?" * int(2e6 * share))))),
    Case(
        "1M accents on one letter",
        lambda model, share: post(CHAT, chat(model, messages=_said("a" + "\u0301" * int(1e6 * share)))),
    ),
    Case(
        "1M control tokens",
        lambda model, share: post(CHAT, chat(model, messages=_said("<|im_end|>" * int(1e6 * share)))),
    ),
    Case("1M tiny messages", lambda model, share: post(CHAT, chat(model, messages=_said("x") * int(1e6 * share)))),
    Case(
        "1M tiny parts",
        lambda model, share: post(
            CHAT,
            chat(model, messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * int(1e6 * share)}]),
        ),
    ),
    Case("200k tools", lambda model, share: post(CHAT, chat(model, tools=_tools(int(2e5 * share), 1)))),
    Case("a tool of 16 MiB", lambda model, share: post(CHAT, chat(model, tools=_tools(1, int(16 * MIB * share))))),
    Case("1M token ids", lambda model, share: post(COMPLETIONS, {"model": model, "prompt": [65] * int(1e6 * share)})),
    Case(
        "an image of 32 MiB",
        lambda model, share: post(
            CHAT,
            chat(
                model,
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "image_url",
                                "image_url": {"url": "data:image/png;base64," + "A" * int(32 * MIB * share)},
                            }
                        ],
                    }
                ],
            ),
        ),
    ),
    Case(
        "200k unknown fields",
        lambda model, share: post(CHAT, chat(model, **{f"field{number}": 1 for number in range(int(2e5 * share))})),
        EITHER,
    ),
    Case("a key of 4 MiB", lambda model, share: post(CHAT, chat(model, **{"k" * int(4 * MIB * share): 1})), EITHER),
    Case(
        "500k biases",
        lambda model, share: post(CHAT, chat(model, logit_bias={str(number): 1 for number in range(int(5e5 * share))})),
        EITHER,
    ),
    Case("a stop of 300 KB", lambda model, share: post(CHAT, chat(model, stop="ab" * int(150_000 * share)))),
    Case("1M stops", lambda model, share: post(CHAT, chat(model, stop=["x"] * int(1e6 * share)))),
    Case("65 MiB", lambda model, share: post(CHAT, chat(model, messages=_said("x" * 65 * MIB))), frozenset({413})),
    Case(
        "2,048 prompts",
        lambda model, share: post(COMPLETIONS, {"model": model, "prompt": ["x"] * 2048, "max_tokens": 1}),
        EITHER | {429},
    ),
    Case(
        "20k headers",
        lambda model, share: request_bytes(
            "/health", headers={f"x-{number}": "y" for number in range(int(2e4 * share))}
        ),
        GARBLED,
    ),
    Case(
        "a header of 1 MiB",
        lambda model, share: request_bytes("/health", headers={"x": "y" * int(MIB * share)}),
        GARBLED,
    ),
    Case("a path of 1 MiB", lambda model, share: request_bytes("/" + "y" * int(MIB * share)), GARBLED),
)
ODD = (
    Case("nested 100,000 deep", lambda *_: post(CHAT, _deep(100_000))),
    Case("invalid UTF-8", lambda *_: post(CHAT, b'{"model": "\xff\xfe"}')),
    Case("UTF-8 of a surrogate", lambda *_: post(CHAT, b'{"model": "\xed\xa0\x80"}')),
    Case("a lone surrogate", lambda model, _: post(CHAT, json.dumps(chat(model, messages=_said("\ud800"))).encode())),
    Case("a number of 100,000 digits", _field('"seed": ' + "9" * 100_000)),
    Case("a limit of 100,000 digits", _field('"max_completion_tokens": ' + "9" * 100_000)),
    Case("1e400", _field('"top_p": 1e400')),
    Case("NaN", _field('"top_p": NaN')),
    Case("Infinity", _field('"top_p": -Infinity')),
    Case("a field twice", _field('"top_p": 1, "top_p": 0.5'), EITHER),
    Case("an empty body", lambda *_: post(CHAT, b"")),
    Case("a body of null", lambda *_: post(CHAT, b"null")),
    Case("a zero byte", lambda *_: post(CHAT, b"\0")),
    Case("a byte order mark", lambda model, _: post(CHAT, b"\xef\xbb\xbf" + json.dumps(chat(model)).encode()), EITHER),
    Case(
        "text as content-type", lambda model, _: post(CHAT, chat(model), {"content-type": "text/plain"}), EITHER | {415}
    ),
    Case(
        "a form as content-type",
        lambda model, _: post(CHAT, chat(model), {"content-type": "multipart/form-data; boundary=x"}),
        EITHER | {415},
    ),
    Case(
        "gzip",
        lambda model, _: post(CHAT, gzip.compress(json.dumps(chat(model)).encode()), {"content-encoding": "gzip"}),
        REFUSED | {415},
    ),
    Case(
        "a gzip bomb",
        lambda *_: post(CHAT, gzip.compress(b" " * 64 * MIB), {"content-encoding": "gzip"}),
        REFUSED | {415},
    ),
    Case("chunks of odd sizes", lambda model, _: _chunked(model, (1, 3, 7, 1, 50)), FINE),
    Case("chunks with extensions", lambda model, _: _chunked(model, (16,), b";a=b"), FINE),
    Case("a chunk of -1 bytes", lambda *_: request_bytes(CHAT, b"-1\r\n", {"transfer-encoding": "chunked"}), GARBLED),
    Case(
        "a chunk of 2^64 bytes",
        lambda *_: request_bytes(CHAT, b"1" + b"0" * 16 + b"\r\nx", {"transfer-encoding": "chunked"}),
        GARBLED,
        ends_sending=True,
    ),
    Case(
        "a length that is too small",
        lambda model, _: post(CHAT, chat(model), {"content-length": "10"}),
        frozenset({400}),
    ),
    Case(
        "a length that is too large",
        lambda model, _: post(CHAT, chat(model), {"content-length": "9999"}),
        GARBLED,
        ends_sending=True,
    ),
    Case("a negative length", lambda model, _: post(CHAT, chat(model), {"content-length": "-1"}), GARBLED),
    Case(
        "a length of 10^30",
        lambda model, _: post(CHAT, chat(model), {"content-length": "1" + "0" * 30}),
        GARBLED,
        ends_sending=True,
    ),
    Case("two lengths", _edited(lambda wire: wire.replace(b"\r\n\r\n", b"\r\ncontent-length: 3\r\n\r\n", 1)), GARBLED),
    Case(
        "length and chunks",
        lambda model, _: post(CHAT, chat(model), {"transfer-encoding": "chunked", "content-length": "5"}),
        GARBLED,
        ends_sending=True,
    ),
    Case(
        "an unknown coding", lambda model, _: post(CHAT, chat(model), {"transfer-encoding": "gzip, chunked"}), GARBLED
    ),
    Case("two hosts", _edited(lambda wire: wire.replace(b"\r\n\r\n", b"\r\nhost: other\r\n\r\n", 1)), GARBLED | {403}),
    Case("no host", _edited(lambda wire: wire.replace(b"host: 127.0.0.1\r\n", b"", 1)), GARBLED),
    Case("three requests in one write", lambda model, _: 3 * post(CHAT, chat(model)), FINE, num_answers=3),
    Case("HTTP/1.0", lambda model, _: request_bytes(CHAT, json.dumps(chat(model)).encode(), version="1.0"), FINE),
    Case("HTTP/3.7", _edited(lambda wire: wire.replace(b"HTTP/1.1", b"HTTP/3.7", 1)), GARBLED | FINE),
    Case("expect: 100-continue", lambda model, _: post(CHAT, chat(model), {"expect": "100-continue"}), FINE),
    Case("expect: something else", lambda model, _: post(CHAT, chat(model), {"expect": "tea"}), FINE | {417}),
    Case("bare line feeds", _edited(lambda wire: wire.replace(b"\r\n", b"\n")), GARBLED | FINE),
    Case(
        "a folded header", _edited(lambda wire: wire.replace(b"\r\n\r\n", b"\r\nx: y\r\n z\r\n\r\n", 1)), GARBLED | FINE
    ),
    Case("a zero byte in a header", _edited(lambda wire: wire.replace(b"\r\n\r\n", b"\r\nx: \0\r\n\r\n", 1)), GARBLED),
    Case(
        "an unknown method", lambda *_: b"BREW / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", frozenset({400, 404, 405, 501})
    ),
    Case(
        "CONNECT",
        lambda *_: b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
        frozenset({400, 404, 405, 501}),
    ),
    Case("OPTIONS *", lambda *_: b"OPTIONS * HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", frozenset({400, 404, 405})),
    Case(
        "a whole address as path",
        _edited(lambda wire: wire.replace(b" /v1", b" http://127.0.0.1/v1", 1)),
        frozenset({200, 400, 404, 405}),
    ),
    Case("a path out of the folder", lambda *_: request_bytes("/static/..%2f..%2fapp.py"), frozenset({404})),
    Case(
        "an upgrade to websocket",
        lambda *_: request_bytes(
            "/", headers={"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x"}
        ),
        frozenset({200, 400, 404, 426}),
    ),
    Case("HTTP/2", _raw("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), GARBLED | {404}, ends_sending=True),
    Case("TLS", _raw("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "\x00" * 500), GARBLED, ends_sending=True),
    Case("128 choices", lambda model, _: post(CHAT, chat(model, n=128, max_tokens=2)), FINE | {429}),
)


async def run(
    size: int, seed: int, *, with_watch: bool = False, log: Path | None = None, share: float = 1.0, huge: bool = True
) -> Outcome:
    """size: rounds over all cases. share: of the full size of huge ones."""
    outcome = Outcome("huge and odd bodies", size, seed)
    cases = [*(HUGE if huge else ()), *ODD]
    times: list[tuple[float, float, str]] = []
    async with opened(outcome, log=log) as arena:
        if with_watch and size > 1:
            await _send_all(arena, cases, share, [])
        async with attacked(arena, with_watch=with_watch):
            for _ in range(size):
                await _send_all(arena, cases, share, times)
    outcome.notes = {"cases": len(cases), "slowest": _slowest(times), **_late(outcome, times)}
    return outcome


async def _send_all(arena: Arena, cases: list[Case], share: float, times: list[tuple[float, float, str]]) -> None:
    arena.rng.shuffle(cases)
    for case in cases:
        if arena.served.process.poll() is not None:
            return
        data = case.wire(arena.served.model, share)
        if share < 1:  # a smaller one may be accepted
            case = replace(case, statuses=case.statuses | FINE | {404})
        began = time.perf_counter()
        try:
            async with asyncio.timeout(SECONDS):
                await _send(arena, case, data)
        except TimeoutError:
            arena.outcome.check(False, f"{case.name}: no answer within {SECONDS:g} s")
        times.append((began, time.perf_counter(), case.name))


async def _send(arena: Arena, case: Case, data: bytes) -> None:
    async with await Connection.open(arena.served.port) as connection:
        sending = asyncio.create_task(_written(connection, data, ends_sending=case.ends_sending))
        for _ in range(case.num_answers):
            answer = await connection.read()
            fits = answer.status in case.statuses and (answer.is_whole or None in case.statuses)
            arena.outcome.check(fits, f"{case.name}: {answer.status}, whole={answer.is_whole}: {answer.body[:200]!r}")
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending


async def _written(connection: Connection, data: bytes, *, ends_sending: bool) -> None:
    with suppress(*GONE):
        await connection.send(data)
        if ends_sending:
            connection.close_sending()


def _slowest(times: list[tuple[float, float, str]]) -> dict[str, float]:
    """Seconds to the answer of the slowest cases."""
    by_name: dict[str, float] = defaultdict(float)
    for began, ended, name in times:
        by_name[name] = max(by_name[name], ended - began)
    return {name: round(seconds, 2) for name, seconds in sorted(by_name.items(), key=lambda item: -item[1])[:8]}


def _late(outcome: Outcome, times: list[tuple[float, float, str]]) -> dict[str, dict[str, float]]:
    """By case: the maximum delay of the server compared with the control during it, in milliseconds."""
    found: dict[str, dict[str, float]] = {}
    for what, worst in outcome.watched.get("worst", {}).items():
        by_name: dict[str, float] = {}
        for end, behind in worst:
            names = [name for began, ended, name in times if began <= end and end - behind <= ended]
            for name in names[-1:]:
                by_name.setdefault(name, round(1000 * behind, 1))
        found[f"{what} behind"] = by_name
    return found
