"""Prompts and decode steps of a small model for a memory checker: `scripts/sanitize.sh` runs this under
compute-sanitizer.

    python -m tests.gpu.sanitized_steps [--eager] PART...

A greedy request beside a sampled one with penalties, bias and masks; prompts in parallel and in two chunks, the second
from a kept state; drafts, a checkpoint, a leave and a join. First in float32, where the tokens must equal the CPU's,
then in bfloat16, whose kernels use other instructions. The parts:

plain             a small dense model, also with keys and values in 8 bits
large-heads       in bfloat16 with heads of 128, whose prompts use a separate attention kernel, over both kinds of pages
experts           experts in 8 bits in both dtypes, plain ones in bfloat16 with 8-bit drafts, and a prompt with many
                  tokens
four-bit          a dense model with 4-bit weights
four-bit-experts  experts with 4-bit weights
four-bit-prompts  no steps: the products of a short prompt with 4-bit weights, which these models are too narrow for
gated-prompts     no steps: gate and up of a long prompt with SwiGLU, likewise

Uses CUDA graphs unless --eager. There are few steps, because a checker slows each instruction ten to fifty times.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.triton import swiglu_hopper
from agentspec.kernels.triton.four_bit_layers import FEW_TOKENS, decoded_product, takes_decoded
from agentspec.runtime.graphs import CudaRecorder
from agentspec.runtime.plan import StepPlan
from agentspec.types import SamplingParams
from tests.fakes.checkpoints import Family
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.hash_chain import ReferenceRequest
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver, poison
from tests.fakes.step_driver import StepDriver
from tests.kernels.test_four_bit_tiles import FORMS, random_weight
from tests.properties.real_model import (
    VOCAB,
    write_agreeing_checkpoint,
    write_agreeing_four_bit_checkpoint,
    write_agreeing_fp8_checkpoint,
)

NUM_DRAFTS = 2
NUM_STEPS = 6
SAMPLED = SamplingParams(
    temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.4, repetition_penalty=1.1, logit_bias={5: 2.0}
)
GREEDY = SamplingParams(temperature=0.0)


def random_masks(seed: int) -> dict[int, np.ndarray]:
    """For slot 0: allow a random half of the vocabulary after each column."""
    return {0: np.random.default_rng(seed).integers(-(2**31), 2**31, (NUM_DRAFTS + 1, -(-VOCAB // 32)), dtype=np.int32)}


def compute_beginning(driver: StepDriver, plan: StepPlan, count: int, *, keep_at: int) -> None:
    """Remove the first tokens of the plan's chunk and compute them at once, saving a state on the way too."""
    chunk = plan.chunks.pop()
    end_row, spare_row = chunk.state_writes[-1][1], plan.joins[-1].rows.newer
    ids = chunk.token_ids
    begin = replace(
        chunk, token_ids=ids[:count], state_writes=((keep_at, spare_row), (count, end_row)), next_token=ids[count]
    )
    driver.executor.collect(driver.executor.launch(StepPlan(leaves=plan.leaves, chunks=[begin])))
    plan.leaves = []
    plan.chunks.append(
        replace(
            chunk, token_ids=ids[count:], start=count, read_row=end_row, state_writes=((len(ids) - count, end_row),)
        )
    )


@torch.inference_mode()
def run_steps(
    checkpoint: Path, device: torch.device, dtype: torch.dtype, *, graphs: bool, **fp8: bool
) -> list[list[int]]:
    """Run the steps and return the tokens that every request emitted. fp8: arguments of `load_model`."""
    model = load_model(checkpoint, device=device, dtype=dtype, **fp8)
    model.limit_drafts(range(model.spec.num_real_tokens))
    driver = StepDriver(model, max_running=2, max_draft_tokens=NUM_DRAFTS, device=device)
    poison(model)
    if graphs:
        driver.executor.capture([NUM_DRAFTS], CudaRecorder(device))
    plan = StepPlan()
    sampled = driver.plan_join(plan, 0, ReferenceRequest(prompt=[7, 8, 9], sampling=SAMPLED, seed=11, length_limit=90))
    first = driver.plan_join(
        plan, 1, ReferenceRequest(prompt=[*range(20, 82)], sampling=GREEDY, seed=0, length_limit=90)
    )
    driver.step(NUM_DRAFTS, slots=[1], plan=plan)
    for number in range(NUM_STEPS):
        driver.step(NUM_DRAFTS, plan=StepPlan(masks=random_masks(number)))
    plan = StepPlan(leaves=[1])
    second = driver.plan_join(
        plan, 1, ReferenceRequest(prompt=[*range(3, 153)], sampling=GREEDY, seed=0, length_limit=170)
    )
    compute_beginning(driver, plan, 128, keep_at=64)
    for number in range(2):
        plan.masks = random_masks(number)
        driver.step(NUM_DRAFTS, plan=plan)
        plan = StepPlan()
    return [running.emitted for running in (sampled, first, second)]


def check_steps(checkpoint: Path, device: torch.device, *, graphs: bool, **fp8: bool) -> list[list[int]]:
    """Check the tokens of every request in float32 against the CPU's, and return them."""
    expected = run_steps(checkpoint, torch.device("cpu"), torch.float32, graphs=False, **fp8)
    found = run_steps(checkpoint, device, torch.float32, graphs=graphs, **fp8)
    assert found == expected, f"on the device {found}, on the CPU {expected}"
    return found


