"""Decode windows that ride in a prompt pass: the weights are read once for both.

A pass of a few hundred tokens is bound by arithmetic, a decode step by reading the weights. In a prompt's pass, a
window costs as much as the same number of prompt tokens. The rest of the step (sampling, commit, drafts) runs as
always.

Owns when riding saves time, and the graphs of passes with windows. Knows neither plans nor models: it is given the pass
as a function of a batch and slot ids.

Shape letters: B slots whose windows ride.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels import PrefillBatch
from agentspec.runtime.graphs import BYTES_A_GRAPH, Recorder
from agentspec.runtime.prefill_graphs import PrefillGraphs, chunk_sizes
from agentspec.runtime.prefill_tables import PromptRun
from agentspec.runtime.step_buffers import stage, stage_into

RIDE_SIZES = (*range(256, 2048, 128), *range(2048, 8192, 256))
"""Rows (tokens and windows together) of the passes that are captured, up to the largest prompt batch that the model
captures."""

_FREE_ROWS = 256
"""A pass of fewer rows is bound by reading its weights: up to here another row costs almost nothing."""

_EVEN_ROWS = 16
"""On a GPU, the windows of a pass are padded to a multiple of this many rows: Triton compiles a kernel again for other
token counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RideKey:
    """A graph of a pass in which windows ride."""

    batch_size: int
    num_tokens: int
    """Prompt tokens. The rows of the pass are these plus the windows' columns."""


class RideGraphs:
    """Graphs of passes in which windows of one fixed number of columns ride."""

    def __init__(
        self,
        ride: Callable[[Tensor, PrefillBatch], None],
        recorder: Recorder,
        *,
        keys: Sequence[RideKey],
        padding_slot: int,
        num_columns: int,
        block_tokens: int,
        max_pages: int,
        device: torch.device,
    ) -> None:
        """keys: graphs that may be recorded. ride: runs a pass over slot_ids_B and a batch, without host reads.
        max_pages: of a sequence."""
        self._num_columns, self._padding_slot, self._device = num_columns, padding_slot, device
        self._slot_ids: dict[int, Tensor] = {}
        self._graphs: dict[int, PrefillGraphs] = {}
        for batch_size in sorted({key.batch_size for key in keys}, reverse=True):
            slot_ids_B = self._slot_ids[batch_size] = stage([padding_slot] * batch_size, torch.int64, device)
            self._graphs[batch_size] = PrefillGraphs(
                functools.partial(ride, slot_ids_B),
                recorder,
                sizes=sorted(key.num_tokens for key in keys if key.batch_size == batch_size),
                block_tokens=block_tokens,
                max_pages=max_pages,
                device=device,
            )

    def recordings(self) -> list[Callable[[], object]]:
        """Functions that record the graphs, over padding and the padding slot only, so that they change nothing."""
        return [record for graphs in self._graphs.values() for record in graphs.recordings().values()]

    def rows_of(self, runs: Sequence[PromptRun], num_slots: int, num_columns: int) -> int | None:
        """Rows of the smallest recorded graph that holds the runs and num_slots windows of num_columns columns; None:
        none does."""
        batch = self._batch(num_slots)
        if num_columns != self._num_columns or batch is None:
            return None
        num_tokens = self._graphs[batch].tokens_of(runs)
        return None if num_tokens is None else num_tokens + batch * num_columns

    def run(self, runs: Sequence[PromptRun], slots: Sequence[int]) -> None:
        """Enqueue the pass of `runs` with the windows of `slots`; a graph must hold them."""
        batch = self._batch(len(slots))
        assert batch is not None, "no graph holds them"
        padded = [*slots, *[self._padding_slot] * (batch - len(slots))]
        stage_into(self._slot_ids[batch], padded)
        self._graphs[batch].run(runs)

    def _batch(self, num_slots: int) -> int | None:
        return min((batch for batch in self._graphs if batch >= num_slots), default=None)


def rows_beyond(ridden: int, alone: int) -> int:
    """Rows that riding adds to a pass, counting only rows that cost arithmetic. ridden, alone: rows with and without
    windows."""
    return max(ridden, _FREE_ROWS) - max(alone, _FREE_ROWS)


def even_batch(num_slots: int, num_columns: int) -> int:
    """Slots that a pass's windows are padded to on a GPU: the fewest that give an even number of rows, doubled until it
    holds num_slots."""
    batch = _EVEN_ROWS // math.gcd(_EVEN_ROWS, num_columns)
    while batch < num_slots:
        batch *= 2
    return batch


def ride_keys(most_tokens: int, *, max_running: int, num_columns: int, most_riders: int) -> list[RideKey]:
    """The graphs to capture. most_tokens: of the largest prompt pass that is captured without windows."""
    batches = {even_batch(num_slots, num_columns) for num_slots in range(1, max_running + 1)}
    return [
        RideKey(batch_size=batch, num_tokens=size - batch * num_columns)
        for batch in sorted(batches)
        for size in RIDE_SIZES
        if batch * num_columns <= most_riders and size <= most_tokens
    ]


def ride_graph_bytes(hidden_size: int, *, max_running: int, max_draft_tokens: int, most_riders: int) -> int:
    """Estimated device memory of these graphs beyond the prompt graphs', before they are recorded."""
    keys = ride_keys(
        chunk_sizes(hidden_size)[-1], max_running=max_running, num_columns=max_draft_tokens + 1, most_riders=most_riders
    )
    return len(keys) * BYTES_A_GRAPH
