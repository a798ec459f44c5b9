"""Mixture-of-experts FFN: top-k routed experts and one shared expert with its own gate.

Owns the parameters; the computation and its order are in the kernels.
"""

from __future__ import annotations

from torch import Tensor

from agentspec import kernels
from agentspec.models.hf_config import MoeConfig
from agentspec.models.tensors import ParameterScope


class MixtureOfExperts:
    """The mixture-of-experts FFN of one layer."""

    def __init__(self, config: MoeConfig, ops: kernels.Backend, parameters: ParameterScope) -> None:
        self._ops = ops
        self.weights = kernels.MixtureWeights(
            router_XH=parameters.take_tensor("gate.weight"),
            top_k=config.top_k,
            first_expert=config.first_expert,
            normalize=config.normalize_top_k,
            gate_up_X2IH=parameters.take("experts.gate_up_proj"),
            down_XHI=parameters.take("experts.down_proj"),
            shared_gate_1H=parameters.take_tensor("shared_expert_gate.weight"),
            shared_gate_up_2IH=parameters.take_rows("shared_expert.gate_proj.weight", "shared_expert.up_proj.weight"),
            shared_down_HI=parameters.take("shared_expert.down_proj.weight"),
        )

    def add_to(
        self, x_NH: Tensor | kernels.OpenSum, norm: kernels.Norm, next_norm: kernels.Norm | None = None
    ) -> Tensor:
        """x plus the block's output on the normed x."""
        return self._ops.add_experts(x_NH, norm, self.weights, next_norm)
