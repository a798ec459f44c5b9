"""The published layouts of 4-bit checkpoints, each with its config and its writers (four_bit.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.fakes.checkpoints import Family, Tensors
from tests.fakes.four_bit import Writer, awq, fp8, gptq, nvfp4, pack_quantized, write_quantized

LM = "model.language_model."
MLP = r"(model|mtp)\.layers\.\d+\.mlp\.(shared_expert\.|experts\.\d+\.)?(gate|up|down)_proj"
TRUNK_MLP = MLP.replace("(model|mtp)", "model")
ROUTED = r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj"
MIXERS = r"(model|mtp)\.layers\.\d+\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))"
TRUNK_MIXERS = MIXERS.replace("(model|mtp)", "model")
KV_SCALES: Tensors = {
    f"{LM}layers.1.self_attn.k_proj.k_scale": torch.tensor(0.02),
    f"{LM}layers.1.self_attn.v_proj.v_scale": torch.tensor(0.03),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One kind of checkpoint."""

    writers: dict[str, Writer]
    config: dict[str, Any] | None
    family: Family = "dense"
    beside: dict[str, Any] | None = None
    extra: Tensors = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    four_bit: str
    """The parameters in 4 bits, as an expression of canonical names without `.weight`."""

    def write(self, directory: Path, *, seed: int = 0, **options: Any) -> tuple[Path, Path]:
        """The quantised checkpoint and the one with its values."""
        return write_quantized(
            directory,
            self.family,
            self.writers,
            self.config,
            beside=self.beside,
            extra=self.extra,
            seed=seed,
            **self.options | options,
        )


def official_gptq(**changes: Any) -> dict[str, Any]:
    """Of the family's own -GPTQ-Int4 checkpoints."""
    dynamic: dict[str, Any] = {"lm_head": {}, f"{LM}embed_tokens": {}}
    dynamic |= {f"-:.*{part}.*": {} for part in ("attn", "shared_expert", "mtp", "visual")}
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "pack_dtype": "int32",
        "dynamic": dynamic,
        "meta": {"quantizer": ["gptqmodel:4.0.0"], "damp_percent": 0.05},
    } | changes


def awq_config(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["visual", "linear_attn.in_proj_b", "mtp."],
    } | changes


def weights(bits: int, kind: str, strategy: str, **changes: Any) -> dict[str, Any]:
    """A group's `weights` in a compressed-tensors config."""
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "group_size": None,
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    } | changes


