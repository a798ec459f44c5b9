"""The graphs of prompt chunks: which exist, their inputs, and that they write the same rows and pages as the same
chunks run eagerly.

Recordings are replayed by running the prefill again, so this needs no GPU; tests/gpu does the same with CUDA graphs.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels import PrefillBatch
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.plan import ChunkPlan, StepPlan
from agentspec.runtime.prefill import run_batch
from agentspec.runtime.prefill_graphs import CHUNK_SIZES, MAX_SPANS, PrefillGraphs, chunk_sizes, prefill_graph_bytes
from agentspec.runtime.prefill_tables import PrefillSizes
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, tokens
from tests.fakes.chunk_rounds import ChunkRounds
from tests.fakes.hash_chain import HashChainModel
from tests.fakes.loaded import load_model
from tests.fakes.prompt_run import Run, batch_of
from tests.fakes.replayer import Replayer
from tests.properties.real_model import write_agreeing_checkpoint

CPU = torch.device("cpu")
BLOCK, PAGES = 64, 20
SIZES = chunk_sizes(HashChainModel().spec.hidden_size)


class Watched:
    """A prefill that records its batches."""

    def __init__(self) -> None:
        self.batches: list[PrefillBatch] = []
        self.graphs = PrefillGraphs(
            self._prefill, Replayer(), sizes=CHUNK_SIZES, block_tokens=BLOCK, max_pages=PAGES, device=CPU
        )
        for record in self.graphs.recordings().values():
            record()
        self.recorded, self.batches = self.batches, []

    def _prefill(self, batch: PrefillBatch) -> None:
        self.batches.append(PrefillBatch(**{name: tensor.clone() for name, tensor in tables_of(batch).items()}))


def tables_of(batch: PrefillBatch) -> dict[str, Tensor]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


def runs_of(*counts: int, start: int = 0, every: int | None = None) -> list[Run]:
    """Runs of the given lengths. every: a state is wanted after each `every` tokens."""
    return [
        Run(
            token_ids=list(range(place, place + count)),
            start=start,
            read_row=2 if start else 0,
            state_writes=(
                *((end, 10 + end) for end in range(every or count, count, every or count)),
                (count, 3 + place),
            ),
            page_ids=list(range(1 + PAGES * place, 1 + PAGES * (place + 1))),
        )
        for place, count in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("runs", "size"),
    [
        (runs_of(1), 64),
        (runs_of(64), 64),
        (runs_of(65), 128),
        (runs_of(1, 1, 1, 1), 64),
        (runs_of(100, 100, 57), 288),
        (runs_of(800), 800),
        (runs_of(1024), 1024),
        (runs_of(512, 512, start=63), 1024),
        (runs_of(60, every=5), 256),
        (runs_of(1025), None),
        (runs_of(1, 1, 1, 1, 1), None),
        (runs_of(60, every=1), None),
    ],
    ids=[
        "one",
        "full",
        "next",
        "four",
        "three",
        "append",
        "largest",
        "off the grid",
        "many states",
        "long",
        "five",
        "too many states",
    ],
)
def test_batch_uses_the_smallest_graph_that_holds_it(runs: list[Run], size: int | None) -> None:
    watched = Watched()
    if size is None:
        with pytest.raises(AssertionError, match="no graph"):
            watched.graphs.run(runs)
        assert watched.batches == []
    else:
        watched.graphs.run(runs)
        (batch,) = watched.batches
        assert len(batch.token_ids_N) == size


@pytest.mark.parametrize(
    ("count", "size"),
    [(1, 64), (64, 64), (65, None), (1638, None), (1639, 2048), (2048, 2048), (2049, None), (5000, 6016)],
)
def test_batch_is_not_padded_to_a_much_larger_recorded_size(count: int, size: int | None) -> None:
    sizes = (64, 1024, 2048, 4096, 6016)
    graphs = PrefillGraphs(lambda batch: None, Replayer(), sizes=sizes, block_tokens=BLOCK, max_pages=100, device=CPU)
    recordings = graphs.recordings()
    for recorded in (64, 2048, 6016):
        recordings[recorded]()
    assert graphs.tokens_of(runs_of(count)) == size


@pytest.mark.parametrize(
    ("runs", "tokens_spans_blocks"),
    [
        (runs_of(1025), (1152, 4, 26)),
        (runs_of(1, 1, 1, 1, 1), (128, 8, 18)),
        (runs_of(60, every=1), (128, 4, 60)),
        (runs_of(640, 512), (1152, 4, 26)),
    ],
    ids=["long", "five", "many states", "full"],
)
def test_eager_batches_come_in_few_sizes(runs: list[Run], tokens_spans_blocks: tuple[int, int, int]) -> None:
    sizes = Watched().graphs.eager_sizes(runs)
    assert (sizes.num_tokens, sizes.num_spans, sizes.num_blocks) == tokens_spans_blocks
    assert sizes.num_pages == PAGES
    assert len(batch_of(runs, block_tokens=BLOCK, sizes=sizes).blocks_MF) == sizes.num_blocks


def test_each_size_is_recorded_once_over_padding_largest_first() -> None:
    watched = Watched()
    assert [len(batch.token_ids_N) for batch in watched.recorded] == sorted(CHUNK_SIZES, reverse=True)
    for batch in watched.recorded:
        sizes = PrefillSizes(
            num_tokens=len(batch.token_ids_N),
            num_spans=MAX_SPANS,
            num_blocks=len(batch.token_ids_N) // BLOCK + 2 * MAX_SPANS,
            num_pages=PAGES,
        )
        assert same(batch, batch_of([], block_tokens=BLOCK, sizes=sizes))
        assert batch.page_table_UP.unique().tolist() == [SCRATCH_PAGE]


def test_each_replay_gets_only_its_own_runs() -> None:
    watched = Watched()
    for runs in (runs_of(1000), runs_of(3, 5), runs_of(200, start=64, every=64), runs_of(1), runs_of(50, 50, 50, 50)):
        watched.graphs.run(runs)
        batch = watched.batches.pop()
        sizes = PrefillSizes(
            num_tokens=len(batch.token_ids_N),
            num_spans=len(batch.spans_UF),
            num_blocks=len(batch.blocks_MF),
            num_pages=batch.page_table_UP.shape[1],
        )
        assert same(batch, batch_of(runs, block_tokens=BLOCK, sizes=sizes))


def same(batch: PrefillBatch, other: PrefillBatch) -> bool:
    return all(torch.equal(tensor, tables_of(other)[name]) for name, tensor in tables_of(batch).items())


class ChunkHouse:
    """An executor over a hash chain model, and rounds of chunks."""

    def __init__(self, seed: int) -> None:
        self.model = HashChainModel(seed=5, max_context=640)
        spec = self.model.spec
        self.rounds = ChunkRounds(
            seed=seed, num_sequences=6, max_length=600, block_tokens=spec.block_tokens, vocab_size=spec.num_real_tokens
        )
        self.model.allocate(num_rows=self.rounds.num_rows, num_pages=self.rounds.num_pages)
        self.executor = ModelExecutor(self.model, max_running=2, max_draft_tokens=2, max_pages_per_slot=40)

    def launch(self, chunks: list[ChunkPlan]) -> dict[str, Any]:
        plan = StepPlan(chunks=chunks)
        return dict(self.executor.collect(self.executor.launch(plan)).scores)

    def storage(self) -> list[Tensor]:
        """All rows and pages except scratch."""
        rows = torch.cat((self.model.rows_R3[:SCRATCH_ROW], self.model.rows_R3[SCRATCH_ROW + 1 :]))
        return [
            rows,
            self.model.attention_PS[SCRATCH_PAGE + 1 :].clone(),
            self.model.mtp_PS[SCRATCH_PAGE + 1 :].clone(),
        ]


@pytest.mark.parametrize("seed", range(4))
def test_replayed_chunks_equal_eager_chunks(seed: int) -> None:
    recorder = Replayer()
    first, second = ChunkHouse(seed), ChunkHouse(seed)
    before = second.storage()
    second.executor.capture([2], recorder)
    assert all(map(torch.equal, before, second.storage())), f"seed {seed}: recording has written"
    num_held = 0
    for step in range(60):
        chunks = first.rounds.next()
        second.rounds.next()
        first.launch(chunks)
        num_replays = recorder.num_write_replays
        second.launch(chunks)
        is_held = sum(len(chunk.token_ids) for chunk in chunks) <= SIZES[-1] and len(chunks) <= MAX_SPANS
        assert recorder.num_write_replays - num_replays == is_held, (
            f"seed {seed}, step {step}: {[len(chunk.token_ids) for chunk in chunks]}"
        )
        assert all(map(torch.equal, first.storage(), second.storage())), f"seed {seed}, step {step}"
        num_held += is_held
    assert 20 < num_held < 58, f"seed {seed}: both ways are taken"
    for sequence in second.rounds.sequences:
        for row, length in sequence.states.items():
            second.model.check_row(row, sequence.known[:length], context=f"seed {seed}")
        if sequence.known:
            second.model.check_pages(sequence.pages, sequence.known, context=f"seed {seed}")


def test_scored_chunks_are_eager() -> None:
    recorder = Replayer()
    house = ChunkHouse(0)
    house.executor.capture([2], recorder)
    run: dict[str, Any] = {"token_ids": tokens([1, 2, 3]), "start": 0, "read_row": 0, "page_ids": [1], "next_token": 4}
    scored = ChunkPlan(request_id="scored", state_writes=((3, 2),), score_top=2, **run)
    plain = ChunkPlan(request_id="plain", state_writes=((3, 3),), **{**run, "page_ids": [2]})
    assert len(house.launch([scored, plain])["scored"]) == 3
    assert recorder.num_write_replays == 0
    assert house.launch([plain]) == {}
    assert recorder.num_write_replays == 1


def test_padding_does_not_change_a_real_models_state(tmp_path: Path) -> None:
    """Rows and pages of a prefill with padding, against one without. The number of rows of a product may change its
    order of summation."""
    model = load_model(
        write_agreeing_checkpoint(tmp_path, num_hidden_layers=2, full_attention_interval=2),
        device=CPU,
        dtype=torch.float32,
    )
    runs = [
        dataclasses.replace(
            run, state_writes=((len(run.token_ids), 2 + place),), page_ids=[1 + 2 * place, 2 + 2 * place]
        )
        for place, run in enumerate(runs_of(70, 1, 30))
    ]
    kept = []
    for sizes in (None, PrefillSizes(num_tokens=128, num_spans=4, num_blocks=10, num_pages=PAGES)):
        model.allocate(num_rows=5, num_pages=7)
        for pool in model.pools.tensors():
            pool.zero_()
        with torch.inference_mode():
            run_batch(model, batch_of(runs, sizes=sizes), with_mtp=True)
        kept.append([tensor.clone() for tensor in model.pools.tensors()])
    for exact, padded in zip(*kept, strict=True):
        torch.testing.assert_close(padded, exact, rtol=1e-5, atol=1e-6)
    assert all(pool.any() for pool in kept[0])


def test_report_lists_chunk_sizes_and_cost() -> None:
    report = ChunkHouse(0).executor.capture([1], Replayer())
    assert report.chunk_sizes == (*CHUNK_SIZES, *range(1152, 8193, 128))
    sizes = ", ".join(map(str, report.chunk_sizes))
    assert str(report).startswith(
        "4 (batches of 1, 2; 1 drafts; greedy and sampled) and 4 of first steps "
        f"and {len(report.chunk_sizes)} of prompts (up to {sizes} tokens): 0.75 GiB, "
    )


@pytest.mark.parametrize(
    ("hidden_size", "longest"), [(2, 8192), (1024, 8192), (2048, 8192), (2560, 6016), (4096, 3712), (5120, 2944)]
)
def test_narrower_model_has_longer_batch_graphs(hidden_size: int, longest: int) -> None:
    sizes = chunk_sizes(hidden_size)
    assert sizes[: len(CHUNK_SIZES)] == CHUNK_SIZES
    assert sizes[-1] == longest
    assert list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize(("hidden_size", "ffn_width"), [(5120, 17_408), (4096, 12_288), (2560, 9216), (1024, 3584)])
def test_memory_estimate_covers_the_largest_forward(hidden_size: int, ffn_width: int) -> None:
    gate_up = chunk_sizes(hidden_size)[-1] * 2 * ffn_width * 2
    assert 4 * gate_up < prefill_graph_bytes(hidden_size) < 2**31


def test_memory_estimate_covers_a_mixture_of_experts() -> None:
    """35B-A3B: each token's results of 8 experts, in 16 bits, and the outputs of their gate and up projections."""
    assert 2 * chunk_sizes(2048)[-1] * 8 * (2048 + 3 * 512) * 2 < prefill_graph_bytes(2048) < 2**31
