"""Configs of the published Qwen3.5 sizes, and models of them with random weights.

Contains only shapes: no checkpoint, no tokenizer, no text.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from agentspec.kernels import FP8, PrefillBatch
from agentspec.models.hf_config import TextConfig, parse_text_config
from agentspec.models.hybrid import DecoderLayer
from agentspec.models.moe import MixtureOfExperts
from agentspec.models.outline import quantization_as
from agentspec.models.protocol import VerifyBatch
from agentspec.models.quantised.recipes import RECIPES, Int4
from agentspec.models.qwen3_5 import Qwen3_5Model, state_forms
from agentspec.models.shards import SINGLE_RANK, Rank, rank_config
from agentspec.models.state import Rings, entry_bytes, page_bytes, row_bytes
from agentspec.models.tensors import random_parameters
from agentspec.types import ZERO_ROW, ModelSpec
from benchmarks.shared_model import ALONE, SharedModel

KV_DTYPES = ("bf16", "fp8")
"""Of keys and values, as benchmarks take them."""
NUM_REAL_TOKENS = 248_077
"""Ids of the family's tokenizer; the rows of the embedding above them are padding."""

STATE_SCALE = 0.05
"""Standard deviation of random recurrent states: their outputs have the size of those after a few tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Experts:
    """The FFN of a model with experts."""

    num: int
    top_k: int
    width: int
    """Width of every expert, including the shared one."""


def _published(
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    ffn: int | _Experts,
    *,
    tied: bool = False,
    fp8: bool = False,
) -> dict[str, Any]:
    """The content of a config.json. heads: numbers of query and key heads. ffn: width of a dense FFN. fp8: as in the
    official FP8 checkpoints."""
    text: dict[str, Any] = {
        "vocab_size": 248_320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    }
    if isinstance(ffn, int):
        text["intermediate_size"] = ffn
    else:
        text |= {"num_experts": ffn.num, "num_experts_per_tok": ffn.top_k}
        text |= {"moe_intermediate_size": ffn.width, "shared_expert_intermediate_size": ffn.width}
    whole = {
        "model_type": "qwen3_5" if isinstance(ffn, int) else "qwen3_5_moe",
        "tie_word_embeddings": tied,
        "text_config": text,
    }
    if fp8:
        whole["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": _kept_in_full(layers),
        }
    return whole


def _kept_in_full(layers: int) -> list[str]:
    """The exclusion list of the official checkpoints, with their module names. It may name modules that a model
    lacks."""
    modules = ["lm_head", "model.embed_tokens", "model.language_model.embed_tokens", "mtp.fc"]
    roots = [f"model.language_model.layers.{layer}" for layer in range(layers)]
    for part in ("linear_attn.conv1d", "linear_attn.in_proj_a", "linear_attn.in_proj_b", "linear_attn.in_proj_ba"):
        modules += [f"{root}.{part}" for root in roots]
    for part in ("mlp.gate", "mlp.shared_expert_gate"):
        modules += [f"{root}.{part}" for root in [*roots, "mtp.layers.0"]]
    return modules


_35B_EXPERTS = _Experts(num=256, top_k=8, width=512)
_122B_EXPERTS = _Experts(num=256, top_k=8, width=1024)
_397B_EXPERTS = _Experts(num=512, top_k=10, width=1024)

CONFIG_FILES = {
    "0.8B": _published(1024, 24, (8, 2), 16, 3584, tied=True),
    "4B": _published(2560, 32, (16, 4), 32, 9216, tied=True),
    "9B": _published(4096, 32, (16, 4), 32, 12288),
    "27B": _published(5120, 64, (24, 4), 48, 17408),
    "27B-FP8": _published(5120, 64, (24, 4), 48, 17408, fp8=True),
    "35B-A3B": _published(2048, 40, (16, 2), 32, _35B_EXPERTS),
    "35B-A3B-FP8": _published(2048, 40, (16, 2), 32, _35B_EXPERTS, fp8=True),
    "122B-A10B": _published(3072, 48, (32, 2), 64, _122B_EXPERTS),
    "122B-A10B-FP8": _published(3072, 48, (32, 2), 64, _122B_EXPERTS, fp8=True),
    "397B-A17B": _published(4096, 60, (32, 2), 64, _397B_EXPERTS),
    "397B-A17B-FP8": _published(4096, 60, (32, 2), 64, _397B_EXPERTS, fp8=True),
}
"""The content of each model's config.json."""


