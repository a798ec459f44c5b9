"""8-bit weights on a CUDA device: exact in decode windows; within a bound in prompts, whose inputs are rounded too;
and FP8 drafts.

The exact twin has the same weights in float32, to the last bit (tests/fakes/forced_blocks.py), so nothing here
measures the cost of quantization.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from agentspec import kernels
from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, assemble
from agentspec.models.hf_config import TextConfig
from agentspec.models.quantization import Fp8Blocks
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.types import SamplingParams
from benchmarks.decode_checks import streams
from benchmarks.published import CONFIGS, spec_of
from tests.fakes.checkpoints import Family
from tests.fakes.compare import TOLERANCE
from tests.fakes.forced_blocks import ForcedPrompts, ForcedWindows, Prompt, random_twins
from tests.fakes.loaded import load_model
from tests.gpu.test_mixture_on_cuda import SMALL as SMALL_MIXTURE
from tests.gpu.test_models_on_cuda import check_against_the_cpu
from tests.properties.real_model import (
    EngineSetup,
    Simulation,
    alone,
    write_agreeing_checkpoint,
    write_agreeing_fp8_checkpoint,
)

pytestmark = pytest.mark.gpu
BLOCK_TOLERANCE = 2**-6
"""For a block in bfloat16, as in test_models_on_cuda.py: weights are exact, so the bound is the same."""
SPREAD = 2**-4
"""For a block whose products round their inputs to 8 bits, root mean square (docs/numerics.md): about 2^-5.2 per
product."""
PRODUCT_SPREAD = 2**-5
"""For values that are one product away from exact inputs."""
LINEAR: Literal["linear_attention"] = "linear_attention"
FULL: Literal["full_attention"] = "full_attention"
ALL = Fp8Blocks(excluded=frozenset())


def cut(config: TextConfig) -> TextConfig:
    return replace(
        config,
        layer_types=(LINEAR, FULL),
        vocab_size=min(config.vocab_size, 8192),
        quantization=config.quantization or ALL,
    )


SIZES = {
    "small": cut(replace(SMALL_MIXTURE, moe=None, intermediate_size=640)),
    "small with experts": cut(SMALL_MIXTURE),
    "27B": cut(CONFIGS["27B-FP8"]),
    "35B-A3B": cut(CONFIGS["35B-A3B-FP8"]),
}
WINDOWS: dict[str, dict[str, Any]] = {
    "one token": {"starts": [77], "num_columns": 1},
    "one user": {"starts": [1000], "num_columns": 4},
    "five slots": {"starts": [200, 64, 3, 130, 511], "num_columns": 3},
    "16 slots": {"starts": [*range(10, 330, 20)], "num_columns": 4},
}
PROMPTS: dict[str, list[Prompt]] = {
    "a chunk of a few blocks": [Prompt(start=4096, count=192, resume_at=(4160,))],
    "several": [
        Prompt(start=0, count=700, resume_at=(64, 576)),
        Prompt(start=70, count=1),
        Prompt(start=1024, count=333),
    ],
    "long": [Prompt(start=0, count=2048, resume_at=(64,))],
}


@pytest.fixture(scope="module", params=SIZES)
def twins(request: pytest.FixtureRequest, cuda: torch.device) -> tuple[Qwen3_5Model, Qwen3_5Model]:
    """One pair for all checks of a size: creating it takes longer than running it."""
    config = SIZES[request.param]
    return random_twins(config, spec_of(request.param, config, torch.bfloat16), cuda, torch.bfloat16)


def test_linears_are_block_scaled(twins: tuple[Qwen3_5Model, Qwen3_5Model]) -> None:
    rounded, exact = twins
    for layers in (rounded._layers, [rounded._mtp_head().layer]):
        for layer in layers:
            assert all(isinstance(weight, kernels.BlockScaled) for weight in weights_of(layer))
    assert not any(isinstance(weight, kernels.BlockScaled) for layer in exact._layers for weight in weights_of(layer))


def weights_of(layer: Any) -> list[kernels.Weight]:
    """Return the linear weights of a layer, experts included."""
    found = [value for part in (layer.mixer, layer.ffn) for name, value in vars(part).items() if name.endswith("_proj")]
    if hasattr(layer.ffn, "weights"):
        mixture = layer.ffn.weights
        found += [mixture.gate_up_X2IH, mixture.down_XHI, mixture.shared_gate_up_2IH, mixture.shared_down_HI]
    return found


def test_decode_blocks_match_exact_weights(twins: tuple[Qwen3_5Model, Qwen3_5Model]) -> None:
    check_decode_blocks(twins)


def check_decode_blocks(twins: tuple[Qwen3_5Model, Qwen3_5Model]) -> None:
    for what, window in WINDOWS.items():
        errors = ForcedWindows(*twins, **window, seed=1).run()
        worst = max(errors, key=lambda name: errors[name])
        print(f"{twins[0].spec.name}, {what}: {worst} {errors[worst]:.1e}")
        for name, error in errors.items():
            assert error < (TOLERANCE if name == "logits" else BLOCK_TOLERANCE), (
                f"{twins[0].spec.name}, {what}: {name}: {error}"
            )


def test_prompt_blocks_are_within_rounding_bound(twins: tuple[Qwen3_5Model, Qwen3_5Model]) -> None:
    for what, prompts in PROMPTS.items():
        work = ForcedPrompts(*twins, prompts=prompts, seed=2)
        work.run()
        kinds: dict[str, float] = {}
        for name, spread in work.spreads.items():
            kind = name.rpartition(", ")[2]
            kinds[kind] = max(kinds.get(kind, 0.0), spread)
        print(f"{twins[0].spec.name}, {what}: " + ", ".join(f"{kind} {spread:.1e}" for kind, spread in kinds.items()))
        for name, spread in work.spreads.items():
            one_product = name.endswith(("keys and values", "convolution states"))
            assert spread < (PRODUCT_SPREAD if one_product else SPREAD), (
                f"{twins[0].spec.name}, {what}: {name}: {spread}"
            )


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_small_float32_models_match_cpu(family: Family, cuda: torch.device, tmp_path: Path) -> None:
    """float32 inputs are never rounded, and the CPU dequantizes the same weights once."""
    check_against_the_cpu(
        write_agreeing_fp8_checkpoint(tmp_path, family, num_hidden_layers=4, full_attention_interval=2), cuda
    )


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_quantized_model_streams_match_cpu(family: Family, cuda: torch.device, tmp_path: Path) -> None:
    checkpoint = write_agreeing_fp8_checkpoint(tmp_path, family, num_hidden_layers=2, full_attention_interval=2)
    check_streams(checkpoint, cuda)


def check_streams(checkpoint: Path, cuda: torch.device) -> None:
    """Agents' streams on the device against each turn alone on the CPU."""
    simulation = Simulation(
        EngineSetup(seed=3, max_draft_tokens=4, random_depth=True, prefill_budget=99),
        checkpoint,
        num_agents=5,
        device=cuda,
    )
    simulation.run()
    assert simulation.metrics.accepted_tokens > 20
    reference = alone(checkpoint)
    for turn in simulation.turns:
        assert turn.emitted == reference.generate(turn.submit)[0], turn.submit


