"""The blocks that every decoder layer shares, and what a forward hands to its layers.

A mixer (attention or Gated DeltaNet) sees the tokens either as windows of slots (`StepInputs`) or as prefill spans (`PrefillInputs`); norms,
projections and FFNs see flat tokens x_NH and never know which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from agentspec import kernels
from agentspec.models.hf_config import TextConfig
from agentspec.models.tensors import ParameterScope


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInputs:
    """Where the B*T tokens of a decode window stand. Lengths live on the device."""

    num_slots: int
    num_tokens: int
    start_B: Tensor
    """int64. Position of column 0."""
    page_table_BP: Tensor
    cos_NA: Tensor
    sin_NA: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRows:
    """Which rows a decode window reads and writes."""

    read_row_B: Tensor
    write_rows_BT: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillInputs:
    """Where the N tokens of a prefill stand."""

    spans: Sequence[kernels.Span]
    cos_NA: Tensor
    sin_NA: Tensor


class Rope:
    """Frequencies of the rotary embedding, plain or YaRN.

    Frequency j is theta ** (-2j / rotary_dim): the exponent's base is the rotary dimension, not the head's. With text alone the
    model's interleaved multi-axis positions (mrope) coincide on all axes and reduce to this.
    """

    def __init__(self, config: TextConfig, device: torch.device) -> None:
        inv_freq, self.scale = rope_frequencies(config)
        self.inv_freq_A = inv_freq.to(device)

    def __call__(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.rope_cos_sin(positions_N, self.inv_freq_A, self.scale)


def rope_frequencies(config: TextConfig) -> tuple[Tensor, float]:
    """(float32 [rotary_dim / 2] radians per position, factor of cos and sin)."""
    dim, theta, yarn = config.rotary_dim, config.rope_theta, config.yarn
    inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return inv_freq, 1.0

    def dimension_of(rotations: float) -> float:
        return dim * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    scale = yarn.attention_factor
    if scale is None:
        scale = 0.1 * math.log(yarn.factor) + 1.0 if yarn.factor > 1 else 1.0
    return inv_freq / yarn.factor * ramp + inv_freq * (1 - ramp), scale


class RMSNorm:
    """Zero-centred RMS norm: gain 1 + weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)


class SwiGLU:
    """down(silu(gate(x)) * up(x)), with gate and up in one projection."""

    def __init__(self, parameters: ParameterScope) -> None:
        self.gate_up_proj = parameters.take_rows("gate_proj.weight", "up_proj.weight")
        self.down_proj = parameters.take("down_proj.weight")

    def __call__(self, x_NH: Tensor) -> Tensor:
        gate, up = linear(x_NH, self.gate_up_proj).chunk(2, -1)
        return linear(silu(gate) * up, self.down_proj)
