"""Short prompt chunks as CUDA graphs: one for each of a few numbers of tokens, recorded once and replayed over tables
that the host fills.

An agent's turn appends a few hundred tokens: the device computes them in less time than the host needs to launch their
kernels one by one. Larger batches keep the device busy longer than that, but while the host launches, no stream gets
its tokens: so whatever fits under the longest gap between two tokens has a graph, as far as memory allows. A batch
between two sizes is filled up with padding tokens, which cost next to nothing up to the 128 rows of a matrix product's
tile. Still larger batches are eager, and chunks whose tokens are scored.

Owns which sizes there are, those of eager batches too, and the tables that all graphs read. Knows neither plans nor
models: it is given the prefill as a function of a batch. Graphs leave nothing but what they write to rows and pages, so
they can share the memory of the decode step's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from agentspec.kernels import PrefillBatch
from agentspec.runtime.graphs import BYTES_A_GRAPH, Recorder
from agentspec.runtime.prefill_tables import PrefillSizes, PrefillTables, PromptRun, block_ends, build_tables
from agentspec.runtime.step_buffers import stage

CHUNK_SIZES = (64, 128, 192, 256, 288, 384, 512, 640, 768, 800, 864, 896, 960, 1024)
"""Tokens of a batch that are captured for every model. Matrix products take a number of tokens well or badly as it
fills their tiles (832 take longer than 896); these are sizes that they take well on an H100, in the family's shapes,
and at most a quarter of one above 192 is padding."""

_STEP = 128
"""Larger batches are filled up to a multiple of so many tokens, captured ones and eager ones."""

_LARGE_BATCH = 8192
"""Tokens. No larger batch is captured, and any larger one launches the same kernels."""

_MOST_BYTES = 3 << 29
"""What the largest captured batch may take: on one H100 enough for all that fits into 0.1 s with 4B, with 27B in FP8
and with 35B-A3B in FP8."""

MAX_SPANS = 4
"""Sequences in a captured batch of up to _FEW_TOKENS tokens; in larger ones twice as many, which are prompts that
begin."""
_FEW_TOKENS = 2048

_BYTES_OF_WIDTH = 104
"""More bytes than a forward holds at the same time, for each of its tokens and each of the hidden size."""


class PrefillGraphs:
    """Graphs of prompt chunks. Those that are recorded are used, and some are recorded by the first batch that needs
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
        """prefill: without host reads. sizes: tokens of a batch, in rising order. max_pages: of a sequence.
        most_at_need: tokens of the largest size that a batch may have recorded."""
        self._prefill, self._recorder = prefill, recorder
        self._block_tokens, self._max_pages, self._device = block_tokens, max_pages, device
        self._most_at_need = most_at_need
        self._sizes = {
            num_tokens: chunk_room(num_tokens, most_spans(num_tokens), block_tokens, max_pages) for num_tokens in sizes
        }
        self._words = torch.empty(
            max(sizes.num_words for sizes in self._sizes.values()), dtype=torch.int64, device=device
        )
        """The static tables: those of every size begin here, for only one runs at a time."""
        self._replays: dict[int, Callable[[], None]] = {}

    def recordings(self) -> dict[int, Callable[[], object]]:
        """By the number of tokens: what records it, over nothing but padding, so that it changes nothing. Does nothing
        about one that is there."""
        # The largest first: what it took and gave back holds everything that the smaller ones need.
        return {num_tokens: partial(self._graph, num_tokens) for num_tokens in reversed(self._sizes)}

    def hold(self, runs: Sequence[PromptRun]) -> bool:
        """Whether there is a graph for `runs`; otherwise they are to run eagerly."""
        return self.tokens_of(runs) is not None

    def run(self, runs: Sequence[PromptRun]) -> None:
        """Enqueue the prefill of `runs`, for which there must be a graph."""
        num_tokens = self.tokens_of(runs)
        assert num_tokens is not None, "no graph holds them"
        replay = self._graph(num_tokens)
        self._fill(num_tokens, runs)
        replay()

    def tokens_of(self, runs: Sequence[PromptRun]) -> int | None:
        """Tokens of the smallest graph that holds the runs; None: they are to run eagerly."""
        num_tokens = sum(len(run.token_ids) for run in runs)
        if len(runs) > most_spans(num_tokens):
            return None
        num_blocks = self._num_blocks(runs)
        fitting = (size for size, sizes in self._sizes.items() if size >= num_tokens and sizes.num_blocks >= num_blocks)
        # As long as not all of them are recorded, the next one may be much larger: an eager pass takes less time than
        # so much padding.
        most = max(num_tokens + num_tokens // 4, CHUNK_SIZES[-1])
        return next(
            (size for size in fitting if size <= most and (size in self._replays or size <= self._most_at_need)), None
        )

    def eager_sizes(self, runs: Sequence[PromptRun], *, riders: int = 0) -> PrefillSizes:
        """Room for `runs` without a graph: in steps, and otherwise as in a graph, since Triton compiles a kernel anew
        for other kinds of sizes.

        riders: rows of windows that join the forward behind them."""
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
        self._words[: tables.sizes.num_words].copy_(stage(tables.words, torch.int64, self._device))


def chunk_room(num_tokens: int, num_spans: int, block_tokens: int, max_pages: int) -> PrefillSizes:
    """Sizes of the tables of a batch."""
    # A span that begins and ends inside of blocks has two besides those that it fills. States wanted inside of blocks
    # cut further ones.
    return PrefillSizes(
        num_tokens=num_tokens,
        num_spans=num_spans,
        num_blocks=num_tokens // block_tokens + 2 * num_spans,
        num_pages=max_pages,
    )


def eager_rooms(hidden_size: int, *, block_tokens: int, max_pages: int) -> list[PrefillSizes]:
    """Enough of those of eager batches to launch every kernel that one launches."""
    least = min(chunk_sizes(hidden_size)[-1] + _STEP, _LARGE_BATCH)
    shapes = [(least, MAX_SPANS), (_LARGE_BATCH, MAX_SPANS), (least, 2 * MAX_SPANS), (least, 4 * MAX_SPANS)]
    return [chunk_room(num_tokens, num_spans, block_tokens, max_pages) for num_tokens, num_spans in shapes]


def chunk_sizes(hidden_size: int) -> tuple[int, ...]:
    """Tokens of the batches that are captured for a model of this width, in rising order."""
    most = min(_MOST_BYTES // (_BYTES_OF_WIDTH * hidden_size), _LARGE_BATCH)
    return *CHUNK_SIZES, *range(CHUNK_SIZES[-1] + _STEP, most + 1, _STEP)


def most_spans(num_tokens: int) -> int:
    """Sequences that a captured batch of so many tokens may have."""
    return MAX_SPANS if num_tokens <= _FEW_TOKENS else 2 * MAX_SPANS


def prefill_graph_bytes(hidden_size: int) -> int:
    """About what the graphs of prompt chunks will take on the device, before there are any."""
    sizes = chunk_sizes(hidden_size)
    return sizes[-1] * hidden_size * _BYTES_OF_WIDTH + len(sizes) * BYTES_A_GRAPH
