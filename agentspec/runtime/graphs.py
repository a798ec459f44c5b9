"""The decode step as CUDA graphs: one for each (batch size, k, variant), recorded once and then replayed; and the first
steps of few slots. Also the recorder itself, which runtime/prefill_graphs.py uses too.

Owns the set of graphs, their input (slot ids) and their outputs. Knows no plans, and nothing of the step's content: it
is given the step as a function of slot ids and key.

All graphs of a recorder share one memory pool, since they run one after another on one stream. So a graph's output is
valid only until the next graph runs; to keep it, enqueue a copy first.

Shape letters: B slots in the step, T = k+1 columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from agentspec.runtime.decode_step import StepResult
from agentspec.runtime.step_buffers import stage, stage_into
from agentspec.types import MAX_WIDE_ROWS, widest_window

Result = TypeVar("Result")

STAGE = "capturing graphs"

BYTES_A_GRAPH = 4 * 2**20
"""Memory that the driver and the pool keep for a graph of some hundred kernels, beside logits and activations.
Measured: about 2 MiB."""

MOST_FIRST = 2
"""Slots that may join at a time for their first step to run from a graph. Behind a short prompt an eager one would be
late: launching it takes longer than the prompt."""

_LOGITS_AT_ONCE = 3
"""Tensors of the logits' size that a sampled step may hold at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphKey:
    batch_size: int
    num_drafted: int
    sampled: bool
    """False: every slot is greedy, without penalties, bias and masks. True: the whole sampler, masks included. A slot
    that needs none of it gets the same tokens from both variants."""
    is_first: bool = False
    """The step of slots that have just joined, without the forward (decode_step.Forward.PREFILLED)."""


Step = Callable[[Tensor, GraphKey], StepResult]
"""A decode step over slot_ids_B, without host reads."""


