"""Puts the rooms together: from an EngineConfig, or from a model that is there already, to a loop that can run.

The only place that knows every part. `auto` settings are resolved here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from agentspec.cache.host_tier import HostMemory
from agentspec.cache.hybrid_cache import HybridCache
from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.errors import AgentspecError, ConfigError
from agentspec.kernels import Machine
from agentspec.models.outline import outline
from agentspec.models.protocol import StepModel
from agentspec.models.registry import load_model, model_spec, resolved_config
from agentspec.models.weights import STAGE as LOADING
from agentspec.models.weights import resolve_checkpoint
from agentspec.mtp.depth_policy import AdaptiveDepth, FixedDepth
from agentspec.mtp.draft_vocab import choose_draft_ids, draft_vocab_size
from agentspec.mtp.token_counts import TokenCounts
from agentspec.runtime.admission import SessionGate, rows_of_sessions
from agentspec.runtime.constraint_source import ConstraintSource
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.fairness import FairShare
from agentspec.runtime.grammar import constraint_source
from agentspec.runtime.graphs import CudaRecorder, graph_bytes
from agentspec.runtime.host_copies import STAGE as LOCKING
from agentspec.runtime.host_copies import HostCopies
from agentspec.runtime.kernels_ahead import KernelJob, KernelsAhead
from agentspec.runtime.memory_plan import (
    AUTO_MAX_RUNNING,
    RESERVED,
    MemoryPlan,
    choose_slots,
    machine_bytes,
    plan_host_memory,
    plan_memory,
)
from agentspec.runtime.metrics import EngineMetrics
from agentspec.runtime.pace import CPU_BUDGET, DEFAULT_MAX_GAP, FixedPace, GapPace, Pace
from agentspec.runtime.prefill_graphs import prefill_graph_bytes
from agentspec.runtime.rehearsal import Rehearsal
from agentspec.runtime.ride import ride_graph_bytes
from agentspec.runtime.scheduler import Scheduler
from agentspec.runtime.step_loop import DepthPolicy, StepLoop
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import MOST_RIDERS, DraftSource, ModelSpec, Progress, no_progress, rows_of_request
from agentspec.wire import ModelInfo

logger = logging.getLogger("agentspec")

CPU_MAX_RUNNING = 8
"""Slots that `max_running=auto` chooses on a CPU, and the least on a GPU."""

AUTO_MAX_DRAFTS = 3
"""Most drafts that `draft_tokens=auto` may choose: the recommendation of the model's authors, and near the optimum for
one user."""

CPU = torch.device("cpu")
CPU_MEMORY_BYTES = 2**30
GPU_MEMORY_SHARE = 0.85

LEAST_MACHINE_BYTES = 64 * 2**30
"""Machines with less get no host tier unless it is asked for."""
HOST_MEMORY_SHARE = 1 / 8
MOST_HOST_BYTES = 32 * 2**30
"""More, and more than half of what the device has, is worth the seconds that locking it takes only to somebody who asks
for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """A house that is ready to run."""

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
    """The CUDA graphs of decode steps and prompts, or why there are none: for people to read."""
    draft_vocabulary: str
    """What drafts are chosen from: for people to read."""
    token_counts: TokenCounts | None
    """What was served, where the settings name a file for it."""
    copies: HostCopies | None
    """The host tier's copies, where there is one."""

    def close(self) -> None:
        """Let go of what outlives the loop. Call when no step will run any more."""
        self.constraints.close()
        if self.copies is not None:
            self.copies.close()
        if self.token_counts is not None:
            try:
                self.token_counts.save()
            except AgentspecError as error:  # at the end of a run there is nobody left to mend it
                logger.error("what was served is not counted: %s", error)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations, as far as the settings choose it."""
        return _dtype(self.config, self.device)


def assemble(config: EngineConfig, progress: Progress = no_progress, *, serves: bool = False) -> Assembly:
    """Load the model that `config` names, the bundled one if it names none, and build an engine around it.

    serves: leave what no first answer needs to `StepLoop.prepare`, and have what compiles grammars ready soon; else the
    first grammar waits for it. Raises CheckpointError when the model can't be loaded, ConfigError when a setting
    doesn't fit it."""
    device = _device(config)
    dtype = _dtype(config, device)
    model_dir = resolve_checkpoint(bundled.checkpoint_of(config.model))
    progress(LOADING, 0, 0)
    with ExitStack() as stack:
        beside = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="agentspec-tokenizer"))
        tokenizer = beside.submit(Tokenizer.from_directory, model_dir)
        ahead = None
        if device.type == "cuda":
            job = KernelJob(config=config, model_dir=str(model_dir), machine=machine_of(device))
            ahead = stack.enter_context(KernelsAhead(job, progress))
        grammars = None
        if serves:
            spec = model_spec(model_dir, resolved_config(model_dir, random_weights=config.random_weights), dtype)
            grammars = constraint_source(
                spec, tokenizer.result(), forces_acceptance=config.force_acceptance is not None
            )
            grammars.prepare()
            stack.push(lambda kind, *_: None if kind is None else grammars.close())
        model = load_model(
            model_dir,
            device=device,
            dtype=dtype,
            random_weights=config.random_weights,
            seed=config.seed,
            fp8_drafts=_fp8_drafts(config, device, dtype),
            progress=progress,
        )
        text = tokenizer.result()
        return build(
            model,
            config=config,
            device=device,
            tokenizer=text,
            model_dir=model_dir,
            constraints=grammars,
            ahead=ahead,
            early=serves,
            progress=progress,
        )


