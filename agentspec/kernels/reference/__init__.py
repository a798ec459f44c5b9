"""The reference backend: every operation in plain torch. Slow and readable; faster backends are tested against it. A
backend.Backend."""

from agentspec.kernels.reference.copies import append_text, draft_copies
from agentspec.kernels.reference.fused import (
    add_experts,
    add_ffn,
    add_linear,
    add_linear_before_experts,
    argmax,
    attention_prefill,
    attention_step,
    draft_argmax,
    draft_best,
    expert_sum,
    gated_delta_prefill,
    gated_delta_step,
    linear,
    logits,
    norm_linear,
    norm_linear_before_delta,
    norm_swiglu,
    norm_to_rows,
    pair_norms,
    rms_norm,
    store_keys_values,
    take_columns,
)
from agentspec.kernels.reference.gated_delta_ring import fold_hidden, gated_delta_ring_step
from agentspec.kernels.reference.hidden import save_hidden
from agentspec.kernels.reference.sampling import sample
from agentspec.kernels.reference.window import commit_window, force_acceptance, open_window, publish_drafts

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
