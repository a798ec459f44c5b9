"""A Qwen3.5 dense text model with its MTP head, differentiable, over packed sequences.

Owns the order of layers and the MTP head's chain. The weights are a plain dict under the engine's canonical names
(agentspec/models/tensors.py); training and storage are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding

from agentspec.models.hf_config import TextConfig
from scripts.tiny_agent import blocks, plain_mixers
from scripts.tiny_agent.architecture import layer_weights
from scripts.tiny_agent.blocks import Weights
from scripts.tiny_agent.packing import Packed

EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which implementations the model runs."""

    attention: Callable[[Tensor, Tensor, Tensor, Packed, float], tuple[Tensor, Tensor]]
    gated_delta: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Packed], Tensor]
    blocks: Any
    """The functions of blocks.py, compiled or not."""


PLAIN = Kernels(plain_mixers.causal_attention, plain_mixers.gated_delta, blocks)


def compiled(module: ModuleType) -> Any:
    """The module's public functions of tensors, compiled for fixed shapes; each is compiled at its first call."""
    names = (
        "gated_delta_inputs",
        "gated_delta_output",
        "attention_inputs",
        "attention_output",
        "mtp_join",
        "add_keys",
        "rms_norm",
    )
    functions = {name: torch.compile(getattr(module, name), dynamic=False) for name in names}
    return type("CompiledBlocks", (), {name: staticmethod(function) for name, function in functions.items()})


class Model:
    """Weights and how to run them. `dtype` is that of activations."""

    def __init__(self, config: TextConfig, weights: Weights, *, dtype: torch.dtype, kernels: Kernels = PLAIN) -> None:
        assert config.tied
        assert config.num_heads % config.num_kv_heads == 0
        self.config, self.weights, self.dtype, self._kernels = config, weights, dtype, kernels
        self._layers = [layer_weights(weights, f"model.layers.{i}.") for i in range(len(config.layer_types))]
        self._mtp = layer_weights(weights, "mtp.")
        self._mtp_layer = layer_weights(weights, "mtp.layers.0.")
        self._scale = config.head_dim**-0.5

    @property
    def head(self) -> Tensor:
        return self.weights[EMBEDDING]

    def hidden(self, tokens_T: Tensor, packed: Packed) -> Tensor:
        """[T, H] after the final norm: what the output head scores."""
        kernels = self._kernels
        cos_TA, sin_TA = blocks.rope_tables(packed.positions, self.config)
        x_TH = self._embed(tokens_T, self.head)
        for layer, kind in zip(self._layers, self.config.layer_types, strict=True):
            if kind == "linear_attention":
                q, k, v, g, beta, z_TVD = kernels.blocks.gated_delta_inputs(x_TH, packed.positions, layer, self.config)
                o_TVD = kernels.gated_delta(q, k, v, g, beta, packed)
                x_TH = kernels.blocks.gated_delta_output(x_TH, o_TVD, z_TVD, layer, self.config)
            else:
                q, k, v, gate = kernels.blocks.attention_inputs(x_TH, cos_TA, sin_TA, layer, self.config)
                o_TND, _ = kernels.attention(q, k, v, packed, self._scale)
                x_TH = kernels.blocks.attention_output(x_TH, o_TND, gate, layer, self.config)
        return cast(Tensor, kernels.blocks.rms_norm(x_TH, self.weights["model.norm.weight"], self.config.rms_norm_eps))

    def drafts(
        self, tokens_T: Tensor, hidden_TH: Tensor, packed: Packed, num_steps: int, embedding_VH: Tensor | None = None
    ) -> list[Tensor]:
        """The MTP head's hiddens [T, H] of each step of its chain; step j (from 0) at token i scores token i + 2 + j.

        As the engine drafts (agentspec/mtp/mtp_drafter.py), with the true tokens as drafts: step 0 pairs the trunk's
        hidden of token i with token i + 1; each further step takes the step before's output as the hidden and one more
        token, and sees the keys of step 0 up to token i and of its own chain. Meaningless at the end of a sequence,
        where token i + 1 + j is another's. `embedding_VH`: in place of the model's, to steer gradients."""
        embedding_VH = self.head if embedding_VH is None else embedding_VH
        head, hiddens = self._kernels.blocks, []
        own: list[tuple[Tensor, Tensor]] = []
        base = None
        m_TH = hidden_TH
        for step in range(num_steps):
            cos_TA, sin_TA = blocks.rope_tables(packed.positions + step + 1, self.config)
            x_TH = head.mtp_join(self._embed(tokens_T.roll(-step - 1), embedding_VH), m_TH, self._mtp, self.config)
            q, k, v, gate = head.attention_inputs(x_TH, cos_TA, sin_TA, self._mtp_layer, self.config)
            if base is None:
                base = k, v
                o_TND, _ = self._kernels.attention(q, k, v, packed, self._scale)
            else:
                own.append((k, v))
                o_TND, lse_TN = self._attention_and_sum(q, *base, packed)
                own_k, own_v = (torch.stack(tensors) for tensors in zip(*own, strict=True))
                o_TND = head.add_keys(q, o_TND, lse_TN, own_k, own_v, self._scale)
            x_TH = head.attention_output(x_TH, o_TND, gate, self._mtp_layer, self.config)
            m_TH = head.rms_norm(x_TH, self._mtp["norm.weight"], self.config.rms_norm_eps)
            hiddens.append(m_TH)
        return hiddens

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V], by the trunk's or the MTP head's hidden alike."""
        return blocks.linear(hidden, self.head).float()

    def _embed(self, tokens_T: Tensor, embedding_VH: Tensor) -> Tensor:
        return embedding(tokens_T, embedding_VH).to(self.dtype)

    def _attention_and_sum(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
        """Attention and the log-sum-exp of its scores, both differentiable.

        Flash attention has no gradient for the sum. But the sum's derivative by a score is that score's share p, so
        scale * q . (sum of p k) for fixed p has the same one by q and by k; the attention with k itself as values, with
        p held fixed, computes it."""
        o_TND, lse_TN = self._kernels.attention(q, k, v, packed, self._scale)
        lse_TN = lse_TN.detach()
        if torch.is_grad_enabled():
            mean_k, _ = self._kernels.attention(q.detach(), k.detach(), k, packed, self._scale)
            linearized = (q.float() * mean_k.float()).sum(-1) * self._scale
            lse_TN = lse_TN + linearized - linearized.detach()
        return o_TND, lse_TN