def rehearsal(config: EngineConfig, model_dir: Path, *, max_pages: int | None = None) -> Rehearsal:
    """What an engine of these settings will launch on a GPU, which this process need not have. Reads no tensor.

    max_pages: of a sequence; None: there is memory for the whole context. Raises as `assemble` does."""
    device = torch.device("cuda")
    dtype = _dtype(config, device)
    text_config = resolved_config(model_dir, random_weights=config.random_weights)
    spec = _limited(model_spec(model_dir, text_config, dtype), config)
    max_draft_tokens = _max_draft_tokens(config, spec)

    def make() -> StepModel:
        model = outline(text_config, spec, dtype=dtype, fp8_drafts=_fp8_drafts(config, device, dtype))
        if max_draft_tokens:
            model.limit_drafts(range(draft_vocab_size(config.draft_vocab_size, num_real_tokens=spec.num_real_tokens)))
        return model

    return Rehearsal(
        outline=make,
        max_running=AUTO_MAX_RUNNING if config.max_running == "auto" else config.max_running,
        max_draft_tokens=max_draft_tokens,
        depths=_depth_policy(config, max_draft_tokens)[1],
        max_pages_per_slot=_max_pages(spec, spec.max_context, max_draft_tokens) if max_pages is None else max_pages,
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
    depth_policy: DepthPolicy | None = None,
    pace: Pace | None = None,
    most_riders: int | None = None,
    constraints: ConstraintSource | None = None,
    clock: Callable[[], float] = time.monotonic,
    ahead: KernelsAhead | None = None,
    early: bool = False,
    progress: Progress = no_progress,
) -> Assembly:
    """Build an engine around a model; allocates its state pools, and captures its steps where that is possible.

    memory: None: by the settings, and by what is free on the device. most_riders: see runtime/ride.py; None: as the
    device has it. ahead: kernels that are being compiled; None: at their first launch. early: see
    ModelExecutor.capture. Raises ConfigError when a setting doesn't fit."""
    spec = model.spec
    max_draft_tokens = _max_draft_tokens(config, spec)
    config = replace(config, max_running=_max_running(config, spec, device, max_draft_tokens, memory))
    token_counts = (
        None if config.token_counts is None else TokenCounts(config.token_counts, num_tokens=spec.num_real_tokens)
    )
    draft_vocabulary = _limit_drafts(
        model, config, max_draft_tokens, {} if token_counts is None else token_counts.known, tokenizer
    )
    memory = _plan_memory(model, config, device, max_draft_tokens, memory)
    model.allocate(num_rows=memory.num_rows, num_pages=memory.num_pages)
    cache = _cache(config, spec, memory, clock)
    copies, metrics = None if memory.host is None else HostCopies(model, memory.host, device), EngineMetrics()
    scheduler = Scheduler(
        cache=cache,
        gate=_gate(config, spec, memory, max_draft_tokens, clock),
        fair=FairShare(clock, cost=config.fair_cost),
        metrics=metrics,
        max_running=_slots(config),
        max_draft_tokens=max_draft_tokens,
        pace=_pace(config, spec, device) if pace is None else pace,
        block_tokens=spec.block_tokens,
        row_bytes=spec.row_bytes,
        page_bytes=spec.page_bytes,
        hold_seconds=config.session_hold_seconds,
    )
    executor = _executor(
        model, config, memory, max_draft_tokens, MOST_RIDERS if most_riders is None else most_riders, device
    )
    policy, depths = (
        (depth_policy, range(max_draft_tokens + 1)) if depth_policy else _depth_policy(config, max_draft_tokens)
    )
    if ahead is not None:
        _await_kernels(ahead, _limited(spec, config), memory, max_draft_tokens, progress)
    reason = _why_eager(config, device)
    graphs = f"none: {reason}" if reason else str(executor.capture(depths, CudaRecorder(device), progress, early=early))
    if copies is not None:
        progress(LOCKING, 0, 0)
        copies.await_memory()
    loop = StepLoop(
        scheduler=scheduler,
        executor=executor,
        depth_policy=policy,
        metrics=metrics,
        overlap=config.overlap,
        token_counts=token_counts,
        copier=copies,
        prepare=executor.prepare,
        clock=clock,
    )
    return Assembly(
        config=config,
        spec=spec,
        info=_info(config, spec, memory, executor.draft_sources),
        model=model,
        tokenizer=tokenizer,
        model_dir=model_dir,
        cache=cache,
        loop=loop,
        constraints=constraints
        or constraint_source(spec, tokenizer, forces_acceptance=config.force_acceptance is not None),
        device=device,
        memory=memory,
        graphs=graphs,
        draft_vocabulary=draft_vocabulary,
        token_counts=token_counts,
        copies=copies,
    )


