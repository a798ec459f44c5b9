"""Directories of safetensors shards with an index, in the published layout, each shard small enough to carry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

MAX_SHARD_BYTES = 15 * 2**20
_INDEX = "model.safetensors.index.json"


def write_shards(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write all tensors, in their order, into shards of at most MAX_SHARD_BYTES (a tensor that is larger has one
    alone), and the index."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and _size(shards[-1]) + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor.detach().cpu().contiguous()
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        (directory / file_name).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file_name)
    index = {"metadata": {"total_size": sum(map(_size, shards))}, "weight_map": weight_map}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def read_shards(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory that `write_shards` wrote, in their order, on the CPU."""
    weight_map: dict[str, str] = json.loads((directory / _INDEX).read_text())["weight_map"]
    files = {file_name: load_file(directory / file_name) for file_name in dict.fromkeys(weight_map.values())}
    return {name: files[file_name][name] for name, file_name in weight_map.items()}


def _size(shard: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in shard.values())
