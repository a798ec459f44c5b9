"""Decode windows that ride in the pass of a prompt: one read of the weights for both.

A pass of a few hundred tokens takes as long as its arithmetic, a decode step not much longer than its weights take to
arrive. Verified in a prompt's pass, windows cost what as many prompt tokens would. What follows in the step (the choice
of tokens, commit, drafts) is as always.

Owns when riding pays, and the graphs of passes that hold windows. Knows neither plans nor models: it is given the pass
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
from agentspec.runtime.step_buffers import stage

RIDE_SIZES = (*range(256, 2048, 128), *range(2048, 8192, 256))
"""Rows of the passes that are captured, tokens and windows together, as far as a model's prompts are captured alone."""

_FREE_ROWS = 256
"""A pass of fewer rows waits for its weights: up to here a row more costs next to nothing."""

_EVEN_ROWS = 16
"""The windows of a pass on a GPU fill a multiple of so many rows: Triton compiles a kernel anew for other numbers of
tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RideKey:
    """A graph of a pass in which windows ride."""

    batch_size: int
    num_tokens: int
    """Of prompts. The rows of the pass are these and the windows' columns."""


class RideGraphs:
    """Graphs of passes in which windows of one number of columns ride."""

    def __init__(
        self,
        ride: Callable[[PrefillBatch, Tensor], None],
        recorder: Recorder,
        *,
        keys: Sequence[RideKey],
        padding_slot: int,
        num_columns: int,
        block_tokens: int,
        max_pages: int,
        device: torch.device,
    ) -> None:
        """keys: those that may be recorded. ride: a pass over a batch and slot_ids_B, without host reads. max_pages: of
        a sequence."""
        self._num_columns, self._padding_slot, self._device = num_columns, padding_slot, device
        self._slot_ids: dict[int, Tensor] = {}
        self._graphs: dict[int, PrefillGraphs] = {}
        for batch_size in sorted({key.batch_size for key in keys}, reverse=True):
            slot_ids_B = self._slot_ids[batch_size] = stage([padding_slot] * batch_size, torch.int64, device)
            self._graphs[batch_size] = PrefillGraphs(
                functools.partial(_call_with, ride, slot_ids_B),
                recorder,
                sizes=sorted(key.num_tokens for key in keys if key.batch_size == batch_size),
                block_tokens=block_tokens,
                max_pages=max_pages,
                device=device,
            )

    def recordings(self) -> list[Callable[[], object]]:
        """What records each of them, over nothing but padding and the padding slot: so it changes nothing."""
        return [record for graphs in self._graphs.values() for record in graphs.recordings().values()]

    def rows_of(self, runs: Sequence[PromptRun], num_slots: int, num_columns: int) -> int | None:
        """Rows of the smallest recorded graph that holds the runs and so many windows of so many columns; None: none
        does."""
        batch = self._batch(num_slots)
        if num_columns != self._num_columns or batch is None:
            return None
        num_tokens = self._graphs[batch].tokens_of(runs)
        return None if num_tokens is None else num_tokens + batch * num_columns

    def run(self, runs: Sequence[PromptRun], slots: Sequence[int]) -> None:
        """Enqueue the pass of `runs` with the windows of `slots`, for which there must be a graph."""
        batch = self._batch(len(slots))
        assert batch is not None, "no graph holds them"
        padded = [*slots, *[self._padding_slot] * (batch - len(slots))]
        self._slot_ids[batch].copy_(stage(padded, torch.int64, self._device))
        self._graphs[batch].run(runs)

    def _batch(self, num_slots: int) -> int | None:
        return min((batch for batch in self._graphs if batch >= num_slots), default=None)


def _call_with(ride: Callable[[PrefillBatch, Tensor], None], slot_ids_B: Tensor, batch: PrefillBatch) -> None:
    ride(batch, slot_ids_B)


def rows_beyond(ridden: int, alone: int) -> int:
    """What riding adds to a pass, in rows that cost their arithmetic. ridden, alone: rows with windows and without."""
    return max(ridden, _FREE_ROWS) - max(alone, _FREE_ROWS)


def even_batch(num_slots: int, num_columns: int) -> int:
    """Slots that the windows of a pass are filled up to on a GPU: the smallest even number of rows, doubled until it
    holds them."""
    batch = _EVEN_ROWS // math.gcd(_EVEN_ROWS, num_columns)
    while batch < num_slots:
        batch *= 2
    return batch


def ride_keys(most_tokens: int, *, max_running: int, num_columns: int, most_riders: int) -> list[RideKey]:
    """The graphs that are captured. most_tokens: of a pass that is captured alone."""
    batches = {even_batch(num_slots, num_columns) for num_slots in range(1, max_running + 1)}
    return [
        RideKey(batch_size=batch, num_tokens=size - batch * num_columns)
        for batch in sorted(batches)
        for size in RIDE_SIZES
        if batch * num_columns <= most_riders and size <= most_tokens
    ]


def ride_graph_bytes(hidden_size: int, *, max_running: int, max_draft_tokens: int, most_riders: int) -> int:
    """About what they will take on the device beside the graphs of prompts alone, before there are any."""
    keys = ride_keys(
        chunk_sizes(hidden_size)[-1], max_running=max_running, num_columns=max_draft_tokens + 1, most_riders=most_riders
    )
    return len(keys) * BYTES_A_GRAPH
