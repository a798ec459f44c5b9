"""Sentinels: characters that stand for added tokens in rendered text and that no client text can contain.

Client text that spells an added token therefore stays text. Each added token of a tokenizer gets a lone surrogate.
Knows nothing of templates or messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentspec.errors import CheckpointError, RequestError
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import tokens

ANY_SENTINEL = re.compile("([\ud800-\udfff])")
_FIRST, _MOST = 0xD800, 0x7FF
OWN_TAG = "\udfff"
"""Written next to a tag that the server itself puts into a message: the tag is the token, not text."""


class Sentinels:
    """The sentinels of one tokenizer. False when it is empty: text that spells an added token is then that token."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        """None: no sentinels. Raises CheckpointError for a tokenizer with more added tokens than there are
        surrogates."""
        added = () if tokenizer is None else tuple(zip(tokenizer.added_tokens, tokenizer.added_ids, strict=True))
        if len(added) > _MOST:
            raise CheckpointError(
                f"the tokenizer has {len(added):,} added tokens; clients' text can be kept apart from {_MOST:,} at most"
            )
        self._sentinel_of = {token.text: chr(_FIRST + number) for number, (token, _) in enumerate(added)}
        self._text_of = {sentinel: text for text, sentinel in self._sentinel_of.items()}
        self._of_id = {token_id: self._sentinel_of[token.text] for token, token_id in added}
        self.ids_of = {sentinel: tokens([token_id]) for token_id, sentinel in self._of_id.items()}
        """Sentinel -> ids of its token (one id)."""
        by_length = sorted(self._sentinel_of, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")

    def __bool__(self) -> bool:
        return bool(self._sentinel_of)

    def of(self, text: str) -> str:
        """Return the sentinel of an added token; for any other text, the text itself."""
        return self._sentinel_of.get(text, text)

    def write(self, text: str) -> str:
        """Replace every added token in the text with its sentinel."""
        return self._spelled.sub(lambda found: self._sentinel_of[found[0]], text)

    def write_own(self, text: str, opening: str, closing: str) -> str:
        """Replace the two tags with their sentinels where OWN_TAG is at their inner side."""
        if OWN_TAG not in text:
            return text
        return text.replace(opening + OWN_TAG, self.of(opening)).replace(OWN_TAG + closing, self.of(closing))

    def spell(self, text: str) -> str:
        """Replace each sentinel with the text of its token: the inverse of `write`."""
        return ANY_SENTINEL.sub(lambda found: self._text_of[found[0]], text) if self else text

    def decode(self, ids: Sequence[int], token_bytes: Sequence[bytes]) -> str:
        """Decode ids to text. Added tokens with bytes in `token_bytes` become sentinels; invalid UTF-8 becomes
        U+FFFD."""
        parts: list[str] = []
        run: list[bytes] = []
        for token_id in ids:
            if token_id in self._of_id and token_bytes[token_id]:
                parts += [b"".join(run).decode("utf-8", "replace"), self._of_id[token_id]]
                run = []
            else:
                run.append(token_bytes[token_id])
        return "".join([*parts, b"".join(run).decode("utf-8", "replace")])

    def end_of(self, spelled: str, text: str, start: int) -> int | None:
        """Return the end of the part of `text` from `start` that spells `spelled`; None when it spells something
        else."""
        place, done = start, 0
        while done < len(spelled):
            stop = place + len(spelled) - done
            found = ANY_SENTINEL.search(text, place, stop)
            part = text[place : found.start() if found else stop] + (self._text_of[found[0]] if found else "")
            if not part or not spelled.startswith(part, done):
                return None
            place = found.end() if found else stop
            done += len(part)
        return place


def refuse_surrogates(value: Any, field: str) -> None:
    """Raise RequestError naming the first text in a JSON-like value that contains a lone surrogate."""
    try:
        msgspec.json.encode(value)  # much faster than checking each text
    except Exception:  # it also fails for values that are not JSON, which are checked elsewhere
        for place, text in _texts(value, field):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    place, text[max(0, error.start - 20) : error.end], f"is not valid Unicode: {error.reason}"
                ) from None


def _texts(value: Any, field: str) -> list[tuple[str, str]]:
    """Return (field, text) for every text in a value. A key has the field name of its object."""
    found: list[tuple[str, str]] = []
    waiting: list[tuple[str, Any]] = [(field, value)]
    while waiting:
        place, part = waiting.pop()
        if isinstance(part, str):
            found.append((place, part))
        elif isinstance(part, Mapping):
            found += [(place, key) for key in part if isinstance(key, str)]
            waiting += [(f"{place}.{key}", part[key]) for key in reversed(list(part))]
        elif isinstance(part, list | tuple):
            waiting += [(f"{place}[{index}]", part[index]) for index in reversed(range(len(part)))]
    return found
