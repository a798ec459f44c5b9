"""Reasoning as an opaque text that clients carry back: OpenAI's `encrypted_content`, without the secrecy. Whoever has
it can read it.

One byte for the form, a check sum, the text in UTF-8, and base64 around it. Knows nothing of items.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_PLAIN, _DEFLATED = 1, 2
_MOST_TIMES = 8
"""A deflated text is at most this many times as long as what carries it: reading a body costs no more than its
length."""


def carried(text: str) -> str:
    """The text that carries this one."""
    raw = text.encode()
    packed = zlib.compress(raw)
    form, held = (_DEFLATED, packed) if len(raw) <= _MOST_TIMES * len(packed) else (_PLAIN, raw)
    return base64.b64encode(bytes([form]) + zlib.crc32(raw).to_bytes(4, "big") + held).decode("ascii")


def read_carried(given: str) -> str | None:
    """The text that was carried; None for what isn't of our making."""
    try:
        held = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError):
        return None
    form, check, raw = held[:1], held[1:5], held[5:]
    if form == bytes([_DEFLATED]):
        reader = zlib.decompressobj()
        try:
            raw = reader.decompress(raw, _MOST_TIMES * len(raw) + 1)
        except zlib.error:
            return None
        if not reader.eof:
            return None
    elif form != bytes([_PLAIN]):
        return None
    try:
        return raw.decode() if zlib.crc32(raw).to_bytes(4, "big") == check else None
    except UnicodeDecodeError:
        return None
