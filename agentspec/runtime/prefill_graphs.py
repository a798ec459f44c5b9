"""Short prompt chunks as CUDA graphs: one for each of a few token counts, recorded once and replayed over tables that
the host fills.

An agent's turn appends a few hundred tokens, which the device computes faster than the host launches their kernels one
by one. Larger batches keep the device busy for longer, but no stream gets tokens while the host launches. So every
batch that fits under the longest gap between two tokens has a graph, as far as memory allows. A batch between two sizes
is padded to the larger one; padding costs almost nothing up to the 128 rows of a matrix product's tile. Larger batches,
and chunks whose tokens are scored, are eager.

Owns the sizes, those of eager batches too, and the tables that all graphs read. Knows neither plans nor models: it is
given the prefill as a function of a batch. Graphs only write to rows and pages, so they can share memory with those of
the decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from agentspec.kernels import PrefillBatch
from agentspec.runtime.graphs import BYTES_A_GRAPH, Recorder
from agentspec.runtime.prefill_tables import PrefillSizes, PrefillTables, PromptRun, block_ends, build_tables
from agentspec.runtime.step_buffers import stage_into

CHUNK_SIZES = (64, 128, 192, 256, 288, 384, 512, 640, 768, 800, 864, 896, 960, 1024)
"""Token counts that are captured for every model. A matrix product's speed depends on how well the token count fills
its tiles (832 takes longer than 896); these sizes are fast on an H100 in the family's shapes. Above 192, padding is at
most a quarter of a size."""

_STEP = 128
"""Larger batches, captured and eager ones, are padded to a multiple of this many tokens."""

_LARGE_BATCH = 8192
"""Tokens. No larger batch is captured; larger ones launch the same kernels."""

_MOST_BYTES = 3 << 29
"""Most memory for the largest captured batch: on one H100 enough for all that fits into 0.1 s with 4B and with 27B in
FP8."""

_NARROW = 2048
"""Up to this hidden size every batch of up to _LARGE_BATCH tokens is captured. A mixture like 35B-A3B computes that
many in less time than some hosts need for its thousand launches."""

MAX_SPANS = 4
"""Most sequences in a captured batch of up to _FEW_TOKENS tokens. Larger batches, usually prompts that begin, may have
twice as many."""
_FEW_TOKENS = 2048

_BYTES_OF_WIDTH = 104
"""An upper bound on the bytes that a forward holds at a time, per token and per unit of the hidden size."""


class PrefillGraphs:
    """Graphs of prompt chunks. Recorded graphs are used; small ones are also recorded by the first batch that needs
    them."""

    def __init__(
        self,
        prefill: Callable[[PrefillBatch], None],
        recorder: Recorder,
        *,
        sizes: Sequence[int],
        block_tokens: int,
        max_pages: int,
        device: torch.device,
        most_at_need: int = 0,
    ) -> None:
        """prefill: without host reads. sizes: token counts in rising order. max_pages: of a sequence. most_at_need:
        largest size that may be recorded by the first batch that needs it."""
        self._prefill, self._recorder = prefill, recorder
        self._block_tokens, self._max_pages, self._device = block_tokens, max_pages, device
        self._most_at_need = most_at_need
        self._sizes = {
            num_tokens: chunk_room(num_tokens, most_spans(num_tokens), block_tokens, max_pages) for num_tokens in sizes
        }
        self._words = torch.empty(
            max(sizes.num_words for sizes in self._sizes.values()), dtype=torch.int64, device=device
        )
        """The static tables. Those of every size start here, since only one graph runs at a time."""
        self._replays: dict[int, Callable[[], None]] = {}

    def recordings(self) -> dict[int, Callable[[], object]]:
        """By token count: a function that records the graph over padding only, so that it changes nothing. It does
        nothing if the graph is recorded."""
        # The largest first: the smaller ones then fit into the memory that it took from the pool and gave back.
        return {num_tokens: partial(self._graph, num_tokens) for num_tokens in reversed(self._sizes)}

    def run(self, runs: Sequence[PromptRun]) -> None:
        """Enqueue the prefill of `runs`; a graph must hold them."""
        num_tokens = self.tokens_of(runs)
        assert num_tokens is not None, "no graph holds them"
        replay = self._graph(num_tokens)
        self._fill(num_tokens, runs)
        replay()

    def tokens_of(self, runs: Sequence[PromptRun]) -> int | None:
        """Tokens of the smallest graph that holds the runs; None: they must run eagerly."""
        num_tokens = sum(len(run.token_ids) for run in runs)
        if len(runs) > most_spans(num_tokens):
            return None
        num_blocks = self._num_blocks(runs)
        fitting = (size for size, sizes in self._sizes.items() if size >= num_tokens and sizes.num_blocks >= num_blocks)
        # While not all graphs are recorded, the next recorded one may be much larger. An eager pass is faster than that
        # much padding.
        most = max(num_tokens + num_tokens // 4, CHUNK_SIZES[-1])
        return next(
            (size for size in fitting if size <= most and (size in self._replays or size <= self._most_at_need)), None
        )

    def eager_sizes(self, runs: Sequence[PromptRun], *, riders: int = 0) -> PrefillSizes:
        """Table sizes for `runs` without a graph. Sizes are rounded as for graphs, since Triton compiles a kernel again
        for other kinds of sizes.

        riders: rows of windows that join the forward after them."""
        num_tokens = -(-(sum(len(run.token_ids) for run in runs) + riders) // _STEP) * _STEP - riders
        room = chunk_room(
            num_tokens, max(MAX_SPANS, 1 << (len(runs) - 1).bit_length()), self._block_tokens, self._max_pages
        )
        return replace(room, num_blocks=max(room.num_blocks, self._num_blocks(runs)))

    def _num_blocks(self, runs: Sequence[PromptRun]) -> int:
        return sum(len(block_ends(run, self._block_tokens)) for run in runs)

    def _graph(self, num_tokens: int) -> Callable[[], None]:
        if num_tokens not in self._replays:
            self._fill(num_tokens, [])
            sizes = self._sizes[num_tokens]
            batch = PrefillTables(sizes=sizes, words=self._words[: sizes.num_words]).batch
            self._replays[num_tokens] = self._recorder.record_writes(lambda: self._prefill(batch))
        return self._replays[num_tokens]

    def _fill(self, num_tokens: int, runs: Sequence[PromptRun]) -> None:
        tables = build_tables(runs, block_tokens=self._block_tokens, sizes=self._sizes[num_tokens])
        stage_into(self._words[: tables.sizes.num_words], tables.words)


def chunk_room(num_tokens: int, num_spans: int, block_tokens: int, max_pages: int) -> PrefillSizes:
    """Sizes of a batch's tables."""
    # A span that begins and ends inside blocks has two more than it fills. A state that is wanted inside a block splits
    # the block.
    return PrefillSizes(
        num_tokens=num_tokens,
        num_spans=num_spans,
        num_blocks=num_tokens // block_tokens + 2 * num_spans,
        num_pages=max_pages,
    )


