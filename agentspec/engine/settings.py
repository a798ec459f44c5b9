"""An engine's settings for one model and device: resolves the `auto` values of an EngineConfig, and plans its memory.

Raises ConfigError for a setting that doesn't fit. Builds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from agentspec.cache.host_tier import HostMemory
from agentspec.config import EngineConfig
from agentspec.errors import ConfigError
from agentspec.mtp.window_policy import AdaptiveWindow, FixedWindow
from agentspec.runtime.graphs import graph_bytes
from agentspec.runtime.memory_plan import MemoryPlan, choose_slots, machine_bytes, plan_host_memory, plan_memory
from agentspec.runtime.pace import CPU_BUDGET, DEFAULT_MAX_GAP, FixedPace, GapPace, Pace
from agentspec.runtime.prefill_graphs import prefill_graph_bytes
from agentspec.runtime.ride import ride_graph_bytes
from agentspec.runtime.step_loop import WindowPolicy
from agentspec.types import MOST_RIDERS, ModelSpec, WindowShape

CPU_MAX_RUNNING = 8
"""Slots that `max_running=auto` chooses on a CPU, and the fewest on a GPU."""

AUTO_MAX_DRAFTS = 3
"""Most drafts that `draft_tokens=auto` may choose: what the model's authors recommend, and near the optimum for one
user."""

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
    max_draft_tokens: int
    max_running: int

    @classmethod
    def resolve(
        cls, config: EngineConfig, spec: ModelSpec, device: torch.device, *, given: MemoryPlan | None = None
    ) -> Self:
        """given: the memory, where it is not planned by the settings."""
        settings = cls(
            config=config,
            spec=spec,
            device=device,
            max_draft_tokens=_max_draft_tokens(config, spec),
            max_running=CPU_MAX_RUNNING if config.max_running == "auto" else config.max_running,
        )
        if config.max_running != "auto" or device.type == "cpu" or given is not None:
            return settings
        num_slots = choose_slots(
            spec,
            lambda num_slots: replace(settings, max_running=num_slots)._memory_bytes(),
            max_draft_tokens=settings.max_draft_tokens,
            least=CPU_MAX_RUNNING,
        )
        return replace(settings, max_running=num_slots)

    @property
    def why_eager(self) -> str | None:
        """Why steps are not captured; None: they are captured."""
        if self.device.type != "cuda":
            return f"steps run eagerly on the {self.device.type.upper()}"
        return None if self.config.graphs else "switched off"

    def max_pages(self, max_length: int) -> int:
        """Pages of a sequence of max_length tokens, including what its last steps may write beyond its end."""
        return -(-(max_length + 4 * (self.max_draft_tokens + 1)) // self.spec.block_tokens)

    def window_policy(self) -> tuple[WindowPolicy, Sequence[int]]:
        """The policy that the settings ask for, and every k that it may choose."""
        if self.config.draft_tokens == "auto" and self.max_draft_tokens > 0:
            return AdaptiveWindow(self.max_draft_tokens), range(self.max_draft_tokens + 1)
        return FixedWindow(WindowShape(self.max_draft_tokens)), [self.max_draft_tokens]

    def pace(self) -> Pace:
        config, block_tokens = self.config, self.spec.block_tokens
        if config.prefill_budget != "auto":
            return FixedPace(config.prefill_budget, block_tokens=block_tokens)
        if config.max_gap_seconds is None and self.device.type == "cpu":
            return FixedPace(CPU_BUDGET, block_tokens=block_tokens)
        max_gap = DEFAULT_MAX_GAP if config.max_gap_seconds is None else config.max_gap_seconds
        return GapPace(max_gap, block_tokens=block_tokens)

    def plan_memory(self, given: MemoryPlan | None) -> MemoryPlan:
        """Rows and pages for the memory left by everything already on the device and by the graphs to come. A `given`
        plan is kept; it only gets a host tier if the settings ask for one."""
        config = self.config
        memory = given or plan_memory(
            limited(self.spec, config),
            memory_bytes=self._memory_bytes(),
            max_running=self.max_running,
            max_draft_tokens=self.max_draft_tokens,
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
            host_bytes = min(int(machine_bytes() * HOST_MEMORY_SHARE), MOST_HOST_BYTES, device_bytes // 2)
        host = plan_host_memory(spec, host_bytes)
        if host is None and config.host_memory_gib:
            raise ConfigError(
                "host_memory",
                config.host_memory_gib,
                "is too little for a state and the path that leads to it; 0 does without",
            )
        return host

    def _memory_bytes(self) -> int:
        """Memory for rows and pages."""
        if self.config.memory_gib is not None:
            return int(self.config.memory_gib * 2**30)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # freed by loading
            free, _ = torch.cuda.mem_get_info(self.device)
            return int(max(free - self._graph_bytes(), 0) * GPU_MEMORY_SHARE)
        return CPU_MEMORY_BYTES

    def _graph_bytes(self) -> int:
        """Estimated device memory of the graphs to come."""
        if self.why_eager is not None:
            return 0
        spec, slots = self.spec, {"max_running": self.max_running, "max_draft_tokens": self.max_draft_tokens}
        return (
            graph_bytes(vocab_size=spec.vocab_size, **slots)
            + prefill_graph_bytes(spec.hidden_size)
            + ride_graph_bytes(spec.hidden_size, most_riders=MOST_RIDERS, **slots)
        )


def limited(spec: ModelSpec, config: EngineConfig) -> ModelSpec:
    """The model's spec, with the context that the settings ask for."""
    if config.max_context is None:
        return spec
    if config.max_context > spec.max_context:
        raise ConfigError("max_context", config.max_context, f"{spec.name} has a context of {spec.max_context} tokens")
    return replace(spec, max_context=config.max_context)


def device_of(config: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if config.device == "cuda" and not available:
        raise ConfigError("device", "cuda", "no CUDA device is available")
    return torch.device("cuda" if available and config.device != "cpu" else "cpu")


def dtype_of(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Of weights and activations, where the settings choose it."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if config.dtype == "bfloat16" else torch.float32


def drafts_in_fp8(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> bool:
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
