"""Encode text to token ids for dry runs and forced outputs, with a checkpoint's own BPE."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from agentspec import files
from agentspec.errors import CheckpointError


class Encoder(Protocol):
    """A deterministic function from text to token ids."""

    @property
    def name(self) -> str:
        """Name of the encoder, for the report."""

    def encode(self, text: str) -> array[int]: ...


@dataclass(frozen=True, slots=True)
class Bpe:
    """A `tokenizers.Tokenizer`. No tokens are added around the text."""

    tokenizer: Tokenizer
    name: str

    def encode(self, text: str) -> array[int]:
        return array("i", self.tokenizer.encode(text, add_special_tokens=False).ids)


def find_encoder(model_dir: str | Path) -> Encoder:
    """Load the BPE of a checkpoint directory from its tokenizer.json. Raises CheckpointError when it is missing or
    invalid."""
    path = Path(model_dir) / "tokenizer.json"
    if not files.is_there(path):
        raise CheckpointError(
            f"{path}: no such file; a dry run takes its tokens from there, "
            "or runs without --model on the bundled tokenizer"
        )
    return Bpe(
        files.parsed(path, Tokenizer.from_buffer, "not a usable tokenizer"), f"the tokenizer of {Path(model_dir).name}"
    )
