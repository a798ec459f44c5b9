"""A model without memory: one layer of each kind on the device type "meta", used to find out which kernels the whole
model would launch.

Knows configs and the forms of parameters. The runtime decides what to do with the outline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from agentspec import kernels
from agentspec.models.hf_config import LayerType, TextConfig
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.shards import SINGLE_RANK, Rank, rank_config
from agentspec.models.tensors import empty_parameter, parameter_forms, quantized_schemes
from agentspec.types import ModelSpec

META = torch.device("meta")


def outline(
    config: TextConfig,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    fp8_drafts: bool,
    rank: Rank = SINGLE_RANK,
    group: kernels.Group | None = None,
) -> Qwen3_5Model:
    """A rank's part of the model of `config` with one layer of each kind, its MTP head and its vocabulary.

    Layers are of one kind if they have the same mixer and the same quantised parameters: the kernels that a layer
    launches depend on nothing else."""
    quantized = quantized_schemes(config)
    layers = _kinds(config, frozenset(quantized))
    parameters: dict[str, kernels.Weight] = {}
    for name, parameter in parameter_forms(config, rank.count).items():
        layer = _layer_index(name)
        if layer is None or layer in layers:
            kept = name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layers[layer]}.", 1)
            parameters[kept] = empty_parameter(
                name, parameter, quantized.get(name), device=META, dtype=dtype, rank=rank
            )
    types: tuple[LayerType, ...] = tuple(config.layer_types[layer] for layer in layers)
    config = replace(rank_config(config, rank), layer_types=types)
    return Qwen3_5Model(config, spec, parameters, fp8_drafts=fp8_drafts, group=group)


def weight_bytes(config: TextConfig, *, dtype: torch.dtype, rank: Rank = SINGLE_RANK) -> int:
    """Memory of a rank's part of all parameters as a GPU holds them, from the config alone: a CPU may hold quantised
    ones in a wider form. Copies for drafting are not included."""
    quantized = quantized_schemes(config)
    return sum(
        empty_parameter(name, parameter, quantized.get(name), device=META, dtype=dtype, rank=rank).nbytes
        for name, parameter in parameter_forms(config, rank.count).items()
    )


def _kinds(config: TextConfig, quantized: frozenset[str]) -> Mapping[int, int]:
    """The first layer of each kind: its index in the model, and its index among these first layers."""
    of_layer: dict[int, set[str]] = {}
    for name in quantized:
        layer = _layer_index(name)
        if layer is not None:
            of_layer.setdefault(layer, set()).add(name.partition(f"layers.{layer}.")[2])
    first: dict[tuple[LayerType, frozenset[str]], int] = {}
    for layer, layer_type in enumerate(config.layer_types):
        first.setdefault((layer_type, frozenset(of_layer.get(layer, ()))), layer)
    return {layer: place for place, layer in enumerate(first.values())}


def _layer_index(name: str) -> int | None:
    """Index of the trunk layer that a parameter belongs to; None for any other parameter."""
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None
