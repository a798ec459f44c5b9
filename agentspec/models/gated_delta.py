"""Gated DeltaNet mixer: projections, short convolution, the gated delta rule, gated norm.

Owns projections and the order of operations; the recurrence and everything that touches a state row is in the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.models.hf_config import TextConfig
from agentspec.models.layers import StateRows
from agentspec.models.tensors import ParameterScope


class GatedDeltaNet:
    def __init__(self, config: TextConfig, ops: kernels.Backend, parameters: ParameterScope) -> None:
        self._ops = ops
        rows = parameters.take_rows("in_proj_qkv.weight", "in_proj_z.weight")
        self.in_proj, self.in_proj_ba = rows.stack_full(parameters.take_tensor_rows("in_proj_b.weight", "in_proj_a.weight"))
        """The latter is None where b and a are the last rows of `in_proj`: write strength and decay stay in full precision where the rest is
        quantised."""
        self.weights = kernels.DeltaWeights(
            conv_C4=parameters.take_tensor("conv1d.weight").squeeze(1),
            a_log_V=parameters.take_tensor("A_log"),
            dt_bias_V=parameters.take_tensor("dt_bias"),
            norm_D=parameters.take_tensor("norm.weight"),
            eps=config.rms_norm_eps,
            gate=config.output_gate,
        )
        self.out_proj = parameters.take("out_proj.weight")

    def step(self, x_NH: Tensor, norm: kernels.Norm, ssm_RVDK: Tensor, conv_R3C: Tensor, rows: StateRows) -> Tensor:
        """x plus the mixer over a decode window: reads each slot's row, writes the state after every column."""
        projected_NP = self._ops.norm_linear(x_NH, norm, self.in_proj, self.in_proj_ba)
        o_ND = self._ops.gated_delta_step(projected_NP, self.weights, ssm_RVDK, conv_R3C, rows.read_row_B, rows.write_rows_BT)
        return self._ops.add_linear(x_NH, o_ND, self.out_proj)

    def prefill(self, x_NH: Tensor, norm: kernels.Norm, ssm_RVDK: Tensor, conv_R3C: Tensor, batch: kernels.PrefillBatch) -> Tensor:
        """x plus the mixer over prompt tokens: reads each span's row, writes the wanted states."""
        projected_NP = self._ops.norm_linear(x_NH, norm, self.in_proj, self.in_proj_ba)
        o_ND = self._ops.gated_delta_prefill(projected_NP, self.weights, ssm_RVDK, conv_R3C, batch)
        return self._ops.add_linear(x_NH, o_ND, self.out_proj)

    def ride(self, x_NH: Tensor, norm: kernels.Norm, ssm_RVDK: Tensor, conv_R3C: Tensor, batch: kernels.PrefillBatch, rows: StateRows) -> Tensor:
        """`prefill` for the batch's tokens, which come first, and `step` for the windows behind them; the weights are read once."""
        num_tokens = len(batch.token_ids_N)
        projected_NP = self._ops.norm_linear(x_NH, norm, self.in_proj, self.in_proj_ba)
        prompts_ND = self._ops.gated_delta_prefill(projected_NP[:num_tokens], self.weights, ssm_RVDK, conv_R3C, batch)
        windows_ND = self._ops.gated_delta_step(projected_NP[num_tokens:], self.weights, ssm_RVDK, conv_R3C, rows.read_row_B, rows.write_rows_BT)
        return self._ops.add_linear(x_NH, torch.cat((prompts_ND, windows_ND)), self.out_proj)
