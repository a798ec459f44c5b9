"""What a GPU would hold of a model, from the model's config and the headers of its files alone.

Owns what the model takes besides rows and pages, and the search for what is missing or would fit. The split into slots,
rows and pages is the engine's own (engine/settings.py). Needs no GPU and reads no weights.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from agentspec import kernels
from agentspec.config import EngineConfig
from agentspec.engine.settings import PLENTY_BYTES, Settings, drafts_in_fp8, dtype_of, limited, pages_in_fp8
from agentspec.errors import ConfigError
from agentspec.models.fp8_drafts import in_fp8, quantize_mtp_layer
from agentspec.models.heads import draft_head_bytes, draft_rows
from agentspec.models.hf_config import TextConfig
from agentspec.models.outline import META, load_operators, parameters_of, quantized_as
from agentspec.models.quantised.recipes import RECIPES
from agentspec.models.registry import model_spec, resolved_config, why_cpu_only
from agentspec.models.stored import sizes
from agentspec.models.weights import Checkpoint
from agentspec.mtp.draft_vocab import draft_vocab_size
from agentspec.runtime.memory_plan import MemoryPlan, rings_bytes
from agentspec.types import ModelSpec, rows_of_request

GPU = torch.device("cuda")
_MOST_MISSING = 2**50
"""Bytes. What doesn't fit with so much more doesn't fit because of a setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CardPlan:
    """How an engine would divide the memory of a GPU."""

    settings: Settings
    memory: MemoryPlan
    rings_bytes: int
    buffer_bytes: int
    """What is left for the buffers of slots, activations and fragmentation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """A model and an engine's settings, on a GPU whose size is not known yet."""

    config: EngineConfig
    text: TextConfig
    spec: ModelSpec
    weights: Mapping[tuple[str, str], int]
    """Bytes by part and form (`stored.sizes`) as the GPU holds them, with the precision of drafting weights that the
    settings choose."""
    draft_head_bytes: int
    """Memory of the draft head besides the target head; 0: there are no drafts."""

    @classmethod
    def of_checkpoint(cls, config: EngineConfig, model_dir: Path, *, has_weights: bool) -> Self:
        """has_weights: the directory has safetensors files. If not, the config alone says what the weights are, in the
        settings' dtype where it names no other form.

        Raises CheckpointError as loading does, and ConfigError for settings that don't fit the model."""
        text, dtype = resolved_config(model_dir, random_weights=not has_weights), dtype_of(config, GPU)
        spec = model_spec(model_dir, text, dtype, fp8_pages=pages_in_fp8(config, dtype))
        if not has_weights:
            return cls.of_config(config, spec, text)
        with Checkpoint(model_dir) as checkpoint:
            parameters = checkpoint.empty_parameters(checkpoint.layout(text), device=META, dtype=dtype)
        return cls._of(config, spec, text, parameters)

    @classmethod
    def of_config(cls, config: EngineConfig, spec: ModelSpec, text: TextConfig) -> Self:
        """Raises ConfigError for settings that don't fit the model."""
        return cls._of(config, spec, text, parameters_of(text, dtype=dtype_of(config, GPU)))

    @classmethod
    def _of(
        cls, config: EngineConfig, spec: ModelSpec, text: TextConfig, parameters: dict[str, kernels.Weight]
    ) -> Self:
        """parameters: on the device type "meta"."""
        load_operators()
        dtype = dtype_of(config, GPU)
        config = replace(config, host_memory_gib=0.0)  # host memory is no part of a GPU
        limited(spec, config)  # raises for a context that the model doesn't have
        has_drafts = _smallest(config, spec).max_draft_tokens > 0
        fp8_drafts = drafts_in_fp8(config, GPU, dtype)
        if fp8_drafts:
            quantize_mtp_layer(parameters)
        return cls(
            config=config,
            text=text,
            spec=spec,
            weights=sizes(parameters),
            draft_head_bytes=_draft_head(config, spec, parameters, fp8=fp8_drafts) if has_drafts else 0,
        )

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def state_per_slot(self) -> tuple[int, int]:
        """What a running request has of its own besides pages: (number of state rows, bytes of its ring)."""
        settings = Settings.resolve(self.config, self.spec, GPU, free=PLENTY_BYTES)
        ring = settings.ring
        rows = rows_of_request(settings.max_drafts, has_ring=ring is not None)
        return rows, 0 if ring is None else ring.capacity * self.spec.entry_bytes

    def plan(self, free: int) -> CardPlan:
        """free: bytes of the GPU that nobody holds before the weights are loaded. Raises ConfigError if the model
        doesn't fit."""
        loaded = free - self.weight_bytes
        settings = Settings.resolve(self.config, self.spec, GPU, free=loaded)
        left = loaded - self.draft_head_bytes
        room = left - settings.graphs_bytes()
        if settings.memory_bytes(left) > room:
            raise ConfigError("memory", self.config.memory_gib, f"there are {max(room, 0) / 2**30:.4g} GiB")
        memory = settings.plan_memory(None, left)
        rings = rings_bytes(self.spec, settings.ring, settings.max_running)
        state = memory.num_rows * self.spec.row_bytes + memory.num_pages * self.spec.page_bytes + rings
        return CardPlan(
            settings=settings,
            memory=memory,
            rings_bytes=rings,
            buffer_bytes=room - state,
        )

    def fits(self, free: int) -> bool:
        """Whether `plan` has a plan."""
        try:
            self.plan(free)
        except ConfigError:
            return False
        return True

    def missing_bytes(self, free: int) -> int:
        """How much more memory the smallest plan needs; 0: it fits. Raises ConfigError if no amount would do."""
        if not self.fits(free + _MOST_MISSING):
            self.plan(free + _MOST_MISSING)
        return bisect_left(range(_MOST_MISSING), True, key=lambda more: self.fits(free + more))

    def quantized(self) -> dict[str, Needs]:
        """What `agentspec quantize --to TARGET` would make of the model, by target, the largest first."""
        texts = {target: quantized_as(self.text, target) for target in RECIPES}
        found = {
            target: Needs.of_config(self.config, self.spec, text) for target, text in texts.items() if text is not None
        }
        return dict(sorted(found.items(), key=lambda entry: -entry[1].weight_bytes))


