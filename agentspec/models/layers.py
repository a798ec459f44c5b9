"""Blocks that every decoder layer shares, and the inputs of their forward passes.

A mixer gets its tokens either as windows of slots (`VerifyBatch`) or as spans of prompts (`PrefillBatch`). Projections
and FFNs get flat tokens x_NH in both cases. A block that ends in the residual stream takes the stream and returns it
with its output added, so that a backend can fuse the addition into the projection.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.models.hf_config import TextConfig
from agentspec.models.protocol import VerifyBatch
from agentspec.models.state import Memory, StateForm
from agentspec.models.tensors import ParameterScope
from agentspec.types import MAX_WINDOW


class Mixer(Protocol):
    """Mixes the tokens of a sequence: attention or a recurrence. `step` and `prefill` run between its two
    projections."""

    form: StateForm
    """Its state between calls; `memory` below has this form."""
    in_projs: tuple[kernels.Weight, Tensor | None]
    """Projection of the normed input, and its rows that stay in full precision where the others are quantised."""
    out_proj: kernels.Weight
    """Projection of the mixed values back to the residual stream."""

    def project(self, x_NH: Tensor, norm: kernels.Norm) -> Tensor:
        """[N, P]: all that it needs of the normed input, token by token."""

    def step(self, projected_NP: Tensor, memory: Memory, windows: VerifyBatch) -> Tensor:
        """Mixed values [N, D] of every column of decode windows, slot by slot; writes to memory what its form says."""

    def prefill(self, projected_NP: Tensor, memory: Memory, batch: kernels.PrefillBatch) -> Tensor:
        """Mixed values [N, D] of prompt tokens; writes what a page holds of each token, and the wanted states."""

    def mix_prompt(
        self, x_NH: Tensor, norm: kernels.Norm, memory: Memory, batch: kernels.PrefillBatch
    ) -> Tensor | kernels.ProductInput:
        """`prefill` of `project`, where `out_proj` is all that follows, by Backend.add_linear: the values may be an
        input of this product alone."""


def rope_table(config: TextConfig, device: torch.device) -> kernels.RopeTable:
    """Rotary embedding, plain or YaRN, of every position that a sequence or its last window may reach.

    With text alone the model's interleaved multi-axis positions (mrope) coincide on all axes and reduce to this."""
    inv_freq_A, scale = rope_frequencies(config)
    positions_L = torch.arange(config.max_context + 2 * MAX_WINDOW)
    cos_LA, sin_LA = kernels.rope_cos_sin(positions_L, inv_freq_A, scale)
    return kernels.RopeTable(cos_LA=cos_LA.to(device), sin_LA=sin_LA.to(device))


def rope_frequencies(config: TextConfig) -> tuple[Tensor, float]:
    """(float32 [rotary_dim / 2] radians per position, factor of cos and sin).

    Frequency j is theta ** (-2j / rotary_dim): the exponent's base is the rotary dimension, not the head's."""
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


class SwiGLU:
    """down(silu(gate(x)) * up(x)), with gate and up in one projection."""

    def __init__(self, ops: kernels.Backend, parameters: ParameterScope) -> None:
        self._ops = ops
        self.gate_up_proj = parameters.take_rows("gate_proj.weight", "up_proj.weight")
        self.down_proj = parameters.take("down_proj.weight")

    def add_to(self, x_NH: Tensor, norm: kernels.Norm, next_norm: kernels.Norm | None = None) -> Tensor:
        """x plus the block's output on the normed x."""
        return self._ops.add_ffn(x_NH, norm, self.gate_up_proj, self.down_proj, next_norm)
