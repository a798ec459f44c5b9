"""Device operations: one operation, one signature.

A `Backend` has every operation of a forward and of a decode step; `backend(device)` picks it. Its reference, in `reference/`, is plain torch and runs
anywhere; faster ones stand behind the same signatures and are tested against it. Prefill's operations have the reference alone so far, and are
imported from here.

Shape letters: N tokens (or keys), B slots, T tokens a slot, R rows, H hidden size, C conv channels, V value heads, D value dim, K key
dim, Q query heads, G key/value heads, A half of the rotary dims, P pages, S tokens a page, X experts, I expert width, J chosen
experts; in attention D is the head dim.

Layouts of the pools, one layer each: `ssm_RVDK` float32 (value dim before key dim), `conv_R3C` (the last three rows BEFORE the convolution, oldest
first), `hidden_RH`, `kv_P2SGD` (keys at [:, 0], values at [:, 1]).
"""

from __future__ import annotations

import functools
import importlib
from typing import cast

import torch

from agentspec.kernels import reference
from agentspec.kernels.backend import AttentionWeights, Backend, DeltaWeights, Norm, RopeTable
from agentspec.kernels.reference.attention import paged_attention_prefill, write_kv_prefill
from agentspec.kernels.reference.causal_conv import causal_conv_prefill
from agentspec.kernels.reference.fused import split_heads, split_keys_values
from agentspec.kernels.reference.gated_delta import gated_delta_prefill
from agentspec.kernels.reference.hidden import read_hidden, write_hidden_prefill
from agentspec.kernels.reference.moe import mix_experts, route_top_k
from agentspec.kernels.reference.norms import gated_rms_norm
from agentspec.kernels.reference.rope import rope_cos_sin
from agentspec.kernels.spans import Span

__all__ = [
    "AttentionWeights",
    "Backend",
    "DeltaWeights",
    "Norm",
    "RopeTable",
    "Span",
    "backend",
    "causal_conv_prefill",
    "gated_delta_prefill",
    "gated_rms_norm",
    "mix_experts",
    "paged_attention_prefill",
    "read_hidden",
    "rope_cos_sin",
    "route_top_k",
    "split_heads",
    "split_keys_values",
    "write_hidden_prefill",
    "write_kv_prefill",
]


@functools.cache
def backend(device: torch.device) -> Backend:
    """The operations for tensors on `device`. Triton is imported for CUDA alone: elsewhere it may not be installed."""
    if device.type == "cuda":
        return cast(Backend, importlib.import_module("agentspec.kernels.triton"))
    return reference