def what_would_fit(needs: Needs, free: int) -> str:
    """In which forms a model would fit that doesn't, in words. free: as for `Needs.plan`."""
    forms = needs.quantized()
    by_reason: dict[str | None, list[str]] = {}
    for target, form in forms.items():
        if form.fits(free):
            by_reason.setdefault(why_cpu_only(form.text), []).append(_described(target, form))
    found = [", ".join(words) + (f" ({reason})" if reason else "") for reason, words in by_reason.items()]
    if found:
        return f"`agentspec quantize` makes what would fit: {'; '.join(found)}"
    if forms:
        return f"`agentspec quantize` makes nothing that would fit: the least is {_described(*list(forms.items())[-1])}"
    return ""


def _described(target: str, form: Needs) -> str:
    return f"--to {target} with {form.weight_bytes / 2**30:.1f} GiB of weights"


def _smallest(config: EngineConfig, spec: ModelSpec) -> Settings:
    """Settings on a GPU without free memory: the fewest slots, everything else as on any GPU."""
    return Settings.resolve(config, spec, GPU, free=0)


def _draft_head(config: EngineConfig, spec: ModelSpec, parameters: Mapping[str, kernels.Weight], *, fp8: bool) -> int:
    """Memory of the draft head besides the target head."""
    size = draft_vocab_size(config.draft_vocab_size, num_real_tokens=spec.num_real_tokens)
    embedding_VH = parameters["model.embed_tokens.weight"].tensor
    head = parameters.get("lm_head.weight")
    head_VH = kernels.Plain(embedding_VH) if head is None else head
    rows, ids_O = draft_rows(head_VH, embedding_VH, range(size), spec.num_real_tokens, None, tied=head is None)
    return draft_head_bytes(in_fp8(rows) if fp8 else rows, ids_O, head_VH)
