"""Decodes large JSON bodies in slices, between which others may run: a decoder holds the interpreter until it returns.

The result is msgspec's, except that long lists of token ids are arrays where the caller takes them, and that of equal
names in a large object only the last one's value is decoded, and so refused if it is wrong. One body at a time is
decoded, API keys taking turns, so that others wait for one slice, however many large bodies arrive.
"""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from agentspec.fair_queue import FairQueue, Flow
from agentspec.files import MAX_NESTING
from agentspec.heap import return_free_memory
from agentspec.server.errors import ApiError
from agentspec.server.json_count import JsonCount
from agentspec.types import tokens

LARGE_BYTES = 2**20
"""A body up to this size is decoded within 50 ms, whatever it contains."""
SLICE_BYTES = 2**18
"""Bytes that are decoded at once."""
VALUE_BYTES = 64
"""What a value that is decoded by itself costs beside its bytes, in bytes."""

_MAX_LEVELS = 8
"""Values further inside are decoded whole. Finding the values of an object or array takes one look at all its bytes,
which makes no copy, but isn't divided. A message's text is at level 5."""
_TURNS = 8
"""Turns of the event loop that others get after such a look, which takes up to 20 ms for 32 MiB. A short request needs
several turns; with one a look it would wait for as many looks."""
_MAX_ELEMENTS = 400_000
"""An array that isn't only integers is decoded whole, if the body holds more values."""

_IDLE_SECONDS = 0.5
"""After the last large body, until its memory is returned: by then most requests have passed it on."""

_BLANKS = b" \t\r\n"
_INTEGERS = b"0123456789-, \t\r\n"
_UNFINISHED = re.compile(rb"\\(?:u(?:[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?|[0-9a-fA-F]{0,3})?)?\Z")
"""The beginning of an escape, or of two that are one character, at the end of a text."""
_UNFINISHED_BYTES = 11
_PLACE = re.compile(r" \(byte \d+\)| in position \d+(?:-\d+)?| - at `[^`]*`")
"""A place in a slice, which means nothing to the client."""


class LargeJson:
    """The decoder of one server's large bodies."""

    def __init__(self) -> None:
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(SLICE_BYTES)
        """Bodies before their turn."""
        self._is_busy = False
        self._returning: asyncio.TimerHandle | None = None

    async def decode(self, body: bytes | bytearray, id_fields: Container[str], owner: str = "") -> Any:
        """Decode a body. A long list of integers in a field of `id_fields`, or in a list there, is an array of
        types.tokens; the field itself is then a list with this array. owner: the name of the API key.

        Raises ApiError: 413 for too many values, 400 for invalid JSON and for too many levels. Raises OverloadedError
        if too many bytes wait."""
        async with self._turn(Flow(owner), len(body)):
            count = JsonCount()
            for start in range(0, len(body), SLICE_BYTES):
                count.feed(memoryview(body)[start : start + SLICE_BYTES])
                if count.excess is not None:
                    raise ApiError(413, f"the body {count.excess}", code="body_too_large")
                await asyncio.sleep(0)
            if count.num_levels > MAX_NESTING:
                raise too_deep()
            try:
                return await _Decoding(id_fields, count.num_values).decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise invalid(_PLACE.sub("", str(error))) from None

    @asynccontextmanager
    async def _turn(self, flow: Flow, num_bytes: int) -> AsyncIterator[None]:
        self._waiting.check_room(flow, num_bytes, "decoded")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = self._waiting.enqueue(turn, flow, num_bytes)
        if not self._is_busy:
            self._begin_next()
        try:
            await turn
            yield
        finally:
            self._waiting.remove(ticket)
            if not turn.cancelled():  # otherwise the client has left before its turn
                self._begin_next()

    def _begin_next(self) -> None:
        ticket = self._waiting.dequeue()
        while ticket is not None and ticket.item.cancelled():
            ticket = self._waiting.dequeue()
        self._is_busy = ticket is not None
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None
        if ticket is not None:
            ticket.item.set_result(None)
        else:
            self._returning = asyncio.get_running_loop().call_later(_IDLE_SECONDS, return_free_memory)


def invalid(reason: str) -> ApiError:
    return ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json")


def too_deep() -> ApiError:
    return ApiError(400, f"the body is nested deeper than {MAX_NESTING} levels", code="invalid_json")


