"""4-bit weights on a CUDA device: exact in decode windows, rounded to bfloat16 in prompts, and equal to the reference
in float32.

The exact twin has the same weights in float32 (tests/fakes/forced_blocks.py), so nothing here measures the cost of
quantization."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from agentspec import kernels
from agentspec.models.hf_config import MoeConfig, TextConfig
from agentspec.models.outline import quantized_as
from agentspec.models.quantised.parse import parse_quantization
from agentspec.models.qwen3_5 import Qwen3_5Model
from benchmarks.published import CONFIGS, spec_of
from tests.fakes.checkpoints import Family
from tests.fakes.forced_blocks import ForcedPrompts, random_twins
from tests.fakes.four_bit_layouts import official_gptq
from tests.gpu.test_fp8_on_cuda import PROMPTS, SPREAD, check_decode_blocks, check_streams, weights_of
from tests.gpu.test_models_on_cuda import check_against_the_cpu
from tests.properties.real_model import write_agreeing_four_bit_checkpoint

pytestmark = pytest.mark.gpu
LINEAR: Literal["linear_attention"] = "linear_attention"
FULL: Literal["full_attention"] = "full_attention"
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "mtp*"], "group_size": 16}
EXPERTS = replace(
    CONFIGS["35B-A3B"],
    moe=MoeConfig(num_experts=32, top_k=8, intermediate_size=512, shared_intermediate_size=512, normalize_top_k=True),
)
"""Of published widths; fewer experts, so that many tokens visit one."""


def cut(config: TextConfig) -> TextConfig:
    return replace(config, layer_types=(LINEAR, FULL), vocab_size=8192)


def as_target(config: TextConfig, target: str) -> TextConfig:
    found = quantized_as(cut(config), target)
    assert found is not None
    return found


def in_nvfp4(config: TextConfig) -> TextConfig:
    return replace(cut(config), quantization=parse_quantization({"quantization_config": NVFP4}, {}, "test"))


def by_32(config: TextConfig) -> TextConfig:
    """FFNs, of a mixture its routed experts."""
    quantization = {"quantization_config": official_gptq(group_size=32, sym=False, checkpoint_format="gptq_v2")}
    return replace(cut(config), quantization=parse_quantization(quantization, {}, "test"))


CONFIG_OF = {
    "int4": lambda: as_target(CONFIGS["27B"], "int4"),
    "mixed4": lambda: as_target(CONFIGS["27B"], "mixed4"),
    "nvfp4": lambda: in_nvfp4(CONFIGS["27B"]),
    "35B-A3B-mixed4": lambda: as_target(CONFIGS["35B-A3B"], "mixed4"),
    "35B-A3B-nvfp4": lambda: cut(CONFIGS["35B-A3B-nvfp4"]),
    "few experts, int4": lambda: as_target(EXPERTS, "int4"),
    "few experts, nvfp4": lambda: in_nvfp4(EXPERTS),
    "by 32 with zero points": lambda: by_32(CONFIGS["27B"]),
    "few experts, by 32 with zero points": lambda: by_32(EXPERTS),
}


@pytest.fixture(scope="module", params=CONFIG_OF)
def twins(request: pytest.FixtureRequest, cuda: torch.device) -> tuple[Qwen3_5Model, Qwen3_5Model]:
    config = CONFIG_OF[request.param]()
    return random_twins(config, spec_of(request.param, config, torch.bfloat16), cuda, torch.bfloat16)


def test_ffns_are_in_tiles(twins: tuple[Qwen3_5Model, Qwen3_5Model]) -> None:
    for layer in twins[0]._layers:
        assert any(isinstance(weight, kernels.FourBitTiles) for weight in weights_of(layer))


def test_decode_blocks_match_exact_weights(twins: tuple[Qwen3_5Model, Qwen3_5Model]) -> None:
    check_decode_blocks(twins)


def test_prompt_blocks_are_within_rounding_bound(twins: tuple[Qwen3_5Model, Qwen3_5Model]) -> None:
    for what, prompts in PROMPTS.items():
        work = ForcedPrompts(*twins, prompts=prompts, seed=2)
        work.run()
        worst = max(work.spreads, key=lambda name: work.spreads[name])
        print(f"{twins[0].spec.name}, {what}: {worst} {work.spreads[worst]:.1e}")
        for name, spread in work.spreads.items():
            assert spread < SPREAD, f"{twins[0].spec.name}, {what}: {name}: {spread}"


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_small_float32_models_match_cpu(family: Family, cuda: torch.device, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "full_attention_interval": 2}
    check_against_the_cpu(write_agreeing_four_bit_checkpoint(tmp_path, "int4", family, **sizes), cuda)


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_model_streams_match_cpu(family: Family, cuda: torch.device, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "full_attention_interval": 2}
    checkpoint = write_agreeing_four_bit_checkpoint(tmp_path, "int4", family, **sizes)
    check_streams(checkpoint, cuda)
