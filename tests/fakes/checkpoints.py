"""Tiny random checkpoints in the published layouts, written without transformers and without agentspec's own loader
code.

Every parameter has an effect: norms, gates, decays and biases are random, and head counts differ from each other, so
that a wrong convention changes the logits and zeros or ones can't hide it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Family = Literal["dense", "moe", "next"]
Tensors = dict[str, Tensor]

VISION_DEPTH, VISION_HIDDEN, VISION_FFN = 2, 32, 64

_TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "full_attention_interval": 4,
    "mtp_num_hidden_layers": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
_MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
_TYPES = {
    "dense": ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
    "moe": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    "next": ("qwen3_next", "Qwen3NextForCausalLM"),
}


def text_config(family: Family, **overrides: Any) -> dict[str, Any]:
    """The flat text config of a tiny model; overrides replace fields, None removes one."""
    text = dict(_TEXT) | ({"intermediate_size": 96} if family == "dense" else _MOE)
    if family == "next":
        rope = {name: value for name, value in _TEXT["rope_parameters"].items() if not name.startswith("mrope")}
        text |= {
            "rope_parameters": rope,
            "intermediate_size": 96,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
        del text["mtp_num_hidden_layers"]
    text |= overrides
    return {name: value for name, value in text.items() if value is not None}


def config_json(family: Family, text: dict[str, Any], *, wrapper: bool, tied: bool) -> dict[str, Any]:
    """A config.json in the published shape: multimodal wrapper, or flat."""
    model_type, architecture = _TYPES[family]
    if not wrapper:
        flat_type = model_type if family == "next" else f"{model_type}_text"
        flat_architecture = architecture.replace("ForConditionalGeneration", "ForCausalLM")
        return {"architectures": [flat_architecture], "model_type": flat_type, "tie_word_embeddings": tied, **text}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": tied,
        "image_token_id": 150,
        "video_token_id": 151,
        "vision_start_token_id": 152,
        "vision_end_token_id": 153,
        "text_config": {"model_type": f"{model_type}_text", **text},
        "vision_config": {
            "model_type": model_type,
            "depth": VISION_DEPTH,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": VISION_FFN,
            "num_heads": 2,
            "in_channels": 3,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 16,
        },
    }


class _Maker:
    """Draws the tensors of a checkpoint in the unpacked, fused-experts form."""

    def __init__(self, text: dict[str, Any], seed: int) -> None:
        self.c = text
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: Tensors = {}

    def normal(self, name: str, *shape: int, std: float, mean: float = 0.0) -> None:
        self.tensors[name] = mean + std * torch.randn(shape, generator=self.generator)

    def linear(self, name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        self.normal(f"{name}.weight", rows, columns, std=scale / math.sqrt(columns))

    def norm(self, name: str, size: int, mean: float = 0.0) -> None:
        self.normal(f"{name}.weight", size, std=0.2, mean=mean)

    def swiglu(self, prefix: str, width: int) -> None:
        hidden = self.c["hidden_size"]
        self.linear(f"{prefix}gate_proj", width, hidden)
        self.linear(f"{prefix}up_proj", width, hidden)
        self.linear(f"{prefix}down_proj", hidden, width, 0.6)

    def ffn(self, prefix: str) -> None:
        hidden = self.c["hidden_size"]
        if "num_experts" not in self.c:
            self.swiglu(prefix, self.c["intermediate_size"])
            return
        experts, width = self.c["num_experts"], self.c["moe_intermediate_size"]
        self.linear(f"{prefix}gate", experts, hidden)
        self.normal(f"{prefix}experts.gate_up_proj", experts, 2 * width, hidden, std=hidden**-0.5)
        self.normal(f"{prefix}experts.down_proj", experts, hidden, width, std=0.6 * width**-0.5)
        self.linear(f"{prefix}shared_expert_gate", 1, hidden)
        self.swiglu(f"{prefix}shared_expert.", self.c["shared_expert_intermediate_size"])

    def attention(self, prefix: str) -> None:
        c, hidden, dim = self.c, self.c["hidden_size"], self.c["head_dim"]
        self.linear(f"{prefix}q_proj", 2 * c["num_attention_heads"] * dim, hidden)
        self.linear(f"{prefix}k_proj", c["num_key_value_heads"] * dim, hidden)
        self.linear(f"{prefix}v_proj", c["num_key_value_heads"] * dim, hidden)
        self.linear(f"{prefix}o_proj", hidden, c["num_attention_heads"] * dim, 0.6)
        # Gains above 1 sharpen the softmax, so that positions matter.
        self.norm(f"{prefix}q_norm", dim, mean=0.5)
        self.norm(f"{prefix}k_norm", dim, mean=0.5)

    def gated_delta(self, prefix: str) -> None:
        c, hidden = self.c, self.c["hidden_size"]
        heads, values = c["linear_num_value_heads"], c["linear_num_value_heads"] * c["linear_value_head_dim"]
        channels = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
        self.linear(f"{prefix}in_proj_qkv", channels, hidden)
        self.linear(f"{prefix}in_proj_z", values, hidden)
        self.linear(f"{prefix}in_proj_b", heads, hidden)
        self.linear(f"{prefix}in_proj_a", heads, hidden)
        self.normal(f"{prefix}conv1d.weight", channels, 1, 4, std=0.4)
        self.tensors[f"{prefix}A_log"] = torch.empty(heads).uniform_(0.05, 4.0, generator=self.generator).log()
        self.normal(f"{prefix}dt_bias", heads, std=0.5)
        self.norm(f"{prefix}norm", c["linear_value_head_dim"], mean=1.0)
        self.linear(f"{prefix}out_proj", hidden, values, 0.6)

    def layer(self, prefix: str, *, full_attention: bool) -> None:
        self.norm(f"{prefix}input_layernorm", self.c["hidden_size"])
        self.norm(f"{prefix}post_attention_layernorm", self.c["hidden_size"])
        if full_attention:
            self.attention(f"{prefix}self_attn.")
        else:
            self.gated_delta(f"{prefix}linear_attn.")
        self.ffn(f"{prefix}mlp.")

    def trunk(self, *, tied: bool) -> None:
        c = self.c
        self.normal("model.embed_tokens.weight", c["vocab_size"], c["hidden_size"], std=1.0)
        for i in range(c["num_hidden_layers"]):
            types = c.get("layer_types")
            full = types[i] == "full_attention" if types else (i + 1) % c.get("full_attention_interval", 4) == 0
            self.layer(f"model.layers.{i}.", full_attention=full)
        self.norm("model.norm", c["hidden_size"])
        if not tied:
            self.linear("lm_head", c["vocab_size"], c["hidden_size"])

    def mtp(self) -> None:
        hidden = self.c["hidden_size"]
        self.linear("mtp.fc", hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norm(f"mtp.{name}", hidden)
        self.layer("mtp.layers.0.", full_attention=True)


def _vision(out_hidden: int) -> Tensors:
    generator = torch.Generator().manual_seed(5)
    hidden, merged = VISION_HIDDEN, 4 * VISION_HIDDEN
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj": (hidden, 3, 2, 4, 4), "merger.norm": (hidden,)}
    shapes |= {"merger.linear_fc1": (merged, merged), "merger.linear_fc2": (out_hidden, merged)}
    for i in range(VISION_DEPTH):
        shapes |= {f"blocks.{i}.norm1": (hidden,), f"blocks.{i}.norm2": (hidden,)}
        shapes |= {f"blocks.{i}.attn.qkv": (3 * hidden, hidden), f"blocks.{i}.attn.proj": (hidden, hidden)}
        shapes |= {
            f"blocks.{i}.mlp.linear_fc1": (VISION_FFN, hidden),
            f"blocks.{i}.mlp.linear_fc2": (hidden, VISION_FFN),
        }
    tensors = {"model.visual.pos_embed.weight": torch.randn(16, hidden, generator=generator)}
    for name, shape in shapes.items():
        tensors[f"model.visual.{name}.weight"] = torch.randn(shape, generator=generator)
        tensors[f"model.visual.{name}.bias"] = torch.randn(shape[0], generator=generator)
    return tensors


def _split_experts(tensors: Tensors, root: str) -> Tensors:
    """Per-expert names instead of fused ones under `root` ("model." or "mtp.")."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not name.startswith(root) or ".experts." not in name:
            out[name] = tensor
            continue
        prefix, kind = name.rsplit(".", 1)
        for e, expert in enumerate(tensor):
            if kind == "gate_up_proj":
                gate, up = expert.chunk(2)
                out[f"{prefix}.{e}.gate_proj.weight"], out[f"{prefix}.{e}.up_proj.weight"] = gate, up
            else:
                out[f"{prefix}.{e}.down_proj.weight"] = expert
    return out


