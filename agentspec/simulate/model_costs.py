"""Costs of named models: bytes per state row and per token of KV, and times of the parts of a step, for runs without a
model.

Times are measured (`python -m benchmarks.step_costs`) and fitted (`python -m benchmarks.fit_costs`) into
model_costs.json. A prompt pass takes the time of its tokens without context, from a table, plus a time per pair of a
token and one that it attends to. A decode step takes the time of its batch without context, from a table, plus a time
per token of context. Reading the weights once per pass and per step is included: it dominates the tables' low ends.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentspec.errors import ConfigError

PUBLISHED_ACCEPTANCE = (0.92, 0.85, 0.81, 0.79, 0.74, 0.67, 0.89)
"""Conditional acceptance by draft position of the 397B model on coding (InferenceX golden curve, thinking off: 1.92,
2.70, 3.33 ... per step)."""

Table = tuple[tuple[int, float], ...]
"""(size, seconds), sizes in rising order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    name: str
    row_bytes: int
    """Recurrent state, conv rows and the hidden column of one checkpoint."""
    kv_bytes_per_token: int
    """Attention layers and the MTP layer."""
    passes: Table
    """Of a prompt pass, by its token count, without attention."""
    pair_seconds: float = 0.0
    """Per pair of a prompt token and one that it attends to."""
    chunk_sizes: tuple[int, ...] = ()
    """Token counts of the prompt passes that are graphs: one between two sizes takes as long as the larger."""
    steps: Table
    """Of a decode step, by its batch size, at the measured number of drafts."""
    context_seconds: float = 0.0
    """Of a decode step, per token of context of each slot."""
    join_seconds: float = 0.0
    """Of a step in which requests take their first step, beside prompts and windows."""
    ride_seconds: float = 0.0
    """Time that a pass with the running streams' windows saves over running both separately."""
    turn_seconds: float = 0.0
    """From the end of an answer until the session's next request reaches the scheduler, without recorded waits: client,
    HTTP, text."""
    acceptance: tuple[float, ...] = PUBLISHED_ACCEPTANCE

    def pass_seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Device time of (start, tokens) chunks in one pass; 0 for none."""
        if not chunks:
            return 0.0
        num_tokens = sum(count for _, count in chunks)
        num_pairs = sum(count * (start + (count + 1) / 2) for start, count in chunks)
        if len(chunks) <= _GRAPH_SPANS:
            place = bisect_left(self.chunk_sizes, num_tokens)
            num_tokens = self.chunk_sizes[place] if place < len(self.chunk_sizes) else num_tokens
        return _between(self.passes, num_tokens) + num_pairs * self.pair_seconds

    def step_seconds(self, contexts: Sequence[int]) -> float:
        """Device time of a decode step of slots with these context lengths; 0 for none."""
        if not contexts:
            return 0.0
        sizes = [size for size, _ in self.steps]
        place = bisect_left(sizes, len(contexts))  # a batch is padded to a captured size
        seconds = self.steps[place][1] if place < len(sizes) else _between(self.steps, len(contexts))
        return seconds + sum(contexts) * self.context_seconds


_GRAPH_SPANS = 4
"""Most sequences in a captured prompt pass."""


def _between(table: Table, size: int) -> float:
    """Linear interpolation between the entries, and extrapolation beyond the last two; the first value below the first
    entry."""
    if size <= table[0][0] or len(table) == 1:
        return table[0][1]
    place = min(max(bisect_left([entry for entry, _ in table], size), 1), len(table) - 1)
    (low, low_seconds), (high, high_seconds) = table[place - 1], table[place]
    return low_seconds + (high_seconds - low_seconds) * (size - low) / (high - low)


def _load() -> dict[str, ModelCosts]:
    found = {}
    for entry in json.loads(Path(__file__).with_name("model_costs.json").read_text(encoding="utf-8"))["models"]:
        fields = entry | {name: tuple((size, seconds) for size, seconds in entry[name]) for name in ("passes", "steps")}
        costs = ModelCosts(**fields | {"chunk_sizes": tuple(entry["chunk_sizes"])})
        found[costs.name] = costs
    full = found["27b"]
    state_bytes = 48 * 48 * 128 * 128 * 4
    found["27b-bf16-state"] = replace(full, name="27b-bf16-state", row_bytes=full.row_bytes - state_bytes // 2)
    return found


MODEL_COSTS = _load()


def model_costs(name: str) -> ModelCosts:
    """Costs by name. Raises ConfigError that lists the known names."""
    if name not in MODEL_COSTS:
        raise ConfigError("dry_run", name, f"no costs by that name; there are {', '.join(MODEL_COSTS)}")
    return MODEL_COSTS[name]