def tiny_agent(**settings: Any) -> Assembly:
    return assemble(
        EngineConfig(device="cuda", draft_tokens=3, memory_gib=0.5, max_running=8, max_context=1024, **settings)
    )


def test_fp8_drafts_do_not_change_output_tokens(cuda: torch.device) -> None:
    rng = random.Random(7)
    parts = {precision: tiny_agent(dtype="float32", draft_precision=precision) for precision in ("checkpoint", "fp8")}
    prompts = [rng.choices(range(4096), k=rng.randint(1, 100)) for _ in range(24)]
    sampling = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    expected, accepted = streams(parts["checkpoint"], prompts, sampling)
    found, accepted_in_fp8 = streams(parts["fp8"], prompts, sampling)
    print(f"accepted: {accepted} by the checkpoint's weights, {accepted_in_fp8} in FP8")
    assert found == expected
    assert accepted_in_fp8 > 0.9 * accepted > 0


def test_drafts_use_fp8_by_default(cuda: torch.device) -> None:
    assert tiny_agent().draft_vocabulary.startswith("all 4,096 tokens (FP8; ")
    assert tiny_agent(draft_precision="checkpoint").draft_vocabulary == "all 4,096 tokens"


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_fp8_drafts_use_block_scaled_weights(family: Family, cuda: torch.device, tmp_path: Path) -> None:
    checkpoint = write_agreeing_checkpoint(tmp_path, family, num_hidden_layers=2, full_attention_interval=2)
    model = load_model(checkpoint, device=cuda, dtype=torch.bfloat16, fp8_drafts=True)
    assert all(isinstance(weight, kernels.BlockScaled) for weight in weights_of(model._mtp_head().layer))
    assert not any(isinstance(weight, kernels.BlockScaled) for layer in model._layers for weight in weights_of(layer))
    assert model.limit_drafts(range(0, 160, 2)) == 80 * (64 + 8) + 4
    assert isinstance(model._draft_head_OH, kernels.BlockScaled)
    m_NH = torch.randn(5, 64, device=cuda, dtype=torch.bfloat16, generator=torch.Generator(cuda).manual_seed(1))
    with torch.inference_mode():
        scores_NO = m_NH.float() @ model._draft_head_OH.dequantize().T
        best_N = model.draft_head(m_NH)
    # Compare scores, not tokens: two tokens may tie.
    assert torch.allclose(scores_NO.gather(1, best_N[:, None] // 2)[:, 0], scores_NO.max(1).values, rtol=2**-7)
