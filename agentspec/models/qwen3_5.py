"""Qwen3.5 (dense and MoE) and Qwen3-Next with the MTP head: the blocks that a config asks for, and their parameters."""

from __future__ import annotations

import torch

from agentspec import kernels
from agentspec.models.attention import GatedAttention, attention_form
from agentspec.models.gated_delta import GatedDeltaNet, delta_form
from agentspec.models.hf_config import TextConfig
from agentspec.models.hybrid import HybridModel
from agentspec.models.layers import Mixer
from agentspec.models.state import StateForm, hidden_form
from agentspec.models.tensors import ParameterScope


def state_forms(config: TextConfig, dtype: torch.dtype, *, fp8_pages: bool = False) -> list[StateForm]:
    """The state of each layer, of the MTP layer, and the hidden column. dtype: of activations. fp8_pages: see
    `attention_form`."""
    recurrent, attention = delta_form(config, dtype), attention_form(config, dtype, fp8=fp8_pages)
    forms = [recurrent if layer_type == "linear_attention" else attention for layer_type in config.layer_types]
    return [*forms, *[attention] * config.has_mtp, hidden_form(config.hidden_size, dtype)]


class Qwen3_5Model(HybridModel):  # noqa: N801  the family's name has an underscore
    """A loaded model."""

    def _mixer(self, config: TextConfig, index: int, parameters: ParameterScope, rope: kernels.RopeTable) -> Mixer:
        if config.layer_types[index] == "linear_attention":
            return GatedDeltaNet(config, self._ops, parameters.under("linear_attn."))
        return GatedAttention(config, self._ops, parameters.under("self_attn."), rope, fp8_pages=self._fp8_pages)
