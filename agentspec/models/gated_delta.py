"""Gated DeltaNet mixer: projections, short convolution, the gated delta rule, gated norm.

Owns the projections and the order of operations. The recurrence, and every access to a state row, is in the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.models.hf_config import CONV_TAPS, TextConfig
from agentspec.models.protocol import VerifyBatch
from agentspec.models.state import Memory, Part, StateForm
from agentspec.models.tensors import ParameterScope

SSM_DTYPE = torch.float32


def delta_form(config: TextConfig, dtype: torch.dtype) -> StateForm:
    """The recurrent state, value dim before key dim (transformers stores [V, K, D]), and the last three rows of [q | k
    | v] before the convolution, oldest first. In a ring: see kernels.DeltaRing."""
    state = Part("ssm_LRVDK", (config.num_value_heads, config.value_dim, config.key_dim), SSM_DTYPE)
    return StateForm(
        row_parts=(state, Part("conv_LR3C", (CONV_TAPS - 1, config.conv_channels), dtype)),
        ring_parts=(
            Part("ring_key_LSCGK", (config.num_key_heads, config.key_dim), SSM_DTYPE),
            Part("ring_delta_LSCVD", (config.num_value_heads, config.value_dim), SSM_DTYPE),
            Part("ring_decay_LSCV", (config.num_value_heads,), SSM_DTYPE),
            Part("ring_conv_LSCX", (config.conv_channels,), dtype),
        ),
    )


class GatedDeltaNet:
    """The recurrent mixer of one layer."""

    def __init__(self, config: TextConfig, ops: kernels.Backend, parameters: ParameterScope) -> None:
        self._ops = ops
        rows = parameters.take_rows("in_proj_qkv.weight", "in_proj_z.weight")
        self.in_projs = rows.append_full_precision(
            torch.cat([parameters.take_tensor(name) for name in ("in_proj_b.weight", "in_proj_a.weight")])
        )
        """The second has the rows of b and a; None where they are the last rows of the first. Separate where that is
        quantised: write strength and decay stay in full precision."""
        self.weights = kernels.DeltaWeights(
            conv_C4=parameters.take_tensor("conv1d.weight").squeeze(1),
            a_log_V=parameters.take_tensor("A_log"),
            dt_bias_V=parameters.take_tensor("dt_bias"),
            norm_D=parameters.take_tensor("norm.weight"),
            eps=config.rms_norm_eps,
            gate=config.output_gate,
        )
        self.form = delta_form(config, self.weights.conv_C4.dtype)
        self.out_proj = parameters.take("out_proj.weight")

    def project(self, x_NH: Tensor, norm: kernels.Norm) -> Tensor:
        return self._ops.norm_linear(x_NH, norm, *self.in_projs)

    def step(self, projected_NP: Tensor, memory: Memory, windows: VerifyBatch) -> Tensor:
        ssm_RVDK, conv_R3C, *ring = memory
        if windows.ring is None:
            return self._ops.gated_delta_step(
                projected_NP, self.weights, ssm_RVDK, conv_R3C, windows.read_row_B, windows.write_rows_BT
            )
        return self._ops.gated_delta_ring_step(
            projected_NP,
            self.weights,
            ssm_RVDK,
            conv_R3C,
            kernels.DeltaRing(*ring),
            windows.read_row_B,
            windows.ring,
            windows.live,
            # A pass begins with an embedding of torch's, which starts when all before it has ended, and what this
            # touches of the pools nothing else in the pass does.
            reads_early=True,
        )

    def prefill(self, projected_NP: Tensor, memory: Memory, batch: kernels.PrefillBatch) -> Tensor:
        ssm_RVDK, conv_R3C = memory[:2]
        mixed_NX = self._ops.gated_delta_prefill(projected_NP, self.weights, ssm_RVDK, conv_R3C, batch)
        assert isinstance(mixed_NX, Tensor)
        return mixed_NX

    def mix_prompt(
        self, x_NH: Tensor, norm: kernels.Norm, memory: Memory, batch: kernels.PrefillBatch
    ) -> Tensor | kernels.ProductInput:
        first_gate = len(self.weights.conv_C4)
        gates = slice(first_gate, first_gate + self.out_proj.shape[1])
        projected = self._ops.norm_linear_before_delta(x_NH, norm, *self.in_projs, gates)
        ssm_RVDK, conv_R3C = memory[:2]
        return self._ops.gated_delta_prefill(
            projected, self.weights, ssm_RVDK, conv_R3C, batch, out_weight=self.out_proj
        )
