"""A small dense Qwen3.5 model with random weights: its config.json and its tensors in the published namespace.

Knows nothing of tokenizers beyond the number of ids and the end ids.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_VOCAB_MULTIPLE = 64
_ATTENTION_INTERVAL = 4


def text_config(num_tokens: int) -> dict[str, Any]:
    """The text model's config: eight layers, every fourth one attention, the others Gated DeltaNet; one MTP layer."""
    layers = 8
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": math.ceil(num_tokens / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention" if (layer + 1) % _ATTENTION_INTERVAL == 0 else "linear_attention" for layer in range(layers)],
        "full_attention_interval": _ATTENTION_INTERVAL,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 16384,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "use_cache": True,
    }


def config(text: dict[str, Any], *, end_of_text_id: int) -> dict[str, Any]:
    """The published wrapper around the text config."""
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**text, "eos_token_id": end_of_text_id},
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def generation_config(*, end_of_turn_id: int, end_of_text_id: int) -> dict[str, Any]:
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [end_of_turn_id, end_of_text_id],
        "pad_token_id": end_of_text_id,
    }


def random_tensors(text: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """Every tensor of the checkpoint: bfloat16, but float32 where Qwen3.5 publishes float32 (A_log, linear_attn.norm)."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in _shapes(text).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("A_log"):
            tensors[name] = noise.mul(0.5)
        elif name.endswith("linear_attn.norm.weight"):
            tensors[name] = noise.mul(0.1).add(1.0)
        elif len(shape) == 1:
            tensors[name] = noise.mul(0.1).bfloat16()
        else:
            tensors[name] = noise.mul(1.0 / math.sqrt(math.prod(shape[1:]))).bfloat16()
    return tensors


def _shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    model = "model.language_model."
    shapes: dict[str, tuple[int, ...]] = {model + "embed_tokens.weight": (vocab, hidden)}
    for layer, kind in enumerate(text["layer_types"]):
        shapes |= _layer_shapes(f"{model}layers.{layer}.", kind, text)
    shapes |= {model + "norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
    shapes |= {"mtp.fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"mtp.{norm}.weight": (hidden,) for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return shapes | _layer_shapes("mtp.layers.0.", "full_attention", text)


def _layer_shapes(prefix: str, kind: str, text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    mixer = _attention_shapes(text) if kind == "full_attention" else _gated_delta_shapes(text)
    shapes = {
        "input_layernorm.weight": (hidden,),
        **mixer,
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    return {prefix + name: shape for name, shape in shapes.items()}


def _attention_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = text["hidden_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * head, text["num_key_value_heads"] * head
    return {
        "self_attn.q_proj.weight": (2 * queries, hidden),  # per head: query, then gate
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }


def _gated_delta_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys, values = text["linear_num_key_heads"] * text["linear_key_head_dim"], heads * text["linear_value_head_dim"]
    channels = 2 * keys + values
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (values, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, text["linear_conv_kernel_dim"]),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.norm.weight": (text["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }
