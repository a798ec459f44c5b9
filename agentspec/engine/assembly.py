"""Builds an engine: from an EngineConfig, or from a loaded model, to a loop that can run.

The only module that knows every part. engine/settings.py resolves `auto` settings.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from agentspec.cache.hybrid_cache import HybridCache
from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.fit import Needs, what_would_fit
from agentspec.engine.ranks import DEFAULTS, RankOptions, Ranks
from agentspec.engine.settings import (
    PLENTY_BYTES,
    Settings,
    device_of,
    drafts_in_fp8,
    dtype_of,
    free_bytes,
    limited,
    pages_in_fp8,
    refuse_weights,
)
from agentspec.errors import AgentspecError, ConfigError
from agentspec.kernels import Machine, group_of_launches
from agentspec.models.outline import outline, weight_bytes
from agentspec.models.protocol import StepModel
from agentspec.models.registry import load_model, model_spec, refuse_device, resolved_config
from agentspec.models.shards import Rank
from agentspec.models.weights import STAGE as LOADING
from agentspec.models.weights import resolve_checkpoint
from agentspec.mtp.draft_vocab import choose_draft_ids, draft_vocab_size
from agentspec.mtp.token_counts import TokenCounts
from agentspec.runtime.constraint_source import ConstraintSource
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.grammar import constraint_source
from agentspec.runtime.graphs import CudaRecorder
from agentspec.runtime.host_copies import STAGE as LOCKING
from agentspec.runtime.host_copies import HostCopies
from agentspec.runtime.kernels_ahead import KernelJob, KernelsAhead
from agentspec.runtime.memory_plan import AUTO_MAX_RUNNING, MemoryPlan
from agentspec.runtime.pace import Pace
from agentspec.runtime.ranks.leader import LedCopies
from agentspec.runtime.rehearsal import Rehearsal
from agentspec.runtime.step_loop import StepLoop, WindowPolicy, new_step_loop
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import MOST_RIDERS, ModelSpec, Progress, no_progress
from agentspec.wire import ModelInfo

logger = logging.getLogger("agentspec")

CPU = torch.device("cpu")

_CHECK_SECONDS = 0.2
"""How often ranks are looked after while kernels are compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """The parts of an engine that is ready to run."""

    config: EngineConfig
    spec: ModelSpec
    info: ModelInfo
    model: StepModel
    tokenizer: Tokenizer | None
    model_dir: Path | None
    cache: HybridCache
    loop: StepLoop
    constraints: ConstraintSource
    device: torch.device
    memory: MemoryPlan
    graphs: str
    """The CUDA graphs of decode steps and prompts, or why there are none, as text for people."""
    draft_vocabulary: str
    """The draft vocabulary, as text for people."""
    token_counts: TokenCounts | None
    """Counts of the served tokens, if the settings name a file for them."""
    copies: HostCopies | LedCopies | None
    """The host tier's copies, if there is one."""
    ranks: Ranks | None = None
    """The other ranks, if the model is shared by several."""

    def close(self) -> None:
        """Release what outlives the loop. Call when no step will run any more."""
        self.constraints.close()
        if self.copies is not None:
            self.copies.close()
        if self.ranks is not None:
            self.ranks.close()
        if self.token_counts is not None:
            try:
                self.token_counts.save()
            except AgentspecError as error:  # the engine is closing: log it, since no caller can handle it
                logger.error("what was served is not counted: %s", error)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations, where the settings choose it."""
        return dtype_of(self.config, self.device)


def assemble(
    config: EngineConfig,
    progress: Progress = no_progress,
    *,
    serves: bool = False,
    memory: MemoryPlan | None = None,
    rank_options: RankOptions = DEFAULTS,
) -> Assembly:
    """Load the model that `config` names, by default the bundled one, and build an engine around it.

    serves: leave work that no first answer needs to `StepLoop.prepare`, and build the grammar compiler in the
    background once the engine is built; otherwise the first grammar waits for it. memory: as for `build`. Raises
    CheckpointError if the model can't be loaded, ConfigError if a setting doesn't fit it, RankError if a rank ends
    before it is ready."""
    device = device_of(config, shares_device=rank_options.shares_device)
    dtype = dtype_of(config, device)
    fp8_pages = pages_in_fp8(config, dtype)
    model_dir = resolve_checkpoint(bundled.checkpoint_of(config.model))
    progress(LOADING, 0, 0)
    whole = resolved_config(model_dir, random_weights=config.random_weights)
    rank = Rank(0, config.tensor_parallel)
    refuse_device(whole, device, rank)  # before anything starts
    with ExitStack() as stack:
        ranks = None
        if rank.count > 1:
            ranks = Ranks(config, model_dir, rank_options)
            stack.push(partial(_close_after_error, ranks))
        beside = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="agentspec-tokenizer"))
        # A server's text process reads the same table, and reports what is wrong with it.
        tokenizer = beside.submit(Tokenizer.from_directory, model_dir, reads_table=not serves)
        ahead = None
        if device.type == "cuda":
            free = free_bytes(device)
            refuse_weights(
                config.model,
                weight_bytes(whole, dtype=dtype, rank=rank),
                free,
                lambda: (
                    what_would_fit(
                        Needs.of_config(config, model_spec(model_dir, whole, dtype, fp8_pages=fp8_pages), whole), free
                    )
                    if ranks is None
                    else ""
                ),
            )
            job = KernelJob(config=config, model_dir=str(model_dir), machine=machine_of(device))
            ahead = stack.enter_context(KernelsAhead(job, progress))
        model = load_model(
            model_dir,
            device=device,
            dtype=dtype,
            random_weights=config.random_weights,
            seed=config.seed,
            fp8_drafts=drafts_in_fp8(config, device, dtype),
            fp8_pages=fp8_pages,
            rank=rank,
            group=None if ranks is None else ranks.join(device),
            progress=progress,
        )
        assembly = build(
            model,
            config=config,
            memory=memory,
            device=device,
            tokenizer=tokenizer.result(),
            model_dir=model_dir,
            ahead=ahead,
            early=serves,
            ranks=ranks,
            progress=progress,
        )
        if serves:  # not sooner: its imports would hold up the start, which is bound by Python too
            assembly.constraints.prepare()
        return assembly


def _close_after_error(ranks: Ranks, kind: type[BaseException] | None, *_: object) -> None:
    """Called at the end of a context."""
    if kind is not None:
        ranks.close()


def rehearsal(config: EngineConfig, model_dir: Path, *, max_pages: int | None = None, index: int = 0) -> Rehearsal:
    """What a rank of an engine with these settings will launch on a GPU. This process needs no GPU, and no weights are
    read.

    max_pages: of a sequence; None: memory holds the whole context. index: the rank's. Raises as `assemble` does."""
    rank = Rank(index, config.tensor_parallel)
    device = torch.device("cuda")
    dtype = dtype_of(config, device)
    fp8_pages = pages_in_fp8(config, dtype)
    text_config = resolved_config(model_dir, random_weights=config.random_weights)
    refuse_device(text_config, device, rank)
    spec = limited(model_spec(model_dir, text_config, dtype, rank, fp8_pages=fp8_pages), config)
    max_running = AUTO_MAX_RUNNING if config.max_running == "auto" else config.max_running
    # With any amount of memory: whatever a smaller one rules out is compiled for nothing, but nothing is missing.
    settings = Settings.resolve(replace(config, max_running=max_running), spec, device, free=PLENTY_BYTES)

    def make() -> StepModel:
        fp8_drafts = drafts_in_fp8(config, device, dtype)
        group = None if rank.count == 1 else group_of_launches(rank.index, rank.count)
        model = outline(
            text_config, spec, dtype=dtype, fp8_drafts=fp8_drafts, fp8_pages=fp8_pages, rank=rank, group=group
        )
        if settings.max_draft_tokens:
            model.limit_drafts(range(draft_vocab_size(config.draft_vocab_size, num_real_tokens=spec.num_real_tokens)))
        return model

    return Rehearsal(
        outline=make,
        max_running=max_running,
        max_draft_tokens=settings.max_draft_tokens,
        max_copies=settings.max_copies,
        depths=settings.window_policy()[1],
        max_pages_per_slot=settings.max_pages(spec.max_context) if max_pages is None else max_pages,
        ring=settings.ring,
        force_acceptance=config.force_acceptance,
        allow_forced_output=config.allow_forced_output,
    )


def build(
    model: StepModel,
    *,
    config: EngineConfig,
    memory: MemoryPlan | None = None,
    device: torch.device = CPU,
    tokenizer: Tokenizer | None = None,
    model_dir: Path | None = None,
    window_policy: WindowPolicy | None = None,
    pace: Pace | None = None,
    most_riders: int = MOST_RIDERS,
    clock: Callable[[], float] = time.monotonic,
    ahead: KernelsAhead | None = None,
    early: bool = False,
    ranks: Ranks | None = None,
    progress: Progress = no_progress,
) -> Assembly:
    """Build an engine around a model: allocate its state pools, and capture its steps where that is possible.

    memory: None: by the settings and the device's free memory. most_riders: see runtime/ride.py. ahead: kernels that
    are being compiled; None: they are compiled at their first launch. early: see ModelExecutor.capture. ranks: the
    other ones, which the assembly closes. Raises ConfigError if a setting doesn't fit, RankError if a rank ends."""
    spec = model.spec
    settings = Settings.resolve(config, spec, device, given=memory)
    token_counts = (
        None if config.token_counts is None else TokenCounts(config.token_counts, num_tokens=spec.num_real_tokens)
    )
    counts = {} if token_counts is None else token_counts.known
    draft_ids = _choose_drafts(settings, counts, tokenizer)
    if ranks is not None:
        ranks.build(settings, draft_ids, most_riders=most_riders, early=early, given=memory)
    draft_vocabulary = _limit_drafts(model, draft_ids, has_counts=bool(counts))
    memory = settings.plan_memory(memory) if ranks is None else ranks.plan(partial(settings.plan_memory, memory))
    executor, copies = device_side(model, settings, memory, most_riders)
    policy, depths = (window_policy, range(settings.max_drafts + 1)) if window_policy else settings.window_policy()
    _await_kernels(ahead, settings, memory, progress, ranks)
    if ranks is not None:
        progress = ranks.allocate(memory, progress)
    graphs = make_ready(executor, copies, settings, depths, progress, early=early)
    led, led_copies = (executor, copies) if ranks is None else ranks.lead(executor, copies)
    loop = new_step_loop(
        spec=spec,
        num_rows=memory.num_rows,
        num_pages=memory.num_pages,
        host_memory=memory.host,
        prefix_cache=config.prefix_cache,
        max_running=settings.max_running,
        max_draft_tokens=settings.max_drafts,
        has_ring=settings.ring is not None,
        pace=settings.pace() if pace is None else pace,
        hold_seconds=config.session_hold_seconds,
        fair_cost=config.fair_cost,
        executor=led,
        window_policy=policy,
        overlap=config.overlap,
        token_counts=token_counts,
        copier=led_copies,
        prepare=led.prepare,
        clock=clock,
    )
    return Assembly(
        config=replace(config, max_running=settings.max_running),
        spec=spec,
        info=_model_info(settings, memory, executor),
        model=model,
        tokenizer=tokenizer,
        model_dir=model_dir,
        cache=loop.scheduler.cache,
        loop=loop,
        constraints=constraint_source(spec, tokenizer, forces_acceptance=config.force_acceptance is not None),
        device=device,
        memory=memory,
        graphs=graphs,
        draft_vocabulary=draft_vocabulary,
        token_counts=token_counts,
        copies=led_copies,
        ranks=ranks,
    )


