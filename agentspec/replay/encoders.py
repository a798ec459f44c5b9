"""Text to token ids for dry runs, by a checkpoint's own BPE.

No request is ever served from these ids; they only give prompts their lengths and their common prefixes.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from agentspec import files
from agentspec.errors import CheckpointError


class Encoder(Protocol):
    """Turns text into ids, the same text into the same ids."""

    @property
    def name(self) -> str:
        """Shown beside every figure that depends on it."""
        ...

    def encode(self, text: str) -> array[int]: ...


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


def find_encoder(model_dir: str | Path) -> Encoder:
    """The BPE of a checkpoint directory, by its tokenizer.json. Raises CheckpointError when there is none, or one that
    can't be read."""
    path = Path(model_dir) / "tokenizer.json"
    if not files.is_there(path):
        raise CheckpointError(
            f"{path}: no such file; a dry run takes its tokens from there, or runs without --model on the bundled tokenizer"
        )
    return Bpe(
        files.parsed(path, Tokenizer.from_buffer, "not a usable tokenizer"), f"the tokenizer of {Path(model_dir).name}"
    )
