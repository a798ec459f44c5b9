"""On real kernels: published states are correct, no state is copied, and only as many rows move as the design says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from agentspec.engine.in_process import Engine
from agentspec.kernels import PrefillBatch
from agentspec.kernels.reference.live import live_rows
from agentspec.kernels.reference.spans import read_spans
from agentspec.kernels.traffic import state_traffic
from agentspec.models.protocol import VerifyBatch
from agentspec.runtime.executor import StepTicket
from agentspec.runtime.plan import StepPlan
from agentspec.types import BLOCK_TOKENS, SCRATCH_ROW, Breakpoint, CheckpointKind, SamplingParams
from agentspec.wire import Submit
from tests.fakes.copy_counter import CopyCounter
from tests.fakes.prompt_run import Run, batch_of
from tests.fakes.scalar_decay import load_decay_model
from tests.fakes.sequence_driver import poison
from tests.properties.real_model import (
    EngineSetup,
    Loader,
    Scratch,
    Simulation,
    StateSpy,
    assemble_engine,
    load,
    write_agreeing_checkpoint,
)

SETUPS = {
    "roomy": EngineSetup(seed=11, max_draft_tokens=3, random_depth=True, prefill_budget=130),
    "tight": EngineSetup(
        seed=8, max_draft_tokens=4, random_depth=True, prefill_budget=99, max_running=3, spare_rows=4, num_pages=10
    ),
}
RINGS = {
    "rings": EngineSetup(seed=11, max_draft_tokens=15, random_depth=True, prefill_budget=130, has_ring=True),
    "rings, tight": EngineSetup(
        seed=15,
        max_draft_tokens=3,
        max_copies=12,
        random_depth=True,
        prefill_budget=99,
        max_running=3,
        spare_rows=4,
        num_pages=10,
        has_ring=True,
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_agreeing_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=2, full_attention_interval=2
    )


def test_chunk_ending_on_checkpoint_writes_both_rows(checkpoint: Path) -> None:
    model, tokens = load(checkpoint), list(range(3, 3 + BLOCK_TOKENS))
    model.allocate(num_rows=5, num_pages=3)
    poison(model)
    model.prefill(batch_of([Run(token_ids=tokens, state_writes=((BLOCK_TOKENS, 2), (BLOCK_TOKENS, 4)), page_ids=[2])]))
    for row in (2, 4):
        Scratch(checkpoint).check(model, row, [2], tokens, with_mtp=False, context="two writes at one count")


@pytest.mark.parametrize(
    ("setup", "loader"),
    [
        *(pytest.param(setup, load, id=name) for name, setup in (SETUPS | RINGS).items()),
        *(pytest.param(setup, load_decay_model, id=f"scalar decay, {name}") for name, setup in SETUPS.items()),
    ],
)
def test_published_and_resumed_states_equal_scratch_prefill(
    checkpoint: Path, setup: EngineSetup, loader: Loader
) -> None:
    simulation = Simulation(setup, checkpoint, num_agents=8, loader=loader)
    spy = StateSpy(simulation, Scratch(checkpoint, loader=loader))
    simulation.run()
    assert spy.num_resumed > 5
    assert all(spy.num_published[kind] for kind in (CheckpointKind.SYSTEM, CheckpointKind.USER, CheckpointKind.TURN)), (
        spy.num_published
    )


class CallSpy:
    """Counts the windows and chunks that the model was called with."""

    def __init__(self, model: Any, executor: Any) -> None:
        self.windows: list[tuple[int, int]] = []
        """(slots, columns) of each verify, and of the windows of each ride: of slots with live columns where the device
        chooses those."""
        self.chunk_writes: list[int] = []
        """Number of state writes of each chunk."""
        self.beside_chunks: list[tuple[int, bool]] = []
        """Of each step with chunks and windows: (drafts of its windows, whether they rode)."""
        self.num_rides = self.num_folds = 0
        verify, prefill, ride, launch = model.verify, model.prefill, model.ride, executor.launch

        def spy_verify(batch: VerifyBatch) -> Tensor:
            self._count_windows(batch)
            hidden: Tensor = verify(batch)
            return hidden

        def spy_prefill(batch: PrefillBatch) -> Tensor:
            self._count_chunks(batch)
            hidden: Tensor = prefill(batch)
            return hidden

        def spy_ride(prompts: PrefillBatch, windows: VerifyBatch) -> tuple[Tensor, Tensor]:
            self.num_rides += 1
            self._count_chunks(prompts)
            self._count_windows(windows)
            hiddens: tuple[Tensor, Tensor] = ride(prompts, windows)
            return hiddens

        def spy_launch(plan: StepPlan) -> StepTicket:
            num_before = self.num_rides
            ticket: StepTicket = launch(plan)
            if plan.chunks and plan.decode_slots:
                self.beside_chunks.append((plan.num_drafted, self.num_rides > num_before))
            return ticket

        model.verify, model.prefill, model.ride, executor.launch = spy_verify, spy_prefill, spy_ride, spy_launch

    def _count_windows(self, batch: VerifyBatch) -> None:
        num_slots, num_columns = batch.tokens_BT.shape
        if batch.live is not None:
            num_slots = len(list(live_rows(batch.live)))
        self.windows.append((num_slots, num_columns))
        if batch.ring is not None:
            self.num_folds += int((batch.ring.fold_row_B != SCRATCH_ROW).sum())

    def _count_chunks(self, batch: PrefillBatch) -> None:
        self.chunk_writes.extend(sum(len(block.save_rows) for block in span.blocks) for span in read_spans(batch))

    def tiles(self, num_layers: int, *, has_ring: bool) -> tuple[int, int]:
        """(read, written) by design: a window reads one row per slot and writes one per column, with rings only folded
        ones; a chunk reads one and writes the requested ones."""
        read = sum(num_slots for num_slots, _ in self.windows) + len(self.chunk_writes)
        columns = sum(num_slots * num_columns for num_slots, num_columns in self.windows)
        written = (self.num_folds if has_ring else columns) + sum(self.chunk_writes)
        return num_layers * read, num_layers * written


@pytest.mark.parametrize("name", SETUPS | RINGS)
def test_run_copies_no_state(checkpoint: Path, name: str) -> None:
    setup = (SETUPS | RINGS)[name]
    simulation = Simulation(setup, checkpoint, num_agents=5)
    calls = CallSpy(simulation.model, simulation.assembly.loop.executor)
    state_traffic.reset()
    with CopyCounter(simulation.model.pools.tensors()) as counter:
        simulation.run()
    assert counter.touched == []
    assert (state_traffic.rows_read, state_traffic.rows_written) == calls.tiles(
        simulation.model.pools["ssm_LRVDK"].shape[0], has_ring=setup.has_ring
    )
    assert calls.num_rides > 0
    wide = [rode for num_drafted, rode in calls.beside_chunks if num_drafted > setup.max_draft_tokens]
    assert bool(wide) == (setup.max_copies > 0)
    assert not any(wide), "windows with copies don't ride"
    assert calls.num_rides == len(calls.beside_chunks) - len(wide), "all others do"
    stats, metrics = simulation.assembly.cache.stats(), simulation.metrics
    assert metrics.cached_tokens > 0
    assert stats["checkpoints_created"] > 10
    assert stats["checkpoints_superseded"] > 0
    assert bool(metrics.preemptions) == ("tight" in name)


@pytest.mark.parametrize("num_drafted", [0, 3])
def test_turn_moves_only_window_and_checkpoint_rows(checkpoint: Path, num_drafted: int) -> None:
    """Prefill in two chunks, then decode; a second session forks at the system prompt, and a third turn resumes after
    the first."""
    model = load(checkpoint)
    assembly = assemble_engine(
        EngineSetup(max_draft_tokens=num_drafted, prefill_budget=128, max_running=2, overlap=False), model
    )
    engine, metrics = Engine(assembly), assembly.loop.metrics
    num_layers = model.pools["ssm_LRVDK"].shape[0]
    rng = random.Random(5)
    system, query = rng.choices(range(3, 160), k=70), rng.choices(range(3, 160), k=130)
    marks = [Breakpoint(70, CheckpointKind.SYSTEM), Breakpoint(190, CheckpointKind.USER)]
    greedy = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)

    def turn(request_id: str, prompt: list[int], *, chunks: int, prefill_writes: int) -> list[int]:
        """Run one turn; prefill must read a row a chunk and write `prefill_writes` rows, decode read one a step and
        write one a column."""
        state_traffic.reset()
        before = metrics.decode_slots
        with CopyCounter(model.pools.tensors()) as counter:
            emitted, _ = engine.generate(
                Submit(request_id=request_id, prompt_ids=prompt, breakpoints=marks, sampling=greedy)
            )
        steps = metrics.decode_slots - before
        assert counter.touched == []
        assert state_traffic.rows_read == num_layers * (chunks + steps)
        assert state_traffic.rows_written == num_layers * (prefill_writes + steps * (num_drafted + 1))
        return emitted

    # Chunks of 128 and 71 tokens: SYSTEM at 64, USER at 128, the rolling checkpoint at 192, and each chunk's end.
    emitted = turn("first", system + query, chunks=2, prefill_writes=3 + 2)
    # Forks at 64: USER at 128, the rolling checkpoint at 192, and the ends of two chunks of 128 and 7.
    turn("fork", system + query[::-1], chunks=2, prefill_writes=2 + 2)
    # Resumes at 256, behind the generated turn: 270 + 10 - 1 tokens need one chunk, and nothing new to keep.
    turn("second turn", system + query + emitted + query[:10], chunks=1, prefill_writes=1)
