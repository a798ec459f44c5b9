"""Writes the safetensors files of a checkpoint one after another, with their index.

Owns names and sizes of files. Knows nothing of what the tensors mean.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from agentspec.models.weights import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 2**32
"""Maximum size of a file. Its tensors stay in memory until it is written."""


class ShardFiles:
    """The safetensors files of a new checkpoint."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._names: list[list[str]] = []
        """Tensor names of each file written so far."""
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor to the current file, or to the next one if it is too large for that."""
        if self._waiting and self._waiting_bytes + tensor.nbytes > SHARD_BYTES:
            self._write()
        self._waiting[name] = tensor.contiguous()
        self._waiting_bytes += tensor.nbytes

    def _write(self) -> None:
        save_file(self._waiting, self._shard(len(self._names)), metadata={"format": "pt"})
        self._names.append(list(self._waiting))
        self._total_bytes += self._waiting_bytes
        self._waiting, self._waiting_bytes = {}, 0

    def _shard(self, index: int) -> Path:
        return self._directory / f"{index}.safetensors"

    def finish(self) -> int:
        """Write the last file, rename the files as in published checkpoints, and return the bytes of all tensors."""
        self._write()
        if len(self._names) == 1:
            self._shard(0).rename(self._directory / SINGLE_FILE)
            return self._total_bytes
        weight_map = {}
        for index, names in enumerate(self._names):
            file_name = f"model-{index + 1:05}-of-{len(self._names):05}.safetensors"
            self._shard(index).rename(self._directory / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        write_json(
            self._directory / INDEX_FILE,
            {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))},
        )
        return self._total_bytes


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
