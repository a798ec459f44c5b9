"""Gated DeltaNet mixer: projections, short convolution, the gated delta rule, gated norm.

Owns projections and the order of operations; the recurrence and everything that touches a state row is in the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from agentspec import kernels
from agentspec.models.hf_config import TextConfig
from agentspec.models.layers import PrefillInputs, StateRows, StepInputs
from agentspec.models.tensors import ParameterScope


class GatedDeltaNet:
    def __init__(self, config: TextConfig, parameters: ParameterScope) -> None:
        self.eps = config.rms_norm_eps
        self.output_gate = config.output_gate
        heads, values = config.num_value_heads, config.num_value_heads * config.value_dim
        self.head_shape = (heads, config.value_dim)
        self.sizes = [config.conv_channels, values, heads, heads]
        self.in_proj = parameters.take_rows("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight")
        self.conv_weight_C4 = parameters.take("conv1d.weight").squeeze(1)
        self.a_log_V = parameters.take("A_log")
        self.dt_bias_V = parameters.take("dt_bias")
        self.norm_weight = parameters.take("norm.weight")
        self.out_proj = parameters.take("out_proj.weight")

    def step(self, x_NH: Tensor, ssm_RVDK: Tensor, conv_R3C: Tensor, inputs: StepInputs, rows: StateRows) -> Tensor:
        """A decode window: reads each slot's row, writes the state after every column."""
        window = (inputs.num_slots, inputs.num_tokens)
        qkv, z, b, a = torch.split(linear(x_NH, self.in_proj), self.sizes, -1)
        qkv_BTC = kernels.causal_conv(torch.unflatten(qkv, 0, window), self.conv_weight_C4, conv_R3C, rows.read_row_B, rows.write_rows_BT)
        o_BTVD = kernels.gated_delta(
            qkv_BTC,
            torch.unflatten(a, 0, window),
            torch.unflatten(b, 0, window),
            self.a_log_V,
            self.dt_bias_V,
            ssm_RVDK,
            rows.read_row_B,
            rows.write_rows_BT,
        )
        return self._output(o_BTVD.flatten(0, 1), z)

    def prefill(self, x_NH: Tensor, ssm_RVDK: Tensor, conv_R3C: Tensor, inputs: PrefillInputs) -> Tensor:
        """Prefill spans: reads each span's row, writes the state at its wanted counts."""
        qkv, z, b, a = torch.split(linear(x_NH, self.in_proj), self.sizes, -1)
        qkv_NC = kernels.causal_conv_prefill(qkv, self.conv_weight_C4, conv_R3C, inputs.spans)
        o_NVD = kernels.gated_delta_prefill(qkv_NC, a, b, self.a_log_V, self.dt_bias_V, ssm_RVDK, inputs.spans)
        return self._output(o_NVD, z)

    def _output(self, o_NVD: Tensor, z: Tensor) -> Tensor:
        z_NVD = torch.unflatten(z, -1, self.head_shape)
        normed_NVD = kernels.gated_rms_norm(o_NVD, z_NVD, self.norm_weight, self.eps, self.output_gate)
        return linear(normed_NVD.flatten(1), self.out_proj)