def device_side(
    model: StepModel, settings: Settings, memory: MemoryPlan, most_riders: int
) -> tuple[ModelExecutor, HostCopies | None]:
    """What each rank has: the model's pools, an executor whose steps run eagerly so far, and the host tier's copies."""
    model.allocate(num_rows=memory.num_rows, num_pages=memory.num_pages, rings=settings.rings)
    copies = None if memory.host is None else HostCopies(model, memory.host, settings.device)
    executor = ModelExecutor(
        model,
        max_running=settings.max_running,
        max_draft_tokens=settings.max_draft_tokens,
        max_copies=settings.max_copies,
        max_pages_per_slot=settings.max_pages(memory.max_length),
        force_acceptance=settings.config.force_acceptance,
        allow_forced_output=settings.config.allow_forced_output,
        most_riders=most_riders,
        ring=settings.ring,
        device=settings.device,
    )
    return executor, copies


def make_ready(
    executor: ModelExecutor,
    copies: HostCopies | None,
    settings: Settings,
    depths: Sequence[int],
    progress: Progress,
    *,
    early: bool,
) -> str:
    """Capture the steps where that is possible, and wait for the host tier's memory. Returns the graphs as text for
    people."""
    reason = settings.why_eager
    graphs = f"none: {reason}"
    if reason is None:
        graphs = str(executor.capture(depths, CudaRecorder(settings.device), progress, early=early))
    if copies is not None:
        progress(LOCKING, 0, 0)
        copies.await_memory()
    return graphs