def compressed(groups: list[dict[str, Any]], form: str, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {f"group_{i}": {"output_activations": None} | group for i, group in enumerate(groups)},
        "ignore": ["lm_head", "re:.*visual.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*in_proj_[ab]$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.13.0",
    } | changes


def int4_group(group: int, **changes: Any) -> dict[str, Any]:
    return {
        "targets": ["Linear"],
        "weights": weights(4, "int", "group", group_size=group),
        "input_activations": None,
    } | (changes)


NVFP4_WEIGHTS = weights(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
NVFP4_INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
BLOCK_MIXERS = {
    "targets": ["re:.*_attn.*"],
    "weights": weights(8, "float", "block", block_structure=[128, 128]),
    "input_activations": FP8_INPUTS,
    "format": "float-quantized",
}


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    """The content of hf_quant_config.json."""
    quantization: dict[str, Any] = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": [],
    }
    return {"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization | changes}


def mixed_layers(family: Family) -> dict[str, dict[str, Any]]:
    """`quantized_layers` of a MIXED_PRECISION checkpoint: mixers in FP8, the FFNs and the head in 4 bits."""
    four, eight = {"quant_algo": "W4A16_NVFP4", "group_size": 16}, {"quant_algo": "FP8"}
    layers: dict[str, dict[str, Any]] = {"lm_head": four}
    layers |= {f"{LM}layers.0.linear_attn.{part}": eight for part in ("in_proj_qkv", "in_proj_z", "out_proj")}
    layers |= {f"{LM}layers.1.self_attn.{part}_proj": eight for part in "qkvo"}
    parts = ["gate_proj", "up_proj", "down_proj"]
    if family == "moe":
        parts = [f"shared_expert.{part}" for part in parts] + [
            f"experts.{e}.{part}" for e in range(4) for part in parts
        ]
    return layers | {f"{LM}layers.{i}.mlp.{part}": four for i in range(2) for part in parts}


_NVFP4 = nvfp4("compressed-tensors", inputs=False)
_MIXED_WRITERS = {
    "lm_head": nvfp4("modelopt", inputs=False),
    TRUNK_MLP: nvfp4("modelopt", inputs=False),
    TRUNK_MIXERS: fp8("tensor", inputs=True),
}

LAYOUTS: dict[str, Layout] = {
    "gptq, official": Layout(writers={TRUNK_MLP: gptq(128)}, config=official_gptq(), four_bit=TRUNK_MLP),
    "gptq, official, moe": Layout(
        family="moe",
        writers={ROUTED: gptq(128, dtype=torch.bfloat16)},
        config=official_gptq(),
        four_bit=r"model\..*\.mlp\.experts\..*",
    ),
    "gptq, the head too": Layout(
        writers={TRUNK_MLP: gptq(128), "lm_head": gptq(128)}, config=official_gptq(lm_head=True), four_bit=TRUNK_MLP
    ),
    "gptq v2, asymmetric, overrides": Layout(
        writers={
            r".*\.down_proj": gptq(128, version=2),
            MLP: gptq(32, symmetric=False, version=2),
            MIXERS: gptq(32, symmetric=False, version=2),
        },
        config=official_gptq(
            group_size=32,
            sym=False,
            checkpoint_format="gptq_v2",
            dynamic={"+:.*down_proj": {"group_size": 128, "sym": True}},
        ),
        four_bit=f"{MLP}|{MIXERS}",
    ),
    "gptq, asymmetric, zero of the first version": Layout(
        writers={TRUNK_MLP: gptq(32, symmetric=False)},
        config=official_gptq(group_size=32, sym=False),
        four_bit=TRUNK_MLP,
    ),
    "awq": Layout(
        writers={TRUNK_MLP: awq(128), TRUNK_MIXERS: awq(128)},
        config=awq_config(),
        four_bit=f"{TRUNK_MLP}|{TRUNK_MIXERS}",
    ),
    "awq, moe": Layout(
        family="moe",
        writers={ROUTED: awq(32)},
        config=awq_config(
            group_size=32, modules_to_not_convert=["visual", "self_attn", "linear_attn", "shared_expert", "mtp"]
        ),
        four_bit=r"model\..*\.mlp\.experts\..*",
    ),
    "compressed-tensors, int4 g32": Layout(
        writers={MLP: pack_quantized(32), MIXERS: pack_quantized(32)},
        config=compressed([int4_group(32)], "pack-quantized"),
        options={"linear_num_value_heads": 6},
        four_bit=f"{MLP}|{MIXERS}",
    ),
    "compressed-tensors, int4 g128, asymmetric, moe, MTP plain": Layout(
        family="moe",
        writers={TRUNK_MLP: pack_quantized(128, symmetric=False), TRUNK_MIXERS: pack_quantized(128, symmetric=False)},
        config=compressed(
            [int4_group(128, weights=weights(4, "int", "group", group_size=128, symmetric=False))], "pack-quantized"
        ),
        four_bit=r"model\.layers\.\d+\.(mlp\.(experts|shared_expert)\..*|self_attn\.[qkvo]_proj"
        r"|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))",
    ),
    "compressed-tensors, nvfp4": Layout(
        writers={MLP: _NVFP4, MIXERS: _NVFP4},
        config=compressed(
            [{"targets": ["Linear"], "weights": NVFP4_WEIGHTS, "input_activations": None}], "nvfp4-pack-quantized"
        ),
        options={"linear_num_value_heads": 6},
        four_bit=f"{MLP}|{MIXERS}",
    ),
    "compressed-tensors, nvfp4 with inputs, moe": Layout(
        family="moe",
        writers={ROUTED: nvfp4("compressed-tensors", inputs=True)},
        config=compressed(
            [
                {
                    "targets": [r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"],
                    "weights": NVFP4_WEIGHTS,
                    "input_activations": NVFP4_INPUTS,
                }
            ],
            "nvfp4-pack-quantized",
            ignore=["re:^mtp.*"],
            kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        ),
        extra={f"{LM}layers.1.self_attn.{part}_scale": torch.tensor([0.02]) for part in "kv"},
        four_bit=r"model\..*\.mlp\.experts\..*",
    ),
    "compressed-tensors, nvfp4 and 8-bit rows": Layout(
        writers={TRUNK_MLP: _NVFP4, TRUNK_MIXERS: fp8("channel", dtype=torch.bfloat16)},
        config=compressed(
            [
                {
                    "targets": ["Linear"],
                    "weights": weights(8, "float", "channel"),
                    "input_activations": FP8_INPUTS,
                    "format": "float-quantized",
                },
                {
                    "targets": [f"{LM}layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")]
                    + [r"re:model.language_model.layers.1.mlp.*"],
                    "weights": NVFP4_WEIGHTS,
                    "input_activations": None,
                    "format": "nvfp4-pack-quantized",
                },
            ],
            "mixed-precision",
        ),
        four_bit=TRUNK_MLP,
    ),
    "compressed-tensors, int4 and 8-bit blocks, also in_proj_a": Layout(
        writers={
            MLP: pack_quantized(32),
            MIXERS: fp8("block", dtype=torch.bfloat16),
            r".*in_proj_a": fp8("block", dtype=torch.bfloat16),
        },
        config=compressed(
            [
                int4_group(32, targets=["re:.*mlp.*"], format="pack-quantized"),
                BLOCK_MIXERS,
            ],
            "mixed-precision",
            ignore=["lm_head", "re:.*in_proj_b"],
        ),
        four_bit=MLP,
    ),
    "compressed-tensors, int4, 8-bit blocks and a head in 8 bits by row": Layout(
        writers={
            TRUNK_MLP: pack_quantized(128),
            TRUNK_MIXERS: fp8("block", dtype=torch.bfloat16),
            "lm_head": fp8("channel", dtype=torch.bfloat16),
        },
        config=compressed(
            [
                int4_group(128, targets=["re:.*mlp.*"], format="pack-quantized"),
                BLOCK_MIXERS,
                {
                    "targets": ["lm_head"],
                    "weights": weights(8, "float", "channel"),
                    "input_activations": FP8_INPUTS,
                    "format": "float-quantized",
                },
            ],
            "mixed-precision",
            ignore=["re:mtp.*", "re:.*in_proj_[ab]"],
        ),
        four_bit=TRUNK_MLP,
    ),
    "modelopt, nvfp4, moe": Layout(
        family="moe",
        writers={ROUTED: nvfp4("modelopt", inputs=True)},
        config={
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "ignore": ["lm_head", "mtp*", "model.visual*"]
            + [
                f"{LM}layers.{i}.{part}*"
                for i in range(2)
                for part in ("linear_attn", "self_attn", "mlp.shared_expert", "mlp.gate")
            ],
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}
            },
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
        },
        extra=KV_SCALES,
        four_bit=r"model\..*\.mlp\.experts\..*",
    ),
    "modelopt, mixed, both files": Layout(
        writers=_MIXED_WRITERS,
        config={
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": mixed_layers("dense"),
        },
        beside=modelopt("MIXED_PRECISION", kv_cache_quant_algo="FP8", quantized_layers=mixed_layers("dense")),
        extra=KV_SCALES,
        four_bit=TRUNK_MLP,
    ),
    "modelopt, mixed, one file, moe": Layout(
        family="moe",
        writers=_MIXED_WRITERS,
        config=None,
        beside=modelopt("MIXED_PRECISION", quantized_layers=mixed_layers("moe")),
        four_bit=r"model\..*\.mlp\.(experts|shared_expert)\..*",
    ),
    "modelopt, mixed by groups, 8-bit rows": Layout(
        writers={TRUNK_MLP: nvfp4("modelopt", inputs=False)},
        config={
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "config_groups": {
                "group_0": {
                    "targets": [
                        f"language_model.model.layers.{i}.mlp.{part}_proj"
                        for i in range(2)
                        for part in ("gate", "up", "down")
                    ],
                    "weights": {"num_bits": 4, "type": "float", "group_size": 16},
                }
            },
        },
        four_bit=TRUNK_MLP,
    ),
    "modelopt, 8 bits by tensor, the head too": Layout(
        writers={f"{TRUNK_MLP}|lm_head": fp8("tensor", inputs=True)},
        config=None,
        beside=modelopt("FP8", group_size=None, exclude_modules=["mtp*", "*linear_attn*", f"{LM}layers.*.self_attn*"]),
        four_bit="nothing",
    ),
    "modelopt, 8-bit rows alone": Layout(
        writers={TRUNK_MLP: fp8("channel", shape="vector")},
        config=None,
        beside=modelopt(
            "FP8_PER_CHANNEL_PER_TOKEN",
            group_size=None,
            exclude_modules=["mtp*", "lm_head", "*linear_attn*", f"{LM}layers.*.self_attn*"],
        ),
        four_bit="nothing",
    ),
}
