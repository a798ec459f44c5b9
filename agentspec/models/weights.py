"""Strict safetensors loading: every checkpoint tensor is used once and every parameter is filled once, or an error
lists the names.

Owns files, indexes, and the checks on them; `checkpoint_layout.py` says which tensors are expected. Executes nothing
from a checkpoint: pickle files are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentspec import kernels
from agentspec.errors import CheckpointError
from agentspec.files import is_panic, is_there, read_object
from agentspec.models.checkpoint_layout import Layout, Source, checkpoint_layout, roots_with_split_experts
from agentspec.models.hf_config import TextConfig
from agentspec.models.quantization import Fp8Blocks, Scheme, StoredTensor, canonical_name, is_convertible
from agentspec.models.shards import SINGLE_RANK, Rank, rank_config, split_region
from agentspec.models.tensors import empty_parameter, stacked_parts
from agentspec.types import Progress, no_progress

STAGE = "loading weights"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_VISION_PREFIXES = ("model.visual.", "visual.")
_KV_SCALE = re.compile(r"(model|mtp)\.layers\.\d+\.self_attn\.(k_proj\.k|v_proj\.v|k|v)_scale")
_FLOAT_DTYPES = ("F32", "F16", "BF16")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_SMALL_HUB_FILES = ["*.json", "*.jinja"]


def resolve_checkpoint(model: str, *, weights: bool = True) -> Path:
    """Return a local directory unchanged, or the local snapshot of a hub id (downloaded with huggingface_hub;
    safetensors, JSON and templates only).

    weights: False: of a hub id, everything except its safetensors files."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"model={model!r}: is a file; give the checkpoint's directory")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise CheckpointError(f"model={model!r}: no such directory")
    # Imported late: the import is slow, and most models are local directories.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES if weights else _SMALL_HUB_FILES))
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model={model!r}: neither a directory nor a repository on the hub (or it is private)"
        ) from error
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model={model!r}: no such directory, and the hub could not deliver it: {error}"
        ) from error