def _model_info(settings: Settings, memory: MemoryPlan, executor: ModelExecutor) -> ModelInfo:
    spec = settings.spec
    return ModelInfo(
        model_id=spec.name,
        vocab_size=spec.vocab_size,
        max_context=memory.max_length,
        stop_token_ids=spec.stop_token_ids,
        draft_sources=executor.draft_sources,
        max_running=settings.max_running,
        forced_acceptance=settings.config.force_acceptance,
    )


def _await_kernels(
    ahead: KernelsAhead | None, settings: Settings, memory: MemoryPlan, progress: Progress, ranks: Ranks | None
) -> None:
    """Wait until the kernels are compiled. If memory holds less than the whole context, a few other kernels are
    launched: compile those too. Raises RankError when a rank ends meanwhile."""
    if ahead is None:
        return
    _await(ahead, ranks)
    max_pages = settings.max_pages(memory.max_length)
    if max_pages != settings.max_pages(limited(settings.spec, settings.config).max_context):
        config = replace(ahead.job.config, copy_drafts=settings.max_copies)
        job = msgspec.structs.replace(ahead.job, config=config, max_pages=max_pages)
        with KernelsAhead(job, progress) as others:
            _await(others, ranks)


def _await(ahead: KernelsAhead, ranks: Ranks | None) -> None:
    while not ahead.wait(_CHECK_SECONDS):
        if ranks is not None:
            ranks.check()


def machine_of(device: torch.device) -> Machine:
    """The properties of a GPU that kernels depend on."""
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        capability=(properties.major, properties.minor), num_multiprocessors=properties.multi_processor_count
    )


def _choose_drafts(settings: Settings, counts: Mapping[int, int], tokenizer: Tokenizer | None) -> Sequence[int] | None:
    """The draft vocabulary; None: there are no drafts."""
    config, spec = settings.config, settings.spec
    if settings.max_draft_tokens == 0:
        if config.draft_vocab_size is not None:
            raise ConfigError("draft_vocab", config.draft_vocab_size, "there are no drafts to choose")
        if config.draft_precision != "auto":
            raise ConfigError("draft_precision", config.draft_precision, "there are no drafts to make")
        return None
    size = draft_vocab_size(config.draft_vocab_size, num_real_tokens=spec.num_real_tokens)
    always = {*spec.stop_token_ids, *(() if tokenizer is None else tokenizer.added_ids)}
    return choose_draft_ids(counts, size=size, num_real_tokens=spec.num_real_tokens, always=always)


def _limit_drafts(model: StepModel, ids: Sequence[int] | None, *, has_counts: bool) -> str:
    """Set the model's draft vocabulary; returns its description."""
    if ids is None:
        return "nothing: there are no drafts"
    num_bytes, num_real = model.limit_drafts(ids), model.spec.num_real_tokens
    facts = []
    if len(ids) < num_real:
        facts.append("the most served" if has_counts else "the lowest ids")
    if model.fp8_drafts:
        facts.append("FP8")
    if num_bytes:
        facts.append(f"{num_bytes / 2**20:.1f} MiB")
    chosen = f"{len(ids):,} of {num_real:,}" if len(ids) < num_real else f"all {num_real:,}"
    return f"{chosen} tokens" + (f" ({'; '.join(facts)})" if facts else "")
