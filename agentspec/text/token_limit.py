"""No more tokens than a context holds: texts that are too long are refused before they are encoded, or as soon as it
shows.

Owns what can be said of a tokenizer by its parts alone: how many bytes one id stands for at most, and where a text can
be cut so that its parts have the ids of the whole. Where neither is certain, texts are encoded whole, and the ids
counted.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from agentspec.errors import ContextLengthError
from agentspec.types import tokens

_NFC_SHRINKS = 4
"""Canonical composition makes no text shorter than this fraction of its UTF-8 (U+1FBE U+0308 U+0301, 7 bytes, become
the 2 of U+0390)."""

_KEEPS_ALL = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")

_WORDS_APART = frozenset(
    {
        # Qwen2 to Qwen3, and Qwen3.5
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
"""Splits that end a match behind a letter that a single space and a letter follow, whatever stands before, and begin
the next one at that space, whatever comes after: none looks behind, and all that look ahead look at the blanks that
they match. Normalisation joins nothing with a space."""

_WORD_CUT = re.compile("[A-Za-z](?= [A-Za-z])")
_PART_CHARACTERS = 1 << 16
_BATCH_CHARACTERS = 1 << 20
"""Encoded at a time: then the ids are counted."""


_ASCII = bytes(range(128))
_LETTERS = bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1))

COUNTED_CONTEXTS = 4
"""What only counts tokens counts so many contexts."""


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How many tokens a text may have."""

    context: int
    times: int = 1
    """For those who only count: so many contexts."""

    @property
    def most(self) -> int:
        return self.context * self.times

    def error(self, found: str) -> ContextLengthError:
        times = f"{self.times} times " if self.times > 1 else ""
        return ContextLengthError("prompt_ids", found, f"exceeds {times}the context limit of {self.context} tokens")

    def check(self, num_tokens: int, *, is_all: bool = True) -> None:
        """Raises ContextLengthError for too many tokens. is_all: there are no more of them."""
        if num_tokens > self.most:
            raise self.error(f"{num_tokens} tokens" if is_all else f"more than {num_tokens} tokens")

    def check_text(self, text: str, bounds: TokenBounds | None) -> None:
        """Raises ContextLengthError for a text that has more tokens however it is encoded."""
        if bounds is None or 4 * len(text) <= self.most * bounds.most_letters:
            return
        data = text.encode(errors="ignore")  # without sentinels, each of which is one id
        if bounds.least_tokens(data) > self.most:
            raise self.error(f"{len(data):,} bytes")


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """What one id stands for at most."""

    most_bytes: int
    """Of text that normalisation leaves as it is."""
    most_letters: int
    """ASCII letters, of which long tokens have fewer than of blanks."""

    def least_tokens(self, data: bytes) -> int:
        """No fewer ids can stand for a text; data: its UTF-8."""
        num_others = (
            0 if data.isascii() else len(data.translate(None, _ASCII))
        )  # composition joins no more letters than there are marks
        num_letters = len(data) - len(data.translate(None, _LETTERS)) - num_others
        return max(
            len(data) // (self.most_bytes * (_NFC_SHRINKS if num_others else 1)), num_letters // self.most_letters
        )


class Encodes(Protocol):
    """What is needed of a tokenizer."""

    bounds: TokenBounds | None
    cuts_at_words: bool

    def encode_batch(self, texts: Sequence[str], *, added_tokens: bool = True) -> list[list[int]]: ...


def encode_within(
    tokenizer: Encodes,
    texts: Sequence[str],
    *,
    each: TokenLimit | None = None,
    together: TokenLimit | None = None,
    added_tokens: bool = True,
) -> list[array[int]]:
    """The ids of each text, as the tokenizer's `encode` has them. Raises ContextLengthError for too many, of one text
    or of all; and RequestError like `encode`."""
    limit = each or together
    if limit is not None:
        for text in texts:
            limit.check_text(text, tokenizer.bounds)
    found = [tokens() for _ in texts]
    num_all = 0
    for batch in _batches(texts, tokenizer.cuts_at_words and limit is not None):
        for (place, _), ids in zip(
            batch, tokenizer.encode_batch([part for _, part in batch], added_tokens=added_tokens), strict=True
        ):
            found[place].extend(ids)
            num_all += len(ids)
            if each is not None:
                each.check(len(found[place]), is_all=False)
        if together is not None:
            together.check(num_all, is_all=False)
    return found


def _batches(texts: Sequence[str], cuts: bool) -> Iterator[list[tuple[int, str]]]:
    """The texts, or their parts, with the place of each text, as many at a time as are encoded at once."""
    batch: list[tuple[int, str]] = []
    size = 0
    for place, text in enumerate(texts):
        for part in _parts(text) if cuts else [text]:
            batch.append((place, part))
            size += len(part)
            if size >= _BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _parts(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > 2 * _PART_CHARACTERS and (cut := _WORD_CUT.search(text, start + _PART_CHARACTERS)):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def token_bounds(backend: Backend, table: Sequence[bytes], *, cuts_only: bool) -> TokenBounds | None:
    """None: nobody can say, as where a part of the tokenizer drops some of the text.

    table: the bytes behind each id, as `encode` reads them. cuts_only: no added token takes blanks from its
    neighbours."""
    normalizer = backend.normalizer
    if not cuts_only or not (normalizer is None or isinstance(normalizer, normalizers.NFC)):
        return None
    parts = _pre_tokenizers(backend)
    if not any(part["type"] == "ByteLevel" for part in parts):
        return None
    if not all(part["type"] in ("ByteLevel", "Digits") or part.get("behavior") in _KEEPS_ALL for part in parts):
        return None
    if {token for token in table if len(token) == 1} != {bytes([byte]) for byte in range(256)}:
        return None
    most_letters = 1
    for token in table:
        if len(token) > most_letters:
            most_letters = max(most_letters, len(token) - len(token.translate(None, _LETTERS)))
    return TokenBounds(max(map(len, table)), most_letters)


def can_cut_at_words(backend: Backend, *, cuts_only: bool) -> bool:
    """A text without added tokens may be cut between an ASCII letter and a single space with a letter behind it."""
    if not cuts_only or not (backend.normalizer is None or isinstance(backend.normalizer, normalizers.NFC)):
        return False
    match _pre_tokenizers(backend):
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:
            return pattern in _WORDS_APART
    return False


def _pre_tokenizers(backend: Backend) -> list[dict[str, Any]]:
    if backend.pre_tokenizer is None:
        return []
    described = json.loads(backend.pre_tokenizer.__getstate__())
    return list(described["pretokenizers"]) if described["type"] == "Sequence" else [described]
