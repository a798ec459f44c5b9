"""Device memory traffic of decode steps and prompts: only the required state rows, moved by our kernels. Also
host-device copies of ids and results."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from triton.runtime import JITFunction

from agentspec.kernels import triton as triton_backend
from agentspec.kernels.traffic import state_traffic
from agentspec.runtime.graphs import CudaRecorder
from agentspec.runtime.plan import ChunkPlan, StepPlan
from agentspec.types import SamplingParams, tokens
from benchmarks.published import make_model
from benchmarks.running_engine import Case, RunningEngine
from benchmarks.trace import Timeline, record
from tests.fakes.copy_counter import CopyCounter
from tests.fakes.hash_chain import ReferenceRequest
from tests.fakes.sequence_driver import poison
from tests.fakes.step_driver import StepDriver
from tests.properties.real_model import load, write_agreeing_checkpoint
from tests.test_decode_benchmark import TOY

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"num_hidden_layers": 4, "full_attention_interval": 2}
NUM_RECURRENT_LAYERS = 2
NUM_STEPS = 32
NUM_APPENDS = 8
GREEDY = SamplingParams(temperature=0.0)

SMALL_TORCH_KERNELS = ("index", "gather", "Gather", "CatArray", "CUDAFunctor", "direct_copy")
"""Parts of the names of torch kernels allowed in a greedy step: rows of the embedding, of the drafts and their
positions, pages of a table."""
MAX_TORCH_KERNELS = 8
"""Per step."""

PRODUCTS = ("gemm", "nvjet", "cutlass", "cublas", "splitK")
"""Parts of the names of the library kernels that compute products of many tokens."""


def test_step_reads_one_row_and_writes_one_per_column(cuda: torch.device, tmp_path: Path) -> None:
    """Eagerly, because a graph captures the same function. No torch operation accesses a pool."""
    model = load(write_agreeing_checkpoint(tmp_path, **SMALL), cuda)
    driver = StepDriver(model, max_running=3, max_draft_tokens=3, device=cuda)
    poison(model)
    plan = StepPlan()
    for slot in range(3):
        sampling = SamplingParams(temperature=0.8 if slot == 1 else 0.0, top_p=0.9)
        driver.plan_join(
            plan, slot, ReferenceRequest(prompt=[5, 6, 7 + slot], sampling=sampling, seed=slot, length_limit=250)
        )
    driver.step(3, plan=plan)
    for num_drafted, slots in ((3, [0, 1, 2]), (0, [2, 0]), (2, [1])):
        state_traffic.reset()
        with CopyCounter(model.pools.tensors()) as counter:
            driver.step(num_drafted, slots=slots)
        moved = (state_traffic.rows_read, state_traffic.rows_written)
        assert moved == (NUM_RECURRENT_LAYERS * len(slots), NUM_RECURRENT_LAYERS * len(slots) * (num_drafted + 1))
        assert counter.touched == []


def test_prompts_access_pools_only_in_kernels(cuda: torch.device, tmp_path: Path) -> None:
    """Eagerly, three prompts at once with states kept on the way, and their first steps. Only the device knows which
    rows move."""
    model = load(write_agreeing_checkpoint(tmp_path, **SMALL), cuda)
    driver = StepDriver(model, max_running=3, max_draft_tokens=3, device=cuda)
    poison(model)
    plan = StepPlan()
    for slot, length in enumerate((1, 90, 200)):
        driver.plan_join(
            plan,
            slot,
            ReferenceRequest(
                prompt=[*range(3, 103), *range(3, 103)][:length], sampling=GREEDY, seed=slot, length_limit=250
            ),
        )
        chunk, spare_row = plan.chunks[-1], plan.joins[-1].rows.newer
        kept = ((64, spare_row),) if length > 64 else ()
        plan.chunks[-1] = dataclasses.replace(chunk, state_writes=(*kept, *chunk.state_writes))
    with CopyCounter(model.pools.tensors()) as counter:
        driver.step(2, plan=plan)
    assert counter.touched == []
    assert [len(running.emitted) for running in driver.running.values()] == [1, 1, 1]


def our_kernels() -> set[str]:
    modules = [
        importlib.import_module(f"{triton_backend.__name__}.{found.name}")
        for found in pkgutil.iter_modules(triton_backend.__path__)
    ]
    return {value.__name__ for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}


@pytest.fixture
def timeline(cuda: torch.device) -> Timeline:
    """Profile greedy steps of two slots in the overlapped loop, replayed, after the first ones."""
    with profile(activities=[ProfilerActivity.CUDA]):  # must start before a graph is captured, to see into the graph
        torch.cuda.synchronize()
    model = make_model("toy", TOY, device=cuda, dtype=torch.bfloat16)
    engine = RunningEngine(Case(model="toy", context=70, batch=2, depth=3), model, cuda, num_steps=NUM_STEPS + 9)
    assert not engine.graphs.startswith("none")
    for _ in range(8):
        engine.step()
    return record(engine.step, NUM_STEPS)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_replayed_step_copies_no_state(timeline: Timeline) -> None:
    calls = Counter(kernel.name for kernel in timeline.kernels)
    copies = {name: number for name, number in calls.items() if name.startswith(("Memcpy", "Memset"))}
    ours, foreign = (
        our_kernels(),
        {name: number for name, number in calls.items() if name not in copies and "at::" in name},
    )
    unknown = calls.keys() - ours - copies.keys() - foreign.keys()
    assert not unknown, "kernels that are neither ours nor torch's"
    assert {"_gated_delta_ring_step", "_commit_window", "_publish_drafts"} <= calls.keys()
    strange = [name for name in foreign if not any(part in name for part in SMALL_TORCH_KERNELS)]
    assert not strange
    assert sum(foreign.values()) <= MAX_TORCH_KERNELS * NUM_STEPS, foreign
    of_pages = sum(number for name, number in foreign.items() if "direct_copy" in name)
    assert of_pages < NUM_STEPS, f"unexpected copies in a step: {foreign}"
    to_host = sum(number for name, number in copies.items() if "DtoH" in name)
    to_device = sum(number for name, number in copies.items() if "HtoD" in name)
    assert to_host == NUM_STEPS, f"expected one result copy per step: {copies}"
    assert to_device <= of_pages, f"expected copies of new pages only: {copies}"
    assert to_host + to_device == sum(copies.values()), f"unexpected copies: {copies}"
    assert not [name for name in copies if "Pageable" in name], f"copies from or to pageable memory: {copies}"


@pytest.fixture
def appends(cuda: torch.device) -> Timeline:
    """Profile chunks of 200 tokens after 256, with a state kept on the way, replayed."""
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.cuda.synchronize()
    model = make_model(
        "toy", TOY, device=cuda, dtype=torch.bfloat16, fp8_drafts=False
    )  # its widths are not supported by W8A8 products
    model.computes_prompts = True
    driver = StepDriver(model, max_running=1, max_draft_tokens=3, max_length=512, device=cuda)
    driver.executor.capture([3], CudaRecorder(cuda))
    chunk = ChunkPlan(
        request_id="r",
        token_ids=tokens(range(200)),
        start=256,
        read_row=2,
        state_writes=((64, 3), (200, 4)),
        page_ids=[*range(1, 9)],
        next_token=0,
    )

    def append() -> None:
        driver.executor.launch(StepPlan(chunks=[chunk]))

    append()
    return record(append, NUM_APPENDS)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_replayed_append_copies_no_state(appends: Timeline) -> None:
    calls = Counter(kernel.name for kernel in appends.kernels)
    copies = {name: number for name, number in calls.items() if name.startswith("Memcpy")}
    foreign = {name: number for name, number in calls.items() if "at::" in name}
    products = {name for name in calls if any(part in name for part in PRODUCTS)}
    unknown = [
        name
        for name in calls.keys() - our_kernels() - copies.keys() - foreign.keys() - products
        if not name.startswith("Memset")
    ]
    assert not unknown, "kernels that are not ours, torch's or a library product"
    strange = [name for name in foreign if not any(part in name for part in SMALL_TORCH_KERNELS)]
    assert not strange
    assert sum(number for name, number in copies.items() if "HtoD" in name) == NUM_APPENDS, (
        f"expected one copy of the tables: {copies}"
    )
    assert not [name for name in copies if "Pageable" in name or "DtoH" in name], copies
    # The tables are copied to the place that the graph reads, and torch's sum of a product and the residual starts with
    # a copy of the residual.
    most = (1 + 2 * len(TOY.layer_types)) * NUM_APPENDS
    assert sum(number for name, number in copies.items() if "DtoD" in name) <= most, (
        f"expected copies of tables and residuals only: {copies}"
    )
