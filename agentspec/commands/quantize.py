"""`agentspec quantize SRC DST`: convert a checkpoint in full precision to the official FP8 format.

Owns the layout of the files. `models/quantization.py` decides which parameters are converted,
`kernels.quantize_blocks` how they are rounded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from agentspec import kernels
from agentspec.engine import bundled
from agentspec.errors import CheckpointError
from agentspec.files import read_object
from agentspec.models.hf_config import load_text_config
from agentspec.models.quantization import QUANTIZATION_FIELDS, SCALE_SUFFIX, canonical_name, is_convertible
from agentspec.models.weights import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE, Checkpoint, resolve_checkpoint

CONFIG_FILE = "config.json"
SHARD_BYTES = 2**32
"""Maximum size of a file. Its tensors stay in memory until it is written."""

_PARAMETER_SUFFIX = re.compile(r"\.(weight|bias)$")


def run(source: str, destination: str) -> int:
    """Quantise the checkpoint that `source` names and print the sizes. Raises CheckpointError and then leaves nothing
    at `destination`."""
    before, after = quantize(resolve_checkpoint(bundled.checkpoint_of(source)), Path(destination))
    print(f"{destination}: {after / 1e6:,.1f} MB of weights, {before / 1e6:,.1f} MB before ({after / before:.0%})")
    return 0


def quantize(source: Path, destination: Path) -> tuple[int, int]:
    """Write the checkpoint `source` in 8 bits to the new directory `destination`; return the weights' bytes before and
    after.

    Experts are written one by one, as in published 8-bit checkpoints. Other tensors, such as vision, keep name and
    dtype. Files beside the weights are copied. `destination` appears only when it is complete."""
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination}: exists already; name a directory that doesn't")
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination.parent}: no such directory")
    config = load_text_config(source)
    if config.quantization is not None:
        form = "in 8 bits" if config.quantization.is_official else "quantised"
        raise CheckpointError(f"{source}: is {form} already (quantization_config)")
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        with Checkpoint(source) as checkpoint:
            if config.num_mtp_layers is None:
                config = config.with_mtp_layers(int(checkpoint.has_mtp))
            checkpoint.layout(config)
            shards = _Shards(partial)
            before = sum(shards.add_all(name, tensor) for name, tensor in checkpoint.stored_tensors())
            after = shards.finish()
        _write_config(source, partial, shards.kept)
        _copy_other_files(source, partial)
        for path in partial.glob("*.safetensors"):  # safetensors writes them readable for their owner only
            shutil.copymode(partial / CONFIG_FILE, path)
        partial.rename(destination)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{destination}: can't be written: {error}") from error
        raise
    return before, after


class _Shards:
    """The safetensors files of the new checkpoint, written one after another."""

    def __init__(self, directory: Path) -> None:
        self.kept: set[str] = set()
        """Names of tensors that weren't converted."""
        self._directory = directory
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._names: list[list[str]] = []
        """Tensor names of each file written so far."""
        self._total_bytes = 0

    def add_all(self, name: str, tensor: Tensor) -> int:
        """Convert a stored tensor if needed and add the result; return the stored tensor's bytes."""
        if not is_convertible(canonical_name(name)):
            self.kept.add(name)
            self._add(name, tensor)
        else:
            for part_name, part in _experts(name, tensor):
                quantized = kernels.quantize_blocks(part)
                if not quantized.scales.isfinite().all():
                    raise CheckpointError(
                        f"{part_name}: holds values that aren't finite, or too large for a multiplier in bfloat16"
                    )
                self._add(part_name, quantized.values)
                self._add(part_name + SCALE_SUFFIX, quantized.scales.bfloat16())
        return tensor.nbytes

    def _add(self, name: str, tensor: Tensor) -> None:
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
        _write_json(
            self._directory / INDEX_FILE,
            {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))},
        )
        return self._total_bytes


def _experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split a convertible tensor into matrices with their new names: a stack of experts into each expert's
    projections."""
    if tensor.dim() == 2:
        yield name, tensor
        return
    prefix, _, kind = name.rpartition(".")
    for expert, weight in enumerate(tensor):
        if kind == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", weight
        else:
            gate, up = weight.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up


def _write_config(source: Path, destination: Path, kept: set[str]) -> None:
    """Write the source's config, extended by the modules that weren't converted, by their names in the checkpoint."""
    modules = {_PARAMETER_SUFFIX.sub("", name) for name in kept if _PARAMETER_SUFFIX.search(name)}
    quantization = QUANTIZATION_FIELDS | {"modules_to_not_convert": sorted(modules)}
    _write_json(destination / CONFIG_FILE, read_object(source / CONFIG_FILE) | {"quantization_config": quantization})


def _copy_other_files(source: Path, destination: Path) -> None:
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in (".safetensors", *PICKLE_SUFFIXES) or path.name == INDEX_FILE
        if path.is_file() and not is_weights and path.name != CONFIG_FILE:
            shutil.copyfile(path, destination / path.name)


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