def eager_rooms(hidden_size: int, *, block_tokens: int, max_pages: int) -> list[PrefillSizes]:
    """Table sizes of eager batches that together launch every kernel an eager batch may launch."""
    least = min(chunk_sizes(hidden_size)[-1] + _STEP, _LARGE_BATCH)
    shapes = [(least, MAX_SPANS), (_LARGE_BATCH, MAX_SPANS), (least, 2 * MAX_SPANS), (least, 4 * MAX_SPANS)]
    return [chunk_room(num_tokens, num_spans, block_tokens, max_pages) for num_tokens, num_spans in shapes]


def chunk_sizes(hidden_size: int) -> tuple[int, ...]:
    """Token counts that are captured for a model of this width, in rising order."""
    most = _LARGE_BATCH
    if hidden_size > _NARROW:
        most = min(_MOST_BYTES // (_BYTES_OF_WIDTH * hidden_size), _LARGE_BATCH)
    return *CHUNK_SIZES, *range(CHUNK_SIZES[-1] + _STEP, most + 1, _STEP)


def most_spans(num_tokens: int) -> int:
    """Most sequences in a captured batch of this many tokens."""
    return MAX_SPANS if num_tokens <= _FEW_TOKENS else 2 * MAX_SPANS


def prefill_graph_bytes(hidden_size: int) -> int:
    """Estimated device memory of all prompt graphs, before they are recorded."""
    sizes = chunk_sizes(hidden_size)
    return sizes[-1] * hidden_size * _BYTES_OF_WIDTH + len(sizes) * BYTES_A_GRAPH
