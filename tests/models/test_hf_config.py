"""Where fields of config.json may be, and which values are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from agentspec.errors import CheckpointError, UnsupportedModelError
from agentspec.models.hf_config import TextConfig, load_text_config, parse_text_config
from agentspec.models.layers import rope_frequencies
from tests.fakes.checkpoints import Family, config_json, text_config

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}


def parse(family: Family = "dense", *, wrapper: bool = True, tied: bool = False, **overrides: Any) -> TextConfig:
    text = text_config(family, **overrides)
    return parse_text_config(config_json(family, text, wrapper=wrapper and family != "next", tied=tied))


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_wrapper_and_flat_config_agree(family: Family) -> None:
    assert parse(family, wrapper=True) == parse(family, wrapper=False)


def test_dense_fields() -> None:
    config = parse()
    assert config.model_type == "qwen3_5_text"
    assert config.layer_types == ("linear_attention",) * 3 + ("full_attention",) + ("linear_attention",) * 3 + (
        "full_attention",
    )
    assert (config.rotary_dim, config.rope_theta, config.max_context) == (8, 1e7, 16384)
    assert config.conv_channels == 2 * 2 * 16 + 6 * 16
    assert (config.intermediate_size, config.moe) == (96, None)
    assert config.num_mtp_layers == 1
    assert config.eos_token_ids == (2,)


def test_moe_config_has_no_dense_width() -> None:
    """Qwen3-Next's config has an unused intermediate_size, Qwen3.5's MoE none; neither may be used by a layer."""
    for family in ("moe", "next"):
        config = parse(family)
        assert config.intermediate_size is None
        assert config.moe is not None
        assert config.moe.shared_intermediate_size == 48


def test_flat_moe_config_equals_wrapped() -> None:
    """The largest published model has a flat config."""
    assert parse("moe", wrapper=False).moe == parse("moe").moe


@pytest.mark.parametrize(("stated", "expected"), [(None, True), (True, True), (False, False)])
def test_norm_topk_prob_defaults_to_true(stated: bool | None, expected: bool) -> None:
    moe = parse("next", norm_topk_prob=stated).moe
    assert moe is not None
    assert moe.normalize_top_k is expected


def test_top_level_tie_word_embeddings_has_priority() -> None:
    raw = config_json("dense", text_config("dense", tie_word_embeddings=False), wrapper=True, tied=True)
    assert parse_text_config(raw).tied
    del raw["tie_word_embeddings"]
    assert not parse_text_config(raw).tied
    raw["text_config"]["tie_word_embeddings"] = True
    assert parse_text_config(raw).tied


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": ROPE},
        {
            "rope_parameters": {
                "type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
            }
        },
        {"rope_parameters": None, "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1e7},
        {
            "rope_parameters": None,
            "rope_scaling": {"type": "default", "rope_theta": 1e7},
            "partial_rotary_factor": 0.25,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}},
    ],
)
def test_all_rope_field_layouts_are_read(fields: dict[str, Any]) -> None:
    config = parse(**fields)
    assert (config.rope_theta, config.rotary_dim, config.yarn) == (1e7, 8, None)


def test_missing_rope_theta_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_theta"):
        parse(rope_parameters={"rope_type": "default"})


@pytest.mark.parametrize(
    "extra", [{}, {"beta_fast": 16.0, "beta_slow": 2.0}, {"attention_factor": 1.5}, {"truncate": False}]
)
def test_yarn_frequencies_match_transformers(extra: dict[str, Any]) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
    }
    text = text_config("dense", head_dim=128, max_position_embeddings=16384, rope_parameters=rope | extra)
    config = parse_text_config(config_json("dense", text, wrapper=False, tied=False))
    reference = transformers.Qwen3_5TextConfig(**text)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](reference, torch.device("cpu"))
    frequencies, scale = rope_frequencies(config)
    torch.testing.assert_close(frequencies, expected)
    assert scale == pytest.approx(factor)


def test_yarn_extends_max_context() -> None:
    rope = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}
    assert parse(rope_parameters=rope).max_context == 4 * 16384


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"mtp_num_hidden_layers": 0}, 0),
        ({"mtp_num_hidden_layers": 1}, 1),
        ({"mtp_num_hidden_layers": None, "num_nextn_predict_layers": 1}, 1),
        ({"mtp_num_hidden_layers": None}, None),
    ],
)
def test_number_of_mtp_layers_is_read(fields: dict[str, Any], expected: int | None) -> None:
    assert parse(**fields).num_mtp_layers == expected


@pytest.mark.parametrize(
    ("stated", "expected"), [(None, "silu"), ("silu", "silu"), ("swish", "silu"), ("sigmoid", "sigmoid")]
)
def test_output_gate_is_read(stated: str | None, expected: str) -> None:
    assert parse(output_gate_type=stated).output_gate == expected


def test_end_ids_of_both_levels_are_merged() -> None:
    raw = config_json("dense", text_config("dense", eos_token_id=[2, 3]), wrapper=True, tied=False)
    raw["eos_token_id"] = 7
    assert parse_text_config(raw).eos_token_ids == (7, 2, 3)


@pytest.mark.parametrize("model_type", ["qwen4_exp", "qwen4_exp_text", "qwen3", "qwen3_moe", "llama", None, 5], ids=str)
def test_unsupported_model_type_is_refused(model_type: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"model_type={model_type!r}"):
        parse_text_config({"model_type": model_type, **text_config("dense")})


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        (
            "dense",
            {"layer_types": ["linear_attention"] * 7 + ["sliding_attention"]},
            "layer_types\\[7\\]='sliding_attention'",
        ),
        ("dense", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("dense", {"attention_bias": True}, "attention_bias=True"),
        ("dense", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("dense", {"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim=3"),
        ("dense", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16'"),
        ("dense", {"output_gate_type": "tanh"}, "output_gate_type='tanh'"),
        ("dense", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ("dense", {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2"),
        ("next", {"mlp_only_layers": [1]}, "mlp_only_layers=\\[1\\]"),
        ("next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("dense", {"quantization_config": {"quant_method": "awq"}}, "quantization_config: quant_method='awq'"),
        ("dense", {"rope_parameters": ROPE | {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ("dense", {"rope_parameters": ROPE | {"factor": 2.0}}, "unsupported fields: factor"),
        ("dense", {"model_type": "qwen3_5_moe_text"}, "model_type='qwen3_5_moe_text' inside 'qwen3_5'"),
    ],
)
def test_unimplemented_value_is_refused(family: Family, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse(family, **fields)


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("dense", {"head_dim": None}, "'head_dim' is missing"),
        ("dense", {"intermediate_size": None}, "'intermediate_size' is missing"),
        ("moe", {"num_experts": None}, "'num_experts' is missing"),
        ("moe", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds num_experts=8"),
        ("dense", {"vocab_size": "many"}, "vocab_size='many'"),
        ("dense", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ("dense", {"rms_norm_eps": True}, "rms_norm_eps=True"),
        ("dense", {"layer_types": ["full_attention"]}, "must list 8 layers"),
        ("dense", {"num_attention_heads": 5}, "num_attention_heads=5"),
        ("dense", {"linear_num_value_heads": 5}, "linear_num_value_heads=5"),
        ("dense", {"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, "48 rotary dimensions"),
        ("dense", {"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ],
)
def test_invalid_value_is_refused(family: Family, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        parse(family, **fields)


def test_unreadable_config_error_names_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_text_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: unreadable JSON"):
        load_text_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="JSON object"):
        load_text_config(tmp_path)