def _pack_projections(tensors: Tensors, text: dict[str, Any]) -> Tensors:
    """Qwen3-Next's in_proj_qkvz and in_proj_ba: rows of one key head after another."""
    key_heads, key_dim = text["linear_num_key_heads"], text["linear_key_head_dim"]
    out = {name: tensor for name, tensor in tensors.items() if ".in_proj_" not in name}
    for name in [name for name in tensors if name.endswith("in_proj_qkv.weight")]:
        prefix = name.removesuffix("in_proj_qkv.weight")
        qkv, z, b, a = (tensors[f"{prefix}in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a"))
        q, k, v = qkv.tensor_split([key_heads * key_dim, 2 * key_heads * key_dim])
        rows_of = [[part.chunk(key_heads)[h] for part in (q, k, v, z)] for h in range(key_heads)]
        out[f"{prefix}in_proj_qkvz.weight"] = torch.cat([row for rows in rows_of for row in rows])
        out[f"{prefix}in_proj_ba.weight"] = torch.cat(
            [part.chunk(key_heads)[h] for h in range(key_heads) for part in (b, a)]
        )
    return out


_PLAIN = re.compile(
    r"embed_tokens|lm_head|norm|conv1d|A_log|dt_bias|in_proj_(a|b|ba|qkvz)\b|mlp\.gate\.|shared_expert_gate|mtp\.fc|visual"
)
_ALIASES = (
    "layers.0.mlp.gate",
    "layers.0.mlp.shared_expert_gate",
    "layers.0.linear_attn.in_proj_ba",
    "visual.deepstack_merger_list.0",
)
"""Modules that published lists of exclusions name although no checkpoint has them (dense ones list a router)."""


