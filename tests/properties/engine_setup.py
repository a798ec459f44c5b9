"""A random engine to test: its settings, its memory, and the behaviour of its clients.

Every engine is derived from one integer, which reproduces it. Builds the engine; contains no checks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Self
from unittest.mock import patch

import torch

from agentspec import types
from agentspec.cache.host_tier import HostMemory
from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, build
from agentspec.engine.ranks import Ranks
from agentspec.runtime.memory_plan import RESERVED, MemoryPlan, longest_sequence
from agentspec.types import (
    MAX_WIDE_ROWS,
    MOST_RIDERS,
    ModelSpec,
    SlotResult,
    WindowShape,
    rows_of_request,
    widest_window,
)
from tests.fakes.hash_chain import HashChainModel

BLOCK = 16
MAX_CONTEXT = 1024
MAX_PROMPT_CHECKPOINTS = 8
"""Rows that a request may take besides its own while its prompt is computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup:
    """One engine and the behaviour of its clients."""

    seed: int
    max_draft_tokens: int
    random_depth: bool
    overlap: bool
    late_device: bool
    """Steps may run as late as when the host waits for them."""
    prefill_budget: int
    max_running: int
    num_rows: int
    num_pages: int
    budget_share: float
    """Budget in bytes, as a share of the pools' size."""
    draft_accuracy: float
    stop_chance: float
    prefix_cache: bool
    hold_seconds: float
    long_outputs: bool
    short_prompts: bool
    """Conversations restart before they grow long."""
    scoring_share: float
    """Share of requests with prompt logprobs."""
    stopping_share: float
    """Share of requests with stop strings."""
    session_share: float
    """Share of requests with a session id."""
    sampled_share: float
    """Share of requests that aren't plain greedy."""
    extra_clients: int
    """Number of concurrent requests beyond the engine's slots."""
    bursts: bool
    """The clients send new requests only when all earlier ones have ended."""
    host: HostMemory | None = None
    """The host tier; its copies are late."""
    slow_copies: bool = False
    """Copies are very late."""
    most_riders: int = MOST_RIDERS
    """See runtime/ride.py."""
    has_ring: bool = False
    """Slots have rings."""
    max_copies: int = 0
    """Copies behind the MTP drafts."""
    min_match: int = 1
    """Tokens that must occur earlier for what follows them to be copied. Hashes repeat nothing, so few are enough."""
    max_wide_rows: int = MAX_WIDE_ROWS
    """Instead of types.MAX_WIDE_ROWS: with few, steps of several slots have no copies and look for none."""

    @classmethod
    def random(cls, seed: int) -> Self:
        """A random engine with any k, and with as little memory as one request needs. One in six is crowded: many
        growing streams, and pages for few. One in twelve stops late."""
        rng = random.Random(seed)
        kind = random.Random(f"kind {seed}")
        drafts = rng.randrange(8)
        is_crowded, stops_late = seed % 6 == 4, seed % 12 == 7
        if stops_late:
            drafts = kind.randint(5, 7)
        max_running = rng.choice([8, 12] if is_crowded else [1, 3, 4, 6, 8, 8, 10, 10, 12, 12])
        has_ring = random.Random(f"ring {seed}").random() < 0.4
        copying = random.Random(f"copies {seed}")
        max_copies = copying.randint(1, 7 - drafts) if drafts < 7 and copying.random() < 0.25 else 0
        per_request = rows_of_request(drafts + max_copies, has_ring=has_ring)
        few_rows = not is_crowded and rng.random() < 0.3
        few_pages = is_crowded or rng.random() < 0.45
        if few_rows:
            num_rows = (
                RESERVED
                + rng.choice([1, max_running // 2 + 1, max_running, max_running]) * per_request
                + rng.randrange(6)
            )
        else:
            num_rows = RESERVED + max_running * per_request + rng.choice([4, 12, 60])
        if is_crowded:
            num_pages = rng.randrange(24, 40)
        elif few_pages:
            num_pages = rng.choice(
                [rng.randrange(4, 12), rng.randrange(12, 24), rng.randrange(24, 48), rng.randrange(24, 48)]
            )
        else:
            num_pages = rng.choice([80, 160, 400])
        is_serial = max_running == 1 or num_rows < RESERVED + 2 * per_request or num_pages < 12
        setup = cls(
            seed=seed,
            max_draft_tokens=drafts,
            random_depth=rng.random() < 0.5,
            overlap=rng.random() < 0.7,
            late_device=rng.random() < 0.7,
            prefill_budget=64 if is_crowded else rng.choice([64, 80, 144, 512]),
            max_running=max_running,
            num_rows=num_rows,
            num_pages=num_pages,
            budget_share=1.0 if num_pages < 12 else rng.choice([1.0, 1.0, 0.9, 0.6]),
            draft_accuracy=rng.choice([0.0, 0.5, 0.9, 1.0]),
            stop_chance=rng.choice([0.0, 0.02, 0.1, 0.1]),
            prefix_cache=rng.random() < 0.93,
            hold_seconds=rng.choice([0.0, 5.0]) * (not is_crowded),
            long_outputs=not is_serial and (is_crowded or rng.random() < (0.4 if few_pages else 0.15)),
            short_prompts=is_crowded or rng.random() < (0.8 if few_pages else 0.2),
            scoring_share=rng.choice([0.02, 0.02, 0.1]),
            stopping_share=rng.choice([0.1, 0.4, 0.9]),
            session_share=rng.choice([0.0, 0.9, 0.9]) * (not is_crowded),
            sampled_share=rng.choice([0.0, 0.4, 0.4, 1.0]),
            extra_clients=rng.choice([-1, 0, 2, 5]),
            bursts=rng.random() < 0.2,
            host=random_host(rng),
            slow_copies=is_crowded,
            most_riders=rng.choice([0, 16, MOST_RIDERS, MOST_RIDERS]),
            has_ring=has_ring,
            max_copies=max_copies,
            min_match=copying.choice([1, 1, 2]),
            max_wide_rows=copying.choice([16, 32, MAX_WIDE_ROWS, MAX_WIDE_ROWS]),
        )
        if is_crowded:
            return setup.crowded(kind)
        return setup.stopping_late(kind, long_outputs=not is_serial) if stops_late else setup

    def crowded(self, kind: Random) -> Self:
        """Streams that rarely end early, so that they fill the pages and are preempted again and again, and few
        requests that want scores of their whole prompt, so that they find most of their state again."""
        return replace(
            self,
            prefix_cache=True,
            budget_share=kind.choice([1.0, 0.9]),
            stop_chance=0.0,
            stopping_share=kind.choice([0.1, 0.4]),
            scoring_share=kind.choice([0.6, 0.02, 0.02]),
        )

    def stopping_late(self, kind: Random, *, long_outputs: bool) -> Self:
        """Long streams of accepted drafts that end in a stop string: the device is often past a boundary that the kept
        tokens don't reach."""
        return replace(
            self,
            random_depth=False,
            overlap=True,
            draft_accuracy=kind.choice([0.9, 1.0]),
            stop_chance=0.0,
            stopping_share=0.9,
            sampled_share=kind.choice([0.0, 0.0, 0.4]),
            long_outputs=long_outputs,
        )

    @property
    def concurrency(self) -> int:
        return max(1, self.max_running + self.extra_clients)

    def new_model(self, device: torch.device) -> HashChainModel:
        return HashChainModel(
            seed=self.seed,
            block_tokens=BLOCK,
            draft_accuracy=self.draft_accuracy,
            stop_chance=self.stop_chance,
            max_context=MAX_CONTEXT,
            device=device,
        )

    def config(self, *, graphs: bool = True, num_ranks: int = 1) -> EngineConfig:
        return EngineConfig(
            tensor_parallel=num_ranks,
            draft_tokens=self.max_draft_tokens,
            copy_drafts=self.max_copies,
            state_form="ring" if self.has_ring else "rows",
            prefix_cache=self.prefix_cache,
            overlap=self.overlap,
            max_running=self.max_running,
            prefill_budget=self.prefill_budget,
            session_hold_seconds=self.hold_seconds,
            graphs=graphs,
        )

    @contextmanager
    def constants(self) -> Iterator[None]:
        """The code's constants as this engine has them, while it is built (graphs, captured there, have them in them)
        and while it runs."""
        with (
            patch.object(ModelSpec, "min_copy_match", self.min_match),
            patch.object(types, "MAX_WIDE_ROWS", self.max_wide_rows),
        ):
            yield

    def build(
        self,
        model: HashChainModel,
        clock: Callable[[], float],
        device: torch.device,
        *,
        graphs: bool,
        ranks: Ranks | None = None,
    ) -> Assembly:
        spec = model.spec
        budget_bytes = int(
            self.budget_share * ((self.num_rows - RESERVED) * spec.row_bytes + (self.num_pages - 1) * spec.page_bytes)
        )
        max_drafts = self.max_draft_tokens + self.max_copies
        own_rows = rows_of_request(max_drafts, has_ring=self.has_ring)
        least_rows = own_rows + MAX_PROMPT_CHECKPOINTS
        num_pages = min(self.num_pages, 1 + (budget_bytes - least_rows * spec.row_bytes) // spec.page_bytes)
        with self.constants():
            assembly = build(
                model,
                config=self.config(graphs=graphs, num_ranks=1 if ranks is None else ranks.rank.count),
                device=device,
                memory=MemoryPlan(
                    num_rows=self.num_rows,
                    num_pages=self.num_pages,
                    host=self.host if self.prefix_cache else None,
                    max_length=min(MAX_CONTEXT, longest_sequence(num_pages, max_drafts, BLOCK)),
                ),
                most_riders=self.most_riders,
                window_policy=RandomWindow(self.max_draft_tokens, self.max_copies, random.Random(self.seed))
                if self.random_depth
                else None,
                clock=clock,
                ranks=ranks,
            )
        assembly.cache.budget_bytes = budget_bytes
        return assembly


def random_host(rng: random.Random) -> HostMemory | None:
    if rng.random() < 0.4:
        return None
    return HostMemory(
        num_rows=rng.choice([3, 10, 60]),
        num_pages=rng.choice([20, 100, 400]),
        ready_share=rng.choice([0.1, 0.5, 1.0]),
        min_fetch_blocks=rng.choice([1, 1, 4]),
    )


class RandomWindow:
    """A window policy that chooses the numbers of MTP drafts and copies at random."""

    def __init__(self, max_draft_tokens: int, max_copies: int, rng: random.Random) -> None:
        self._max, self._max_copies, self._rng = max_draft_tokens, max_copies, rng

    def choose(self, batch_size: int, num_matched: int = 0) -> WindowShape:
        room = widest_window(batch_size) - 1 - self._max
        most_copies = min(self._max_copies, room)
        if most_copies > 0 and self._rng.random() < 0.5:
            return WindowShape(self._max, self._rng.randint(1, most_copies))
        return WindowShape(self._rng.randint(0, self._max))

    def observe(self, *, shape: WindowShape, slots: Sequence[SlotResult], seconds: float) -> None:
        pass
