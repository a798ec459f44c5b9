"""CUDA graphs of prompt chunks: bitwise equal to eager chunks, correct states, no wait in a launch, and their use by
an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.config import EngineConfig
from agentspec.engine.in_process import Engine
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.graphs import CudaRecorder
from agentspec.runtime.plan import StepPlan
from agentspec.runtime.prefill_graphs import MAX_SPANS, chunk_sizes
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW
from tests.fakes.chunk_rounds import ChunkRounds
from tests.fakes.hash_chain import HashChainModel
from tests.fakes.loaded import load_model
from tests.fakes.replayer import Replayer
from tests.fakes.sequence_driver import poison
from tests.properties.real_model import write_agreeing_checkpoint, write_agreeing_fp8_checkpoint

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2}
MAX_LENGTH = 1500
NoWaits = Callable[[], AbstractContextManager[None]]
MakeModel = Callable[[], HashChainModel | Qwen3_5Model]


class ChunkHarness:
    """An executor over a poisoned model, with a source of random rounds of chunks."""

    def __init__(self, model: HashChainModel | Qwen3_5Model, device: torch.device, *, seed: int = 0) -> None:
        self.model, spec = model, model.spec
        self.rounds = ChunkRounds(
            seed=seed,
            num_sequences=6,
            max_length=MAX_LENGTH,
            block_tokens=spec.block_tokens,
            vocab_size=spec.num_real_tokens,
        )
        model.allocate(num_rows=self.rounds.num_rows, num_pages=self.rounds.num_pages)
        if isinstance(model, Qwen3_5Model):
            poison(model)
        max_pages = -(-MAX_LENGTH // spec.block_tokens) + 1
        self.executor = ModelExecutor(
            model, max_running=1, max_draft_tokens=2, max_pages_per_slot=max_pages, device=device
        )

    def storage(self) -> dict[str, Tensor]:
        """Return copies of all rows and pages except scratch."""
        model = self.model
        if isinstance(model, HashChainModel):
            rows, pages = {"rows": (model.rows_R3, 0)}, {"attention": (model.attention_PS, 0), "mtp": (model.mtp_PS, 0)}
        else:
            pools = model.pools
            rows = {"ssm": (pools["ssm_LRVDK"], 1), "conv": (pools["conv_LR3C"], 1), "hidden": (pools.hidden_RH, 0)}
            pages = {"kv": (pools["kv_AP2SGD"], 1)}
        kept = {name: without(tensor, dim, SCRATCH_ROW) for name, (tensor, dim) in rows.items()}
        return kept | {name: without(tensor, dim, SCRATCH_PAGE) for name, (tensor, dim) in pages.items()}


def without(tensor: Tensor, dim: int, index: int) -> Tensor:
    return torch.cat((tensor.narrow(dim, 0, index), tensor.narrow(dim, index + 1, tensor.shape[dim] - index - 1)), dim)


def assert_same(expected: dict[str, Tensor], got: dict[str, Tensor], context: str) -> None:
    for name, tensor in expected.items():
        # Compare bits: NaN, which unwritten storage holds, equals itself.
        same = torch.equal(tensor.view(torch.uint8), got[name].view(torch.uint8))
        assert same, f"{context}: {name} differs in {int((tensor != got[name]).sum())} of {tensor.numel()} values"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_agreeing_checkpoint(tmp_path, **SMALL)


KINDS: dict[str, tuple[torch.dtype, Callable[[Path], Path]]] = {
    "float32": (torch.float32, lambda directory: write_agreeing_checkpoint(directory, **SMALL)),
    "bfloat16": (torch.bfloat16, lambda directory: write_agreeing_checkpoint(directory, **SMALL)),
    "experts, float32": (torch.float32, lambda directory: write_agreeing_checkpoint(directory, "moe", **SMALL)),
    "experts, bfloat16": (torch.bfloat16, lambda directory: write_agreeing_checkpoint(directory, "moe", **SMALL)),
    "experts in FP8, bfloat16": (
        torch.bfloat16,
        lambda directory: write_agreeing_fp8_checkpoint(directory, "moe", **SMALL),
    ),
}


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        *((kind, seed) for kind in ("hash chain", "float32", "bfloat16") for seed in (1, 2)),
        *((kind, 3) for kind in KINDS if "experts" in kind),
    ],
)
def test_replayed_chunks_are_bitwise_equal_to_eager_chunks(
    kind: str, seed: int, cuda: torch.device, tmp_path: Path
) -> None:
    """Both are padded to the same number of tokens, because it may determine a kernel's accumulation order."""
    make_model: MakeModel = functools.partial(HashChainModel, seed=5, device=cuda)
    if kind != "hash chain":
        dtype, write = KINDS[kind]
        make_model = functools.partial(
            load_model, write(tmp_path), device=cuda, dtype=dtype, fp8_drafts=dtype != torch.float32
        )

    first, second = (ChunkHarness(make_model(), cuda, seed=seed) for _ in range(2))
    before = second.storage()
    replayer = Replayer()
    first.executor.capture([2], replayer)
    second.executor.capture([2], CudaRecorder(cuda))
    assert_same(before, second.storage(), f"{kind}, seed {seed}, at the start")
    for step in range(60):
        plan = StepPlan(chunks=first.rounds.next())
        for harness in (first, second):
            harness.executor.collect(harness.executor.launch(plan))
        sizes = [len(chunk.token_ids) for chunk in plan.chunks]
        assert_same(first.storage(), second.storage(), f"{kind}, seed {seed}, step {step}, chunks of {sizes}")
    assert 20 < replayer.num_write_replays < 60, "both replayed and eager chunks must occur"


@pytest.mark.parametrize("seed", [3, 4])
def test_states_and_pages_match_recomputation(seed: int, cuda: torch.device) -> None:
    model = HashChainModel(seed=5, device=cuda)
    harness = ChunkHarness(model, cuda, seed=seed)
    harness.executor.capture([2], CudaRecorder(cuda))
    for step in range(60):
        harness.executor.collect(harness.executor.launch(StepPlan(chunks=harness.rounds.next())))
        for sequence in harness.rounds.sequences:
            for row, length in sequence.states.items():
                model.check_row(row, sequence.known[:length], context=f"seed {seed}, step {step}")
            if sequence.known:
                model.check_pages(sequence.pages, sequence.known, context=f"seed {seed}, step {step}")


def test_chunk_launch_does_not_synchronize(cuda: torch.device, checkpoint: Path, no_waits: NoWaits) -> None:
    harness = ChunkHarness(load_model(checkpoint, device=cuda, dtype=torch.float32), cuda)
    harness.executor.capture([2], CudaRecorder(cuda))
    num_replays = 0
    while num_replays < 30:
        chunks = harness.rounds.next(most=MAX_SPANS)
        if sum(len(chunk.token_ids) for chunk in chunks) > chunk_sizes(harness.model.spec.hidden_size)[-1]:
            harness.executor.launch(StepPlan(chunks=chunks))
            continue
        num_replays += 1
        with no_waits():
            harness.executor.launch(StepPlan(chunks=chunks))
    torch.cuda.synchronize()


@pytest.mark.parametrize("graphs", [True, False])
def test_startup_report_lists_captured_chunks(graphs: bool, cuda: torch.device, checkpoint: Path) -> None:
    with Engine(
        EngineConfig(model=str(checkpoint), device="cuda", memory_gib=0.05, max_running=1, graphs=graphs)
    ) as engine:
        sizes = chunk_sizes(engine._assembly.spec.hidden_size)
        assert (f"and {len(sizes)} of prompts (up to 64, 128, " in engine._assembly.graphs) == graphs
