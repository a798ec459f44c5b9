"""Text to token ids for dry runs: a checkpoint's own BPE when one is at hand, else a fixed splitting that needs no files.

No request is ever served from these ids; they only give prompts their lengths and their common prefixes.
"""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Protocol
from zlib import crc32

from tokenizers import Tokenizer

from agentspec.errors import CheckpointError

_PIECES = re.compile(r"<\|?\w+\|?>|</\w+>|\s?[^\W\d_]{1,8}|\d{1,3}|[^\w\s]{1,4}|_|\s{1,8}")
"""Control tokens and tags; runs of letters with the blank before them; digits; punctuation; blanks. Every character is in some piece."""

_NUM_PIECE_IDS = 150_000


class Encoder(Protocol):
    """Turns text into ids, the same text into the same ids."""

    @property
    def name(self) -> str:
        """Shown beside every figure that depends on it."""
        ...

    def encode(self, text: str) -> array[int]: ...


class RegexPieces:
    """Splits text into short pieces and hashes each to an id. Token counts are near a BPE's, and equal text has equal ids."""

    name = "regex-pieces"

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> array[int]:
        ids = self._ids
        return array("i", [ids.get(piece) or self._add(piece) for piece in _PIECES.findall(text)])

    def _add(self, piece: str) -> int:
        return self._ids.setdefault(piece, 1 + crc32(piece.encode("utf-8", "surrogatepass")) % _NUM_PIECE_IDS)


class Bpe:
    """A `tokenizers.Tokenizer`. Text is encoded as it stands: nothing is added around it."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def encode(self, text: str) -> array[int]:
        return array("i", self._tokenizer.encode(text, add_special_tokens=False).ids)


def find_encoder(model_dir: str | Path | None) -> Encoder:
    """The BPE of a checkpoint directory, by its tokenizer.json; without a directory the built-in pieces.

    Raises CheckpointError when the directory has no tokenizer, or one that can't be read."""
    if model_dir is None:
        return RegexPieces()
    path = Path(model_dir) / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a dry run takes its tokens from there, or runs without --model")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise CheckpointError(f"{path}: {error}") from None
    return Bpe(tokenizer, f"the tokenizer of {Path(model_dir).name}")
