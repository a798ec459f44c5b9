"""Gated full attention: per-head norms on q and k, partial RoPE, a sigmoid gate on the output.

Owns the projections and the order of operations. Keys and values are in pages that the caller owns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec import kernels
from agentspec.models.hf_config import TextConfig
from agentspec.models.protocol import VerifyBatch
from agentspec.models.state import Memory, Part, StateForm
from agentspec.models.tensors import ParameterScope
from agentspec.types import BLOCK_TOKENS


def attention_form(config: TextConfig, dtype: torch.dtype, *, fp8: bool = False) -> StateForm:
    """Keys (after norm and RoPE) at [:, :, 0] of the pool of the A attention layers, values at [:, :, 1].

    dtype: of activations. fp8: keys and values are stored as 8-bit floats with an exponent for each token and head
    (kernels/reference/fp8_pages.py); otherwise in dtype."""
    tokens, heads = BLOCK_TOKENS, config.num_kv_heads
    values = Part("kv_AP2SGD", (2, tokens, heads, config.head_dim), kernels.FP8 if fp8 else dtype)
    exponents = Part("kv_exponent_AP2GS", (2, heads, tokens), torch.int8)
    return StateForm(page_parts=(values, exponents) if fp8 else (values,))


class GatedAttention:
    """The attention mixer of one layer."""

    def __init__(
        self,
        config: TextConfig,
        ops: kernels.Backend,
        parameters: ParameterScope,
        rope: kernels.RopeTable,
        *,
        first_position: int = 0,
        fp8_pages: bool = False,
    ) -> None:
        """first_position: keys before it are never read. fp8_pages: see `attention_form`."""
        self._ops = ops
        self._rope = rope
        self._first_position = first_position
        self.weights = kernels.AttentionWeights(
            q_norm=kernels.Norm(weight=parameters.take_tensor("q_norm.weight"), eps=config.rms_norm_eps),
            k_norm=kernels.Norm(weight=parameters.take_tensor("k_norm.weight"), eps=config.rms_norm_eps),
            scale=config.head_dim**-0.5,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self.form = attention_form(config, self.weights.q_norm.weight.dtype, fp8=fp8_pages)
        self.qkv_proj = parameters.take_rows("q_proj.weight", "k_proj.weight", "v_proj.weight")
        self.in_projs: tuple[kernels.Weight, Tensor | None] = self.qkv_proj, None
        self.out_proj = parameters.take("o_proj.weight")

    def project(self, x_NH: Tensor, norm: kernels.Norm) -> Tensor:
        return self._ops.norm_linear(x_NH, norm, self.qkv_proj)

    def step(self, projected_NP: Tensor, memory: Memory, windows: VerifyBatch) -> Tensor:
        return self.attend(projected_NP, memory, windows.length_B, windows.page_table_BP, windows.live)

    def attend(
        self,
        projected_NP: Tensor,
        memory: Memory,
        start_B: Tensor,
        page_table_BP: Tensor,
        live: kernels.LiveColumns | None = None,
    ) -> Tensor:
        """Like `step`, for windows with column 0 at position start_B (int64)."""
        kv_P2SGD, exponent_P2GS = _pools(memory)
        return self._ops.attention_step(
            projected_NP,
            self.weights,
            self._rope,
            kv_P2SGD,
            page_table_BP,
            start_B,
            first_position=self._first_position,
            exponent_P2GS=exponent_P2GS,
            live=live,
        )

    def prefill(self, projected_NP: Tensor, memory: Memory, batch: kernels.PrefillBatch) -> Tensor:
        kv_P2SGD, exponent_P2GS = _pools(memory)
        return self._ops.attention_prefill(
            projected_NP, self.weights, self._rope, kv_P2SGD, batch, exponent_P2GS=exponent_P2GS
        )

    def mix_prompt(self, x_NH: Tensor, norm: kernels.Norm, memory: Memory, batch: kernels.PrefillBatch) -> Tensor:
        return self.prefill(self.project(x_NH, norm), memory, batch)

    def prefill_keys_values(
        self, x_NH: Tensor, norm: kernels.Norm, memory: Memory, batch: kernels.PrefillBatch
    ) -> None:
        """Do only the stores of `prefill`, for a last layer whose output isn't needed."""
        kv_P2SGD, exponent_P2GS = _pools(memory)
        first_key = 2 * self.weights.num_heads * self.weights.head_dim
        projected_NK = self._ops.norm_linear(x_NH, norm, self.qkv_proj.cut((slice(first_key, None),)))
        self._ops.store_keys_values(
            projected_NK, self.weights, self._rope, kv_P2SGD, batch, exponent_P2GS=exponent_P2GS
        )


def _pools(memory: Memory) -> tuple[Tensor, Tensor | None]:
    """(keys and values, their exponents if they are in FP8)."""
    return memory[0], memory[1] if len(memory) > 1 else None
