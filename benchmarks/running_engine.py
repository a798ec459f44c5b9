"""An engine in which every slot decodes at a context of a chosen length, for timing and tracing.

Uses the engine's own scheduler, step loop and executor, assembled by assembly.build. Weights and contexts are random
(published.PrefilledModel), and acceptance is forced.
"""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor

from agentspec import kernels
from agentspec.config import EngineConfig
from agentspec.engine import settings
from agentspec.engine.assembly import build, machine_of
from agentspec.engine.settings import Settings
from agentspec.kernels.slots import Window
from agentspec.models.hf_config import TextConfig
from agentspec.models.shards import SINGLE_RANK, Rank
from agentspec.mtp.window_policy import AdaptiveWindow, FixedWindow
from agentspec.runtime import decode_step
from agentspec.runtime.graphs import graph_bytes
from agentspec.runtime.kernels_ahead import KernelJob, KernelsAhead
from agentspec.runtime.memory_plan import RESERVED, MemoryPlan, rings_bytes
from agentspec.runtime.prefill_graphs import prefill_graph_bytes
from agentspec.runtime.request import new_request
from agentspec.runtime.scheduler import SESSION_CHECKPOINTS
from agentspec.runtime.step_buffers import StepBuffers
from agentspec.types import (
    ModelSpec,
    RingShape,
    SamplingParams,
    WindowShape,
    most_drafts,
    no_progress,
    rows_of_request,
)
from agentspec.wire import Submit, TokensEvent
from benchmarks.published import CONFIG_FILES, PrefilledModel
from benchmarks.step_bytes import parameter_bytes

MAX_DRAFTS = 3
"""The number of drafts for the emitted counts in names of cases, and the maximum of the adaptive depth."""

