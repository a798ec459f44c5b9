"""Decode steps of a small model, for a memory checker to watch: `scripts/sanitize.sh` runs this under compute-sanitizer.

    python -m tests.gpu.sanitized_steps [--eager]

A greedy request beside a sampled one with penalties, bias and masks; drafts, a checkpoint on the way, a leave and a join. First in float32, where the
tokens must be the CPU's, then in bfloat16, whose kernels use other instructions. As CUDA graphs unless --eager. Few steps: a checker makes each
instruction ten to fifty times as slow.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from agentspec.models.registry import load_model
from agentspec.runtime.graphs import CudaRecorder
from agentspec.runtime.plan import StepPlan
from agentspec.types import SamplingParams
from tests.fakes.hash_chain import ReferenceRequest
from tests.fakes.sequence_driver import poison
from tests.fakes.step_driver import StepDriver
from tests.properties.real_model import VOCAB, write_agreeing_checkpoint

NUM_DRAFTS = 2
NUM_STEPS = 6
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.4, repetition_penalty=1.1, logit_bias={5: 2.0})
GREEDY = SamplingParams(temperature=0.0)


def random_masks(seed: int) -> dict[int, np.ndarray]:
    """For slot 0: half of the vocabulary after each column."""
    return {0: np.random.default_rng(seed).integers(-(2**31), 2**31, (NUM_DRAFTS + 1, -(-VOCAB // 32)), dtype=np.int32)}


@torch.inference_mode()
def run_steps(checkpoint: Path, device: torch.device, dtype: torch.dtype, *, graphs: bool) -> list[list[int]]:
    """What every request emitted."""
    model = load_model(checkpoint, device=device, dtype=dtype)
    driver = StepDriver(model, max_running=2, max_draft_tokens=NUM_DRAFTS, device=device)
    poison(model)
    if graphs:
        driver.executor.capture([NUM_DRAFTS], CudaRecorder(device))
    plan = StepPlan()
    sampled = driver.plan_join(plan, 0, ReferenceRequest(prompt=[7, 8, 9], sampling=SAMPLED, seed=11, length_limit=90))
    first = driver.plan_join(plan, 1, ReferenceRequest(prompt=[*range(20, 82)], sampling=GREEDY, seed=0, length_limit=90))
    driver.step(NUM_DRAFTS, slots=[1], plan=plan)
    for number in range(NUM_STEPS):
        driver.step(NUM_DRAFTS, plan=StepPlan(masks=random_masks(number)))
    plan = StepPlan(leaves=[1])
    second = driver.plan_join(plan, 1, ReferenceRequest(prompt=[4, 5], sampling=GREEDY, seed=0, length_limit=90))
    for number in range(2):
        plan.masks = random_masks(number)
        driver.step(NUM_DRAFTS, plan=plan)
        plan = StepPlan()
    return [running.emitted for running in (sampled, first, second)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitized_steps")
    parser.add_argument("--eager", action="store_true", help="launch kernel by kernel instead of replaying graphs")
    graphs = not parser.parse_args().eager
    torch.set_num_threads(1)
    # Prompts still go through torch's attention, and racecheck reports hazards inside cuDNN's kernel for it. Torch has others.
    torch.backends.cuda.enable_cudnn_sdp(False)
    cuda = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_agreeing_checkpoint(Path(folder), num_hidden_layers=2, full_attention_interval=2)
        expected = run_steps(checkpoint, torch.device("cpu"), torch.float32, graphs=False)
        found = run_steps(checkpoint, cuda, torch.float32, graphs=graphs)
        assert found == expected, f"on the device {found}, on the CPU {expected}"
        num_tokens = sum(map(len, run_steps(checkpoint, cuda, torch.bfloat16, graphs=graphs)))
    print(f"{sum(map(len, found))} tokens in float32, as on the CPU; {num_tokens} in bfloat16")


if __name__ == "__main__":
    main()