class Checkpoint:
    """The open safetensors files of a directory, by canonical name. Use as a context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = ExitStack()
        self._where: dict[str, tuple[Any, str]] = {}
        """Canonical name -> (open file, name in the file)."""
        self._stored: dict[str, Any] = {}
        """Name in a file -> that file, open; file by file, vision included."""
        self.bytes_read = 0
        """Of tensors and their parts, as they are stored."""
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
        except BaseException as error:
            if not isinstance(error, OSError | SafetensorError) and not is_panic(error):
                raise
            raise CheckpointError(f"{path}: not a readable safetensors file: {error}") from error
        names = set(file.keys())
        if listed is not None and names != listed:
            raise CheckpointError(
                f"{path}: does not hold what the index says"
                f"{_names('; missing', listed - names)}{_names('; unlisted', names - listed)}"
            )
        self._stored |= dict.fromkeys(sorted(names), file)
        for name in names:
            if name.startswith(_VISION_PREFIXES):
                continue
            canonical = canonical_name(name)
            if canonical in self._where:
                raise CheckpointError(
                    f"{self._directory}: {canonical} is filled twice, by {self._where[canonical][1]} and {name}"
                )
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

    def tensor(self, canonical: str, region: kernels.Region = ()) -> Tensor:
        """A region of a tensor; only its part of the file is read."""
        file, name = self._where[canonical]
        tensor: Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
        self.bytes_read += tensor.nbytes
        return tensor

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of all tensors in the files, vision included, file by file."""
        return tuple(self._stored)

    def stored_tensor(self, name: str, region: kernels.Region = ()) -> Tensor:
        """A region of a tensor by its name in the file."""
        file = self._stored[name]
        tensor: Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
        return tensor

    def layout(self, config: TextConfig, num_ranks: int = 1) -> Layout:
        """How the checkpoint stores the parameters, as so many ranks share them. Raises CheckpointError like `load`;
        reads no tensor."""
        by_expert = roots_with_split_experts(self.names)
        num_layers = len(config.layer_types) if "model" in by_expert else 1
        if config.moe is not None and by_expert and config.moe.num_experts * num_layers > len(self.names):
            # Checked before checkpoint_layout makes the name of every expert: the config may ask for millions.
            raise CheckpointError(
                f"{self._directory}: {len(self.names)} tensors can't hold "
                f"num_experts={config.moe.num_experts} for {num_layers} layers"
            )
        layout = checkpoint_layout(config, self.names, num_ranks)
        self._check(layout.sources, config)
        return layout

    def load(
        self,
        config: TextConfig,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rank: Rank = SINGLE_RANK,
        progress: Progress = no_progress,
    ) -> dict[str, kernels.Weight]:
        """Load a rank's part of all parameters, by canonical name, and read nothing else (`bytes_read`). Quantised ones
        have the form of `tensors.empty_parameter`.

        config: of the whole model. Raises ConfigError if the ranks can't share the model. Raises CheckpointError that
        lists all tensors that are missing, unexpected, of the wrong shape or of the wrong format, or that names the
        first quantised tensor with a value that isn't finite: kernels would read its code as a large number."""
        rank_config(config, rank)  # raises with the config's own names
        layout = self.layout(config, rank.count)
        parameters = self.empty_parameters(layout, device=device, dtype=dtype, rank=rank)
        for num_read, (name, source) in enumerate(layout.sources.items()):
            progress(STAGE, num_read, len(layout.sources))
            self._refuse_values(source.tensors(name))
            for parameter_name, region, part in self._parts(name, source, layout, rank):
                parameters[parameter_name].fill(region, part)
        progress(STAGE, len(layout.sources), len(layout.sources))
        return parameters

    def empty_parameters(
        self, layout: Layout, *, device: torch.device, dtype: torch.dtype, rank: Rank = SINGLE_RANK
    ) -> dict[str, kernels.Weight]:
        """A rank's part of all parameters, uninitialised, in the forms in which `load` fills them; reads no tensor.
        Raises CheckpointError like `load`."""
        schemes = self._schemes_as_stored(layout)
        parameters = {}
        for name, parameter in layout.parameters.items():
            block_rows = layout.block_rows.get(name, kernels.SCALE_BLOCK)
            parameters[name] = empty_parameter(
                name, parameter, schemes.get(name), device=device, dtype=dtype, block_rows=block_rows, rank=rank
            )
        return parameters

    def _parts(
        self, name: str, source: Source, layout: Layout, rank: Rank
    ) -> Iterator[tuple[str, kernels.Region, kernels.Weight]]:
        """Read a rank's part of a tensor, as (parameter, region of the rank's part of it, values)."""
        if source.shard is not None:
            (run,) = source.shard.slices(name, rank)
            packed = self._read(name, source, (run,)).tensor
            for target in source.targets:
                assert target.pick is not None, (
                    f"{name}: only picked parts of {target.parameter} can be found in a part"
                )
                yield target.parameter, target.region, kernels.Plain(target.pick(packed))
            return
        for target in source.targets:
            assert target.pick is None, f"{name}: has no shard, so {target.parameter} can't be picked from a part"
            shard = layout.parameters[target.parameter].shard
            for region, taken in split_region(target.parameter, target.region, shard, rank):
                yield target.parameter, region, self._read(name, source, taken)

    def _read(self, name: str, source: Source, region: kernels.Region) -> kernels.Weight:
        if source.scheme is None:
            return kernels.Plain(self.tensor(name, region))
        weight = source.scheme.read(name, self.tensor, region)
        if not weight.is_finite():
            raise CheckpointError(f"{self._directory}: {name} or its multipliers hold values that aren't finite")
        return weight

    def _schemes_as_stored(self, layout: Layout) -> dict[str, Scheme]:
        """The parameters' schemes with what the files' headers say. Raises CheckpointError where what is one matrix, or
        one stack of experts, differs in that."""
        found: dict[str, tuple[str, Scheme]] = {}
        for name, source in layout.sources.items():
            for target in source.targets:
                if target.parameter in layout.schemes and source.scheme is not None:
                    scheme = source.scheme.as_stored(name, self.dtype)
                    other, known = found.setdefault(target.parameter, (name, scheme))
                    if scheme != known:
                        raise CheckpointError(f"{self._directory}: {other} and {name} differ in the dtype of scales")
        for first, *others in stacked_parts(found):
            for other in others:
                if found[first][1] != found[other][1]:
                    raise CheckpointError(f"{self._directory}: {first} and {other} differ in the dtype of scales")
        return {name: scheme for name, (_, scheme) in found.items()}

    def _refuse_values(self, tensors: Mapping[str, StoredTensor]) -> None:
        for name, stored in tensors.items():
            if stored.complaint is not None and name in self._where:
                complaint = stored.complaint(self.tensor(name))
                if complaint is not None:
                    raise CheckpointError(f"{self._directory}: {name} {complaint}")

    def _check(self, sources: Mapping[str, Source], config: TextConfig) -> None:
        self._check_formats(sources, config)
        stored = {tensor: part for name, source in sources.items() for tensor, part in source.tensors(name).items()}
        wanted: dict[str, tuple[tuple[int, ...], ...]] = {
            name: (source.shape,) for name, source in sources.items() if source.scheme is None
        }
        optional = {name for name, part in stored.items() if part.is_optional and name not in self._where}
        wanted |= {name: part.shapes for name, part in stored.items() if name not in optional}
        present = self.names - self.unused(config)
        missing, unexpected = wanted.keys() - present, present - wanted.keys()
        if missing or unexpected:
            hints = ""
            if "lm_head.weight" in unexpected:
                hints += " (tie_word_embeddings is true, so there must be no lm_head.weight)"
            if any(name.startswith("mtp.") for name in missing) and not self.has_mtp:
                hints += " (the config promises an MTP head; set mtp_num_hidden_layers to 0 to run without it)"
            if any(name.endswith("g_idx") for name in unexpected):
                hints += " (g_idx is an order of columns by activation, which is not supported)"
            raise CheckpointError(
                f"{self._directory}:{_names(' missing tensors', missing)}"
                f"{_names(' unexpected tensors', unexpected)}{hints}"
            )
        misshapen = [
            f"{name} has shape {list(self.shape(name))}, expected {' or '.join(str(list(shape)) for shape in shapes)}"
            for name, shapes in sorted(wanted.items())
            if self.shape(name) not in shapes
        ]
        if misshapen:
            raise CheckpointError(f"{self._directory}: {'; '.join(_shortened(misshapen))}")
        self._refuse_dtypes(
            "tensors must be F32, F16 or BF16",
            [name for name, source in sources.items() if source.scheme is None],
            _FLOAT_DTYPES,
        )
        for what, dtypes in dict.fromkeys((part.what, part.dtypes) for part in stored.values()):
            names = [name for name, part in stored.items() if (part.what, part.dtypes) == (what, dtypes)]
            self._refuse_dtypes(f"{what} must be {' or '.join(dtypes)}", set(names) - optional, dtypes)

    def _check_formats(self, sources: Mapping[str, Source], config: TextConfig) -> None:
        """Check that a tensor is quantised exactly where the config says so: read in the other format it would be
        noise."""
        present = self.names & sources.keys()
        wanted = {name: scheme for name in present if (scheme := sources[name].scheme) is not None}
        known = {scheme.dtype for scheme in wanted.values()} | {Fp8Blocks.dtype, "U8"}
        found = {name for name in present if self.dtype(name) in known}
        lacking = {name for name, scheme in wanted.items() if self.dtype(name) != scheme.dtype}
        surplus = found - wanted.keys()
        form = "in 8 bits" if config.quantization is None or config.quantization.is_official else "quantised"
        if surplus and config.quantization is None:
            raise CheckpointError(
                f"{self._directory}: config.json has no quantization_config{_names(f', but these are {form}', surplus)}"
            )
        never = {name for name in surplus if not is_convertible(name)}
        complaints = [
            _names(f"must not be {form}", never),
            _names(f"{form} although quantization_config excludes them", surplus - never),
            _names(f"neither {form} nor excluded by quantization_config", lacking),
        ]
        if surplus or lacking:
            raise CheckpointError(f"{self._directory}: {'; '.join(filter(None, complaints))}")

    def unused(self, config: TextConfig) -> set[str]:
        """The tensors that a checkpoint may contain although nothing reads them: multipliers of keys and values, which
        aren't in 8 bits here."""
        if config.quantization is None or config.quantization.is_official:
            return set()
        found = {name for name in self.names if _KV_SCALE.fullmatch(name)}
        for name in found:
            if math.prod(self.shape(name)) != 1:
                raise CheckpointError(f"{self._directory}: {name} has shape {list(self.shape(name))}, expected []")
        self._refuse_dtypes("multipliers of keys and values must be F32, F16 or BF16", found, _FLOAT_DTYPES)
        return found

    def _refuse_dtypes(self, rule: str, names: Iterable[str], allowed: tuple[str, ...]) -> None:
        refused = [f"{name} ({self.dtype(name)})" for name in sorted(names) if self.dtype(name) not in allowed]
        if refused:
            raise CheckpointError(f"{self._directory}: {rule}: {', '.join(_shortened(refused))}")


def _files(directory: Path) -> Iterable[tuple[Path, set[str] | None]]:
    """(safetensors file, the names that the index lists for it), for a sharded or a single-file checkpoint."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    index_path, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if is_there(index_path):
        weight_map = read_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_path}: weight_map is missing or empty")
        listed: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise CheckpointError(f"{index_path}: weight_map[{name!r}]={file_name!r} is not a plain file name")
            listed.setdefault(file_name, set()).add(name)
        missing = [file_name for file_name in sorted(listed) if not (directory / file_name).is_file()]
        if missing:
            raise CheckpointError(f"{directory}: shards of the index are missing: {', '.join(_shortened(missing))}")
        return [(directory / file_name, names) for file_name, names in listed.items()]
    if single.is_file():
        return [(single, None)]
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{directory}: pickle files are refused, only safetensors is loaded: {', '.join(_shortened(pickles))}"
        )
    raise CheckpointError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _names(label: str, names: Iterable[str]) -> str:
    listed = sorted(names)
    return f"{label}: {', '.join(_shortened(listed))}" if listed else ""


def _shortened(names: list[str]) -> list[str]:
    return names if len(names) <= 20 else [*names[:20], f"and {len(names) - 20} more"]