class Recorder(Protocol):
    """Records functions for replay."""

    def record(self, step: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
        """(replay, result): each call of `replay` repeats `step`, and leaves its result in the same tensors."""

    def record_writes(self, work: Callable[[], None]) -> Callable[[], None]:
        """Only `replay`, for work that returns nothing and writes only to memory it doesn't own."""

    def bytes_used(self) -> int:
        """Device memory of all recordings."""


class CudaRecorder:
    """Records CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._free_before = self._free_bytes()

    def record(self, step: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
        replay, result = self._capture(step)
        # Logits are most of a graph's memory. A tensor that owned them would keep other graphs from using the same
        # memory.
        return replay, replace(result, logits_BTV=_unowned(result.logits_BTV))

    def record_writes(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._capture(work)[0]

    def _capture(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # A capture can neither compile nor load a kernel, nor allocate a library's workspace. Running the same work
            # first does all that.
            work()
            # torch.cuda.graph would wait for the device and free all unused memory, which the next work would allocate
            # again. thread_local: other threads may keep using the device; only this thread's calls are captured.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        # Later work may overwrite what that run reads: the prompt tables of all sizes share one place.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay, result

    def bytes_used(self) -> int:
        return self._free_before - self._free_bytes()

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


class _Address:
    """The address of a contiguous float32 tensor, in a form that torch accepts as a tensor without taking ownership."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _unowned(tensor: Tensor) -> Tensor:
    """A view of the same memory without ownership. It stays valid as long as the graph's pool, but other graphs of the
    pool may reuse the memory."""
    return torch.as_tensor(_Address(tensor), device=tensor.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphReport:
    """The captured graphs, and their cost."""

    batch_sizes: tuple[int, ...]
    depths: tuple[int, ...]
    """Values of k."""
    num_graphs: int
    """Of decode steps."""
    num_first: int = 0
    """Graphs of first steps."""
    chunk_sizes: tuple[int, ...] = ()
    """Tokens of the graphs of prompt chunks."""
    num_rides: int = 0
    """Graphs of prompt chunks in which windows ride."""
    num_late: int = 0
    """Graphs, of all of these, that are not captured yet."""
    device_bytes: int
    """Of the captured ones."""
    seconds: float
    """For the captured ones."""

    def __str__(self) -> str:
        sizes, depths, chunks = (
            ", ".join(map(str, values)) for values in (self.batch_sizes, self.depths, self.chunk_sizes)
        )
        first = f" and {self.num_first} of first steps" if self.num_first else ""
        prompts = f" and {len(self.chunk_sizes)} of prompts (up to {chunks} tokens)" if chunks else ""
        rides = f" and {self.num_rides} of prompts with windows" if self.num_rides else ""
        late = f"; {self.num_late} of them follow when nothing else is to be done" if self.num_late else ""
        return (
            f"{self.num_graphs} (batches of {sizes}; {depths} drafts; greedy and sampled){first}{prompts}{rides}: "
            f"{self.device_bytes / 2**30:.2f} GiB, captured in {self.seconds:.1f} s{late}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    slot_ids_B: Tensor
    """int64. Static input."""
    slot_ids: list[int]
    """The host's copy of the input, as of the last replay."""
    replay: Callable[[], None]
    result: StepResult
    """Static output."""


class StepGraphs:
    """All graphs of an engine's steps. Each is recorded by its first step at the latest: no step runs eagerly."""

    def __init__(
        self,
        step: Step,
        recorder: Recorder,
        *,
        max_running: int,
        depths: Sequence[int],
        max_mtp_drafts: int,
        device: torch.device,
    ) -> None:
        """depths: numbers of drafts that steps may have. max_mtp_drafts: see `graph_keys`. The slot after the last
        running one is the padding slot, which is always inert, so recording changes nothing."""
        self._step, self._recorder, self._device = step, recorder, device
        self._padding_slot = max_running
        self._sizes = batch_sizes(max_running)
        # The largest first: the smaller ones then fit into the memory that it took from the pool and gave back.
        keys = graph_keys(max_running, depths, max_mtp_drafts=max_mtp_drafts)
        self._keys = sorted(keys, key=lambda key: key.batch_size * (key.num_drafted + 1), reverse=True)
        self._graphs: dict[GraphKey, _Graph] = {}

    def recordings(self) -> dict[GraphKey, Callable[[], object]]:
        """By key, the largest first: a function that records the graph, and does nothing if it is recorded."""
        return {key: partial(self._graph, key) for key in self._keys}

    def run(self, slots: Sequence[int], *, num_drafted: int, sampled: bool, is_first: bool = False) -> StepResult:
        """Enqueue one step. The result has one row per slot of `slots`, and is valid until the next call.

        Raises KeyError for a key that the engine has no graph for."""
        size = self.batch_size(len(slots))
        graph = self._graph(GraphKey(batch_size=size, num_drafted=num_drafted, sampled=sampled, is_first=is_first))
        padded = [*slots, *[self._padding_slot] * (size - len(slots))]
        if padded != graph.slot_ids:
            stage_into(graph.slot_ids_B, padded)
            graph.slot_ids[:] = padded
        graph.replay()
        return graph.result.first(len(slots))

    def batch_size(self, num_slots: int) -> int:
        """The captured size that num_slots slots are padded to."""
        return next((size for size in self._sizes if size >= num_slots), num_slots)

    def _graph(self, key: GraphKey) -> _Graph:
        if key not in self._graphs:
            if key not in self._keys:
                raise KeyError(key)
            slot_ids = [self._padding_slot] * key.batch_size
            slot_ids_B = stage(slot_ids, torch.int64, self._device)
            replay, result = self._recorder.record(lambda: self._step(slot_ids_B, key))
            self._graphs[key] = _Graph(slot_ids_B=slot_ids_B, slot_ids=slot_ids, replay=replay, result=result)
        return self._graphs[key]


def graph_keys(max_running: int, depths: Sequence[int], *, max_mtp_drafts: int) -> list[GraphKey]:
    """Keys of all graphs of steps. Windows of more than max_mtp_drafts drafts have copies, and at most `MAX_WIDE_ROWS`
    columns in all; first steps verify nothing, and have none."""
    sizes = batch_sizes(max_running)
    steps = [
        GraphKey(batch_size=size, num_drafted=num_drafted, sampled=sampled)
        for size, num_drafted, sampled in product(sizes, depths, (True, False))
        if num_drafted <= max_mtp_drafts or num_drafted < widest_window(size)
    ]
    first_depths = dict.fromkeys(min(num_drafted, max_mtp_drafts) for num_drafted in depths)
    first = [
        GraphKey(batch_size=size, num_drafted=num_drafted, sampled=sampled, is_first=True)
        for size, num_drafted, sampled in product(sizes, first_depths, (True, False))
        if size <= MOST_FIRST
    ]
    return steps + first


def batch_sizes(max_running: int) -> tuple[int, ...]:
    """Captured batch sizes: powers of two, and `max_running` itself."""
    return *(1 << power for power in range((max_running - 1).bit_length())), max_running


def graph_bytes(*, vocab_size: int, max_running: int, max_draft_tokens: int, has_copies: bool = False) -> int:
    """Estimated device memory of an engine's decode-step graphs, before they are recorded. max_draft_tokens: of the MTP
    head."""
    num_columns = max_draft_tokens + 1
    num_rows = max(max_running * num_columns, MAX_WIDE_ROWS * has_copies)
    num_graphs = 2 * (len(batch_sizes(max_running)) * (num_columns + 2 * has_copies) + MOST_FIRST * num_columns)
    return _LOGITS_AT_ONCE * num_rows * vocab_size * torch.float32.itemsize + num_graphs * BYTES_A_GRAPH
