"""What named models cost: bytes a state row and a token of KV take, and how long the parts of a step take, for runs
without a model.

Times are measured (`python -m benchmarks.step_costs`) and fitted (`python -m benchmarks.fit_costs`) into
model_costs.json. A prompt pass takes what its tokens take with no context, by a table, and a time for each pair of a
token and one that it attends to. A decode step takes what its batch takes with no context, by a table, and a time for
each token of context. Weights are read once a pass and once a step: the tables' low ends say so.
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
2.70, 3.33 ... a step)."""

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
    """Of a prompt pass, by its tokens, none of which attends to another."""
    pair_seconds: float = 0.0
    """For each pair of a prompt token and one that it attends to."""
    chunk_sizes: tuple[int, ...] = ()
    """Tokens of the prompt passes that are graphs: those between two sizes take as long as the larger one."""
    steps: Table
    """Of a decode step, by its batch, at the measured number of drafts."""
    context_seconds: float = 0.0
    """Of a decode step, for each token of context of each slot."""
    join_seconds: float = 0.0
    """Of a step in which requests take their first step, beside prompts and windows."""
    ride_seconds: float = 0.0
    """What a pass with the windows of the running streams takes less than both apart."""
    turn_seconds: float = 0.0
    """From the end of an answer to the next request of its session at the scheduler, apart from recorded waits: the
    client, HTTP, text."""
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
        """Device time of a decode step of slots with so many tokens in their states; 0 for none."""
        if not contexts:
            return 0.0
        sizes = [size for size, _ in self.steps]
        place = bisect_left(sizes, len(contexts))  # a batch is filled up to a captured size
        seconds = self.steps[place][1] if place < len(sizes) else _between(self.steps, len(contexts))
        return seconds + sum(contexts) * self.context_seconds


_GRAPH_SPANS = 4
"""Most sequences in a captured prompt pass."""


def _between(table: Table, size: int) -> float:
    """Linear between the entries and beyond the last two; below the first entry as the first."""
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
    """Costs by name. Raises ConfigError that lists the names there are."""
    if name not in MODEL_COSTS:
        raise ConfigError("dry_run", name, f"no costs by that name; there are {', '.join(MODEL_COSTS)}")
    return MODEL_COSTS[name]