WORKSPACE_BYTES = 2 * 2**30
"""Bytes besides weights, pools and graphs: activations, logits of eager steps, the slots' buffers."""

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, ignore_eos=True)
"""Sampling that the model cards recommend for thinking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the table."""

    model: str
    context: int
    """Tokens in each slot's state when the first decode step begins."""
    batch: int
    depth: int | Literal["auto"]
    """Drafts per step; auto: the window policy chooses, up to MAX_DRAFTS."""
    emitted: float = 3.39
    """Mean tokens per step that the forced acceptance gives with MAX_DRAFTS drafts."""
    sampled: bool = False
    state_form: Literal["rows", "ring"] = "ring"
    copies: int = 0
    """Columns for copies in every window, on average. Random text repeats nothing, so they are dead: only what they
    cost then is measured, and without `shares` what they cost anyway."""
    ranks: int = 1
    """GPUs that share the model."""
    shares: bool = True
    """The windows of a step share its rows, as the engine's do with rings and copies; otherwise all have the same
    columns, dead or live."""

    def __post_init__(self) -> None:
        for name, value in (("context", self.context), ("batch", self.batch)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        most = most_drafts(has_ring=self.state_form == "ring")
        if self.depth != "auto" and not 0 <= self.depth <= most:
            raise ValueError(f"k={self.depth}: must be auto, or 0 to {most}")
        if not 0 <= self.copies <= most - self.max_drafts:
            raise ValueError(
                f"copies={self.copies}: must be 0 to {most - self.max_drafts} behind {self.max_drafts} drafts"
            )
        acceptance_rate(self.emitted)

    @property
    def max_drafts(self) -> int:
        return MAX_DRAFTS if self.depth == "auto" else self.depth

    @property
    def rate(self) -> float:
        """Probability that a draft is accepted, given those before it; equal at every position."""
        return acceptance_rate(self.emitted)

    @property
    def expected_emitted(self) -> float:
        """Mean tokens per step at this case's depth."""
        return emitted_at(self.rate, self.max_drafts)

    def __str__(self) -> str:
        return (
            f"{self.model}, context {self.context}, batch {self.batch}, k {self.depth}, emitted "
            f"{self.emitted:g}{', sampled' * self.sampled}{', ring' * (self.state_form == 'ring')}"
            f"{f', {self.copies} copies' * bool(self.copies)}{', one width' * (not self.shares)}"
            f"{f', {self.ranks} GPUs' * (self.ranks > 1)}"
        )


def emitted_at(rate: float, num_drafts: int) -> float:
    return sum(rate**position for position in range(num_drafts + 1))


def acceptance_rate(emitted: float) -> float:
    """The acceptance rate at which MAX_DRAFTS drafts give the number of tokens per step."""
    if not 1.0 <= emitted <= MAX_DRAFTS + 1:
        raise ValueError(f"emitted={emitted}: a step of {MAX_DRAFTS} drafts emits 1 to {MAX_DRAFTS + 1} tokens")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if emitted_at(middle, MAX_DRAFTS) < emitted else (low, middle)
    return high


def memory_for(case: Case, spec: ModelSpec, num_steps: int) -> MemoryPlan:
    """Exactly the rows and pages of every slot's requests, with two checkpoints each, which admission requires."""
    window = case.max_drafts + case.copies + 1
    length = case.context + 1 + num_steps * window
    pages = case.batch * -(-(length + 4 * window) // spec.block_tokens) + 1
    own_rows = rows_of_request(window - 1, has_ring=case.state_form == "ring")
    rows = RESERVED + case.batch * (own_rows + SESSION_CHECKPOINTS)
    return MemoryPlan(num_rows=rows, num_pages=pages, max_length=length)


def missing_bytes(case: Case, spec: ModelSpec, device: torch.device, num_steps: int, *, num_engines: int = 1) -> int:
    """Missing bytes for this case; 0 or less: it fits. The model is loaded, its pools are released.

    num_engines: engines at the same time, each with its own pools and graphs."""
    if device.type == "cpu":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    plan = memory_for(case, spec, num_steps)
    graphs = graph_bytes(
        vocab_size=spec.vocab_size,
        max_running=case.batch,
        max_draft_tokens=case.max_drafts,
        has_copies=case.copies > 0,
    )
    graphs += prefill_graph_bytes(spec.hidden_size)
    pools = plan.num_rows * spec.row_bytes + plan.num_pages * spec.page_bytes
    if case.state_form == "ring":
        pools += rings_bytes(spec, RingShape.of(case.max_drafts + case.copies + 1), case.batch)
    return num_engines * (pools + graphs) + WORKSPACE_BYTES - free


def missing_for_weights(config: TextConfig, device: torch.device, *, fp8_drafts: bool, rank: Rank = SINGLE_RANK) -> int:
    """Missing bytes for a rank's part of a bfloat16 model's weights and little else; 0 or less: they fit."""
    if device.type == "cpu":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    sizes = parameter_bytes(config, torch.bfloat16, fp8_drafts=fp8_drafts, rank=rank)
    return sum(sizes.values()) + WORKSPACE_BYTES - free


class RecordedDepth(AdaptiveWindow):
    """The engine's window policy, with a record of its choices."""

    def __init__(self, max_mtp: int) -> None:
        super().__init__(max_mtp)
        self.chosen: list[int] = []

    def choose(self, batch_size: int, num_matched: int = 0) -> WindowShape:
        shape = super().choose(batch_size, num_matched)
        self.chosen.append(shape.num_mtp)
        return shape


@contextmanager
def windows_of_one_width() -> Iterator[None]:
    """Engines that are built and run in this context don't share rows: all windows of a step have the same columns,
    dead or live. For comparisons."""

    def open_windows(buffers: StepBuffers, slot_ids_B: Tensor, num_drafted: int) -> Window:
        return kernels.backend(buffers.device).open_window(
            buffers.slots_SF, buffers.page_table_SP, slot_ids_B, num_drafted + 1, buffers.ring
        )

    def policy(*arguments: Any, shares: bool, **keywords: Any) -> AdaptiveWindow:
        return AdaptiveWindow(*arguments, **keywords)

    with patch.object(decode_step, "open_windows", open_windows), patch.object(settings, "AdaptiveWindow", policy):
        yield


@contextmanager
def kernels_ahead(
    name: str, config: EngineConfig, device: torch.device, *, max_pages: int | None = None
) -> Iterator[KernelsAhead | None]:
    """The engine's kernels, compiled in parallel as at the start of a server. None on a CPU, and for models that are
    not published ones. max_pages: as in KernelJob."""
    if device.type != "cuda" or name not in CONFIG_FILES:
        yield None
        return
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG_FILES[name]))
        named = replace(config, model=directory, random_weights=True)
        job = KernelJob(config=named, model_dir=directory, machine=machine_of(device), max_pages=max_pages)
        with KernelsAhead(job, no_progress) as ahead:
            yield ahead