def _nvfp4_mixed(layers: int, *, experts: bool) -> dict[str, Any]:
    """The quantization of NVIDIA's checkpoints of this family: FFNs and the head in NVFP4, mixers in FP8."""
    four: dict[str, object] = {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    eight: dict[str, object] = {"quant_algo": "FP8"}
    ffn = ("gate_proj", "up_proj", "down_proj")
    parts = dict.fromkeys((f"mlp.{part}" for part in ffn), four)
    if experts:
        parts = {"mlp.experts": four} | dict.fromkeys((f"mlp.shared_expert.{part}" for part in ffn), four)
    parts |= {f"linear_attn.{part}": eight for part in ("in_proj_qkv", "in_proj_z", "out_proj")}
    parts |= {f"self_attn.{part}_proj": eight for part in "qkvo"}
    of_layers = {f"model.language_model.layers.{i}.{part}": kind for i in range(layers) for part, kind in parts.items()}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"lm_head": four} | of_layers,
    }


_MIXED4 = RECIPES["mixed4"]
_HEAD_IN_INT4 = re.compile(r"lm_head\.weight").fullmatch, lambda _: Int4(128)
_RECIPES = {
    "mixed4": _MIXED4,
    "int4": RECIPES["int4"],
    "mixed4-head4": replace(_MIXED4, choices=(_HEAD_IN_INT4, *_MIXED4.choices)),
}
"""What checkpoints are measured as: what `agentspec quantize` writes, and mixed4 with its head in 4 bits too."""
for _name, _targets in {
    "4B": ("mixed4", "int4"),
    "27B": ("mixed4", "int4", "mixed4-head4"),
    "35B-A3B": ("mixed4", "int4", "mixed4-head4"),
    "122B-A10B": ("mixed4",),
    "397B-A17B": ("mixed4",),
}.items():
    _config = parse_text_config(CONFIG_FILES[_name])
    for _target in _targets:
        _recipe = _RECIPES[_target]
        CONFIG_FILES[f"{_name}-{_target}"] = CONFIG_FILES[_name] | {
            "tie_word_embeddings": _recipe.keeps_tied(_config),
            "quantization_config": quantization_as(_config, _recipe),
        }
for _name, _layers in {"27B": 64, "35B-A3B": 40}.items():
    CONFIG_FILES[f"{_name}-nvfp4"] = CONFIG_FILES[_name] | {
        "quantization_config": _nvfp4_mixed(_layers, experts=_name != "27B")
    }

MANY_GPUS = tuple(name for name in CONFIG_FILES if name.startswith(("122B", "397B")))
"""Models that are shared by several GPUs; benchmarks of one GPU measure them only if they are asked to."""

CONFIGS = {name: parse_text_config(config) for name, config in CONFIG_FILES.items()}


