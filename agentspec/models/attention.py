"""Gated full attention: per-head norms on q and k, partial RoPE, a sigmoid gate on the output.

Owns projections and the order of operations; pages belong to the caller, who passes one layer of the KV pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.models.hf_config import TextConfig
from agentspec.models.layers import StepInputs
from agentspec.models.tensors import ParameterScope


class GatedAttention:
    def __init__(self, config: TextConfig, ops: kernels.Backend, parameters: ParameterScope) -> None:
        self._ops = ops
        self.weights = kernels.AttentionWeights(
            q_norm=kernels.Norm(weight=parameters.take_tensor("q_norm.weight"), eps=config.rms_norm_eps),
            k_norm=kernels.Norm(weight=parameters.take_tensor("k_norm.weight"), eps=config.rms_norm_eps),
            scale=config.head_dim**-0.5,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self.qkv_proj = parameters.take_rows("q_proj.weight", "k_proj.weight", "v_proj.weight")
        self.o_proj = parameters.take("o_proj.weight")

    def step(self, x_NH: Tensor, norm: kernels.Norm, kv_P2SGD: Tensor, inputs: StepInputs, *, first_position: int = 0) -> Tensor:
        """x plus the attention of a decode window; writes the window's keys and values first. Keys before `first_position` are never read."""
        projected_NP = self._ops.norm_linear(x_NH, norm, self.qkv_proj)
        o_ND = self._ops.attention_step(
            projected_NP, self.weights, inputs.rope, kv_P2SGD, inputs.page_table_BP, inputs.start_B, first_position=first_position
        )
        return self._ops.add_linear(x_NH, o_ND, self.o_proj)

    def prefill(self, x_NH: Tensor, norm: kernels.Norm, kv_P2SGD: Tensor, rope: kernels.RopeTable, batch: kernels.PrefillBatch) -> Tensor:
        """x plus the attention of prompt tokens; writes their keys and values first."""
        projected_NP = self._ops.norm_linear(x_NH, norm, self.qkv_proj)
        o_ND = self._ops.attention_prefill(projected_NP, self.weights, rope, kv_P2SGD, batch)
        return self._ops.add_linear(x_NH, o_ND, self.o_proj)

    def ride(
        self, x_NH: Tensor, norm: kernels.Norm, kv_P2SGD: Tensor, rope: kernels.RopeTable, batch: kernels.PrefillBatch, inputs: StepInputs
    ) -> Tensor:
        """`prefill` for the batch's tokens, which come first, and `step` for the windows behind them; the weights are read once."""
        num_tokens = len(batch.token_ids_N)
        projected_NP = self._ops.norm_linear(x_NH, norm, self.qkv_proj)
        prompts_ND = self._ops.attention_prefill(projected_NP[:num_tokens], self.weights, rope, kv_P2SGD, batch)
        windows_ND = self._ops.attention_step(
            projected_NP[num_tokens:], self.weights, inputs.rope, kv_P2SGD, inputs.page_table_BP, inputs.start_B, first_position=0
        )
        return self._ops.add_linear(x_NH, torch.cat((prompts_ND, windows_ND)), self.o_proj)

    def prefill_keys_values(self, x_NH: Tensor, norm: kernels.Norm, kv_P2SGD: Tensor, rope: kernels.RopeTable, batch: kernels.PrefillBatch) -> None:
        """Only the stores of `prefill`, for a last layer whose output nobody needs."""
        first_key = 2 * self.weights.num_heads * self.weights.head_dim
        projected_NK = self._ops.norm_linear(x_NH, norm, self.qkv_proj.cut((slice(first_key, None),)))
        self._ops.store_keys_values(projected_NK, self.weights, rope, kv_P2SGD, batch)
