"""What a 4-bit checkpoint says and can't be served as is refused with field and value, and so are tensors that don't
fit what it says."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.config import EngineConfig
from agentspec.engine.assembly import rehearsal
from agentspec.errors import CheckpointError, ConfigError, UnsupportedModelError
from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.models.hf_config import load_text_config, parse_text_config
from agentspec.models.outline import parameters_of
from agentspec.models.quantization import Quantization
from agentspec.models.registry import load_model, resolved_config, why_cpu_only
from agentspec.models.shards import Rank
from agentspec.models.weights import Checkpoint
from benchmarks import published
from tests.fakes.checkpoints import config_json, rewrite, text_config
from tests.fakes.four_bit import edit_quantization, gptq, nvfp4
from tests.fakes.four_bit_layouts import (
    FP8_INPUTS,
    LAYOUTS,
    LM,
    NVFP4_INPUTS,
    NVFP4_WEIGHTS,
    TRUNK_MIXERS,
    TRUNK_MLP,
    awq_config,
    compressed,
    int4_group,
    mixed_layers,
    modelopt,
    official_gptq,
    weights,
)

CPU = torch.device("cpu")
Change = Callable[[dict[str, Tensor]], object]


def parsed(quantization: dict[str, Any] | None, beside: dict[str, Any] | None = None) -> Quantization:
    raw = config_json("dense", text_config("dense"), wrapper=True, tied=False)
    raw |= {} if quantization is None else {"quantization_config": quantization}
    found = parse_text_config(raw, quantization=beside).quantization
    assert found is not None
    return found


def load(directory: Path) -> None:
    with Checkpoint(directory) as checkpoint:
        checkpoint.load(resolved_config(directory, random_weights=False), device=CPU, dtype=torch.float32)


# Configs


def int4(**changes: Any) -> dict[str, Any]:
    given = weights(4, "int", "group", group_size=128) | changes
    return compressed([int4_group(128, weights=given)], "pack-quantized")


def float4(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": NVFP4_WEIGHTS | changes, "input_activations": None}
    return compressed([group], "nvfp4-pack-quantized")


CONFIGS: list[tuple[dict[str, Any], str]] = [
    (official_gptq(bits=8), r"quant_method='gptq': bits=8 is not supported \(only 4\)"),
    (official_gptq(bits=None), r"bits=None is not supported \(only 4\)"),
    (official_gptq(group_size=64), r"group_size=64 is not supported \(only 16, 32, 128\)"),
    (official_gptq(group_size=-1), r"group_size=-1 is not supported"),
    (official_gptq(desc_act=True), r"desc_act=True is not supported \(only False\)"),
    (official_gptq(checkpoint_format="marlin"), r"checkpoint_format='marlin'"),
    (official_gptq(pack_dtype="int64"), r"pack_dtype='int64'"),
    (official_gptq(rotation="hadamard"), r"rotation='hadamard' is not supported"),
    (official_gptq(dynamic={"+:.*mlp.*": {"bits": 8}}), r"dynamic\['\+:\.\*mlp\.\*'\]: bits=8"),
    (official_gptq(dynamic={".*mlp.*": {"desc_act": True}}), r"dynamic\['\.\*mlp\.\*'\]: desc_act=True"),
    (official_gptq(dynamic={".*mlp.*": 4}), r"dynamic\['\.\*mlp\.\*'\] must be an object"),
    (official_gptq(dynamic=[".*"]), "dynamic must be an object"),
    (awq_config(bits=8), r"quant_method='awq': bits=8"),
    (awq_config(version="gemv"), r"version='gemv' is not supported \(only 'gemm', 'GEMM'\)"),
    (awq_config(zero_point=False), "zero_point=False"),
    (awq_config(group_size=48), "group_size=48"),
    (awq_config(modules_to_not_convert="lm_head"), "modules_to_not_convert must be a list of names"),
    (int4(num_bits=8), r"config_groups\['group_0'\]: weights: num_bits=8 is not supported \(only 4\)"),
    (int4(strategy="channel"), r"strategy='channel' is not supported \(only 'group'\)"),
    (int4(group_size=96), "group_size=96"),
    (int4(actorder="group"), r"actorder='group' is not supported \(only 'static', 'weight'\)"),
    (int4(actorder=True), "actorder=True"),
    (int4(type="nf"), "type='nf'"),
    (int4(sideways=True), "weights: sideways=True"),
    (int4() | {"format": "marlin-24"}, r"format='marlin-24' is not supported \(only 'pack-quantized'\)"),
    (int4() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config="),
    (int4() | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config="),
    (int4() | {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme="),
    (int4() | {"config_groups": {}}, "config_groups is missing or empty"),
    (int4() | {"config_groups": {"group_0": 4}}, r"config_groups\['group_0'\] must be an object"),
    (int4() | {"ignore": ["re:(a+)+"]}, r"expression '\(a\+\)\+' has more than 1000 letters or repeats a group"),
    (int4() | {"ignore": ["re:("]}, r"'\(' is no regular expression"),
    (compressed([int4_group(128, targets=["Conv1d"])], "pack-quantized"), r"targets='Conv1d' is not supported"),
    (
        compressed([int4_group(128, input_activations=FP8_INPUTS)], "pack-quantized"),
        r"input_activations=.* is not supported with weights in 4 bits of int",
    ),
    (float4(strategy="group"), "strategy='group'"),
    (float4(group_size=32), r"group_size=32 is not supported \(only 16\)"),
    (float4(symmetric=False), "symmetric=False"),
    (float4(num_bits=6), r"num_bits=6 is not supported \(only 4, 8\)"),
    (
        compressed([{"targets": ["Linear"], "weights": weights(8, "float", "group")}], "float-quantized"),
        r"strategy='group' is not supported \(only 'tensor', 'channel', 'block'\)",
    ),
    (
        compressed(
            [{"targets": ["Linear"], "weights": weights(8, "float", "block", block_structure=[64, 64])}],
            "float-quantized",
        ),
        r"block_structure=\[64, 64\]",
    ),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, r"quant_method='modelopt': quant_algo='NVFP4_AWQ'"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo='W4A16_AWQ'"),
    ({"quant_method": "modelopt"}, "quant_algo is missing"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, r"group_size=32 is not supported"),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"},
        r"kv_cache_quant_algo='NVFP4' is not supported \(only 'FP8'\)",
    ),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"lm_head": {"quant_algo": "MXFP8"}},
        },
        r"quantized_layers\['lm_head'\]: quant_algo='MXFP8'",
    ),
    (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
        },
        "targets='Linear'",
    ),
    ({"quant_method": "auto-round", "bits": 4}, "quant_method='auto-round' is not supported"),
    ({"bits": 4}, "quant_method=None is not supported"),
]


@pytest.mark.parametrize(("quantization", "message"), CONFIGS)
def test_config_is_refused_by_field_and_value(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(quantization)


@pytest.mark.parametrize(
    ("quantization", "beside", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt("FP8"), "differ in the quant_algo"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
            modelopt("NVFP4", exclude_modules=["lm_head", "mtp*"]),
            "differ in the excluded modules",
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": mixed_layers("dense") | {"lm_head": {"quant_algo": "FP8"}},
            },
            modelopt("MIXED_PRECISION", quantized_layers=mixed_layers("dense")),
            "differ in the quantized layers",
        ),
        (official_gptq(), modelopt("NVFP4"), r"quant_method='gptq' beside hf_quant_config\.json"),
        (None, modelopt("NVFP4", has_zero_point=True), r"hf_quant_config\.json: quantization: has_zero_point=True"),
        (None, {"producer": {}}, "quant_algo is missing"),
    ],
)
def test_files_that_disagree_are_refused(
    quantization: dict[str, Any] | None, beside: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        parsed(quantization, beside)


def test_modules_are_found_by_name_expression_and_class() -> None:
    four, eight = int4_group(32), {"weights": weights(8, "float", "channel"), "input_activations": FP8_INPUTS}
    config = parsed(
        compressed(
            [
                four,
                eight | {"targets": [r"re:.*layers\.1\.mlp.*"], "format": "float-quantized"},
                four
                | {"targets": [f"{LM}layers.1.mlp.up_proj"], "weights": weights(4, "int", "group", group_size=128)},
            ],
            "mixed-precision",
            ignore=["lm_head", f"{LM}layers.0.mlp.gate_proj", r"re:model\.language_model\.layers\.2\..*"],
        )
    )
    found = {
        module: None if (scheme := config.scheme(module)) is None else (scheme.bits, scheme.column_block)
        for module in (
            "lm_head",
            "model.layers.0.mlp.gate_proj",
            "model.layers.0.mlp.up_proj",
            "model.layers.1.mlp.gate_proj",
            "model.layers.1.mlp.up_proj",
            "model.layers.2.mlp.up_proj",
        )
    }
    assert list(found.values()) == [None, None, (4, 32), (8, 1), (4, 128), None]
    assert config.column_block == 128


def test_a_module_in_several_groups_is_refused() -> None:
    groups = [int4_group(32, targets=["re:.*mlp.*"]), int4_group(128, targets=["re:.*up_proj"])]
    with pytest.raises(UnsupportedModelError, match=r"several groups with model\.layers\.0\.mlp\.up_proj as a target"):
        parsed(compressed(groups, "pack-quantized")).scheme("model.layers.0.mlp.up_proj")


def test_first_expression_of_gptq_decides() -> None:
    config = parsed(official_gptq(dynamic={"-:.*down.*": {}, ".*mlp.*": {"group_size": 32}}))
    blocks = [
        None if (scheme := config.scheme(f"model.layers.0.{module}")) is None else scheme.column_block
        for module in ("mlp.down_proj", "mlp.up_proj", "self_attn.o_proj")
    ]
    assert blocks == [None, 32, 128]
    # Expressions begin at the beginning of a name, in any spelling.
    config = parsed(official_gptq(dynamic={"-:model.layers.0": {}, f"-:{LM}layers.1": {}, "-:layers.2": {}}))
    assert [config.scheme(f"model.layers.{i}.mlp.up_proj") is None for i in range(3)] == [True, True, False]


def test_modelopt_wildcards_exclude_modules_and_what_is_in_them() -> None:
    """`mlp.gate*` is the router, not `mlp.gate_proj`."""
    listed = [f"{LM}layers.0.mlp.gate*", f"{LM}layers.1.mlp.*", "*.layers.2.self_attn*"]
    config = parsed(None, modelopt("NVFP4", exclude_modules=listed))
    excluded = {
        module
        for module in (
            "layers.0.mlp.gate",
            "layers.0.mlp.gate_proj",
            "layers.1.mlp.up_proj",
            "layers.10.mlp.up_proj",
            "layers.2.self_attn.q_proj",
            "layers.2.linear_attn.out_proj",
        )
        if config.scheme(f"model.{module}") is None
    }
    assert excluded == {"layers.0.mlp.gate", "layers.1.mlp.up_proj", "layers.2.self_attn.q_proj"}


def test_a_stack_of_experts_may_be_listed_as_one() -> None:
    layers = {f"{LM}layers.0.mlp.experts": {"quant_algo": "W4A16_NVFP4"}}
    config = parsed(None, modelopt("MIXED_PRECISION", quantized_layers=layers))
    assert config.scheme("model.layers.0.mlp.experts.3.up_proj") is not None
    assert config.scheme("model.layers.1.mlp.experts.3.up_proj") is None
    assert config.scheme("model.layers.0.mlp.shared_expert.up_proj") is None


def test_inputs_in_4_bits_are_said() -> None:
    group = {"targets": ["Linear"], "weights": NVFP4_WEIGHTS}
    assert parsed(float4()).notes == ()
    with_inputs = parsed(compressed([group | {"input_activations": NVFP4_INPUTS}], "nvfp4-pack-quantized"))
    assert with_inputs.notes == parsed({"quant_method": "modelopt", "quant_algo": "NVFP4"}).notes
    assert "W4A4" in with_inputs.notes[0]


# Tensors

UP = f"{LM}layers.0.mlp.up_proj"
CANONICAL_UP = r"model\.layers\.0\.mlp\.up_proj"
O_PROJ = f"{LM}layers.1.self_attn.o_proj"


def put(name: str, change: Callable[[Tensor], Tensor | None]) -> Change:
    """Replace a tensor by what `change` returns, or change it in place."""

    def apply(tensors: dict[str, Tensor]) -> None:
        found = change(tensors[name])
        if found is not None:
            tensors[name] = found.contiguous()

    return apply


def with_codes(code: int, scales: Tensor) -> Tensor:
    return torch.full_like(scales.view(torch.uint8), code).view(torch.float8_e4m3fn)


def add(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


TENSORS: list[tuple[str, Change, str]] = [
    ("gptq, official", lambda t: t.pop(f"{UP}.scales"), rf"missing tensors: {CANONICAL_UP}\.scales$"),
    ("gptq, official", lambda t: t.pop(f"{UP}.qweight"), rf"missing tensors: {CANONICAL_UP}\.qweight$"),
    (
        "gptq, official",
        put(f"{UP}.qweight", lambda t: t[:-1]),
        r"up_proj\.qweight has shape \[15, 256\], expected \[16, 256\]",
    ),
    (
        "gptq, official",
        put(f"{UP}.qweight", lambda t: t.long()),
        r"packed values must be I32: .*up_proj\.qweight \(I64\)",
    ),
    ("gptq, official", put(f"{UP}.scales", lambda t: t.view(torch.int16)), r"multipliers must be F16 or BF16 or F32"),
    (
        "gptq, official",
        put(f"{UP}.scales", lambda t: t.t()),
        r"up_proj\.scales has shape \[256, 1\], expected \[1, 256\]",
    ),
    ("gptq, official", put(f"{UP}.scales", lambda t: t.fill_(torch.nan)), r"up_proj\.weight .* aren't finite"),
    (
        "gptq, official",
        put(f"{UP}.scales", lambda t: t.float()),
        r"gate_proj\.weight and .*up_proj\.weight differ in the dtype",
    ),
    (
        "gptq, official",
        put(f"{UP}.qzeros", lambda t: t.bitwise_xor_(1)),
        r"up_proj\.qzeros has zero points although sym=True",
    ),
    (
        "gptq, official",
        put(f"{UP}.g_idx", lambda t: t.flip(0).add_(1)),
        r"up_proj\.g_idx isn't the plain order .*act order",
    ),
    ("gptq, official", add(f"{UP}.bias", torch.ones(256)), r"up_proj\.bias is not zero"),
    (
        "gptq, official",
        add(f"{UP}.weight", torch.ones(256, 128)),
        r"neither quantised nor excluded .*: .*up_proj\.weight$",
    ),
    (
        "gptq, official",
        lambda t: (t.pop(f"{O_PROJ}.weight"), t.update({f"{O_PROJ}.qweight": torch.zeros(16, 128, dtype=torch.int32)})),
        r"missing tensors: .*o_proj\.weight unexpected tensors: .*o_proj\.qweight",
    ),
    ("awq", put(f"{UP}.qzeros", lambda t: t[:, 1:]), r"up_proj\.qzeros has shape \[1, 31\], expected \[1, 32\]"),
    ("awq", lambda t: t.pop(f"{UP}.qzeros"), r"missing tensors: .*up_proj\.qzeros$"),
    (
        "compressed-tensors, int4 g32",
        put(f"{UP}.weight_shape", lambda t: t.flip(0)),
        r"up_proj\.weight_shape is \[128, 256\], expected \[256, 128\]",
    ),
    (
        "compressed-tensors, int4 g32",
        add(f"{UP}.weight_g_idx", torch.arange(128)),
        r"unexpected tensors: .*up_proj\.weight_g_idx \(g_idx is an order of columns by activation",
    ),
    ("compressed-tensors, int4 g32", add(f"{UP}.weight_zero_point", torch.zeros(4)), r"unexpected .*weight_zero_point"),
    (
        "compressed-tensors, int4 g32",
        put(f"{UP}.weight_scale", lambda t: t[:, :2]),
        r"weight_scale has shape \[256, 2\]",
    ),
    (
        "compressed-tensors, nvfp4",
        put(f"{UP}.weight_scale", lambda t: t.view(torch.uint8)),
        r"multipliers of groups must be F8_E4M3: .*up_proj\.weight_scale \(U8\)",
    ),
    *(
        (
            "compressed-tensors, nvfp4",
            put(f"{UP}.weight_scale", partial(with_codes, code)),
            r"up_proj\.weight_scale holds scales that are below 0 or not finite",
        )
        for code in (0x7F, 0x81, 0xFF)
    ),
    *(
        (
            "compressed-tensors, nvfp4",
            put(f"{UP}.weight_global_scale", partial(torch.full_like, fill_value=scale)),
            r"up_proj\.weight_global_scale is .*: must be above 0",
        )
        for scale in (0.0, -1.0, torch.nan)
    ),
    (
        "compressed-tensors, nvfp4",
        put(f"{UP}.weight_global_scale", lambda t: t.repeat(2)),
        r"weight_global_scale has shape \[2\], expected \[\] or \[1\]",
    ),
    ("modelopt, mixed, both files", lambda t: t.pop(f"{UP}.weight_scale_2"), r"missing tensors: .*weight_scale_2$"),
    ("modelopt, mixed, both files", add(f"{UP}.pre_quant_scale", torch.ones(128)), r"unexpected .*pre_quant_scale"),
    (
        "modelopt, mixed, both files",
        put(f"{UP}.weight", lambda t: t.float()),
        r"neither quantised nor excluded by quantization_config: .*up_proj\.weight$",
    ),
    (
        "modelopt, mixed, both files",
        put(f"{O_PROJ}.weight", lambda t: t.view(torch.uint8)),
        r"neither quantised nor excluded by quantization_config: .*o_proj\.weight$",
    ),
    (
        "modelopt, mixed, both files",
        put(f"{O_PROJ}.weight_scale", lambda t: t.repeat(3)),
        r"o_proj\.weight_scale has shape \[3\], expected \[\] or \[1\]",
    ),
    (
        "modelopt, mixed, both files",
        put("mtp.fc.weight", lambda t: t.to(torch.float8_e4m3fn)),
        r"must not be quantised: mtp\.fc\.weight$",
    ),
    (
        "modelopt, mixed, both files",
        put("mtp.layers.0.mlp.up_proj.weight", lambda t: t.to(torch.uint8)),
        r"quantised although quantization_config excludes them: mtp\.layers\.0\.mlp\.up_proj\.weight$",
    ),
    (
        "modelopt, mixed, both files",
        put(f"{LM}layers.1.self_attn.k_proj.k_scale", lambda t: t.repeat(2)),
        r"k_proj\.k_scale has shape \[2\], expected \[\]",
    ),
    (
        "modelopt, mixed, both files",
        add(f"{LM}layers.1.self_attn.k_proj.k_bias", torch.zeros(())),
        r"unexpected .*k_bias",
    ),
]


@pytest.mark.parametrize(("layout", "change", "message"), TENSORS)
def test_tensors_that_do_not_fit_are_named(layout: str, change: Change, message: str, tmp_path: Path) -> None:
    stored, _ = LAYOUTS[layout].write(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load(rewrite(stored, change))


def test_optional_tensors_may_be_missing(tmp_path: Path) -> None:
    stored, _ = LAYOUTS["gptq, official"].write(tmp_path)
    rewrite(stored, lambda t: [t.pop(name) for name in list(t) if name.endswith("g_idx")])
    rewrite(stored, add(f"{UP}.bias", torch.zeros(256)))
    load(stored)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (
            "gptq, official",
            {"intermediate_size": 192},
            r"down_proj\.weight: its 192 columns aren't whole groups of 128",
        ),
        (
            "compressed-tensors, nvfp4",
            {"linear_value_head_dim": 3},
            r"out_proj\.weight: its 18 columns .* groups of 16",
        ),
        (
            "gptq v2, asymmetric, overrides",
            {"linear_key_head_dim": 3},
            r"in_proj_qkv\.weight: 140 x 128 codes don't fill words of 8",
        ),
        ("awq", {"linear_key_head_dim": 3}, r"in_proj_qkv\.weight: codes of 140 rows don't fill words of 8"),
    ],
)
def test_sizes_that_the_format_cannot_store_are_named(
    layout: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    # Written with sizes that fit; the config then asks for others.
    stored, _ = LAYOUTS[layout].write(tmp_path)
    path = stored / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"] |= options
    path.write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=message):
        load(stored)


def test_fused_experts_in_4_bits_are_refused(tmp_path: Path) -> None:
    stored, _ = LAYOUTS["gptq, official, moe"].write(tmp_path, experts="fused")
    with pytest.raises(CheckpointError, match=r"neither quantised nor excluded .*: .*mlp\.experts\.down_proj"):
        load(stored)

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(LM) and ".experts." in name]:
            tensors[f"{name}.qweight"] = tensors.pop(name)

    with pytest.raises(UnsupportedModelError, match=r"experts\.gate_up_proj: a stack of experts as one tensor"):
        load(rewrite(stored, pack))


def test_parts_of_one_matrix_must_have_one_form(tmp_path: Path) -> None:
    layout = dataclasses.replace(
        LAYOUTS["gptq, official"],
        config=official_gptq(dynamic={"-:.*(attn|mtp).*": {}, ".*up_proj": {"group_size": 32}}),
    )
    stored, _ = layout.write(tmp_path / "form")
    with pytest.raises(
        UnsupportedModelError, match=r"gate_proj\.weight, .*up_proj\.weight are stored in different forms"
    ):
        load(stored)
    layout = dataclasses.replace(
        layout, config=official_gptq(dynamic={"-:.*(attn|mtp).*": {}, r"-:.*layers\.1\..*up_proj": {}})
    )
    stored, _ = layout.write(tmp_path / "plain")
    with pytest.raises(UnsupportedModelError, match=r"excludes model\.layers\.1\.mlp\.up_proj\.weight but not"):
        load(stored)


def test_experts_of_a_layer_must_have_one_form(tmp_path: Path) -> None:
    changes = {"-:.*(attn|mtp|shared).*": {}, r".*experts\.2\.up_proj": {"group_size": 32}}
    layout = dataclasses.replace(LAYOUTS["gptq, official, moe"], config=official_gptq(dynamic=changes))
    with pytest.raises(
        UnsupportedModelError, match=r"experts\.0\.gate_proj and .*experts\.2\.up_proj are stored in diff"
    ):
        load(layout.write(tmp_path)[0])


def test_excluded_tensors_in_4_bits_are_named(tmp_path: Path) -> None:
    stored, _ = LAYOUTS["gptq, official"].write(tmp_path)
    edit_quantization(stored, lambda config: config["dynamic"].update({"-:.*layers.0.mlp.*": {}}))
    with pytest.raises(
        CheckpointError, match=r"missing tensors: .*up_proj\.weight.* unexpected tensors: .*up_proj\.qweight"
    ):
        load(stored)


def test_a_head_in_4_bits_must_be_promised(tmp_path: Path) -> None:
    stored, _ = LAYOUTS["gptq, the head too"].write(tmp_path)
    edit_quantization(stored, lambda config: config.update(lm_head=False))
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight unexpected tensors: lm_head\.g_idx"):
        load(stored)


def test_an_mtp_head_that_is_plain_in_part_is_refused(tmp_path: Path) -> None:
    """One that is plain as a whole needs no exclusion."""
    layout = LAYOUTS["compressed-tensors, int4 g32"]
    writers = {pattern.replace("(model|mtp)", "model"): writer for pattern, writer in layout.writers.items()}
    load(dataclasses.replace(layout, writers=writers).write(tmp_path / "whole")[0])
    writers[r"mtp\.layers\.0\.mlp\.down_proj"] = next(iter(layout.writers.values()))
    with pytest.raises(CheckpointError, match=r"neither quantised nor excluded .*: mtp\.layers\.0\.mlp\.gate_proj"):
        load(dataclasses.replace(layout, writers=writers).write(tmp_path / "part")[0])


def test_packed_projections_in_4_bits_are_refused(tmp_path: Path) -> None:
    path = LAYOUTS["gptq, official"].write(tmp_path)[0] / "config.json"
    raw = config_json("next", text_config("next"), wrapper=False, tied=False)
    raw |= {"quantization_config": official_gptq(dynamic={})}
    path.write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match=r"in_proj_qkvz: packed projections in 4 bits are not supported"):
        load(path.parent)


# Devices


@pytest.mark.parametrize(
    ("layout", "what"),
    [
        ("compressed-tensors, int4 g32", r"weights of \[128, 96\] in int4 in groups of 32 \(.*out_proj.weight\)"),
        ("compressed-tensors, nvfp4", r"weights of \[128, 96\] in e2m1 in groups of 16 \(.*out_proj.weight\)"),
    ],
)
def test_a_gpu_is_refused_before_weights_are_read(layout: str, what: str, tmp_path: Path) -> None:
    stored, _ = LAYOUTS[layout].write(tmp_path)
    (stored / "model.safetensors").write_bytes(b"never read")
    message = rf"device='cuda': {what} run on the CPU reference only so far"
    with pytest.raises(ConfigError, match=message):
        load_model(stored, device=torch.device("cuda"), dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=message):
        load_model(stored, device=torch.device("cuda"), dtype=torch.bfloat16, random_weights=True)
    with pytest.raises(ConfigError, match=message):
        rehearsal(EngineConfig(model=str(stored)), stored)


@pytest.mark.parametrize(
    ("layout", "module"),
    [
        ("gptq, official", "down_proj.weight"),
        ("awq", "down_proj.weight"),
        ("compressed-tensors, nvfp4 and 8-bit rows", "down_proj.weight"),
        ("modelopt, mixed, one file, moe", "experts.down_proj"),
        ("compressed-tensors, int4 g128, asymmetric, moe, MTP plain", "experts.gate_up_proj"),
        ("gptq, asymmetric, zero of the first version", "down_proj.weight"),
        ("awq, moe", "experts.down_proj"),
    ],
)
def test_a_gpu_holds_weights_of_whole_tiles_in_tiles(layout: str, module: str, tmp_path: Path) -> None:
    """As many bytes as row by row."""
    stored, _ = LAYOUTS[layout].write(tmp_path)
    parameters = parameters_of(load_text_config(stored).with_mtp_layers(0), dtype=torch.bfloat16)
    tiles = {name: weight for name, weight in parameters.items() if isinstance(weight, FourBitTiles)}
    assert f"model.layers.0.mlp.{module}" in tiles
    for weight in tiles.values():
        assert weight.nbytes == weight.form.empty(tuple(weight.shape), torch.device("meta")).nbytes


@pytest.mark.parametrize("layout", ["gptq, the head too", "modelopt, mixed, both files"])
def test_a_gpu_holds_a_head_in_4_bits_and_a_cpu_expands_it(layout: str, tmp_path: Path) -> None:
    stored, _ = LAYOUTS[layout].write(tmp_path)
    config = resolved_config(stored, random_weights=False)
    assert isinstance(parameters_of(config, dtype=torch.bfloat16)["lm_head.weight"], FourBitTiles)
    with Checkpoint(stored) as checkpoint:
        loaded = checkpoint.load(config, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert not loaded["lm_head.weight"].is_quantized


def test_a_head_without_whole_tiles_is_expanded_on_a_gpu_too(tmp_path: Path) -> None:
    stored, _ = LAYOUTS["gptq, the head too"].write(tmp_path)
    config = dataclasses.replace(load_text_config(stored).with_mtp_layers(0), vocab_size=168)
    assert not parameters_of(config, dtype=torch.bfloat16)["lm_head.weight"].is_quantized
    assert why_cpu_only(config) is None


def test_a_gpu_is_refused_where_parts_of_ranks_are_not_whole_tiles() -> None:
    """A rank of eight has 64 of 512 columns, which are whole groups, but no tile."""
    config = published.CONFIGS["35B-A3B-nvfp4"]
    assert why_cpu_only(config, Rank(0, 4)) is None
    reason = why_cpu_only(config, Rank(0, 8))
    assert reason is not None
    assert re.match(r"weights of \[256, 2048, 64\] in e2m1 in groups of 16 \(.*experts.down_proj\)", reason)


def test_the_formats_differ_by_content_not_by_name(tmp_path: Path) -> None:
    """A config of one format with the tensors of another one."""
    layout = LAYOUTS["gptq, official"]
    for writer in (nvfp4("modelopt", inputs=False), gptq(32)):
        stored, _ = dataclasses.replace(layout, writers={TRUNK_MLP: writer, TRUNK_MIXERS: writer}).write(
            tmp_path / str(id(writer))
        )
        with pytest.raises(CheckpointError):
            load(stored)
    assert load_text_config(stored).quantization is not None
