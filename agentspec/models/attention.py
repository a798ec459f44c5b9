"""Gated full attention: per-head norms on q and k, partial RoPE, a sigmoid gate on the output.

Owns projections and the order of operations; pages belong to the caller, who passes one layer of the KV pool.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from agentspec import kernels
from agentspec.models.hf_config import TextConfig
from agentspec.models.layers import PrefillInputs, RMSNorm, StepInputs
from agentspec.models.tensors import ParameterScope


class GatedAttention:
    def __init__(self, config: TextConfig, parameters: ParameterScope) -> None:
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.scale = config.head_dim**-0.5
        self.qkv_proj = parameters.take_rows("q_proj.weight", "k_proj.weight", "v_proj.weight")
        self.o_proj = parameters.take("o_proj.weight")
        self.q_norm = RMSNorm(parameters.take("q_norm.weight"), config.rms_norm_eps)
        self.k_norm = RMSNorm(parameters.take("k_norm.weight"), config.rms_norm_eps)

    def step(self, x_NH: Tensor, kv_P2SGD: Tensor, inputs: StepInputs, *, first_position: int = 0) -> Tensor:
        """Attention of a decode window; writes the window's keys and values first. Keys before `first_position` are never read."""
        q_NQD, gate_ND, k_NGD, v_NGD = self._project(x_NH, inputs.cos_NA, inputs.sin_NA)
        q, k, v = (torch.unflatten(x, 0, (inputs.num_slots, inputs.num_tokens)) for x in (q_NQD, k_NGD, v_NGD))
        kernels.write_kv(kv_P2SGD, k, v, inputs.page_table_BP, inputs.start_B)
        o_BTQD = kernels.paged_attention(q, kv_P2SGD, inputs.page_table_BP, inputs.start_B, scale=self.scale, first_position=first_position)
        return self._output(o_BTQD.flatten(0, 1), gate_ND)

    def prefill(self, x_NH: Tensor, kv_P2SGD: Tensor, inputs: PrefillInputs) -> Tensor:
        """Attention of prefill spans; writes their keys and values first."""
        q_NQD, gate_ND, k_NGD, v_NGD = self._project(x_NH, inputs.cos_NA, inputs.sin_NA)
        kernels.write_kv_prefill(kv_P2SGD, k_NGD, v_NGD, inputs.spans)
        o_NQD = kernels.paged_attention_prefill(q_NQD, kv_P2SGD, inputs.spans, scale=self.scale)
        return self._output(o_NQD, gate_ND)

    def prefill_keys_values(self, x_NH: Tensor, kv_P2SGD: Tensor, inputs: PrefillInputs) -> None:
        """Only the stores of `prefill`, for a last layer whose output nobody needs."""
        first_key = 2 * self.num_heads * self.head_dim
        k_NGD, v_NGD = self._keys_values(linear(x_NH, self.qkv_proj[first_key:]), inputs.cos_NA, inputs.sin_NA)
        kernels.write_kv_prefill(kv_P2SGD, k_NGD, v_NGD, inputs.spans)

    def _project(self, x_NH: Tensor, cos_NA: Tensor, sin_NA: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        queries_gates, keys_values = linear(x_NH, self.qkv_proj).tensor_split([2 * self.num_heads * self.head_dim], -1)
        # q_proj's rows hold q and its gate head by head, not all of q before all gates.
        q_NQD, gate_NQD = torch.unflatten(queries_gates, -1, (self.num_heads, 2 * self.head_dim)).chunk(2, -1)
        q_NQD = kernels.apply_rope(self.q_norm(q_NQD), cos_NA, sin_NA)
        return q_NQD, gate_NQD.flatten(1), *self._keys_values(keys_values, cos_NA, sin_NA)

    def _keys_values(self, keys_values: Tensor, cos_NA: Tensor, sin_NA: Tensor) -> tuple[Tensor, Tensor]:
        k_NGD, v_NGD = torch.unflatten(keys_values, -1, (2 * self.num_kv_heads, self.head_dim)).chunk(2, 1)
        return kernels.apply_rope(self.k_norm(k_NGD), cos_NA, sin_NA), v_NGD

    def _output(self, o_NQD: Tensor, gate_ND: Tensor) -> Tensor:
        return linear(o_NQD.flatten(1) * torch.sigmoid(gate_ND), self.o_proj)
