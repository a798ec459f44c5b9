"""`agentspec quantize SRC DST`: write a checkpoint in 8 bits (the official FP8 format), in 4 bits, or in a mixture.

Owns the walk over the source's tensors, and what is printed. `models/quantised/recipes.py` decides what is stored how,
`models/shard_files.py` writes the files, the kernels round.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

from agentspec import kernels
from agentspec.commands.tables import aligned
from agentspec.engine import bundled
from agentspec.errors import CheckpointError
from agentspec.files import read_object
from agentspec.models.hf_config import TextConfig, load_text_config
from agentspec.models.quantised.recipes import INT4_GROUPS, RECIPES, Decisions, Form, Recipe
from agentspec.models.quantization import canonical_name
from agentspec.models.shard_files import ShardFiles, write_json
from agentspec.models.stored import part_of, place
from agentspec.models.tensors import HEAD
from agentspec.models.weights import INDEX_FILE, PICKLE_SUFFIXES, Checkpoint, resolve_checkpoint

CONFIG_FILE = "config.json"
_EMBEDDING = "model.embed_tokens.weight"
_TIED = "tie_word_embeddings"

_PIECE = 2**22
"""Values that are rounded at once, so that what that takes beside its result doesn't grow with the matrix."""


def run(source: str, destination: str, target: str) -> int:
    """Quantise the checkpoint that `source` names; print what each part is stored as, and the sizes. Raises
    CheckpointError and then leaves nothing at `destination`."""
    summary = quantize(resolve_checkpoint(bundled.checkpoint_of(source)), Path(destination), target)
    print("\n".join(summary.lines()))
    before, after = summary.bytes_before, summary.bytes_after
    print(f"{destination}: {after / 1e6:,.1f} MB of weights, {before / 1e6:,.1f} MB before ({after / before:.0%})")
    return 0


@dataclass(slots=True)
class _Row:
    """The tensors of one part that are stored in one form."""

    bytes_before: int = 0
    bytes_after: int = 0
    squares: float = 0.0
    """Sum of the squared values, where they were rounded."""
    squared_error: float = 0.0


@dataclass(slots=True)
class Summary:
    """What was written."""

    rows: defaultdict[tuple[str, str], _Row] = field(default_factory=lambda: defaultdict(_Row))
    """By part (`stored.PARTS`) and form, in words."""
    notes: list[str] = field(default_factory=list)

    @property
    def bytes_before(self) -> int:
        return sum(row.bytes_before for row in self.rows.values())

    @property
    def bytes_after(self) -> int:
        return sum(row.bytes_after for row in self.rows.values())

    def lines(self) -> Iterator[str]:
        """A table for people: bytes before and after, and the root of the squared error relative to the squared
        values."""
        cells = [("part", "stored as", "MB before", "MB after", "error")]
        for (part, form), row in sorted(self.rows.items(), key=lambda entry: place(entry[0])):
            error = f"{math.sqrt(row.squared_error / row.squares):.2%}" if row.squares else "-"
            cells.append((part, form, f"{row.bytes_before / 1e6:,.1f}", f"{row.bytes_after / 1e6:,.1f}", error))
        yield from aligned(cells, num_left=2)
        yield from (f"note: {note}" for note in self.notes)


def quantize(source: Path, destination: Path, target: str = "fp8") -> Summary:
    """Write the checkpoint `source` to the new directory `destination` as `target`, one of RECIPES, says.

    Experts are written one by one where they are quantised, as in published quantised checkpoints. Other tensors, such
    as vision, keep name and dtype; 8-bit tensors of the source that the recipe leaves in full precision become
    bfloat16. A tied head is written beside the embedding if the recipe quantises heads, and the config says that they
    are no longer tied. Files beside the weights are copied. `destination` appears only when it is complete."""
    recipe = RECIPES[target]
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination}: exists already; name a directory that doesn't")
    if not destination.parent.is_dir():
        raise CheckpointError(f"{destination.parent}: no such directory")
    config = load_text_config(source)
    if config.quantization is not None and not recipe.reads(config.quantization):
        form = "in 8 bits" if config.quantization.is_official else "quantised"
        raise CheckpointError(f"{source}: is {form} already (quantization_config)")
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    try:
        partial.mkdir()
        with Checkpoint(source) as checkpoint:
            if config.num_mtp_layers is None:
                config = config.with_mtp_layers(int(checkpoint.has_mtp))
            conversion = _Conversion(checkpoint, config, recipe, ShardFiles(partial))
            quantization = conversion.run()
        raw = read_object(source / CONFIG_FILE)
        write_json(partial / CONFIG_FILE, _new_config(raw, quantization, unties=conversion.unties))
        _copy_other_files(source, partial)
        for path in partial.glob("*.safetensors"):  # safetensors writes them readable for their owner only
            shutil.copymode(partial / CONFIG_FILE, path)
        partial.rename(destination)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise CheckpointError(f"{destination}: can't be written: {error}") from error
        raise
    return conversion.summary


