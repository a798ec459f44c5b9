"""A model without memory, on the device type "meta": one layer of each kind, used to find out which kernels the whole
model would launch; and all parameters, used to find out what they take.

Knows configs and the forms of parameters. The runtime decides what to do with the outline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from agentspec import kernels
from agentspec.models.checkpoint_layout import checkpoint_layout
from agentspec.models.hf_config import LayerType, TextConfig
from agentspec.models.quantised.parse import parse_quantization
from agentspec.models.quantised.recipes import RECIPES, Decisions, Recipe
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.shards import SINGLE_RANK, Rank, rank_config
from agentspec.models.tensors import empty_parameter, parameter_forms, quantized_schemes
from agentspec.types import ModelSpec

META = torch.device("meta")


def load_operators() -> None:
    """Call before computing with tensors on META. Making, viewing and filling them needs no call. An engine's process
    leaves these operators out of its imports (engine/start.py)."""
    import torch._meta_registrations  # noqa: F401


def outline(
    config: TextConfig,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    fp8_drafts: bool,
    fp8_pages: bool = False,
    rank: Rank = SINGLE_RANK,
    group: kernels.Group | None = None,
) -> Qwen3_5Model:
    """A rank's part of the model of `config` with one layer of each kind, its MTP head and its vocabulary.

    Layers are of one kind if they have the same mixer and the same quantised parameters: the kernels that a layer
    launches depend on nothing else."""
    load_operators()
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
    return Qwen3_5Model(config, spec, parameters, fp8_drafts=fp8_drafts, fp8_pages=fp8_pages, group=group)


def parameters_of(config: TextConfig, *, dtype: torch.dtype, rank: Rank = SINGLE_RANK) -> dict[str, kernels.Weight]:
    """A rank's part of all parameters as a GPU holds them, from the config alone: a CPU may hold quantised ones in a
    wider form."""
    quantized = quantized_schemes(config)
    return {
        name: empty_parameter(name, parameter, quantized.get(name), device=META, dtype=dtype, rank=rank)
        for name, parameter in parameter_forms(config, rank.count).items()
    }


def weight_bytes(config: TextConfig, *, dtype: torch.dtype, rank: Rank = SINGLE_RANK) -> int:
    """Memory of `parameters_of`. Copies for drafting are not included."""
    return sum(weight.nbytes for weight in parameters_of(config, dtype=dtype, rank=rank).values())


def quantized_as(config: TextConfig, target: str) -> TextConfig | None:
    """The config of what `agentspec quantize --to TARGET` makes of a checkpoint with this config; None: it refuses the
    checkpoint, or finds nothing to quantise.

    target: one of RECIPES."""
    recipe = RECIPES[target]
    quantization = quantization_as(config, recipe)
    if quantization is None:
        return None
    parsed = parse_quantization({"quantization_config": quantization}, {}, target)
    return replace(config, quantization=parsed, tied=recipe.keeps_tied(config))


def quantization_as(config: TextConfig, recipe: Recipe) -> dict[str, object] | None:
    """The `quantization_config` in the config.json of what a recipe makes; None: as of `quantized_as`."""
    if not recipe.reads(config.quantization):
        return None
    plain = replace(config, quantization=None, tied=recipe.keeps_tied(config))
    decisions = Decisions(recipe)
    for name, source in checkpoint_layout(plain, set()).sources.items():
        # All experts have one form, so the first one stands for them.
        parts = [f"{name.rpartition('.')[0]}.0.{part}.weight" for part in recipe.splits(name)]
        for part in parts or [name]:
            decisions.form(part, source.shape[-2:] if parts else source.shape)
    return decisions.config()


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
