"""A rank of the decode benchmark on a CPU: the main function of a process that writes what its engine emitted."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from agentspec.models.hf_config import TextConfig
from benchmarks.published import make_model
from benchmarks.running_engine import Case, RunningEngine
from benchmarks.shared_model import join

NUM_STEPS = 8


def main(index: int, count: int, config: TextConfig, directory: Path) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    shared = join(index, count, str(directory / "meeting"), device)
    model = make_model("toy", config, device=device, dtype=torch.float32, shared=shared)
    case = Case(model="toy", context=70, batch=2, depth=3)
    engine = RunningEngine(case, model, device, num_steps=NUM_STEPS + 1)
    emitted = [engine.step() for _ in range(NUM_STEPS)]
    agreed = [shared.largest(index), shared.of_first(index + 5)]
    (directory / f"rank-{index}.json").write_text(json.dumps([emitted, agreed]))
    shared.meet()
