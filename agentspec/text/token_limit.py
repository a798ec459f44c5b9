"""Token limits: refuse texts that exceed a context before they are encoded, or as early as possible while encoding.

Derives two facts from a tokenizer's parts: the most bytes that one id can stand for, and where a text can be split
without changing its ids. Where these are unknown, texts are encoded whole and their ids counted.
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
"""Bound on how much canonical composition shrinks UTF-8. The worst case is U+1FBE U+0308 U+0301, 7 bytes, to U+0390, 2
bytes."""

_LOSSLESS_BEHAVIORS = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_BLANKS = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CUTTABLE_PATTERNS = frozenset(
    {
        # Qwen2 to Qwen3, and Qwen3.5
        _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + _BLANKS,
        _CONTRACTIONS + r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + _BLANKS,
    }
)
"""Pre-tokenizer patterns for which a text can be split between a letter and a single space that a letter follows.

There one match always ends and the next begins, whatever the surrounding text: the patterns have no lookbehind, their
lookahead covers only blanks that they match, and normalisation never composes anything with a space."""

_WORD_CUT = re.compile("[A-Za-z](?= [A-Za-z])")
_PART_CHARACTERS = 1 << 16
_BATCH_CHARACTERS = 1 << 20
"""Characters to encode before the ids are counted."""


_ASCII = bytes(range(128))
_LETTERS = bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1))

COUNTED_CONTEXTS = 4
"""Limit of token counting, in contexts."""


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """The greatest number of tokens that a text may have."""

    context: int
    times: int = 1
    """Multiple of the context, above 1 for counting only."""

    @property
    def most(self) -> int:
        return self.context * self.times

    def error(self, found: str) -> ContextLengthError:
        times = f"{self.times} times " if self.times > 1 else ""
        return ContextLengthError("prompt_ids", found, f"exceeds {times}the context limit of {self.context} tokens")

    def check(self, num_tokens: int, *, is_all: bool = True) -> None:
        """Raise ContextLengthError for too many tokens. `is_all`: `num_tokens` is the total, not a partial count."""
        if num_tokens > self.most:
            raise self.error(f"{num_tokens} tokens" if is_all else f"more than {num_tokens} tokens")

    def check_text(self, text: str, bounds: TokenBounds | None) -> None:
        """Raise ContextLengthError for a text that exceeds the limit in any encoding."""
        if bounds is None or 4 * len(text) <= self.most * bounds.most_letters:
            return
        data = text.encode(errors="ignore")  # without sentinels, each of which is one id
        if bounds.least_tokens(data) > self.most:
            raise self.error(f"{len(data):,} bytes")


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """The most bytes and letters that one id can stand for."""

    most_bytes: int
    """Of text that normalisation does not change."""
    most_letters: int
    """ASCII letters. A tighter bound, since the longest tokens are runs of blanks."""

    def least_tokens(self, data: bytes) -> int:
        """Return a lower bound on the number of ids of a text, given as UTF-8."""
        # Composition merges at most as many letters as there are combining marks.
        num_others = 0 if data.isascii() else len(data.translate(None, _ASCII))
        num_letters = len(data) - len(data.translate(None, _LETTERS)) - num_others
        return max(
            len(data) // (self.most_bytes * (_NFC_SHRINKS if num_others else 1)), num_letters // self.most_letters
        )


class Encodes(Protocol):
    """The part of a tokenizer that encode_within needs."""

    @property
    def bounds(self) -> TokenBounds | None: ...

    @property
    def cuts_at_words(self) -> bool: ...

    def encode_batch(self, texts: Sequence[str], *, added_tokens: bool = True) -> list[list[int]]: ...


def encode_within(
    tokenizer: Encodes,
    texts: Sequence[str],
    *,
    each: TokenLimit | None = None,
    together: TokenLimit | None = None,
    added_tokens: bool = True,
) -> list[array[int]]:
    """Return the ids of each text, equal to the tokenizer's `encode`.

    Raises ContextLengthError when one text exceeds `each`, or all of them exceed `together`; RequestError like
    `encode`."""
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
    """Yield batches of (text index, text or part of it) to encode at once."""
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
    """Return the bounds of a tokenizer; None when they are unknown, for example when it drops some of the text.

    `table`: the bytes of each id, as `encode` reads them. `cuts_only`: no added token absorbs blanks next to it."""
    normalizer = backend.normalizer
    if not cuts_only or not (normalizer is None or isinstance(normalizer, normalizers.NFC)):
        return None
    parts = _pre_tokenizers(backend)
    if not any(part["type"] == "ByteLevel" for part in parts):
        return None
    if not all(
        part["type"] in ("ByteLevel", "Digits") or part.get("behavior") in _LOSSLESS_BEHAVIORS for part in parts
    ):
        return None
    if {token for token in table if len(token) == 1} != {bytes([byte]) for byte in range(256)}:
        return None
    most_letters = 1
    for token in table:
        if len(token) > most_letters:
            most_letters = max(most_letters, len(token) - len(token.translate(None, _LETTERS)))
    return TokenBounds(max(map(len, table)), most_letters)


def can_cut_at_words(backend: Backend, *, cuts_only: bool) -> bool:
    """Whether a text without added tokens can be split between an ASCII letter and a single space that a letter
    follows."""
    if not cuts_only or not (backend.normalizer is None or isinstance(backend.normalizer, normalizers.NFC)):
        return False
    match _pre_tokenizers(backend):
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:
            return pattern in _CUTTABLE_PATTERNS
    return False


def _pre_tokenizers(backend: Backend) -> list[dict[str, Any]]:
    if backend.pre_tokenizer is None:
        return []
    described = json.loads(backend.pre_tokenizer.__getstate__())
    return list(described["pretokenizers"]) if described["type"] == "Sequence" else [described]
