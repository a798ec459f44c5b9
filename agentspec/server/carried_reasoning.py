"""Reasoning as an opaque text that clients send back: the format of OpenAI's `encrypted_content`, but not encrypted.

Base64 of: one byte for the format, a CRC-32, the text in UTF-8. Knows nothing of items.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_PLAIN, _DEFLATED = 1, 2
_MOST_TIMES = 8
"""Maximum ratio of a text to its compressed form, so that reading a body costs no more than its length."""


def encode_reasoning(text: str) -> str:
    """Encode a text."""
    raw = text.encode()
    packed = zlib.compress(raw)
    form, held = (_DEFLATED, packed) if len(raw) <= _MOST_TIMES * len(packed) else (_PLAIN, raw)
    return base64.b64encode(bytes([form]) + zlib.crc32(raw).to_bytes(4, "big") + held).decode("ascii")


def decode_reasoning(given: str) -> str | None:
    """Decode a text; None for input that this server did not encode."""
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