class PrefilledModel(Qwen3_5Model):
    """A model whose prefill can be switched off: then its rows and pages hold random values.

    So a long context takes no time, and a step after it does the same work as after a real prefill. Recorded graphs
    keep the mode in which they were recorded."""

    computes_prompts: bool = False
    """Switch the real prefill on."""

    shared: SharedModel = ALONE
    """The ranks that hold the model."""

    def allocate(self, *, num_rows: int, num_pages: int, rings: Rings | None = None) -> None:
        self._pools = None  # free the first allocation before the second one
        super().allocate(num_rows=num_rows, num_pages=num_pages, rings=rings)
        generator = torch.Generator(self.device).manual_seed(0)
        for tensor in self.pools.tensors():
            _fill(tensor, generator)
        self.pools["ssm_LRVDK"].mul_(STATE_SCALE)
        self.pools["ssm_LRVDK"][:, ZERO_ROW] = 0
        self.pools["conv_LR3C"][:, ZERO_ROW] = 0
        self.pools.hidden_RH[ZERO_ROW] = 0

    def prefill(self, batch: PrefillBatch) -> Tensor:
        if self.computes_prompts:
            return super().prefill(batch)
        hidden_RH = self.pools.hidden_RH
        return torch.zeros(len(batch.token_ids_N), hidden_RH.shape[1], dtype=hidden_RH.dtype, device=hidden_RH.device)

    def ride(self, prompts: PrefillBatch, windows: VerifyBatch) -> tuple[Tensor, Tensor]:
        if self.computes_prompts:
            return super().ride(prompts, windows)
        return self.prefill(prompts), self.verify(windows)

    def mtp_prefill(self, batch: PrefillBatch, previous_NH: Tensor) -> None:
        if self.computes_prompts:
            super().mtp_prefill(batch, previous_NH)

    def release(self) -> None:
        """Free the pools."""
        self._pools = None

    def sibling(self) -> PrefilledModel:
        """A model with the same weights for a second engine, with its own pools and draft head."""
        twin = copy(self)
        twin.release()
        return twin

    @property
    def layers(self) -> list[DecoderLayer]:
        """The trunk's."""
        return self._layers

    @property
    def mixtures(self) -> tuple[list[DecoderLayer], list[DecoderLayer]]:
        """Layers whose FFN is a mixture of experts: the trunk's, and the MTP layer if it has one."""
        drafting = [] if self._mtp is None else [self._mtp.layer]
        trunk, mtp = (
            [layer for layer in layers if isinstance(layer.ffn, MixtureOfExperts)]
            for layers in (self._layers, drafting)
        )
        return trunk, mtp


def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    """Random numbers of about 1; of keys and values in FP8 any codes but NaN, with one exponent for all."""
    if tensor.dtype == FP8:
        codes = tensor.view(torch.uint8)
        codes.random_(0, 256, generator=generator).bitwise_and_(0xFE)
    elif tensor.dtype == torch.int8:
        tensor.fill_(-8)
    else:
        tensor.normal_(0.0, 1.0, generator=generator)


def spec_of(
    name: str, config: TextConfig, dtype: torch.dtype, rank: Rank = SINGLE_RANK, *, fp8_pages: bool = False
) -> ModelSpec:
    """A spec without stop ids, which random weights would generate at times. Rows and pages have a rank's bytes."""
    forms = state_forms(rank_config(config, rank), dtype, fp8_pages=fp8_pages)
    return ModelSpec(
        name=name,
        vocab_size=config.vocab_size,
        num_real_tokens=min(NUM_REAL_TOKENS, config.vocab_size),
        max_context=config.max_context,
        hidden_size=config.hidden_size,
        has_mtp=config.has_mtp,
        stop_token_ids=(),
        row_bytes=row_bytes(forms),
        page_bytes=page_bytes(forms),
        fp8_pages=fp8_pages,
        entry_bytes=entry_bytes(forms),
        has_experts=config.moe is not None,
    )


def make_model(
    name: str,
    config: TextConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    fp8_drafts: bool | None = None,
    fp8_pages: bool = False,
    shared: SharedModel = ALONE,
) -> PrefilledModel:
    """Make this rank's part of a model with random weights on the device. fp8_drafts: None: the engine's default.
    fp8_pages: keys and values are in 8 bits.

    In MANY_GPUS models the quantised experts repeat a few random ones, as drawing and quantising all of 397B takes more
    than a minute. Their steps read the same bytes and do the same work: experts are chosen by the router, whose rows
    don't repeat, and every expert has memory of its own."""
    if fp8_drafts is None:
        fp8_drafts = device.type == "cuda" and dtype != torch.float32
    parameters = random_parameters(
        config, device=device, dtype=dtype, seed=0, rank=shared.rank, repeated=name in MANY_GPUS
    )
    spec = spec_of(name, config, dtype, shared.rank, fp8_pages=fp8_pages)
    precision = {"fp8_drafts": fp8_drafts, "fp8_pages": fp8_pages}
    model = PrefilledModel(rank_config(config, shared.rank), spec, parameters, **precision, group=shared.group)
    model.shared = shared
    return model
