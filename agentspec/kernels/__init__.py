"""Device operations: one operation, one signature.

Every operation has a torch reference in `reference/`; faster implementations stand behind the same signature and are tested
against it. Callers outside this package import operations from here, never from an implementation. Sampling lives in
`reference.sampling` and is imported by name.

Shape letters: N tokens (or keys), B slots, T tokens a slot, R rows, H hidden size, C conv channels, V value heads, D value dim, K key
dim, Q query heads, G key/value heads, A rotary dims, P pages, S tokens a page, X experts, I expert width, J chosen
experts; in attention D is the head dim.

Layouts of the pools, one layer each: `ssm_RVDK` float32 (value dim before key dim), `conv_R3C` (the last three rows BEFORE the convolution, oldest
first), `hidden_RH`, `kv_P2SGD` (keys at [:, 0], values at [:, 1]).
"""

from agentspec.kernels.reference.attention import paged_attention, paged_attention_prefill, write_kv, write_kv_prefill
from agentspec.kernels.reference.causal_conv import causal_conv, causal_conv_prefill
from agentspec.kernels.reference.gated_delta import gated_delta, gated_delta_prefill
from agentspec.kernels.reference.hidden import read_hidden, write_hidden, write_hidden_prefill
from agentspec.kernels.reference.moe import mix_experts, route_top_k
from agentspec.kernels.reference.norms import gated_rms_norm, rms_norm
from agentspec.kernels.reference.rope import apply_rope, rope_cos_sin
from agentspec.kernels.spans import Span

__all__ = [
    "Span",
    "apply_rope",
    "causal_conv",
    "causal_conv_prefill",
    "gated_delta",
    "gated_delta_prefill",
    "gated_rms_norm",
    "mix_experts",
    "paged_attention",
    "paged_attention_prefill",
    "read_hidden",
    "rms_norm",
    "rope_cos_sin",
    "route_top_k",
    "write_hidden",
    "write_hidden_prefill",
    "write_kv",
    "write_kv_prefill",
]
