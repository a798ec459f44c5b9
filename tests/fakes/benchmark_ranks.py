"""A rank of a benchmark on a CPU: main functions of processes that write what their engines emitted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentspec.models.hf_config import TextConfig
from agentspec.types import CheckpointKind
from benchmarks.prefill_engine import PromptEngine, Room
from benchmarks.published import PrefilledModel, make_model
from benchmarks.running_engine import Case, RunningEngine
from benchmarks.shared_model import SharedModel, join
from tests.fakes.forks import FORKS

NUM_STEPS = 8

_CPU = torch.device("cpu")

Main = Callable[[int, int, TextConfig, Path], None]
"""Of a rank's process: its index, the number of ranks, the model, and where to meet and to write."""


def both(main: Main, config: TextConfig, directory: Path) -> tuple[Any, Any]:
    """Run two ranks, and return what they wrote."""
    processes = [FORKS.Process(target=main, args=(rank, 2, config, directory)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout=100)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
    first, second = (json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    return first, second


def decode(index: int, count: int, config: TextConfig, directory: Path) -> None:
    shared, model = _join(index, count, config, directory)
    case = Case(model="toy", context=70, batch=2, depth=3)
    engine = RunningEngine(case, model, _CPU, num_steps=NUM_STEPS + 1)
    emitted = [engine.step() for _ in range(NUM_STEPS)]
    agreed = [shared.largest(index), shared.of_first(index + 5)]
    (directory / f"rank-{index}.json").write_text(json.dumps([emitted, agreed]))
    shared.meet()


def prefill(index: int, count: int, config: TextConfig, directory: Path) -> None:
    """Two turns of a session, of which the second begins in the cache."""
    shared, model = _join(index, count, config, directory)
    engine = PromptEngine(model, _CPU, Room(longest=600, others=600))
    words = random.Random(4)
    prompt, emitted = words.choices(range(model.spec.num_real_tokens), k=200), []
    for _ in range(2):
        answer = engine.ask(prompt, max_tokens=9, session="agent", breakpoints=[(192, CheckpointKind.USER)])
        emitted.append([answer.cached_tokens, answer.token_ids])
        prompt = [*prompt, *answer.token_ids, *words.choices(range(model.spec.num_real_tokens), k=80)]
    (directory / f"rank-{index}.json").write_text(json.dumps(emitted))
    shared.meet()


def _join(index: int, count: int, config: TextConfig, directory: Path) -> tuple[SharedModel, PrefilledModel]:
    torch.set_num_threads(1)
    shared = join(index, count, str(directory / "meeting"), _CPU)
    return shared, make_model("toy", config, device=_CPU, dtype=torch.float32, shared=shared)
