"""Strict safetensors loading: every checkpoint tensor is used once, every parameter is filled once, or the names are told.

Owns how published layouts (namespaces, fused or per-expert experts, Qwen3-Next's packed projections) map to the canonical parameters of
`tensors.py`. Executes nothing from a checkpoint: pickle files are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError
from agentspec.models.hf_config import TextConfig, read_json
from agentspec.models.tensors import Shapes, parameter_dtype, parameter_shapes

_VISION_PREFIXES = ("model.visual.", "visual.")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FLOAT_DTYPES = ("F32", "F16", "BF16")
_PER_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]

Index = int | slice
Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a checkpoint tensor, or a part of it, goes."""

    parameter: str
    index: tuple[Index, ...] = ()
    """Region of the parameter that it fills; () is all of it."""
    pick: Pick | None = None
    """Takes the part out of the checkpoint's tensor; None is all of it."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor that the checkpoint must hold."""

    shape: tuple[int, ...]
    targets: tuple[_Target, ...]


def resolve_checkpoint(model: str) -> Path:
    """A local directory as it is, or the local snapshot of a hub id (downloaded through huggingface_hub; safetensors and JSON only)."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"model={model!r}: is a file; give the checkpoint's directory")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise CheckpointError(f"model={model!r}: no such directory")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"model={model!r}: neither a directory nor a repository on the hub (or it is private)") from error
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"model={model!r}: no such directory, and the hub could not deliver it: {error}") from error


class Checkpoint:
    """The open safetensors files of a directory, by canonical name. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = ExitStack()
        self._where: dict[str, tuple[Any, str]] = {}
        """Canonical name -> (open file, name in the file)."""
        try:
            for path, listed in _files(directory):
                self._open(path, listed)
        except BaseException:
            self._files.close()
            raise

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def _open(self, path: Path, listed: set[str] | None) -> None:
        try:
            file = self._files.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
        names = set(file.keys())
        if listed is not None and names != listed:
            raise CheckpointError(
                f"{path}: does not hold what the index says{_names('; missing', listed - names)}{_names('; unlisted', names - listed)}"
            )
        for name in names:
            if name.startswith(_VISION_PREFIXES):
                continue
            canonical = re.sub(r"^model\.language_model\.", "model.", name)
            if canonical in self._where:
                raise CheckpointError(f"{self._directory}: {canonical} is filled twice, by {self._where[canonical][1]} and {name}")
            self._where[canonical] = file, name

    @property
    def names(self) -> set[str]:
        return set(self._where)

    @property
    def has_mtp(self) -> bool:
        return any(name.startswith("mtp.") for name in self._where)

    def shape(self, canonical: str) -> tuple[int, ...]:
        file, name = self._where[canonical]
        return tuple(file.get_slice(name).get_shape())

    def dtype(self, canonical: str) -> str:
        file, name = self._where[canonical]
        return str(file.get_slice(name).get_dtype())

    def tensor(self, canonical: str) -> Tensor:
        file, name = self._where[canonical]
        tensor: Tensor = file.get_tensor(name)
        return tensor

    def load(self, config: TextConfig, *, device: torch.device, dtype: torch.dtype) -> dict[str, kernels.Weight]:
        """All parameters under canonical names. Raises CheckpointError that lists every tensor which is missing, unexpected or misshapen."""
        shapes = parameter_shapes(config)
        sources = _sources(config, shapes, self.names)
        self._check(sources, config)
        parameters = {name: torch.empty(shape, dtype=parameter_dtype(name, dtype), device=device) for name, shape in shapes.items()}
        for name, source in sources.items():
            tensor = self.tensor(name)
            for target in source.targets:
                part = tensor if target.pick is None else target.pick(tensor)
                parameters[target.parameter][target.index].copy_(part)
        return dict(parameters)

    def _check(self, sources: Mapping[str, _Source], config: TextConfig) -> None:
        wanted, present = set(sources), self.names
        missing, unexpected = wanted - present, present - wanted
        if missing or unexpected:
            hints = ""
            if "lm_head.weight" in unexpected:
                hints += " (tie_word_embeddings is true, so there must be no lm_head.weight)"
            if any(name.startswith("mtp.") for name in missing) and not self.has_mtp:
                hints += " (the config promises an MTP head; set mtp_num_hidden_layers to 0 to run without it)"
            raise CheckpointError(f"{self._directory}:{_names(' missing tensors', missing)}{_names(' unexpected tensors', unexpected)}{hints}")
        misshapen = {name: self.shape(name) for name, source in sources.items() if self.shape(name) != source.shape}
        if misshapen:
            lines = [f"{name} has shape {list(got)}, expected {list(sources[name].shape)}" for name, got in sorted(misshapen.items())]
            raise CheckpointError(f"{self._directory}: {'; '.join(_shortened(lines))}")
        alien = [f"{name} ({self.dtype(name)})" for name in sorted(wanted) if self.dtype(name) not in _FLOAT_DTYPES]
        if alien:
            raise CheckpointError(f"{self._directory}: tensors must be F32, F16 or BF16: {', '.join(_shortened(alien))}")


