"""An engine's settings for one model and device: resolves the `auto` values of an EngineConfig, and plans its memory.

Raises ConfigError for a setting that doesn't fit. Builds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from agentspec.cache.host_tier import HostMemory
from agentspec.config import EngineConfig
from agentspec.errors import ConfigError
from agentspec.models.state import Rings
from agentspec.mtp.window_policy import AdaptiveWindow, FixedWindow
from agentspec.runtime.graphs import graph_bytes
from agentspec.runtime.memory_plan import (
    MemoryPlan,
    choose_slots,
    machine_bytes,
    plan_host_memory,
    plan_memory,
    rings_bytes,
)
from agentspec.runtime.pace import CPU_BUDGET, DEFAULT_MAX_GAP, FixedPace, GapPace, Pace
from agentspec.runtime.prefill_graphs import prefill_graph_bytes
from agentspec.runtime.ride import ride_graph_bytes
from agentspec.runtime.step_loop import WindowPolicy
from agentspec.types import MAX_COPIES, MOST_RIDERS, ModelSpec, RingShape, WindowShape, most_drafts

CPU_MAX_RUNNING = 8
"""Slots that `max_running=auto` chooses on a CPU; on a GPU more or fewer, by its memory."""

AUTO_MAX_DRAFTS = 3
"""Most drafts that `draft_tokens=auto` may choose: what the model's authors recommend, and near the optimum for one
user."""

_FEW_COPIES = 4
"""The smaller number of copies that a window may have, on average."""
_MOST_FOR_COPIES = 1 / 8
"""Share of the memory for rows and pages that wider rings and graphs of wide windows may take where nobody asked for
copies."""

PLENTY_BYTES = 2**50
"""Of a GPU, free: with so many, everything fits."""
CPU_MEMORY_BYTES = 2**30
GPU_MEMORY_SHARE = 0.85

LEAST_MACHINE_BYTES = 64 * 2**30
"""Machines with less memory get no host tier unless it is requested."""
HOST_MEMORY_SHARE = 1 / 8
MOST_HOST_BYTES = 32 * 2**30
"""Page-locking takes seconds. More than this, or than half of the device's memory, is worth that only on request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of one engine, resolved."""

    config: EngineConfig
    spec: ModelSpec
    device: torch.device
    has_ring: bool
    """Slots have rings."""
    max_draft_tokens: int
    """Of the MTP head."""
    max_copies: int
    max_running: int

    @classmethod
    def resolve(
        cls,
        config: EngineConfig,
        spec: ModelSpec,
        device: torch.device,
        *,
        given: MemoryPlan | None = None,
        free: int | None = None,
    ) -> Self:
        """given: the memory, where it is not planned by the settings. free: bytes of a GPU that nobody holds; None: the
        device says."""
        has_ring = _has_ring(config, spec, device)
        max_draft_tokens = _max_draft_tokens(config, spec, has_ring=has_ring)
        settings = cls(
            config=config,
            spec=spec,
            device=device,
            has_ring=has_ring,
            max_draft_tokens=max_draft_tokens,
            max_copies=_max_copies(config, spec, max_draft_tokens, has_ring=has_ring),
            max_running=CPU_MAX_RUNNING if config.max_running == "auto" else config.max_running,
        )
        if device.type == "cpu" or given is not None:
            return settings
        free = free_bytes(device) if free is None else free
        settings = settings._with_slots(free)
        if config.copy_drafts != "auto" or not settings.max_copies:
            return settings
        without = replace(settings, max_copies=0)._with_slots(free)
        return settings if settings._affords_copies(without, free) else without

    def _with_slots(self, free: int) -> Self:
        """With as many slots as memory allows, if their number is chosen automatically."""
        if self.config.max_running != "auto":
            return self
        num_slots = choose_slots(
            self.spec,
            lambda num_slots: replace(self, max_running=num_slots).memory_bytes(free),
            max_draft_tokens=self.max_drafts,
            usual=CPU_MAX_RUNNING,
            ring=self.ring,
        )
        return replace(self, max_running=num_slots)

    def _affords_copies(self, without: Self, free: int) -> bool:
        """without: the same settings without copies. Copies take neither slots nor a context that was asked for."""
        if self.max_running < without.max_running or not self._fits(free):
            return False
        memory_bytes = without.memory_bytes(free)
        graphs = memory_bytes - self.memory_bytes(free)
        rings = rings_bytes(self.spec, self.ring, self.max_running)
        rings -= rings_bytes(self.spec, without.ring, without.max_running)
        return graphs + rings <= _MOST_FOR_COPIES * memory_bytes

    def _fits(self, free: int) -> bool:
        try:
            self.plan_memory(None, free)
        except ConfigError:
            return False
        return True

    @property
    def max_drafts(self) -> int:
        """Most drafts of a window, from both sources."""
        return self.max_draft_tokens + self.max_copies

    @property
    def ring(self) -> RingShape | None:
        """Sizes of the slots' rings; None: slots have none, and every column of a window has a state row."""
        if not self.has_ring:
            return None
        return RingShape.of(self.max_drafts + 1, self.spec.block_tokens)

    @property
    def rings(self) -> Rings | None:
        """The rings to allocate, with one for the padding slot."""
        return None if self.ring is None else Rings(self.max_running + 1, self.ring.capacity)

    @property
    def why_eager(self) -> str | None:
        """Why steps are not captured; None: they are captured."""
        if self.device.type != "cuda":
            return f"steps run eagerly on the {self.device.type.upper()}"
        return None if self.config.graphs else "switched off"

    def max_pages(self, max_length: int) -> int:
        """Pages of a sequence of max_length tokens, including what its last steps may write beyond its end."""
        return -(-(max_length + 4 * (self.max_drafts + 1)) // self.spec.block_tokens)

    def window_policy(self) -> tuple[WindowPolicy, Sequence[int]]:
        """The policy that the settings ask for, and every number of drafts that it may choose."""
        most = self.max_draft_tokens
        least = 0 if self.config.draft_tokens == "auto" else most
        copies = sorted({min(_FEW_COPIES, self.max_copies), self.max_copies} - {0})
        if least == most and not copies:
            return FixedWindow(WindowShape(most)), [most]
        policy = AdaptiveWindow(most, copies, min_mtp=least, shares=self.has_ring)
        return policy, [*range(least, most + 1), *(most + num_copies for num_copies in copies)]

    def pace(self) -> Pace:
        config, block_tokens = self.config, self.spec.block_tokens
        if config.prefill_budget != "auto":
            return FixedPace(config.prefill_budget, block_tokens=block_tokens)
        if config.max_gap_seconds is None and self.device.type == "cpu":
            return FixedPace(CPU_BUDGET, block_tokens=block_tokens)
        max_gap = DEFAULT_MAX_GAP if config.max_gap_seconds is None else config.max_gap_seconds
        return GapPace(max_gap, block_tokens=block_tokens)

    def plan_memory(self, given: MemoryPlan | None, free: int | None = None) -> MemoryPlan:
        """Rows and pages for the memory left by everything already on the device and by the graphs to come. A `given`
        plan is kept; it only gets a host tier if the settings ask for one. free: as for `resolve`."""
        config = self.config
        memory = given or plan_memory(
            limited(self.spec, config),
            memory_bytes=self.memory_bytes(free),
            max_running=self.max_running,
            max_draft_tokens=self.max_drafts,
            ring=self.ring,
        )
        if given is None and config.max_context is not None and memory.max_length < config.max_context:
            raise ConfigError(
                "max_context", config.max_context, f"the memory holds a sequence of {memory.max_length} tokens at most"
            )
        if given is None or config.host_memory_gib:
            memory = replace(memory, host=self._host_memory(memory))
        return memory

    def _host_memory(self, memory: MemoryPlan) -> HostMemory | None:
        config, spec = self.config, self.spec
        if config.host_memory_gib is not None:
            host_bytes = int(config.host_memory_gib * 2**30)
        elif not config.prefix_cache or self.device.type != "cuda" or machine_bytes() < LEAST_MACHINE_BYTES:
            host_bytes = 0
        else:
            device_bytes = memory.num_rows * spec.row_bytes + memory.num_pages * spec.page_bytes
            most = min(int(machine_bytes() * HOST_MEMORY_SHARE), MOST_HOST_BYTES)
            host_bytes = min(most // config.tensor_parallel, device_bytes // 2)  # every rank keeps its own part
        host = plan_host_memory(spec, host_bytes)
        if host is None and config.host_memory_gib:
            raise ConfigError(
                "host_memory",
                config.host_memory_gib,
                "is too little for a state and the path that leads to it; 0 does without",
            )
        return host

    def memory_bytes(self, free: int | None = None) -> int:
        """Memory for rows and pages. free: as for `resolve`."""
        if self.config.memory_gib is not None:
            return int(self.config.memory_gib * 2**30)
        if self.device.type == "cuda":
            left = (free_bytes(self.device) if free is None else free) - self.graphs_bytes()
            return int(max(left, 0) * GPU_MEMORY_SHARE)
        return CPU_MEMORY_BYTES

    def graphs_bytes(self) -> int:
        """Estimated device memory of the graphs to come."""
        if self.why_eager is not None:
            return 0
        spec, slots = self.spec, {"max_running": self.max_running, "max_draft_tokens": self.max_draft_tokens}
        return (
            graph_bytes(vocab_size=spec.vocab_size, has_copies=self.max_copies > 0, **slots)
            + prefill_graph_bytes(spec.hidden_size)
            + ride_graph_bytes(spec.hidden_size, most_riders=MOST_RIDERS, **slots)
        )


def free_bytes(device: torch.device) -> int:
    """Of a GPU's memory, what nobody holds."""
    torch.cuda.empty_cache()  # what loading, or an earlier engine, has freed
    free, _ = torch.cuda.mem_get_info(device)
    return free


def refuse_weights(
    model: str | None, needed_bytes: int, available_bytes: int, advice: Callable[[], str] = lambda: ""
) -> None:
    """Raise ConfigError if the weights need more memory than there is. Nothing has been loaded yet. advice: what would
    fit, in words."""
    if needed_bytes > available_bytes:
        sizes = needed_bytes, available_bytes, needed_bytes - available_bytes
        needed, free, missing = (size / 2**30 for size in sizes)
        raise ConfigError(
            "model",
            model,
            f"its weights take {needed:.1f} GiB and the device has {free:.1f} GiB free: {missing:.1f} GiB are missing, "
            f"before state rows and KV pages{'; ' if (words := advice()) else ''}{words}",
        )


def limited(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The model's spec, with the context that the settings ask for."""
    if config.max_context is None:
        return spec
    if config.max_context > spec.max_context:
        raise ConfigError("max_context", config.max_context, f"{spec.name} has a context of {spec.max_context} tokens")
    return replace(spec, max_context=config.max_context)


def device_of(config: EngineConfig, rank: int = 0, *, shares_device: bool = False) -> torch.device:
    """The device of a rank: the CPU, or the GPU with the rank's number. shares_device: as in RankOptions."""
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device", "cuda", "no CUDA device is available")
    if not available or config.device == "cpu":
        return torch.device("cpu")
    if config.tensor_parallel == 1:
        return torch.device("cuda")
    num_devices = torch.cuda.device_count()
    if not shares_device and config.tensor_parallel > num_devices:
        raise ConfigError(
            "tensor_parallel",
            config.tensor_parallel,
            f"every rank needs a GPU of its own, and torch sees {num_devices}",
        )
    return torch.device("cuda", 0 if shares_device else rank)


def dtype_of(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Of weights and activations, where the settings choose it."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def drafts_in_fp8(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool:
    if config.draft_precision == "auto":
        return device.type == "cuda" and dtype != torch.float32 and config.draft_tokens != 0
    return config.draft_precision == "fp8"


def pages_in_fp8(config: EngineConfig, dtype: torch.dtype) -> bool:
    """dtype: of activations. Raises ConfigError for pages that would be narrower than asked for, or wider."""
    if config.kv_dtype == "bf16" and dtype != torch.bfloat16:
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError("kv_dtype", config.kv_dtype, f"activations are in {kind}, and keys and values too; use auto")
    return config.kv_dtype == "fp8"


def _has_ring(config: EngineConfig, spec: ModelSpec, device: torch.device) -> bool:
    if config.state_form == "auto":
        # Rows move more bytes, which is what a GPU waits for. A CPU waits for the replay of a ring's entries.
        return device.type == "cuda" and spec.entry_bytes > 0
    if config.state_form == "ring" and not spec.entry_bytes:
        raise ConfigError("state_form", "ring", f"{spec.name} has layers that store whole states only")
    return config.state_form == "ring"


def _max_draft_tokens(config: EngineConfig, spec: ModelSpec, *, has_ring: bool) -> int:
    rates, most = config.force_acceptance, most_drafts(spec.block_tokens, has_ring=has_ring)
    if config.draft_tokens != "auto":
        num_drafts = config.draft_tokens
    elif spec.has_mtp:
        num_drafts = AUTO_MAX_DRAFTS if rates is None else len(rates)
    else:
        num_drafts = 0
    if num_drafts > most:
        raise ConfigError("draft_tokens", num_drafts, f"there is room for {most}{_more_room(has_ring)}")
    if num_drafts > 0 and not spec.has_mtp:
        raise ConfigError("draft_tokens", num_drafts, f"{spec.name} has no MTP head; use 0 or auto")
    if rates is not None and len(rates) != num_drafts:
        reason = f"needs one rate for each of {num_drafts} drafts" if num_drafts else "there are no drafts to accept"
        raise ConfigError("force_acceptance", rates, reason)
    return num_drafts


def _max_copies(config: EngineConfig, spec: ModelSpec, max_draft_tokens: int, *, has_ring: bool) -> int:
    room = most_drafts(spec.block_tokens, has_ring=has_ring) - max_draft_tokens
    if config.copy_drafts == "auto":
        # A column of a dense model costs less than 1 % of a step, in a mixture it reads experts of its own.
        return min(MAX_COPIES, room) if has_ring and not spec.has_experts else 0
    if config.copy_drafts > room:
        reason = f"with {max_draft_tokens} MTP drafts there is room for {room}{_more_room(has_ring)}"
        raise ConfigError("copy_drafts", config.copy_drafts, reason)
    return config.copy_drafts


def _more_room(has_ring: bool) -> str:
    return "" if has_ring else "; slots with rings have more (state_form)"
