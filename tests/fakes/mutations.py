"""Makes files hostile: small seeded changes of valid ones, in their bytes and in the values of their JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

DEEP = "[" * 100_000 + "]" * 100_000
LITERALS = (
    *(
        "null",
        "true",
        "0",
        "-1",
        "1.5",
        "1e400",
        "-1e400",
        "NaN",
        "1e-400",
        "1000000000000000000",
        "9" * 4000,
        "9" * 100_000,
    ),
    *(
        '""',
        '"x"',
        '"\\ud800"',
        '"../../etc/passwd"',
        '"/dev/zero"',
        '"' + "x" * 5000 + '"',
        "[]",
        "{}",
        '[{"a": []}]',
        '{"": {}}',
        DEEP,
    ),
)
"""Values as JSON spells them, and as it doesn't."""

_MARK = "@@hostile@@"


def mutated_json(document: Any, rng: random.Random) -> bytes:
    """The document as text, with one value, at any depth, replaced by a hostile one or removed."""
    copy = json.loads(json.dumps(document))
    holder, key = rng.choice(list(_places(copy)))
    if rng.random() < 0.15:
        del holder[key]
        return json.dumps(copy).encode()
    holder[key] = _MARK
    return json.dumps(copy).replace(json.dumps(_MARK), rng.choice(LITERALS)).encode("utf-8", "surrogatepass")


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes, remove or repeat a piece, or cut off the end."""
    kind = rng.choice(("flip", "cut", "drop", "repeat", "insert"))
    first = rng.randrange(len(data) + 1)
    last = min(len(data), first + rng.choice((1, 3, 20, 300)))
    if kind == "cut":
        return data[:first]
    if kind == "drop":
        return data[:first] + data[last:]
    if kind == "repeat":
        return data[:last] + data[first:last] * rng.choice((1, 2, 50)) + data[last:]
    if kind == "insert":
        return data[:first] + rng.choice((b"\0", b"\xff", b"\n", b"[" * 2000, b"{", b'"', b"9" * 5000)) + data[first:]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 4))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])
