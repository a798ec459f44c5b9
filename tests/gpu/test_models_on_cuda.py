"""Whole models on a CUDA device against the CPU's reference, and against exact arithmetic block by block: the
tolerances of docs/numerics.md."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.assembly import assemble
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.weights import resolve_checkpoint
from agentspec.types import SamplingParams
from benchmarks.decode_checks import streams
from benchmarks.published import CONFIGS, spec_of
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.forced_blocks import ForcedWindows, random_twins
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver
from tests.models.test_against_oracle import VARIANTS

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
DENSE = [size for size, config in CONFIGS.items() if config.moe is None and config.quantization is None]
"""Other models have their own files: test_mixture_on_cuda.py, test_fp8_on_cuda.py."""
BLOCK_TOLERANCE = 2**-6
"""For a block in bfloat16: four roundings of half a unit in the last place each, 2^-8, as if all were in the largest
value."""


@torch.inference_mode()
def everything_of(model: Qwen3_5Model, prompt: list[int]) -> dict[str, Tensor]:
    """Return logits, states and drafts of two sequences: prefilled, then decoded with windows of several widths beside
    an inert slot."""
    driver = Driver(model, num_sequences=2)
    hidden_NH = driver.prefill(prompt[:100], (64,), wanted=(10,))
    driver.prefill(prompt[:37], which=1)
    driver.mtp_prefill(prompt[:100], hidden_NH)
    found = {"logits of the prompt": model.logits(hidden_NH)}
    for num_columns, accepted in ((4, (3, 1)), (1, (0, 0)), (8, (2, 7)), (3, (0, 2))):
        windows = [prompt[sequence.length : sequence.length + num_columns] for sequence in driver.sequences]
        found[f"logits of {num_columns} columns"] = model.logits(driver.verify(windows, accepted))
    m_TH = driver.mtp(prompt[100:104], hidden_NH[96:100], 100)
    found |= {"MTP logits": model.logits(m_TH), "drafts": model.draft_head(m_TH)}
    return {name: tensor.cpu() for name, tensor in (found | kept_by(driver)).items()}


@torch.inference_mode()
def long_prompts_of(model: Qwen3_5Model, prompt: list[int]) -> dict[str, Tensor]:
    """Return logits and states of three prompts in one prefill, and of a continuation of the longest one in parallel
    with a second chunk."""
    driver = Driver(model, num_sequences=3, max_tokens=1600)
    first, one_token, middle = driver.prefill_together([prompt[:1216], prompt[:1], prompt[300:931]])
    more, *others = driver.prefill_together([prompt[1216:1500], prompt[1:64], prompt[931:1000]])
    driver.mtp_prefill(prompt[:1500], torch.cat([first, more]), (960, 64))
    hiddens = {
        "longest": torch.cat([first, more]),
        "one token, and 63": torch.cat([one_token, others[0]]),
        "middle": torch.cat([middle, others[1]]),
    }
    found = {f"logits of the prompt: {name}": model.logits(hidden_NH) for name, hidden_NH in hiddens.items()}
    longest = driver.sequences[0]
    found["MTP K/V"] = model.pools["kv_AP2SGD"][-1, longest.pages].transpose(0, 1).flatten(1, 2)[:, 1 : longest.length]
    return {name: tensor.cpu() for name, tensor in (found | kept_by(driver)).items()}


def kept_by(driver: Driver) -> dict[str, Tensor]:
    """Return the rows and pages of every sequence."""
    found: dict[str, Tensor] = {}
    for number, sequence in enumerate(driver.sequences):
        pools, length = driver.model.pools, sequence.length
        keys_values = pools["kv_AP2SGD"][:-1, sequence.pages].transpose(1, 2).flatten(2, 3)[:, :, :length]
        parts = {
            "ssm": pools["ssm_LRVDK"][:, sequence.read_row],
            "conv": pools["conv_LR3C"][:, sequence.read_row],
            "hidden": pools.hidden_RH[sequence.read_row],
            "K/V": keys_values,
        }
        found |= {f"{name} of sequence {number}": part for name, part in parts.items()}
    return found


def check_against_the_cpu(
    checkpoint: Path,
    cuda: torch.device,
    everything_of: Callable[[Qwen3_5Model, list[int]], dict[str, Tensor]] = everything_of,
    *,
    num_tokens: int = 130,
) -> None:
    expected, found = (load_model(checkpoint, device=device, dtype=torch.float32) for device in (CPU, cuda))
    prompt = random.Random(3).choices(range(expected.spec.num_real_tokens), k=num_tokens)
    wanted, got = everything_of(expected, prompt), everything_of(found, prompt)
    if "drafts" in wanted:
        assert torch.equal(got.pop("drafts"), wanted.pop("drafts"))
    real = slice(0, expected.spec.num_real_tokens)
    errors = {name: relative_error(got[name][..., real], wanted[name][..., real]) for name in wanted}
    print({name: f"{error:.1e}" for name, error in errors.items()})
    for name, error in errors.items():
        assert error < TOLERANCE, f"{name}: {error}"


@pytest.mark.parametrize(
    "variant",
    ["dense", "moe", "next", "key and value dims differ", "one value head per key head", "sigmoid output gate"],
)
def test_small_float32_models_match_cpu(variant: str, cuda: torch.device, tmp_path: Path) -> None:
    family, options = VARIANTS[variant]
    check_against_the_cpu(write_checkpoint(tmp_path, family, **options), cuda)


def test_tiny_agent_in_float32_matches_cpu(cuda: torch.device) -> None:
    check_against_the_cpu(resolve_checkpoint(bundled.checkpoint_of(None)), cuda)


def test_long_prompts_of_tiny_agent_match_cpu(cuda: torch.device) -> None:
    check_against_the_cpu(resolve_checkpoint(bundled.checkpoint_of(None)), cuda, long_prompts_of, num_tokens=1500)


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True),
    "sampled": SamplingParams(
        temperature=0.8, top_k=200, top_p=0.95, min_p=0.01, presence_penalty=0.3, max_tokens=48, ignore_eos=True
    ),
}


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tiny_agent_tokens_with_drafts_match_cpu_without_drafts(sampling: str, cuda: torch.device) -> None:
    rng = random.Random(5)
    config = EngineConfig(dtype="float32", memory_gib=0.5, max_running=24, max_context=1024)
    on_cpu = assemble(replace(config, device="cpu", draft_tokens=0))
    on_cuda = assemble(replace(config, device="cuda", draft_tokens=3))
    prompts = [rng.choices(range(on_cpu.spec.num_real_tokens), k=rng.randint(1, 150)) for _ in range(24)]
    expected, _ = streams(on_cpu, prompts, SAMPLINGS[sampling])
    found, num_accepted = streams(on_cuda, prompts, SAMPLINGS[sampling])
    assert found == expected
    assert num_accepted > 50


def check_blocks(rounded: Qwen3_5Model, exact: Qwen3_5Model, what: str, **window: Any) -> None:
    errors = ForcedWindows(rounded, exact, **window).run()
    kinds: dict[str, float] = {}
    for name, error in errors.items():
        kind = name.rpartition(", ")[2]
        kinds[kind] = max(kinds.get(kind, 0.0), error)
    print(f"{what}: " + ", ".join(f"{kind} {error:.1e}" for kind, error in kinds.items()))
    for name, error in errors.items():
        assert error < (TOLERANCE if name == "logits" else BLOCK_TOLERANCE), f"{what}: {name}: {error}"


WINDOWS: dict[str, dict[str, Any]] = {
    "one user": {"starts": [1000], "num_columns": 4},
    "no drafts": {"starts": [200, 64], "num_columns": 1},
    "32 slots": {"starts": [*range(10, 330, 10)], "num_columns": 4},
}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", DENSE)
def test_published_shape_blocks_match_in_bfloat16(size: str, window: str, cuda: torch.device) -> None:
    config = replace(CONFIGS[size], layer_types=("linear_attention", "full_attention"), vocab_size=8192)
    twins = random_twins(config, spec_of(size, config, torch.bfloat16), cuda, torch.bfloat16)
    check_blocks(*twins, f"{size}, {window}", **WINDOWS[window], seed=1)


@pytest.mark.parametrize("window", WINDOWS)
def test_tiny_agent_blocks_match_cpu_in_bfloat16(window: str, cuda: torch.device) -> None:
    """Against the CPU: the checkpoint's weights are bfloat16, so both have the same ones."""
    checkpoint = resolve_checkpoint(bundled.checkpoint_of(None))
    rounded = load_model(checkpoint, device=cuda, dtype=torch.bfloat16)
    exact = load_model(checkpoint, device=CPU, dtype=torch.float32)
    check_blocks(rounded, exact, f"tiny-agent, {window}", **WINDOWS[window], seed=2)


def test_wrong_convention_exceeds_rounding_bound(cuda: torch.device) -> None:
    """The bound on blocks detects a wrong convention: if keys are not rotated, attention exceeds it by far."""
    config = replace(CONFIGS["0.8B"], layer_types=("linear_attention", "full_attention"), vocab_size=8192)
    rounded, exact = random_twins(config, spec_of("0.8B", config, torch.bfloat16), cuda, torch.bfloat16)
    attention: Any = exact._layers[1].mixer
    attention._rope = replace(attention._rope, sin_LA=torch.zeros_like(attention._rope.sin_LA))
    errors = ForcedWindows(rounded, exact, starts=[100], num_columns=4, seed=1).run()
    assert errors["layer 1, keys and values"] > 4 * BLOCK_TOLERANCE, errors
