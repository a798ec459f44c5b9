"""CUDA graphs of the decode step: bitwise equal to eager steps, no wait in a launch, and shared memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentspec.config import EngineConfig
from agentspec.engine.in_process import Engine
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.runtime.decode_step import StepResult
from agentspec.runtime.executor import StepTicket
from agentspec.runtime.graphs import CudaRecorder
from agentspec.runtime.plan import StepPlan
from agentspec.types import SamplingParams
from tests.fakes.checkpoints import Family
from tests.fakes.hash_chain import ReferenceRequest
from tests.fakes.loaded import load_model
from tests.fakes.replayer import Replayer
from tests.fakes.sequence_driver import poison
from tests.fakes.step_driver import StepDriver, greedy
from tests.fakes.twins import run_twins
from tests.properties.real_model import (
    write_agreeing_checkpoint,
    write_agreeing_four_bit_checkpoint,
    write_agreeing_fp8_checkpoint,
)

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
NoWaits = Callable[[], AbstractContextManager[None]]


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "dense": lambda directory: write_agreeing_checkpoint(directory, **SMALL),
    "experts": lambda directory: write_agreeing_checkpoint(directory, "moe", **SMALL),
    "experts in FP8": lambda directory: write_agreeing_fp8_checkpoint(directory, "moe", **SMALL),
    "FP8 pages": lambda directory: write_agreeing_checkpoint(directory, **SMALL),
    "4 bits": lambda directory: write_agreeing_four_bit_checkpoint(directory, **SMALL),
    "experts in 4 bits": lambda directory: write_agreeing_four_bit_checkpoint(directory, "int4", "moe", **SMALL),
}


@pytest.mark.parametrize(
    ("kind", "dtype", "seed"),
    [
        ("dense", torch.float32, 1),
        ("dense", torch.float32, 2),
        ("dense", torch.bfloat16, 1),
        ("dense", torch.bfloat16, 2),
        ("experts", torch.float32, 3),
        ("experts", torch.bfloat16, 4),
        ("experts in FP8", torch.bfloat16, 5),
        ("4 bits", torch.bfloat16, 6),
        ("experts in 4 bits", torch.bfloat16, 9),
        ("FP8 pages", torch.bfloat16, 7),
        ("FP8 pages", torch.float32, 8),
    ],
    ids=str,
)
def test_replayed_step_is_bitwise_equal_to_eager_step(
    kind: str, dtype: torch.dtype, seed: int, cuda: torch.device, tmp_path: Path
) -> None:
    """Both are padded to the same batch: the number of tokens may determine a kernel's accumulation order.

    In 16 bits drafts use FP8, the default."""
    checkpoint = CHECKPOINTS[kind](tmp_path)

    def make_model() -> Qwen3_5Model:
        fp8 = {"fp8_drafts": dtype != torch.float32, "fp8_pages": kind == "FP8 pages"}
        model = load_model(checkpoint, device=cuda, dtype=dtype, **fp8)
        model.limit_drafts(range(model.spec.num_real_tokens))
        return model

    run_twins(
        make_model,
        lambda executor: executor.capture(range(4), Replayer()),
        lambda executor: executor.capture(range(4), CudaRecorder(cuda)),
        seed=seed,
        max_running=5,
        max_draft_tokens=3,
        num_steps=80,
        device=cuda,
    )


@pytest.fixture
def driver(cuda: torch.device, tmp_path: Path) -> StepDriver:
    """A driver captured for 3 drafts only."""
    model = load_model(write_agreeing_checkpoint(tmp_path, **SMALL), device=cuda, dtype=torch.float32)
    driver = StepDriver(model, max_running=3, max_draft_tokens=3, device=cuda)
    poison(model)
    report = driver.executor.capture([3], CudaRecorder(cuda))
    assert report.num_graphs == 6
    return driver


@pytest.mark.parametrize("kind", ["greedy", "sampled", "constrained", "scored"])
def test_steady_loop_waits_only_for_its_result(kind: str, driver: StepDriver, no_waits: NoWaits) -> None:
    sampling = (
        SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5)
        if kind == "sampled"
        else SamplingParams(temperature=0.0)
    )
    plan = StepPlan(num_drafted=3, first_slots=[0, 1, 2])
    for slot in plan.first_slots:
        driver.plan_join(
            plan, slot, ReferenceRequest(prompt=[5, 6, 7 + slot], sampling=sampling, seed=slot, length_limit=250)
        )
        plan.joins[-1] = dataclasses.replace(
            plan.joins[-1], constrained=kind == "constrained", logprobs=3 if kind == "scored" else None
        )
    words = -(-driver.model.spec.vocab_size // 32)
    masks = (
        {slot: np.full((4, words), -1, dtype=np.int32) for slot in plan.first_slots} if kind == "constrained" else {}
    )
    plan.masks = {slot: rows[:1] for slot, rows in masks.items()}
    tickets: list[StepTicket] = [driver.executor.launch(plan)]
    num_emitted = 0
    for step in range(20):
        plan = StepPlan(
            num_drafted=3,
            decode_slots=[0, 1, 2],
            page_updates=[(0, step % 4, driver.running[0].pages[step % 4])],
            masks=masks,
        )
        with no_waits():
            tickets.append(driver.executor.launch(plan))
            outcomes = driver.executor.collect(tickets.pop(0)).slots
        num_emitted += sum(len(outcome.emitted) for outcome in outcomes)
    assert num_emitted >= 60


def test_depth_without_graphs_raises(driver: StepDriver) -> None:
    plan = StepPlan()
    driver.plan_join(plan, 0, greedy([1, 2, 3], 50))
    driver.step(3, plan=plan)
    with pytest.raises(KeyError, match="num_drafted=2"):
        driver.step(2)


def test_work_after_recording_runs_after_recorded_work(cuda: torch.device) -> None:
    """The recorder's first run and capture use its own stream; the tables of the next graph overwrite those that they
    read."""
    table, seen = torch.ones(1, device=cuda), torch.zeros(1, device=cuda)
    slow = torch.ones(8192, 8192, device=cuda)

    def work() -> None:
        torch.mm(slow, slow)
        seen.copy_(table)

    CudaRecorder(cuda).record_writes(work)
    table.fill_(2)
    assert seen.item() == 1


def test_graphs_share_logits_memory(cuda: torch.device) -> None:
    recorder = CudaRecorder(cuda)
    logits_bytes = 2**26

    def step() -> StepResult:
        return StepResult(
            outcome_BF=torch.zeros(1, 16, device=cuda), logits_BTV=torch.zeros(1, 1, logits_bytes // 4, device=cuda)
        )

    kept = [recorder.record(step) for _ in range(4)]  # a graph without references frees its memory
    assert logits_bytes <= recorder.bytes_used() < 2 * logits_bytes, f"{len(kept)} graphs"


@pytest.mark.parametrize(
    ("family", "graphs", "told"),
    [
        ("dense", True, "36 (batches of 1, 2, 3;"),
        ("dense", False, "none: switched off"),
        ("moe", True, "24 (batches of 1, 2, 3;"),
    ],
)
def test_startup_report_lists_captured_graphs(
    family: Family, graphs: bool, told: str, cuda: torch.device, tmp_path: Path
) -> None:
    checkpoint = write_agreeing_checkpoint(tmp_path, family, **SMALL)
    with Engine(
        EngineConfig(model=str(checkpoint), device="cuda", memory_gib=0.05, max_running=3, graphs=graphs)
    ) as engine:
        assert engine._assembly.graphs.startswith(told)


def test_default_memory_leaves_room_for_graphs(cuda: torch.device) -> None:
    with Engine(EngineConfig(device="cuda", max_running=32)) as engine:
        free, total = torch.cuda.mem_get_info(cuda)
        assert engine._assembly.graphs.startswith("62 (batches of 1, 2, 4, 8, 16, 32;")
        assert free > 0.05 * total
