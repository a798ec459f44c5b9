"""Mixtures of experts on a CUDA device: block by block against exact arithmetic, small models against the CPU, and
sessions with a cache.

An FFN's inputs are adjusted at the router, where rounding could otherwise change the chosen expert
(tests/fakes/forced_blocks.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from agentspec.kernels import BlockScaled, MixtureWeights, Norm, OpenSum, Plain, quantize_blocks, reference
from agentspec.kernels import triton as ops
from agentspec.models.hf_config import MoeConfig
from agentspec.models.moe import MixtureOfExperts
from agentspec.text.tokenizer import Tokenizer
from benchmarks.published import CONFIGS, spec_of
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.forced_blocks import ForcedBlocks, ForcedPrompts, ForcedWindows, Prompt, random_twins
from tests.fakes.upcycled import write_upcycled
from tests.gpu.test_models_on_cuda import check_against_the_cpu
from tests.kernels.triton.poison import poison_new_memory
from tests.properties.cached_sessions import SCENARIOS, WORKLOAD, ScenarioRunner

pytestmark = pytest.mark.gpu
BLOCK_TOLERANCE = 2**-6
"""For a block in bfloat16, as in test_models_on_cuda.py."""
LINEAR: Literal["linear_attention"] = "linear_attention"
FULL: Literal["full_attention"] = "full_attention"

MOE = MoeConfig(num_experts=32, top_k=8, intermediate_size=128, shared_intermediate_size=128, normalize_top_k=True)
PUBLISHED = replace(CONFIGS["35B-A3B"], layer_types=(LINEAR, FULL), vocab_size=8192)
SMALL = replace(
    PUBLISHED,
    hidden_size=256,
    num_heads=4,
    head_dim=64,
    rotary_dim=16,
    num_key_heads=2,
    num_value_heads=4,
    key_dim=64,
    value_dim=64,
    moe=MOE,
    vocab_size=1024,
)
SIZES = {
    "small": SMALL,
    "a wider shared expert": replace(SMALL, moe=replace(MOE, shared_intermediate_size=192)),
}
WINDOWS: dict[str, dict[str, Any]] = {
    "one token": {"starts": [77], "num_columns": 1},
    "one user": {"starts": [1000], "num_columns": 4},
    "five slots": {"starts": [200, 64, 3, 130, 511], "num_columns": 3},
    "64 slots": {"starts": [*range(10, 330, 5)], "num_columns": 4},
}
PROMPTS: dict[str, list[Prompt]] = {
    "a chunk of a few blocks": [Prompt(start=4096, count=192, resume_at=(4160,))],
    "several": [
        Prompt(start=0, count=700, resume_at=(64, 640)),
        Prompt(start=70, count=1),
        Prompt(start=1024, count=333),
    ],
    "long": [Prompt(start=0, count=2048, resume_at=(64,))],
}


def check(work: ForcedBlocks, dtype: torch.dtype, what: str) -> None:
    errors = work.run()
    worst = max(errors, key=lambda name: errors[name])
    print(f"{what}: {worst} {errors[worst]:.1e}")
    assert any("FFN" in name for name in errors)
    for name, error in errors.items():
        assert error < (TOLERANCE if dtype == torch.float32 or name == "logits" else BLOCK_TOLERANCE), (
            f"{what}: {name}: {error}"
        )


@pytest.mark.parametrize(
    ("size", "dtype"),
    [("small", torch.bfloat16), ("small", torch.float32), ("a wider shared expert", torch.bfloat16)],
    ids=str,
)
def test_small_model_blocks_match_exact_arithmetic(size: str, dtype: torch.dtype, cuda: torch.device) -> None:
    config = SIZES[size]
    twins = random_twins(config, spec_of(size, config, dtype), cuda, dtype)
    for name, window in WINDOWS.items():
        check(ForcedWindows(*twins, **window, seed=1), dtype, f"{size}, {name}")
    for name, prompts in PROMPTS.items():
        check(ForcedPrompts(*twins, prompts=prompts, seed=2), dtype, f"{size}, {name}")


def test_published_width_blocks_match_in_bfloat16(cuda: torch.device) -> None:
    """One pair of twins for all cases: creating them takes longer than running them."""
    twins = random_twins(PUBLISHED, spec_of("35B-A3B", PUBLISHED, torch.bfloat16), cuda, torch.bfloat16)
    for name, window in WINDOWS.items():
        check(ForcedWindows(*twins, **window, seed=3), torch.bfloat16, f"35B-A3B, {name}")
    for name, prompts in PROMPTS.items():
        check(ForcedPrompts(*twins, prompts=prompts, seed=4), torch.bfloat16, f"35B-A3B, {name}")


def make_wrong(kind: str, ffn: MixtureOfExperts) -> None:
    weights = ffn.weights
    if kind == "weights that don't add up to 1":
        ffn.weights = replace(weights, normalize=False)
    elif kind == "one expert less":
        ffn.weights = replace(weights, top_k=weights.top_k - 1)
    elif kind == "no gate of the shared expert":
        ffn.weights = replace(weights, shared_gate_1H=weights.shared_gate_1H * 1e-6)
    else:
        gate_up_X2IH = weights.gate_up_X2IH.tensor
        ffn.weights = replace(weights, gate_up_X2IH=Plain(gate_up_X2IH.roll(gate_up_X2IH.shape[1] // 2, 1)))


@pytest.mark.parametrize("num_experts", [256, 512])
@pytest.mark.parametrize("num_tokens", [300, 2048, 8192])
def test_a_sum_added_with_the_scores_has_the_bits_of_one_before(
    num_tokens: int, num_experts: int, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mixer's last product, the residual and the mixture of 35B-A3B, in FP8; and as many experts as in 397B-A17B,
    in stacks of one block."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Hopper's instructions")
    poison_new_memory(monkeypatch)
    generator = torch.Generator(cuda).manual_seed(num_tokens + num_experts)
    hidden, depth, width = 2048, 4096, 512 if num_experts == 256 else 128

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=cuda)

    def weight(*shape: int) -> BlockScaled:
        return quantize_blocks((randn(*shape) * shape[-1] ** -0.5).bfloat16())

    weights = MixtureWeights(
        router_XH=(randn(num_experts, hidden) * hidden**-0.5 * 4).bfloat16(),
        top_k=8,
        normalize=True,
        gate_up_X2IH=weight(num_experts, 2 * width, hidden),
        down_XHI=weight(num_experts, hidden, width),
        shared_gate_1H=(randn(1, hidden) * hidden**-0.5).bfloat16(),
        shared_gate_up_2IH=weight(1024, hidden),
        shared_down_HI=weight(hidden, 512),
    )
    out, next_product = weight(hidden, depth), weight(4096, hidden)
    norm, next_norm = (
        Norm(weight=(0.1 * randn(hidden)).bfloat16(), eps=1e-6, product_OH=product) for product in (None, next_product)
    )
    x, residual = randn(num_tokens, depth).bfloat16(), (3 * randn(num_tokens, hidden)).bfloat16()
    with torch.inference_mode():
        apart = ops.add_experts(ops.add_linear(residual.clone(), x, out), norm, weights, next_norm)
        expected = apart.clone(), ops.norm_linear(apart, next_norm, next_product)
        for _ in range(5):
            together = ops.add_linear_before_experts(residual.clone(), x, out, norm, weights)
            assert isinstance(together, OpenSum)
            got = ops.add_experts(together, norm, weights, next_norm)
            assert torch.equal(got, expected[0])
            assert torch.equal(ops.norm_linear(got, next_norm, next_product), expected[1])
    assert expected[0].isfinite().all()


WRONG = ("weights that don't add up to 1", "one expert less", "no gate of the shared expert", "up before gate")


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_convention_exceeds_rounding_bound(kind: str, cuda: torch.device) -> None:
    rounded, exact = random_twins(SMALL, spec_of("small", SMALL, torch.bfloat16), cuda, torch.bfloat16)
    ffn = exact._layers[0].ffn
    assert isinstance(ffn, MixtureOfExperts)
    make_wrong(kind, ffn)
    error = ForcedWindows(rounded, exact, starts=[100, 7], num_columns=4, seed=1).run()["layer 0, FFN"]
    assert error > 2 * BLOCK_TOLERANCE, error


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 32, 128, 256, 257, 1000])
def test_token_output_is_batch_invariant(num_tokens: int, cuda: torch.device) -> None:
    """Also, the kernels give the same bits twice, whatever the uninitialized memory holds."""
    model, exact = random_twins(SMALL, spec_of("small", SMALL, torch.float32), cuda, torch.float32)
    layer, exact_layer = model._layers[1], exact._layers[1]
    generator = torch.Generator(cuda).manual_seed(num_tokens)
    x_NH = torch.randn(num_tokens, SMALL.hidden_size, generator=generator, device=cuda)
    with torch.inference_mode():
        together, again = (layer.ffn.add_to(x_NH.clone(), layer.post_norm) for _ in range(2))
        alone = torch.cat(
            [layer.ffn.add_to(x_NH[n : n + 1].clone(), layer.post_norm) for n in range(0, num_tokens, 50)]
        )
        assert isinstance(exact_layer.ffn, MixtureOfExperts)
        expected = reference.add_experts(x_NH, exact_layer.post_norm, exact_layer.ffn.weights)
    assert torch.equal(together, again)
    assert relative_error(alone, together[::50]) < TOLERANCE
    assert relative_error(together, expected) < TOLERANCE


@pytest.mark.parametrize(
    "overrides",
    [{}, {"num_experts": 32, "num_experts_per_tok": 8}, {"num_experts": 5, "num_experts_per_tok": 5}],
    ids=str,
)
def test_small_models_match_cpu(overrides: dict[str, Any], cuda: torch.device, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "moe", num_hidden_layers=4, **overrides)
    check_against_the_cpu(checkpoint, cuda)


@pytest.mark.parametrize("name", ["roomy", "many prompts at once, long chunks"])
def test_cached_sessions_of_mixture_model_match_uncached(name: str, cuda: torch.device, tmp_path: Path) -> None:
    checkpoint = write_upcycled(tmp_path, noise=1e-3)
    tokenizer = Tokenizer.from_directory(checkpoint)
    assert tokenizer is not None
    words = tokenizer.encode(WORKLOAD.read_text(encoding="utf-8"))
    found = ScenarioRunner(checkpoint, cuda, words=words).run_scenario(name, SCENARIOS[name])
    print(dict(found))
    assert found["replayed prefills"] + found["replayed prefills with windows"] > 5
