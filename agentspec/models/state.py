"""The model's pools: the form of a state row and of a KV page, and their bytes.

Which row or page belongs to whom is the cache's business; here ids are only pointers.

Shape letters: L linear-attention layers, A attention layers (the MTP layer last), R rows, V value heads, D value dim, K key dim, C conv
channels, H hidden size, P pages, S tokens a page, G key/value heads; in pages D is the head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.models.hf_config import CONV_TAPS, TextConfig
from agentspec.types import BLOCK_TOKENS, ZERO_ROW

SSM_DTYPE = torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class StatePools:
    """Everything a model remembers between calls."""

    ssm_LRVDK: Tensor
    """float32. Recurrent state, value dim before key dim (transformers keeps [V, K, D])."""
    conv_LR3C: Tensor
    """Activation dtype. The last three rows of [q | k | v] before the convolution, oldest first."""
    hidden_RH: Tensor
    """Activation dtype. Post-final-norm hidden of the last token."""
    kv_AP2SGD: Tensor
    """Activation dtype. Keys (after norm and RoPE) at [:, :, 0], values at [:, :, 1]."""

    def tensors(self) -> tuple[Tensor, ...]:
        return self.ssm_LRVDK, self.conv_LR3C, self.hidden_RH, self.kv_AP2SGD

    def row_tensors(self) -> tuple[Tensor, ...]:
        """Layer by layer, so that element r of each tensor is contiguous: a part of row r."""
        return *self.ssm_LRVDK.unbind(), *self.conv_LR3C.unbind(), self.hidden_RH

    def page_tensors(self) -> tuple[Tensor, ...]:
        """The same for pages; neighbouring ones are neighbours in memory."""
        return self.kv_AP2SGD.unbind()


def num_kv_layers(config: TextConfig) -> int:
    return config.num_attention_layers + int(config.has_mtp)


def row_bytes(config: TextConfig, dtype: torch.dtype) -> int:
    """Bytes of one state row over all layers."""
    ssm = config.num_value_heads * config.value_dim * config.key_dim * SSM_DTYPE.itemsize
    conv = (CONV_TAPS - 1) * config.conv_channels * dtype.itemsize
    return config.num_linear_layers * (ssm + conv) + config.hidden_size * dtype.itemsize


def page_bytes(config: TextConfig, dtype: torch.dtype) -> int:
    """Bytes of one KV page over all attention layers and the MTP layer."""
    return num_kv_layers(config) * 2 * BLOCK_TOKENS * config.num_kv_heads * config.head_dim * dtype.itemsize


def allocate_pools(config: TextConfig, *, num_rows: int, num_pages: int, device: torch.device, dtype: torch.dtype) -> StatePools:
    """New pools. ZERO_ROW is zeroed, the rest holds whatever memory held."""
    layers = config.num_linear_layers
    pools = StatePools(
        ssm_LRVDK=torch.empty(layers, num_rows, config.num_value_heads, config.value_dim, config.key_dim, dtype=SSM_DTYPE, device=device),
        conv_LR3C=torch.empty(layers, num_rows, CONV_TAPS - 1, config.conv_channels, dtype=dtype, device=device),
        hidden_RH=torch.empty(num_rows, config.hidden_size, dtype=dtype, device=device),
        kv_AP2SGD=torch.empty(num_kv_layers(config), num_pages, 2, BLOCK_TOKENS, config.num_kv_heads, config.head_dim, dtype=dtype, device=device),
    )
    pools.ssm_LRVDK[:, ZERO_ROW] = 0
    pools.conv_LR3C[:, ZERO_ROW] = 0
    pools.hidden_RH[ZERO_ROW] = 0
    return pools