def _files(directory: Path) -> Iterable[tuple[Path, set[str] | None]]:
    """(safetensors file, the names that the index lists for it), for a sharded or a single-file checkpoint."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    index_path, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path}: weight_map is missing or empty")
        listed: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            listed.setdefault(file_name, set()).add(name)
        for file_name in listed:
            if Path(file_name).name != file_name:
                raise CheckpointError(f"{index_path}: {file_name!r} is not a plain file name")
        missing = [file_name for file_name in sorted(listed) if not (directory / file_name).is_file()]
        if missing:
            raise CheckpointError(f"{directory}: shards of the index are missing: {', '.join(_shortened(missing))}")
        return [(directory / file_name, names) for file_name, names in listed.items()]
    if single.is_file():
        return [(single, None)]
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(f"{directory}: pickle files are refused, only safetensors is loaded: {', '.join(_shortened(pickles))}")
    raise CheckpointError(f"{directory}: holds neither model.safetensors nor model.safetensors.index.json")


def _sources(config: TextConfig, shapes: Shapes, present: set[str]) -> dict[str, _Source]:
    """The tensors that the checkpoint must hold, given how it lays out its experts (decided for the trunk and for mtp separately)."""
    split_roots = {name.split(".")[0] for name in present if _PER_EXPERT.search(name)}
    sources: dict[str, _Source] = {}
    for name, shape in shapes.items():
        if ".mlp.experts." in name and name.split(".")[0] in split_roots:
            sources |= _per_expert(name, shape)
        elif config.packed_projections and ".linear_attn.in_proj_" in name:
            if name.endswith("in_proj_qkv.weight"):
                sources |= _packed(config, name.removesuffix("in_proj_qkv.weight"))
        else:
            sources[name] = _Source(shape, (_Target(name),))
    return sources


def _per_expert(name: str, shape: tuple[int, ...]) -> dict[str, _Source]:
    prefix, kind = name.rsplit(".", 1)
    num_experts, rows, columns = shape
    if kind == "down_proj":
        return {f"{prefix}.{e}.down_proj.weight": _Source((rows, columns), (_Target(name, (e,)),)) for e in range(num_experts)}
    width = rows // 2
    sources = {}
    for e in range(num_experts):
        sources[f"{prefix}.{e}.gate_proj.weight"] = _Source((width, columns), (_Target(name, (e, slice(0, width))),))
        sources[f"{prefix}.{e}.up_proj.weight"] = _Source((width, columns), (_Target(name, (e, slice(width, rows))),))
    return sources


def _packed(config: TextConfig, prefix: str) -> dict[str, _Source]:
    """Qwen3-Next's rows go key head by key head: q, k, then that head's share of v and z (of b and a in the other tensor)."""
    key_heads, key_dim = config.num_key_heads, config.key_dim
    share = config.num_value_heads // key_heads
    values = share * config.value_dim
    qkvz_sizes, ba_sizes = [key_dim, key_dim, values, values], [share, share]

    def part(sizes: list[int], which: tuple[int, ...]) -> Pick:
        def pick(packed: Tensor) -> Tensor:
            parts = torch.split(torch.unflatten(packed, 0, (key_heads, sum(sizes))), sizes, 1)
            return torch.cat([parts[i].flatten(0, 1) for i in which])

        return pick

    return {
        f"{prefix}in_proj_qkvz.weight": _Source(
            (key_heads * sum(qkvz_sizes), config.hidden_size),
            (
                _Target(f"{prefix}in_proj_qkv.weight", (), part(qkvz_sizes, (0, 1, 2))),
                _Target(f"{prefix}in_proj_z.weight", (), part(qkvz_sizes, (3,))),
            ),
        ),
        f"{prefix}in_proj_ba.weight": _Source(
            (key_heads * sum(ba_sizes), config.hidden_size),
            (
                _Target(f"{prefix}in_proj_b.weight", (), part(ba_sizes, (0,))),
                _Target(f"{prefix}in_proj_a.weight", (), part(ba_sizes, (1,))),
            ),
        ),
    }


def _names(label: str, names: Iterable[str]) -> str:
    listed = sorted(names)
    return f"{label}: {', '.join(_shortened(listed))}" if listed else ""


def _shortened(names: list[str]) -> list[str]:
    return names if len(names) <= 20 else [*names[:20], f"and {len(names) - 20} more"]