def _executor(
    model: StepModel,
    config: EngineConfig,
    memory: MemoryPlan,
    max_draft_tokens: int,
    most_riders: int,
    device: torch.device,
) -> ModelExecutor:
    return ModelExecutor(
        model,
        max_running=_slots(config),
        max_draft_tokens=max_draft_tokens,
        max_pages_per_slot=_max_pages(model.spec, memory.max_length, max_draft_tokens),
        force_acceptance=config.force_acceptance,
        allow_forced_output=config.allow_forced_output,
        most_riders=most_riders,
        device=device,
    )


def _await_kernels(
    ahead: KernelsAhead, spec: ModelSpec, memory: MemoryPlan, max_draft_tokens: int, progress: Progress
) -> None:
    """Until they are compiled. Where memory holds less than the whole context of `spec`, a few others are launched:
    those too."""
    ahead.wait()
    max_pages = _max_pages(spec, memory.max_length, max_draft_tokens)
    if max_pages != _max_pages(spec, spec.max_context, max_draft_tokens):
        with KernelsAhead(msgspec.structs.replace(ahead.job, max_pages=max_pages), progress) as others:
            others.wait()


def machine_of(device: torch.device) -> Machine:
    """What kernels depend on of a GPU."""
    properties = torch.cuda.get_device_properties(device)
    return Machine(
        capability=(properties.major, properties.minor), num_multiprocessors=properties.multi_processor_count
    )


