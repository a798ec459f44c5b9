"""Loads a checkpoint directory into a model that the runtime can drive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from agentspec import kernels
from agentspec.errors import ConfigError
from agentspec.models import vocabulary
from agentspec.models.hf_config import TextConfig, load_text_config
from agentspec.models.protocol import StepModel
from agentspec.models.qwen3_5 import Qwen3_5Model, state_forms
from agentspec.models.shards import SINGLE_RANK, Rank, rank_config, shard_shape
from agentspec.models.state import entry_bytes, page_bytes, row_bytes
from agentspec.models.stored import describe
from agentspec.models.tensors import HEAD, parameter_forms, quantized_schemes, random_parameters
from agentspec.models.weights import Checkpoint
from agentspec.types import ModelSpec, Progress, no_progress


def load_model(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    random_weights: bool = False,
    seed: int = 0,
    fp8_drafts: bool = False,
    fp8_pages: bool = False,
    rank: Rank = SINGLE_RANK,
    group: kernels.Group | None = None,
    progress: Progress = no_progress,
) -> StepModel:
    """Load the model of a checkpoint directory (`weights.resolve_checkpoint` finds it).

    Args:
        dtype: of weights, activations, conv rows, hidden column and, without fp8_pages, keys and values; recurrent
        state is float32.
        random_weights: read only the JSON files and make random weights from `seed`. A config that doesn't say whether
        there is an MTP head gets one, as in every published checkpoint.
        fp8_drafts: quantise the drafting weights that aren't quantised in the checkpoint (models/fp8_drafts.py).
        fp8_pages: store keys and values in 8 bits (attention.attention_form).
        rank: load this rank's part of the model. group: of as many ranks.
        progress: called with the number of tensors read.
    Raises ConfigError if the ranks can't share the model, CheckpointError, or UnsupportedModelError that names the
    unsupported value."""
    config = resolved_config(path, random_weights=random_weights)
    refuse_device(config, device, rank)
    notes = [] if config.quantization is None else [*config.quantization.notes]
    if random_weights:
        parameters = random_parameters(config, device=device, dtype=dtype, seed=seed, rank=rank)
    else:
        with Checkpoint(path) as checkpoint:
            parameters = checkpoint.load(config, device=device, dtype=dtype, rank=rank, progress=progress)
            if unused := checkpoint.unused(config):
                notes.append(f"{len(unused)} multipliers of keys and values are not used")
    spec = model_spec(path, config, dtype, rank, fp8_pages=fp8_pages)
    spec = replace(spec, weights=describe(config, parameters, notes))
    precision = {"fp8_drafts": fp8_drafts, "fp8_pages": fp8_pages}
    return Qwen3_5Model(rank_config(config, rank), spec, parameters, **precision, group=group)


def refuse_device(config: TextConfig, device: torch.device, rank: Rank = SINGLE_RANK) -> None:
    """Raise ConfigError for a checkpoint whose weights, or a rank's parts of them, no kernel of the device takes, or
    that the ranks can't share."""
    rank_config(config, rank)
    reason = why_cpu_only(config, rank)
    if reason is not None and device.type != "cpu":
        raise ConfigError("device", device.type, reason)


def why_cpu_only(config: TextConfig, rank: Rank = SINGLE_RANK) -> str | None:
    """Why no GPU runs a rank's part of a checkpoint, which the ranks can share; None: GPUs do."""
    forms = parameter_forms(config, rank.count)
    for name, scheme in quantized_schemes(config).items():
        shape = shard_shape(name, forms[name].shape, forms[name].shard, rank)
        reason = None if name == HEAD else scheme.cpu_only(name, shape)  # a head can be expanded
        if reason is not None:
            return f"{reason} ({name}) run on the CPU reference only so far"
    return None


def resolved_config(path: Path, *, random_weights: bool) -> TextConfig:
    """A checkpoint's config with num_mtp_layers resolved: if the config doesn't say, the checkpoint's tensors decide.

    random_weights: read no tensors; if the config doesn't say, there is an MTP head, as in every published
    checkpoint."""
    config = load_text_config(path)
    if config.num_mtp_layers is not None:
        return config
    if random_weights:
        return config.with_mtp_layers(1)
    with Checkpoint(path) as checkpoint:
        return config.with_mtp_layers(int(checkpoint.has_mtp))


def model_spec(
    path: Path, config: TextConfig, dtype: torch.dtype, rank: Rank = SINGLE_RANK, *, fp8_pages: bool = False
) -> ModelSpec:
    """The engine's description of the model, from its config and JSON files; the name is the directory's. Rows and
    pages have the bytes of a rank's part. fp8_pages: see `load_model`."""
    forms = state_forms(rank_config(config, rank), dtype, fp8_pages=fp8_pages)
    return ModelSpec(
        name=path.resolve().name,
        vocab_size=config.vocab_size,
        num_real_tokens=vocabulary.num_real_tokens(path, config),
        max_context=config.max_context,
        hidden_size=config.hidden_size,
        has_mtp=config.has_mtp,
        stop_token_ids=vocabulary.stop_token_ids(path, config),
        row_bytes=row_bytes(forms),
        page_bytes=page_bytes(forms),
        fp8_pages=fp8_pages,
        entry_bytes=entry_bytes(forms),
        has_experts=config.moe is not None,
    )