@contextmanager
def kernels_of_ranks(
    config: EngineConfig, model: PrefilledModel, memory: MemoryPlan, device: torch.device
) -> Iterator[KernelsAhead | None]:
    """`kernels_ahead` of a model that several ranks may share: the first one compiles for all, before any of them
    builds an engine."""
    if model.shared.rank.count == 1:
        with kernels_ahead(model.spec.name, config, device) as ahead:
            yield ahead
        return
    if model.shared.is_first:
        max_pages = Settings.resolve(config, model.spec, device, given=memory).max_pages(memory.max_length)
        with kernels_ahead(model.spec.name, config, device, max_pages=max_pages) as ahead:
            if ahead is not None:
                ahead.wait()
    model.shared.meet()
    yield None


class RunningEngine:
    """Each call of `step` runs the engine's loop once, and reads a decode step of every slot."""

    def __init__(
        self, case: Case, model: PrefilledModel, device: torch.device, *, num_steps: int, graphs: bool = True
    ) -> None:
        """num_steps: number of calls of `step` before any request may end. graphs: as in EngineConfig."""
        self._case = case
        spec, drafts = model.spec, case.max_drafts
        config = EngineConfig(
            tensor_parallel=model.shared.rank.count,
            draft_tokens=case.depth,
            state_form=case.state_form,
            copy_drafts=case.copies,
            max_running=case.batch,
            prefill_budget=case.batch * (case.context + spec.block_tokens),
            force_acceptance=(case.rate,) * drafts if drafts else None,
            graphs=graphs,
        )
        memory = memory_for(case, spec, num_steps)
        self.adaptive = RecordedDepth(drafts) if case.depth == "auto" else None
        policy = FixedWindow(WindowShape(drafts, case.copies)) if case.copies else self.adaptive
        with self._windows(), kernels_of_ranks(config, model, memory, device) as ahead:
            # No prompt is computed while steps are timed, so graphs of windows that ride in one would cost time only.
            parts = build(
                model, config=config, memory=memory, device=device, window_policy=policy, ahead=ahead, most_riders=0
            )
        self.graphs = parts.graphs
        """A description of the captured graphs."""
        self._device = device
        self._loop = parts.loop
        max_tokens = memory.max_length - case.context
        for slot in range(case.batch):
            words = random.Random(slot)
            prompt = words.choices(range(spec.num_real_tokens), k=case.context)
            sampling = msgspec.structs.replace(SAMPLED if case.sampled else GREEDY, max_tokens=max_tokens)
            submit = Submit(request_id=str(slot), prompt_ids=prompt, sampling=sampling)
            self._loop.submit(
                new_request(
                    submit, number=slot, spec=spec, max_length=memory.max_length, engine_seed=0, token_bytes=None
                )
            )
        assert not self.step(), "with overlap, the first call has nothing to read"
        first = self.step()
        assert [len(token_ids) for token_ids in first] == [1] * case.batch, "the prompts bring the first token of each"

    def step(self) -> list[list[int]]:
        """Launch a step and read the one before; return its emitted tokens by slot."""
        emitted = []
        with self._windows():
            events = self._loop.run_once()
        for event in events:
            assert isinstance(event, TokensEvent), (
                f"request {event.request_id} ended before its time: {event.reason}, {event.error}"
            )
            emitted.append(event.token_ids)
        assert not emitted or len(emitted) == self._case.batch, f"{len(emitted)} of {self._case.batch} slots decode"
        return emitted

    def _windows(self) -> AbstractContextManager[None]:
        return nullcontext() if self._case.shares else windows_of_one_width()

    def settle(self) -> None:
        """Wait until the device is idle; the next `step` reads the results of the last one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def let_go(*models: PrefilledModel) -> None:
    """Free memory between two cases; the caller must have dropped its engine."""
    for model in models:
        model.release()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