class _Decoding:
    """The decoding of one body."""

    def __init__(self, id_fields: Container[str], num_values: int) -> None:
        self._id_fields = id_fields
        self._num_values = num_values
        self._spent = 0
        """Cost of what was decoded since others could run."""

    async def decode(self, body: bytes | bytearray) -> Any:
        return await self._value(await _trimmed(body), 0, takes_array=False)

    async def _value(self, raw: memoryview, level: int, *, takes_array: bool) -> Any:
        if len(raw) > SLICE_BYTES and level < _MAX_LEVELS:
            match bytes([raw[0], raw[-1]]):
                case b"{}":
                    return await self._object(raw, level)
                case b"[]":
                    return await self._array(raw, level, takes_array=takes_array)
                case b'""':
                    return await self._text(raw[1:-1])
        return await self._slice(raw)

    async def _object(self, raw: memoryview, level: int) -> dict[str, Any]:
        found = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        await _let_others()
        values = {}
        for name, part in found.items():
            is_ids = level == 0 and name in self._id_fields
            value = await self._value(memoryview(part), level + 1, takes_array=is_ids)
            values[name] = [value] if isinstance(value, array) else value
        return values

    async def _array(self, raw: memoryview, level: int, *, takes_array: bool) -> list[Any] | array[int]:
        forms: list[list[Any] | array[int]] = [tokens(), []] if takes_array else [[]]
        for values in forms:
            if await self._add_integers(raw[1:-1], values):
                return values
        mixed: list[Any] = []
        if self._num_values > _MAX_ELEMENTS:
            mixed += await self._slice(raw)
            return mixed
        parts = msgspec.json.decode(raw, type=list[msgspec.Raw])
        await _let_others()
        small: list[msgspec.Raw] = []
        num_bytes = 0
        for part in parts:
            part_bytes = len(memoryview(part))
            if small and num_bytes + part_bytes > SLICE_BYTES:
                mixed += await self._slice(b"[" + b",".join(small) + b"]")
                small, num_bytes = [], 0
            if part_bytes > SLICE_BYTES:
                mixed.append(await self._value(memoryview(part), level + 1, takes_array=takes_array))
            else:
                small.append(part)
                num_bytes += part_bytes + 1
        mixed += await self._slice(b"[" + b",".join(small) + b"]")
        return mixed

    async def _add_integers(self, inside: memoryview, values: list[Any] | array[int]) -> bool:
        """Append integers to `values`; return whether there is nothing else, and an array can hold all of them."""
        place = 0
        while place <= len(inside):
            piece = bytes(inside[place : place + SLICE_BYTES])
            if place + len(piece) < len(inside):
                piece = piece[: max(0, piece.rfind(b","))]
            if piece.translate(None, _INTEGERS) or not (found := await self._slice(b"[" + piece + b"]")):
                return False
            try:
                values.extend(found) if isinstance(values, list) else values.fromlist(found)
            except (OverflowError, TypeError):
                return False
            place += len(piece) + 1
        return True

    async def _text(self, inside: memoryview) -> str:
        text, place = "", 0
        while place < len(inside):
            piece = bytes(inside[place : place + SLICE_BYTES])
            if place + len(piece) < len(inside):
                piece = piece[: whole_characters(piece)]
            place += len(piece)
            text += await self._slice(b'"' + piece + b'"')  # grows in place: nobody else has it
        return text

    async def _slice(self, raw: memoryview | bytes) -> Any:
        cost = len(raw) + VALUE_BYTES
        if self._spent + cost > SLICE_BYTES:
            self._spent = 0
            await asyncio.sleep(0)
        self._spent += cost
        return msgspec.json.decode(raw)


async def _let_others() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


async def _trimmed(body: bytes | bytearray) -> memoryview:
    """The body without blanks around it."""
    view = memoryview(body)
    while view and not bytes(view[:SLICE_BYTES]).translate(None, _BLANKS):
        view = view[SLICE_BYTES:]
        await asyncio.sleep(0)
    while view and not bytes(view[-SLICE_BYTES:]).translate(None, _BLANKS):
        view = view[:-SLICE_BYTES]
        await asyncio.sleep(0)
    first, last = bytes(view[:SLICE_BYTES]), bytes(view[-SLICE_BYTES:])
    return view[len(first) - len(first.lstrip(_BLANKS)) : len(view) - len(last) + len(last.rstrip(_BLANKS))]


def whole_characters(piece: bytes) -> int:
    """The length of the beginning of a JSON text, in bytes, without an unfinished character at its end."""
    if b"\\" in piece[-_UNFINISHED_BYTES:]:
        # With pairs of them replaced, every backslash begins an escape.
        begun = _UNFINISHED.search(piece.replace(b"\\\\", b"  "), max(0, len(piece) - _UNFINISHED_BYTES))
        if begun is not None:
            return begun.start()
    last = len(piece) - 1
    while last > max(0, len(piece) - 4) and piece[last] & 0xC0 == 0x80:
        last -= 1
    return last if last >= 0 and piece[last] >= 0xC0 else len(piece)