def _max_pages(spec: ModelSpec, max_length: int, max_draft_tokens: int) -> int:
    """Of the longest sequence, with what its last steps may write beyond its end."""
    return -(-(max_length + 4 * (max_draft_tokens + 1)) // spec.block_tokens)


def _cache(config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, clock: Callable[[], float]) -> HybridCache:
    return HybridCache(
        num_rows=memory.num_rows,
        num_pages=memory.num_pages,
        row_bytes=spec.row_bytes,
        page_bytes=spec.page_bytes,
        block_tokens=spec.block_tokens,
        enabled=config.prefix_cache,
        host_memory=memory.host,
        clock=clock,
    )


def _gate(
    config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, max_draft_tokens: int, clock: Callable[[], float]
) -> SessionGate:
    running_rows = RESERVED + _slots(config) * rows_of_request(max_draft_tokens)
    return SessionGate(
        row_bytes=rows_of_sessions(memory.num_rows - running_rows, _slots(config)) * spec.row_bytes,
        page_bytes=(memory.num_pages - 1) * spec.page_bytes,
        hold_seconds=config.session_hold_seconds,
        clock=clock,
    )


def _pace(config: EngineConfig, spec: ModelSpec, device: torch.device) -> Pace:
    if config.prefill_budget != "auto":
        return FixedPace(config.prefill_budget, block_tokens=spec.block_tokens)
    if config.max_gap_seconds is None and device.type == "cpu":
        return FixedPace(CPU_BUDGET, block_tokens=spec.block_tokens)
    max_gap = DEFAULT_MAX_GAP if config.max_gap_seconds is None else config.max_gap_seconds
    return GapPace(max_gap, block_tokens=spec.block_tokens)


def _depth_policy(config: EngineConfig, max_draft_tokens: int) -> tuple[DepthPolicy, Sequence[int]]:
    """What the settings ask for, and every k that it may choose."""
    if config.draft_tokens == "auto" and max_draft_tokens > 0:
        return AdaptiveDepth(max_draft_tokens), range(max_draft_tokens + 1)
    return FixedDepth(max_draft_tokens), [max_draft_tokens]


def _max_running(
    config: EngineConfig, spec: ModelSpec, device: torch.device, max_draft_tokens: int, given: MemoryPlan | None
) -> int:
    if config.max_running != "auto":
        return config.max_running
    if device.type == "cpu" or given is not None:
        return CPU_MAX_RUNNING

    def memory_bytes(num_slots: int) -> int:
        return _memory_bytes(
            config, device, _graph_bytes(replace(config, max_running=num_slots), spec, device, max_draft_tokens)
        )

    return choose_slots(spec, memory_bytes, max_draft_tokens=max_draft_tokens, least=CPU_MAX_RUNNING)


def _slots(config: EngineConfig) -> int:
    assert config.max_running != "auto", "it is resolved before anything is built"
    return config.max_running


def _info(
    config: EngineConfig, spec: ModelSpec, memory: MemoryPlan, draft_sources: tuple[DraftSource, ...]
) -> ModelInfo:
    return ModelInfo(
        model_id=spec.name,
        vocab_size=spec.vocab_size,
        max_context=memory.max_length,
        stop_token_ids=spec.stop_token_ids,
        draft_sources=draft_sources,
        max_running=_slots(config),
        forced_acceptance=config.force_acceptance,
    )


def _limit_drafts(
    model: StepModel,
    config: EngineConfig,
    max_draft_tokens: int,
    counts: Mapping[int, int],
    tokenizer: Tokenizer | None,
) -> str:
    """Give the model its draft vocabulary; says which."""
    spec = model.spec
    if max_draft_tokens == 0:
        if config.draft_vocab_size is not None:
            raise ConfigError("draft_vocab", config.draft_vocab_size, "there are no drafts to choose")
        if config.draft_precision != "auto":
            raise ConfigError("draft_precision", config.draft_precision, "there are no drafts to make")
        return "nothing: there are no drafts"
    size = draft_vocab_size(config.draft_vocab_size, num_real_tokens=spec.num_real_tokens)
    always = {*spec.stop_token_ids, *(() if tokenizer is None else tokenizer.added_ids)}
    num_bytes = model.limit_drafts(
        choose_draft_ids(counts, size=size, num_real_tokens=spec.num_real_tokens, always=always)
    )
    facts = []
    if size < spec.num_real_tokens:
        facts.append("the most served" if counts else "the lowest ids")
    if model.fp8_drafts:
        facts.append("FP8")
    if num_bytes:
        facts.append(f"{num_bytes / 2**20:.1f} MiB")
    chosen = f"{size:,} of {spec.num_real_tokens:,}" if size < spec.num_real_tokens else f"all {size:,}"
    return f"{chosen} tokens" + (f" ({'; '.join(facts)})" if facts else "")


def _plan_memory(
    model: StepModel, config: EngineConfig, device: torch.device, max_draft_tokens: int, given: MemoryPlan | None
) -> MemoryPlan:
    """What rows and pages get, beside all that is on the device by now and the graphs to come. `given` is kept, but for
    a host tier where settings ask for one."""
    memory = given or plan_memory(
        _limited(model.spec, config),
        memory_bytes=_memory_bytes(config, device, _graph_bytes(config, model.spec, device, max_draft_tokens)),
        max_running=_slots(config),
        max_draft_tokens=max_draft_tokens,
    )
    if given is None and config.max_context is not None and memory.max_length < config.max_context:
        raise ConfigError(
            "max_context", config.max_context, f"the memory holds a sequence of {memory.max_length} tokens at most"
        )
    if given is None or config.host_memory_gib:
        memory = replace(memory, host=_host_memory(model.spec, config, device, memory))
    return memory


def _host_memory(spec: ModelSpec, config: EngineConfig, device: torch.device, memory: MemoryPlan) -> HostMemory | None:
    if config.host_memory_gib is not None:
        host_bytes = int(config.host_memory_gib * 2**30)
    elif not config.prefix_cache or device.type != "cuda" or machine_bytes() < LEAST_MACHINE_BYTES:
        host_bytes = 0
    else:
        device_bytes = memory.num_rows * spec.row_bytes + memory.num_pages * spec.page_bytes
        host_bytes = min(int(machine_bytes() * HOST_MEMORY_SHARE), MOST_HOST_BYTES, device_bytes // 2)
    host = plan_host_memory(spec, host_bytes)
    if host is None and config.host_memory_gib:
        raise ConfigError(
            "host_memory",
            config.host_memory_gib,
            "is too little for a state and the path that leads to it; 0 does without",
        )
    return host


def _limited(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The model with the context that the settings ask for."""
    if config.max_context is None:
        return spec
    if config.max_context > spec.max_context:
        raise ConfigError("max_context", config.max_context, f"{spec.name} has a context of {spec.max_context} tokens")
    return replace(spec, max_context=config.max_context)


def _device(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device", "cuda", "no CUDA device is available")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def _fp8_drafts(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool:
    if config.draft_precision == "auto":
        return device.type == "cuda" and dtype != torch.float32 and config.draft_tokens != 0
    return config.draft_precision == "fp8"


def _max_draft_tokens(config: EngineConfig, spec: ModelSpec) -> int:
    rates = config.force_acceptance
    if config.draft_tokens != "auto":
        num_drafts = config.draft_tokens
    elif spec.has_mtp:
        num_drafts = AUTO_MAX_DRAFTS if rates is None else len(rates)
    else:
        num_drafts = 0
    if num_drafts > 0 and not spec.has_mtp:
        raise ConfigError("draft_tokens", num_drafts, f"{spec.name} has no MTP head; use 0 or auto")
    if rates is not None and len(rates) != num_drafts:
        reason = f"needs one rate for each of {num_drafts} drafts" if num_drafts else "there are no drafts to accept"
        raise ConfigError("force_acceptance", rates, reason)
    return num_drafts


def _why_eager(config: EngineConfig, device: torch.device) -> str | None:
    """Why steps are not captured; None: they are."""
    if device.type != "cuda":
        return f"steps run eagerly on the {device.type.upper()}"
    if not config.graphs:
        return "switched off"
    return None


def _graph_bytes(config: EngineConfig, spec: ModelSpec, device: torch.device, max_draft_tokens: int) -> int:
    """About what the graphs to come will take on the device."""
    if _why_eager(config, device) is not None:
        return 0
    slots, width = _slots(config), spec.hidden_size
    of_rides = ride_graph_bytes(width, max_running=slots, max_draft_tokens=max_draft_tokens, most_riders=MOST_RIDERS)
    return (
        graph_bytes(vocab_size=spec.vocab_size, max_running=slots, max_draft_tokens=max_draft_tokens)
        + prefill_graph_bytes(width)
        + of_rides
    )


def _memory_bytes(config: EngineConfig, device: torch.device, for_graphs: int) -> int:
    if config.memory_gib is not None:
        return int(config.memory_gib * 2**30)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading let go of
        free, _ = torch.cuda.mem_get_info(device)
        return int(max(free - for_graphs, 0) * GPU_MEMORY_SHARE)
    return CPU_MEMORY_BYTES