def _to_fp8(weight: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """8-bit values and scales of a matrix or a stack of matrices, block by block."""
    *stack, rows, columns = weight.shape
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty((*stack, math.ceil(rows / 128), math.ceil(columns / 128)), dtype=scale_dtype)
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            block = weight[..., 128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].float()
            scale = (block.abs().amax((-2, -1)) / 448).to(scale_dtype)
            scales[..., i, j] = scale
            values[..., 128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = (
                block / scale.float()[..., None, None]
            ).clamp(-448, 448)
    return values, scales


def _from_fp8(values: Tensor, scales: Tensor) -> Tensor:
    weight = values.float()
    for i in range(scales.shape[-2]):
        for j in range(scales.shape[-1]):
            weight[..., 128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] *= scales[..., i, j, None, None].float()
    return weight


def _quantized(tensors: Tensors, scale_dtype: torch.dtype, plain: tuple[str, ...], *, expand: bool) -> Tensors:
    """All but `_PLAIN` tensors and the modules of `plain` in 8 bits; expand: as float32 tensors of the same values."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if _PLAIN.search(name) or name.removesuffix(".weight") in plain:
            out[name] = tensor
            continue
        values, scales = _to_fp8(tensor, scale_dtype)
        if expand:
            out[name] = _from_fp8(values, scales)
        else:
            out[name], out[f"{name}_scale_inv"] = values, scales
    return out


def quantization_config(tensors: Tensors, *, wrapper: bool) -> dict[str, Any]:
    """The official form; the list names every module in full precision by its path, and some that don't exist."""
    root = "model.language_model." if wrapper else "model."
    modules = {
        name.removesuffix(".weight")
        for name in tensors
        if name.endswith(".weight") and f"{name}_scale_inv" not in tensors
    }
    listed = sorted(modules - {"mtp.fc"} | {root + alias for alias in _ALIASES})
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": listed,
    }


def write_checkpoint(
    directory: Path,
    family: Family,
    *,
    seed: int = 0,
    sharded: bool = False,
    namespace: Literal["wrapper", "flat"] | None = None,
    experts: Literal["fused", "split"] | None = None,
    mtp_experts: Literal["fused", "split"] | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    control_dtype: torch.dtype | None = None,
    vision: bool = True,
    mtp: bool = True,
    fp8: Literal["stored", "expanded"] | None = None,
    scale_dtype: torch.dtype = torch.bfloat16,
    plain: tuple[str, ...] = (),
    **overrides: Any,
) -> Path:
    """Write config.json and safetensors of a tiny model into `directory` (made if missing) and return it.

    namespace: "wrapper" (text_config inside, `model.language_model.`) or "flat" (`model.`); Qwen3-Next is always flat.
    experts, mtp_experts: layout of the trunk's and the head's experts; by default the family's published one.
    control_dtype: of A_log and linear_attn.norm; by default `dtype`.
    fp8: "stored" in 8 bits with multipliers of `scale_dtype`; "expanded": the values that those stand for, as a
    checkpoint in full precision.
    plain: modules in full precision beside those that always are, by the layout's names in the flat namespace. The same
    family, seed and overrides give the same values in every layout (in 8 bits: where parts of experts are quantised
    alike).
    """
    wrapper = family != "next" and namespace != "flat"
    text = text_config(family, **overrides)
    if not mtp:
        text.pop("mtp_num_hidden_layers", None)
    maker = _Maker(text, seed)
    maker.trunk(tied=tied)
    if mtp:
        maker.mtp()
    tensors = {name: t.to(_stored_dtype(name, dtype, control_dtype)) for name, t in maker.tensors.items()}
    if (experts or ("split" if family == "next" else "fused")) == "split":
        tensors = _split_experts(tensors, "model.")
    if (mtp_experts or "split") == "split":
        tensors = _split_experts(tensors, "mtp.")
    if family == "next":
        tensors = _pack_projections(tensors, text)
    if fp8 is not None:
        tensors = _quantized(tensors, scale_dtype, plain, expand=fp8 == "expanded")
    if wrapper:
        tensors = {
            name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: t
            for name, t in tensors.items()
        }
        if vision:
            tensors |= {name: t.to(dtype) for name, t in _vision(text["hidden_size"]).items()}
    directory.mkdir(parents=True, exist_ok=True)
    config = config_json(family, text, wrapper=wrapper, tied=tied)
    if fp8 == "stored":
        config["quantization_config"] = quantization_config(tensors, wrapper=wrapper)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    write_tensors(directory, tensors, sharded=sharded)
    return directory


def write_tensors(directory: Path, tensors: Tensors, *, sharded: bool = False) -> None:
    """safetensors in one file, or in three shards with an index."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    if not sharded:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for i in range(3):
        shard = {name: tensors[name] for name in sorted(tensors)[i::3]}
        file_name = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> Path:
    """Apply `change` to the tensors of a single-file checkpoint, by their names in it."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


def _stored_dtype(name: str, dtype: torch.dtype, control_dtype: torch.dtype | None) -> torch.dtype:
    if control_dtype is not None and name.endswith(("A_log", "linear_attn.norm.weight")):
        return control_dtype
    return dtype
