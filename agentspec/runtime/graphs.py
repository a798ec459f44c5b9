"""The decode step as CUDA graphs: one for each (batch size, k, variant), recorded once and replayed from then on. And
what records them, which runtime/prefill_graphs.py uses too.

Owns which graphs there are, their input (slot ids) and their outputs. Knows no plans, and nothing of what a step does:
it is given the step as a function of slot ids and key.

All graphs of a recorder share one pool of memory, for they run one after the other on one stream. So the output of a
graph stands only until the next one runs: whoever wants to keep it enqueues a copy first.

Shape letters: B slots in the step, T = k+1 columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from agentspec.runtime.decode_step import StepResult
from agentspec.runtime.step_buffers import stage

Result = TypeVar("Result")

STAGE = "capturing graphs"

BYTES_A_GRAPH = 4 * 2**20
"""What the driver and the pool keep for a graph of some hundred kernels, beside logits and activations. Measured: about
2 MiB."""

_LOGITS_AT_ONCE = 3
"""Tensors of the size of the logits that a sampled step may hold at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphKey:
    batch_size: int
    num_drafted: int
    sampled: bool
    """False: every slot is greedy, without penalties, bias and masks. True: the whole sampler, masks included; a slot
    that needs none of it gets the same tokens from it as from the greedy variant."""


Step = Callable[[Tensor, GraphKey], StepResult]
"""A decode step over slot_ids_B, without host reads."""


class Recorder(Protocol):
    """Makes something that can be replayed of a function."""

    def record(self, step: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
        """(replay, result): each call of `replay` does what `step` did, and leaves its result in the same tensors."""
        ...

    def record_writes(self, work: Callable[[], None]) -> Callable[[], None]:
        """`replay` alone, for work that leaves nothing but what it wrote to the storage of others."""
        ...

    def bytes_used(self) -> int:
        """What all recordings keep on the device."""
        ...


class CudaRecorder:
    """Records CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._free_before = self._free_bytes()

    def record(self, step: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
        replay, result = self._capture(step)
        # Owned logits could not share memory with those of the other graphs, and they are most of what a graph needs.
        return replay, StepResult(outcome_BF=result.outcome_BF, logits_BTV=_unowned(result.logits_BTV))

    def record_writes(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._capture(work)[0]

    def _capture(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # A capture can neither compile nor load a kernel, nor make a library's workspace: a run of the same work
            # does that first.
            work()
            # torch.cuda.graph would wait for the device and give back all free memory, which the next work would ask
            # for again. Other threads of the process may go on using the device meanwhile: only this thread's calls are
            # part of the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        # What comes next may write to what that run reads: the tables of prompts are one place for all sizes.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay, result

    def bytes_used(self) -> int:
        return self._free_before - self._free_bytes()

    def _free_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


class _Address:
    """Where a contiguous float32 tensor lies, in the form that torch takes as a tensor without owning its memory."""

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
    """The same memory, which stays where it is as long as the graph's pool, but may be given to another graph of it."""
    return torch.as_tensor(_Address(tensor), device=tensor.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphReport:
    """What was captured, and what it cost."""

    batch_sizes: tuple[int, ...]
    depths: tuple[int, ...]
    """Values of k."""
    num_graphs: int
    """Of decode steps."""
    chunk_sizes: tuple[int, ...] = ()
    """Tokens of the graphs of prompt chunks."""
    num_rides: int = 0
    """Graphs of prompt chunks in which windows ride."""
    num_late: int = 0
    """Graphs, of all of these, that are still to be captured."""
    device_bytes: int
    """Of those that are captured."""
    seconds: float
    """For those that are captured."""

    def __str__(self) -> str:
        sizes, depths, chunks = (
            ", ".join(map(str, values)) for values in (self.batch_sizes, self.depths, self.chunk_sizes)
        )
        prompts = f" and {len(self.chunk_sizes)} of prompts (up to {chunks} tokens)" if chunks else ""
        rides = f" and {self.num_rides} of prompts with windows" if self.num_rides else ""
        late = f"; {self.num_late} of them follow when nothing else is to be done" if self.num_late else ""
        return (
            f"{self.num_graphs} (batches of {sizes}; {depths} drafts; greedy and sampled){prompts}{rides}: "
            f"{self.device_bytes / 2**30:.2f} GiB, captured in {self.seconds:.1f} s{late}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    slot_ids_B: Tensor
    """int64. Static input."""
    slot_ids: list[int]
    """The host's copy of it, as the last replay will have seen it."""
    replay: Callable[[], None]
    result: StepResult
    """Static output."""


class StepGraphs:
    """Every graph that an engine may need, each recorded by its first step at the latest: no step is run eagerly."""

    def __init__(
        self, step: Step, recorder: Recorder, *, max_running: int, depths: Sequence[int], device: torch.device
    ) -> None:
        """depths: the values of k that steps may have. The slot after the last running one is the padding slot, which
        is always inert, so recording changes nothing."""
        self._step, self._recorder, self._device = step, recorder, device
        self._padding_slot = max_running
        self._sizes = batch_sizes(max_running)
        # The largest first: what it took and gave back holds everything that the smaller ones need.
        self._keys = sorted(
            graph_keys(max_running, depths), key=lambda key: key.batch_size * (key.num_drafted + 1), reverse=True
        )
        self._graphs: dict[GraphKey, _Graph] = {}

    def recordings(self) -> dict[GraphKey, Callable[[], object]]:
        """By key, the largest first: what records the graph. Does nothing about one that is there."""
        return {key: partial(self._graph, key) for key in self._keys}

    def run(self, slots: Sequence[int], *, num_drafted: int, sampled: bool) -> StepResult:
        """Enqueue one step. The result has one row a slot of `slots`, and stands until the next call.

        Raises KeyError if no graph is meant for it."""
        size = self.batch_size(len(slots))
        graph = self._graph(GraphKey(batch_size=size, num_drafted=num_drafted, sampled=sampled))
        padded = [*slots, *[self._padding_slot] * (size - len(slots))]
        if padded != graph.slot_ids:
            graph.slot_ids_B.copy_(stage(padded, torch.int64, self._device))
            graph.slot_ids[:] = padded
        graph.replay()
        return graph.result.first(len(slots))

    def batch_size(self, num_slots: int) -> int:
        """The captured size that so many slots are filled up to."""
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


def graph_keys(max_running: int, depths: Sequence[int]) -> list[GraphKey]:
    """Of every graph of decode steps."""
    return [
        GraphKey(batch_size=size, num_drafted=num_drafted, sampled=sampled)
        for size, num_drafted, sampled in product(batch_sizes(max_running), depths, (True, False))
    ]


def batch_sizes(max_running: int) -> tuple[int, ...]:
    """Sizes that are captured: powers of two, and `max_running` itself."""
    return *(1 << power for power in range((max_running - 1).bit_length())), max_running


def graph_bytes(*, vocab_size: int, max_running: int, max_draft_tokens: int) -> int:
    """About what the graphs of an engine's decode steps will take on the device, before there are any."""
    num_columns = max_draft_tokens + 1
    num_graphs = 2 * len(batch_sizes(max_running)) * num_columns
    return (
        _LOGITS_AT_ONCE * max_running * num_columns * vocab_size * torch.float32.itemsize + num_graphs * BYTES_A_GRAPH
    )
