"""Mixture-of-experts FFN: top-k routed experts and one shared expert behind its own gate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from agentspec import kernels
from agentspec.models.hf_config import MoeConfig
from agentspec.models.tensors import ParameterScope


class MixtureOfExperts:
    def __init__(self, config: MoeConfig, ops: kernels.Backend, parameters: ParameterScope) -> None:
        self._ops = ops
        self.top_k = config.top_k
        self.normalize_top_k = config.normalize_top_k
        self.router = parameters.take("gate.weight")
        self.gate_up_X2IH = parameters.take("experts.gate_up_proj")
        self.down_XHI = parameters.take("experts.down_proj")
        self.shared_gate_up = parameters.take_rows("shared_expert.gate_proj.weight", "shared_expert.up_proj.weight")
        self.shared_down = parameters.take("shared_expert.down_proj.weight")
        self.shared_gate = parameters.take("shared_expert_gate.weight")

    def add_to(self, x_NH: Tensor, norm: kernels.Norm) -> Tensor:
        """x plus the block's output on the normed x."""
        normed_NH = self._ops.rms_norm(x_NH, norm)
        weights_NJ, expert_ids_NJ = kernels.route_top_k(linear(normed_NH, self.router), self.top_k, self.normalize_top_k)
        routed_NH = kernels.mix_experts(normed_NH, weights_NJ, expert_ids_NJ, self.gate_up_X2IH, self.down_XHI)
        gate, up = linear(normed_NH, self.shared_gate_up).chunk(2, -1)
        shared_NH = linear(silu(gate) * up, self.shared_down)
        return x_NH + (routed_NH + torch.sigmoid(linear(normed_NH, self.shared_gate)) * shared_NH)
