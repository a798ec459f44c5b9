"""The CUDA backend: every operation of a forward and of a decode step as Triton kernels. A backend.Backend; each
operation is tested against `reference`."""

from agentspec.kernels.triton.attention import attention_step
from agentspec.kernels.triton.cache_keys import compute_keys
from agentspec.kernels.triton.chunked_delta import gated_delta_prefill
from agentspec.kernels.triton.copies import append_text, draft_copies
from agentspec.kernels.triton.delta_products import norm_linear_before_delta
from agentspec.kernels.triton.gated_delta import gated_delta_step
from agentspec.kernels.triton.gated_delta_ring import gated_delta_ring_step
from agentspec.kernels.triton.hidden import fold_hidden, save_hidden
from agentspec.kernels.triton.linear_layers import (
    add_ffn,
    add_linear,
    draft_argmax,
    draft_best,
    linear,
    logits,
    norm_linear,
    norm_swiglu,
)
from agentspec.kernels.triton.mixture import add_experts, add_linear_before_experts, expert_sum
from agentspec.kernels.triton.norms import norm_to_rows, pair_norms, rms_norm
from agentspec.kernels.triton.prefill_attention import attention_prefill, store_keys_values
from agentspec.kernels.triton.sampling import argmax, sample
from agentspec.kernels.triton.window import commit_window, force_acceptance, open_window, publish_drafts
from agentspec.kernels.triton.window_columns import take_columns

__all__ = [
    "add_experts",
    "add_ffn",
    "add_linear",
    "add_linear_before_experts",
    "append_text",
    "argmax",
    "attention_prefill",
    "attention_step",
    "commit_window",
    "draft_argmax",
    "draft_best",
    "draft_copies",
    "expert_sum",
    "fold_hidden",
    "force_acceptance",
    "gated_delta_prefill",
    "gated_delta_ring_step",
    "gated_delta_step",
    "linear",
    "logits",
    "norm_linear",
    "norm_linear_before_delta",
    "norm_swiglu",
    "norm_to_rows",
    "open_window",
    "pair_norms",
    "publish_drafts",
    "rms_norm",
    "sample",
    "save_hidden",
    "store_keys_values",
    "take_columns",
]

compute_keys(__name__)
