"""Counts of served tokens, in a file that each run of an engine reads and updates.

Owns the file format (docs/draft_vocabulary.md) and the counting. Doesn't know how the counts are used.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from agentspec import files
from agentspec.errors import ConfigError


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: Literal[1]
    num_tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Real tokens of the vocabulary of these ids."""
    counts: dict[int, Annotated[int, msgspec.Meta(ge=0)]]
    """By token id; JSON writes the ids as strings."""


class TokenCounts:
    """The counts in the file when it was opened, and of the tokens served since. Not thread-safe."""

    def __init__(self, path: str, *, num_tokens: int) -> None:
        """Read the file if it exists. num_tokens: the model's real tokens.

        Raises ConfigError if it can't be read, belongs to another vocabulary, or couldn't be written later."""
        # Resolved now: the working directory may change before `save`, and a symbolic link must not be replaced.
        self._path = Path(path).resolve()
        self._shown_path = path
        self._num_tokens = num_tokens
        self._served: Counter[int] = Counter()
        self.known = self._read()
        """Times served by token id, before this run."""
        if not (self._path.parent.is_dir() and os.access(self._path.parent, os.W_OK)):
            raise self._wrong("its directory does not exist or can't be written to")

    def add_tokens(self, token_ids: Iterable[int]) -> None:
        """Count served tokens."""
        self._served.update(token_ids)

    def save(self) -> None:
        """Add the tokens served since the last `save` to the counts in the file, which another engine may have written
        in the meantime.

        The file is replaced atomically: readers see the old or the new file. Raises ConfigError if that fails."""
        if not self._served:
            return
        counts = Counter(self._read())
        counts.update(self._served)
        body = msgspec.json.encode(_File(version=1, num_tokens=self._num_tokens, counts=dict(sorted(counts.items()))))
        written = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            written.write_bytes(body + b"\n")
            written.replace(self._path)
        except OSError as error:
            written.unlink(missing_ok=True)
            raise self._wrong(f"can't be written: {error.strerror or error}") from None
        self._served.clear()

    def _read(self) -> dict[int, int]:
        try:
            file = msgspec.json.decode(files.read_bytes(self._path), type=_File)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._wrong(f"can't be read: {error.strerror or error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._wrong(f"is not a file of token counts: {error}") from None
        if file.num_tokens != self._num_tokens:
            raise self._wrong(f"counts a vocabulary of {file.num_tokens} tokens; the model's has {self._num_tokens}")
        for token in file.counts:
            if not 0 <= token < self._num_tokens:
                raise self._wrong(f"counts token {token}, and num_tokens is {self._num_tokens}")
        return file.counts

    def _wrong(self, reason: str) -> ConfigError:
        return ConfigError("token_counts", self._shown_path, reason)
