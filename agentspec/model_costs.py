"""What named models cost: bytes a state row and a token of KV take, and rough times, for dry runs on a machine that can't run them.

Bytes follow from the published shapes (27B: 48 Gated DeltaNet layers of 48 heads x 128 x 128 in float32, 16 attention layers and the MTP
layer of 4 KV heads x 256 in bfloat16). Times are those of one large GPU to the nearest sensible figure; they order events, nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentspec.errors import ConfigError

PUBLISHED_ACCEPTANCE = (0.92, 0.85, 0.81, 0.79, 0.74, 0.67, 0.89)
"""Conditional acceptance by draft position of the 397B model on coding (InferenceX golden curve, thinking off: 1.92, 2.70, 3.33 ... a step)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    name: str
    row_bytes: int
    """Recurrent state, conv rows and the hidden column of one checkpoint."""
    kv_bytes_per_token: int
    """Attention layers and the MTP layer, bfloat16."""
    prefill_seconds_per_token: float
    step_seconds: float
    """One decode step, whatever its batch."""
    acceptance: tuple[float, ...] = PUBLISHED_ACCEPTANCE


def _costs(
    name: str,
    *,
    gdn_layers: int,
    value_heads: int,
    attention_layers: int,
    kv_heads: int,
    hidden: int,
    prefill_tokens_per_second: float,
    step_ms: float,
    state_bytes: int = 4,
) -> ModelCosts:
    """Key heads are 16, GDN heads 128 x 128, attention heads 256 wide in the whole family."""
    conv_channels = 2 * 16 * 128 + value_heads * 128
    state = gdn_layers * value_heads * 128 * 128 * state_bytes
    conv = gdn_layers * 3 * conv_channels * 2
    return ModelCosts(
        name=name,
        row_bytes=state + conv + hidden * 2,
        kv_bytes_per_token=(attention_layers + 1) * 2 * kv_heads * 256 * 2,
        prefill_seconds_per_token=1 / prefill_tokens_per_second,
        step_seconds=step_ms / 1000,
    )


def _dense_27b(name: str, state_bytes: int) -> ModelCosts:
    return _costs(
        name,
        gdn_layers=48,
        value_heads=48,
        attention_layers=16,
        kv_heads=4,
        hidden=5120,
        prefill_tokens_per_second=7_000,
        step_ms=22.0,
        state_bytes=state_bytes,
    )


MODEL_COSTS = {
    costs.name: costs
    for costs in (
        _costs("4b", gdn_layers=24, value_heads=32, attention_layers=8, kv_heads=4, hidden=2560, prefill_tokens_per_second=40_000, step_ms=4.7),
        _costs("9b", gdn_layers=24, value_heads=32, attention_layers=8, kv_heads=4, hidden=4096, prefill_tokens_per_second=20_000, step_ms=9.0),
        _dense_27b("27b", 4),
        _dense_27b("27b-bf16-state", 2),
        _costs("35b-a3b", gdn_layers=30, value_heads=32, attention_layers=10, kv_heads=2, hidden=2048, prefill_tokens_per_second=30_000, step_ms=5.0),
    )
}


def model_costs(name: str) -> ModelCosts:
    """Costs by name. Raises ConfigError that lists the names there are."""
    if name not in MODEL_COSTS:
        raise ConfigError("dry_run", name, f"no costs by that name; there are {', '.join(MODEL_COSTS)}")
    return MODEL_COSTS[name]