@torch.inference_mode()
def check_long_prompt(checkpoint: Path, device: torch.device) -> None:
    """Run a prompt with more tokens than the experts' decode kernels support, so that the prompt kernels run."""
    ids = [(7 * place) % VOCAB for place in range(300)]

    def hiddens(device: torch.device, dtype: torch.dtype) -> Tensor:
        return Driver(load_model(checkpoint, device=device, dtype=dtype), max_tokens=320).prefill(ids).cpu()

    assert relative_error(hiddens(device, torch.float32), hiddens(torch.device("cpu"), torch.float32)) < TOLERANCE
    assert hiddens(device, torch.bfloat16).isfinite().all()


@torch.inference_mode()
def check_short_prompt_products(device: torch.device) -> None:
    """Compare the products of a short prompt with float64."""
    for form in FORMS[:4]:
        weight = FourBitTiles.of(random_weight(form, (256, 384), 1).to(device))
        exact = weight.dequantize(torch.float64).t()
        for num_tokens in (FEW_TOKENS + 1, 300):
            generator = torch.Generator(device).manual_seed(num_tokens)
            x, residual = (
                torch.randn(num_tokens, width, generator=generator, device=device, dtype=torch.bfloat16)
                for width in (384, 256)
            )
            assert takes_decoded(weight, x)
            assert (
                relative_error(decoded_product(x, weight, residual_NO=residual), x.double() @ exact + residual) < 0.02
            )
            gate, up = (x.double() @ exact).chunk(2, -1)
            assert relative_error(decoded_product(x, weight, is_swiglu=True), silu(gate) * up) < 0.02


@torch.inference_mode()
def check_gated_products(device: torch.device) -> None:
    """Compare those of a long prompt with float64. With tokens and programs that leave some without work, and others
    with several pieces of it."""
    for num_tokens, width, depth, programs in ((300, 384, 320, 5), (129, 128, 64, None), (1, 256, 128, 1)):
        generator = torch.Generator(device).manual_seed(num_tokens)
        x = torch.randn(num_tokens, depth, generator=generator, device=device).bfloat16()
        weight = (torch.randn(2 * width, depth, generator=generator, device=device) * depth**-0.5).bfloat16()
        gate, up = (x.double() @ weight.double().t()).chunk(2, -1)
        assert relative_error(swiglu_hopper.product(x, weight, programs), silu(gate) * up) < 0.02


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitized_steps")
    parser.add_argument("--eager", action="store_true", help="launch kernel by kernel instead of replaying graphs")
    parser.add_argument("parts", nargs="+", choices=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for part in arguments.parts:
            found, in_bfloat16 = PARTS[part](Path(folder) / part, torch.device("cuda"), not arguments.eager)
            counts = [sum(map(len, streams)) for streams in (found, in_bfloat16)]
            print(f"{part}: {counts[0]} tokens in float32, as on the CPU; {counts[1]} in bfloat16")


Tokens = list[list[int]]
_SMALL: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}


def _plain(folder: Path, device: torch.device, graphs: bool) -> tuple[Tokens, Tokens]:
    """(tokens in float32, as on the CPU; tokens in bfloat16), as each part."""
    checkpoint = write_agreeing_checkpoint(folder, **_SMALL)
    found = check_steps(checkpoint, device, graphs=graphs)
    found += check_steps(checkpoint, device, graphs=graphs, fp8_pages=True)
    return found, run_steps(checkpoint, device, torch.bfloat16, graphs=graphs)


def _large_heads(folder: Path, device: torch.device, graphs: bool) -> tuple[Tokens, Tokens]:
    large = write_agreeing_checkpoint(folder, head_dim=128, **_SMALL)
    return [], [
        tokens
        for fp8_pages in (False, True)
        for tokens in run_steps(large, device, torch.bfloat16, graphs=graphs, fp8_pages=fp8_pages)
    ]


def _experts(folder: Path, device: torch.device, graphs: bool) -> tuple[Tokens, Tokens]:
    shape = {**_SMALL, "num_experts": 16, "num_experts_per_tok": 4}
    plain = write_agreeing_checkpoint(folder / "plain", "moe", **shape)
    quantized = write_agreeing_fp8_checkpoint(folder / "fp8", "moe", **shape)
    for model in (plain, quantized):
        check_long_prompt(model, device)
    return check_steps(quantized, device, graphs=graphs), [
        *run_steps(quantized, device, torch.bfloat16, graphs=graphs),
        *run_steps(plain, device, torch.bfloat16, graphs=graphs, fp8_drafts=True),
    ]


def _four_bit(folder: Path, device: torch.device, graphs: bool, family: Family = "dense") -> tuple[Tokens, Tokens]:
    checkpoint = write_agreeing_four_bit_checkpoint(folder, "int4", family, **_SMALL)
    found = check_steps(checkpoint, device, graphs=graphs)
    return found, run_steps(checkpoint, device, torch.bfloat16, graphs=graphs)


def _four_bit_prompts(folder: Path, device: torch.device, graphs: bool) -> tuple[Tokens, Tokens]:
    check_short_prompt_products(device)
    return [], []


def _gated_prompts(folder: Path, device: torch.device, graphs: bool) -> tuple[Tokens, Tokens]:
    check_gated_products(device)
    return [], []


PARTS: dict[str, Callable[[Path, torch.device, bool], tuple[Tokens, Tokens]]] = {
    "plain": _plain,
    "large-heads": _large_heads,
    "experts": _experts,
    "four-bit": _four_bit,
    "four-bit-experts": partial(_four_bit, family="moe"),
    "four-bit-prompts": _four_bit_prompts,
    "gated-prompts": _gated_prompts,
}

if __name__ == "__main__":
    main()
