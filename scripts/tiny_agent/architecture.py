"""The model's shape: the config in published form, and initial weights.

Depends only on the tokenizer's number of tokens and its end ids.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from agentspec.models.hf_config import TextConfig, parse_text_config
from agentspec.models.tensors import random_parameters

_VOCAB_MULTIPLE = 64
_ATTENTION_INTERVAL = 4
_EMBEDDING_STD = 0.02


def text_config(num_tokens: int, *, num_layers: int = 12, hidden: int = 256, intermediate: int = 640) -> dict[str, Any]:
    """The text model's config: three Gated DeltaNet layers to each attention layer, tied embeddings, one MTP layer."""
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": math.ceil(num_tokens / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "layer_types": [
            "full_attention" if (layer + 1) % _ATTENTION_INTERVAL == 0 else "linear_attention"
            for layer in range(num_layers)
        ],
        "full_attention_interval": _ATTENTION_INTERVAL,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
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
            "mrope_section": [3, 3, 2],
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "use_cache": True,
    }


def config_json(text: dict[str, Any], *, end_of_text_id: int) -> dict[str, Any]:
    """config.json of a text-only checkpoint, without the wrapper that includes a vision tower."""
    return {"architectures": ["Qwen3_5ForCausalLM"], **text, "eos_token_id": end_of_text_id}


def generation_config(*, end_of_turn_id: int, end_of_text_id: int) -> dict[str, Any]:
    return {
        "do_sample": True,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "eos_token_id": [end_of_turn_id, end_of_text_id],
        "pad_token_id": end_of_text_id,
    }


def parsed(text: dict[str, Any]) -> TextConfig:
    """The config as the engine reads it."""
    return parse_text_config(text)


def initial_weights(config: TextConfig, seed: int) -> dict[str, Tensor]:
    """Initial weights in float32 on the CPU under the engine's canonical names.

    Projections into the residual stream are scaled down by the square root of their number; embeddings are small
    because they are also the output head."""
    parameters = random_parameters(config, device=torch.device("cpu"), dtype=torch.float32, seed=seed)
    weights = {name: parameter.tensor for name, parameter in parameters.items()}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight.mul_((2 * len(config.layer_types)) ** -0.5)
        elif name.endswith("embed_tokens.weight"):
            weight.mul_(_EMBEDDING_STD * config.hidden_size**0.5)
    return weights


def layer_weights(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights of one module, by their names inside it."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
