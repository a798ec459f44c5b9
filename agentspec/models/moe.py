"""Mixture-of-experts FFN: top-k routed experts and one shared expert behind its own gate."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from agentspec import kernels
from agentspec.models.hf_config import MoeConfig
from agentspec.models.layers import SwiGLU
from agentspec.models.tensors import ParameterScope


class MixtureOfExperts:
    def __init__(self, config: MoeConfig, parameters: ParameterScope) -> None:
        self.top_k = config.top_k
        self.normalize_top_k = config.normalize_top_k
        self.router = parameters.take("gate.weight")
        self.gate_up_X2IH = parameters.take("experts.gate_up_proj")
        self.down_XHI = parameters.take("experts.down_proj")
        self.shared_expert = SwiGLU(parameters.under("shared_expert."))
        self.shared_gate = parameters.take("shared_expert_gate.weight")

    def __call__(self, x_NH: Tensor) -> Tensor:
        weights_NJ, expert_ids_NJ = kernels.route_top_k(linear(x_NH, self.router), self.top_k, self.normalize_top_k)
        routed = kernels.mix_experts(x_NH, weights_NJ, expert_ids_NJ, self.gate_up_X2IH, self.down_XHI)
        return routed + torch.sigmoid(linear(x_NH, self.shared_gate)) * self.shared_expert(x_NH)