class _Conversion:
    """One walk over the source's tensors, in the order of its files. One tensor is in memory at a time, and of a stack
    of experts that is split one matrix, beside what waits to be written."""

    def __init__(self, checkpoint: Checkpoint, config: TextConfig, recipe: Recipe, files: ShardFiles) -> None:
        self._decisions = Decisions(recipe)
        self.summary = Summary(notes=self._decisions.notes)
        self._checkpoint = checkpoint
        self._recipe = recipe
        self._files = files
        self._sources = checkpoint.layout(config).sources
        self.unties = config.tied and not recipe.keeps_tied(config)
        """Whether the embedding is written a second time, as a head."""

    def run(self) -> dict[str, object]:
        """Write all tensors; return the quantization_config. Raises CheckpointError if nothing can be quantised, or
        naming a tensor with values that can't."""
        multipliers = {tensor for name, source in self._sources.items() for tensor in source.tensors(name)}
        multipliers -= self._sources.keys()
        for name in self._checkpoint.stored_names:
            if canonical_name(name) not in multipliers:
                self._convert(name)
        self._files.finish()
        quantization = self._decisions.config()
        if quantization is None:
            raise CheckpointError(
                f"nothing can be quantised: no matrix has columns in whole groups of {INT4_GROUPS[-1]}"
            )
        return quantization

    def _convert(self, name: str) -> None:
        """Write what becomes of a stored tensor, and count what is read."""
        canonical = canonical_name(name)
        for part_name, part in self._parts(name):
            row = self._write(part_name, part)
            row.bytes_before += part.values.nbytes
        if canonical in self._sources:
            tensors = self._sources[canonical].tensors(canonical).keys() - {canonical}
            row.bytes_before += sum(self._checkpoint.tensor(tensor).nbytes for tensor in tensors)
        if canonical == _EMBEDDING and self.unties:
            embedding = self._read(name)
            self._write(HEAD, embedding)
            self.summary.notes.append(
                "the head has a matrix of its own now; the embedding, which was the head too, stays in "
                f"{embedding.form_name}"
            )

    def _parts(self, name: str) -> Iterator[tuple[str, kernels.Weight]]:
        """A stored tensor, or each expert's projections of a stack that is quantised, with the names that they get."""
        parts = self._recipe.splits(name)
        if not parts:
            yield name, self._read(name)
            return
        prefix = name.rpartition(".")[0]
        num_experts, num_rows, _ = self._sources[canonical_name(name)].shape
        width = num_rows // len(parts)
        for expert in range(num_experts):
            for index, part in enumerate(parts):
                region = slice(expert, expert + 1), slice(index * width, (index + 1) * width)
                yield f"{prefix}.{expert}.{part}.weight", self._read(name, region).matrix(0)

    def _read(self, name: str, region: kernels.Region = ()) -> kernels.Weight:
        source = self._sources.get(canonical_name(name))
        if source is None or source.scheme is None:
            return kernels.Plain(self._checkpoint.stored_tensor(name, region))
        return source.scheme.read(canonical_name(name), self._checkpoint.tensor, region)

    def _write(self, name: str, weight: kernels.Weight) -> _Row:
        """Write a weight in the recipe's form; return the row of the summary that it belongs to, without what was
        read."""
        canonical = canonical_name(name)
        form = self._decisions.form(name, weight.shape)
        label = form.label if form else "bfloat16" if weight.is_quantized else weight.form_name
        row = self.summary.rows[part_of(canonical), label]
        if form is None and not weight.is_quantized:
            made = weight
        elif form is not None and form.holds(weight):
            made = weight
            _refuse_not_finite(name, weight)
        else:
            made = _rounded(name, weight, form, row)
        for tensor_name, tensor in ({name: made.tensor} if form is None else form.tensors(name, made)).items():
            self._files.add(tensor_name, tensor)
            row.bytes_after += tensor.nbytes
        return row


def _rounded(name: str, weight: kernels.Weight, form: Form | None, row: _Row) -> kernels.Weight:
    """A weight in a form (None: bfloat16), made in pieces; adds the error to the row."""
    made = []
    for piece in _pieces(weight):
        values = piece.dequantize()
        rounded = kernels.Plain(values.bfloat16()) if form is None else form.quantize(values)
        _refuse_not_finite(name, kernels.Plain(values), rounded)
        made.append(rounded)
        row.squares += float(values.square().sum(dtype=torch.float64))
        row.squared_error += float((rounded.dequantize() - values).square().sum(dtype=torch.float64))
    return made[0].stack(made[1:])


def _pieces(weight: kernels.Weight) -> Iterator[kernels.Weight]:
    """The matrices of a stack; of one matrix, rows that are whole blocks."""
    blocks = max(1, _PIECE // (weight.shape[-1] * kernels.SCALE_BLOCK))
    step = blocks * kernels.SCALE_BLOCK if len(weight.shape) == 2 else 1
    for first in range(0, weight.shape[0], step):
        yield weight.cut((slice(first, min(first + step, weight.shape[0])),))


def _refuse_not_finite(name: str, *weights: kernels.Weight) -> None:
    if not all(weight.is_finite() for weight in weights):
        raise CheckpointError(f"{name}: holds values that aren't finite, or too large for a multiplier in bfloat16")


def _new_config(raw: dict[str, object], quantization: dict[str, object], *, unties: bool) -> dict[str, object]:
    """A config.json with another quantization_config, which may have been in two places, as may have been whether
    embedding and head are one matrix."""
    changed = {_TIED: False} if unties else {}
    text = raw.get("text_config")
    if isinstance(text, dict):
        kept = {name: changed.get(name, text[name]) for name in text if name != "quantization_config"}
        raw = raw | {"text_config": kept}
    return raw | changed | {"quantization_config": quantization}


def _copy_other_files(source: Path, destination: Path) -> None:
    for path in sorted(source.iterdir()):
        is_weights = path.suffix in (".safetensors", *PICKLE_SUFFIXES) or path.name == INDEX_FILE
        if path.is_file() and not is_weights and path.name != CONFIG_FILE:
            shutil.copyfile(path, destination / path.name)
