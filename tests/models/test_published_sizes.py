"""Parameter shapes of the published sizes add up exactly to the published byte counts.

`metadata.total_size` of a published index includes text model, MTP head and vision tower. Only the size of the vision
tower is computed by the test itself.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentspec.models.hf_config import TextConfig, parse_text_config
from agentspec.models.qwen3_5 import state_forms
from agentspec.models.state import page_bytes, row_bytes
from agentspec.models.tensors import parameter_shapes

MIB = 2**20


def published_config(
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    ffn: int | tuple[int, int, int],
    *,
    tied: bool = False,
) -> TextConfig:
    """A published size, as in its config.json; ffn: width, or (experts, top-k, width)."""
    text: dict[str, Any] = {
        "vocab_size": 248320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    }
    if isinstance(ffn, int):
        text["intermediate_size"] = ffn
    else:
        experts, top_k, width = ffn
        text |= {
            "num_experts": experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": width,
        }
    model_type = "qwen3_5" if isinstance(ffn, int) else "qwen3_5_moe"
    return parse_text_config({"model_type": model_type, "tie_word_embeddings": tied, "text_config": text})


def text_bytes(config: TextConfig, *, float32_controls: bool) -> int:
    """Bytes in bfloat16, except that Qwen3.5 stores A_log and linear_attn.norm in float32."""
    total = 0
    for name, shape in parameter_shapes(config).items():
        wide = float32_controls and name.endswith(("A_log", "linear_attn.norm.weight"))
        total += math.prod(shape) * (4 if wide else 2)
    return total


def vision_bytes(hidden: int, depth: int, ffn: int, out: int) -> int:
    """Bytes of the vision tower in bfloat16: patches of 16x16x2 RGB, 2304 positions, a merger of 2x2 patches."""
    block = 4 * hidden + (hidden + 1) * 3 * hidden + (hidden + 1) * hidden + (hidden + 1) * ffn + (ffn + 1) * hidden
    patches = (3 * 2 * 16 * 16 + 1) * hidden + 2304 * hidden
    merger = 2 * hidden + (4 * hidden + 1) * 4 * hidden + (4 * hidden + 1) * out
    return 2 * (depth * block + patches + merger)


SMALL_TOWER, LARGE_TOWER = (1024, 24, 4096), (1152, 27, 4304)
SIZES = {
    "3.5-4B": (published_config(2560, 32, (16, 4), 32, 9216, tied=True), SMALL_TOWER, True, 9_319_737_856),
    "3.5-9B": (published_config(4096, 32, (16, 4), 32, 12288), LARGE_TOWER, True, 19_306_216_416),
    "3.5-27B": (published_config(5120, 64, (24, 4), 48, 17408), LARGE_TOWER, True, 55_562_872_800),
    "3.8-27B": (published_config(5120, 64, (24, 4), 48, 17408), LARGE_TOWER, False, 55_562_855_904),
    "3.5-122B-A10B": (published_config(3072, 48, (32, 2), 64, (256, 8, 1024)), LARGE_TOWER, True, 250_173_007_840),
    "3.5-397B-A17B": (published_config(4096, 60, (32, 2), 64, (512, 10, 1024)), LARGE_TOWER, True, 806_795_875_168),
}


@pytest.mark.parametrize("size", SIZES)
def test_parameter_bytes_equal_published_total(size: str) -> None:
    config, (hidden, depth, ffn), float32_controls, published = SIZES[size]
    assert (
        text_bytes(config, float32_controls=float32_controls) + vision_bytes(hidden, depth, ffn, config.hidden_size)
        == published
    )


@pytest.mark.parametrize(
    ("size", "state_mib", "conv_mib", "kv_per_token"),
    [
        ("3.5-4B", 48, 1.125, 36_864),
        ("3.5-27B", 144, 2.8125, 69_632),
        ("3.5-122B-A10B", 144, 2.53125, 26_624),
        ("3.5-397B-A17B", 180, 3.1640625, 32_768),
    ],
)
def test_row_and_page_bytes_of_published_sizes(size: str, state_mib: float, conv_mib: float, kv_per_token: int) -> None:
    """float32 state and bfloat16 conv rows per sequence; keys and values per token, including the MTP layer's."""
    config = SIZES[size][0]
    assert row_bytes(state_forms(config, torch.bfloat16)) == int((state_mib + conv_mib) * MIB) + 2 * config.hidden_size
    assert page_bytes(state_forms(config, torch.bfloat16)) == 64 * kv_per_token
