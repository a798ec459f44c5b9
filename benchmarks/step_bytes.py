"""The compulsory bytes of a decode step, counted from a model's shapes and the formats of its weights.

The number of experts that a step reads doesn't follow from shapes: it is measured by benchmarks/experts_touched.py and
passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from agentspec.kernels import SCALE_BLOCK
from agentspec.models.attention import attention_form
from agentspec.models.fp8_drafts import quantize_mtp_layer
from agentspec.models.hf_config import TextConfig
from agentspec.models.outline import META, parameters_of
from agentspec.models.quantization import is_convertible
from agentspec.models.qwen3_5 import state_forms
from agentspec.models.shards import SINGLE_RANK, Rank, rank_config
from agentspec.models.state import entry_bytes, page_bytes, row_bytes
from agentspec.models.tensors import HEAD, head_scheme, parameter_shapes, quantized_schemes
from agentspec.types import BLOCK_TOKENS, FOLD_TOKENS

ROUTED = ".mlp.experts."
"""Part of the names of parameters that are stacks over all experts of a layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """Mean number of distinct experts that a model with a mixture reads."""

    trunk: float
    """In one layer of the trunk, per step."""
    draft: float
    """In the MTP layer, per forward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """Compulsory bytes of a decode step; data that serves the whole batch is counted once."""

    weights: int
    """Layers and final norm of the trunk, without routed experts."""
    experts: int
    """Routed experts of the trunk that at least one token of the step chose."""
    head: int
    mtp: int
    """The MTP layer with its chosen experts, once for each of the k drafts, which depend on each other."""
    draft_head: int
    """The head's rows of the draft vocabulary, likewise."""
    state: int
    """For each slot one row read and k + 1 written, or with rings what `ring_bytes` counts."""
    kv: int
    """Keys and values of the context, in the trunk's attention layers once and in the MTP layer k times, for each
    slot."""

    @property
    def total(self) -> int:
        return self.weights + self.experts + self.head + self.mtp + self.draft_head + self.state + self.kv


def step_bytes(
    config: TextConfig,
    *,
    batch: int,
    num_drafted: int,
    context: float,
    draft_vocab: int,
    experts: Experts | None = None,
    fp8_drafts: bool = False,
    fp8_pages: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    num_copies: int = 0,
    ring_emitted: float | None = None,
    rank: Rank = SINGLE_RANK,
) -> StepBytes:
    """Count the bytes of a step on a rank. Activations are small and not counted.

    Args:
        context: tokens in each slot's state.
        draft_vocab: tokens that drafts are chosen from.
        experts: of a model with a mixture, and of no other.
        fp8_drafts: the MTP layer and the draft head are in 8 bits, whatever the checkpoint has.
        fp8_pages: keys and values are in 8 bits.
        num_copies: columns behind the MTP drafts'.
        ring_emitted: tokens that a step emits, where slots have rings; None: they have none.
        rank: of those that share the model.
    """
    assert (experts is None) == (config.moe is None), "a mixture's bytes need the chosen experts"
    sizes = parameter_bytes(config, dtype, fp8_drafts=fp8_drafts, rank=rank)
    config = rank_config(config, rank)
    trunk = {name: size for name, size in sizes.items() if name.startswith(("model.layers.", "model.norm."))}
    mtp = {name: size for name, size in sizes.items() if name.startswith("mtp.")}
    weights, draft = (sum(size for name, size in part.items() if ROUTED not in name) for part in (trunk, mtp))
    chosen = 0.0
    if config.moe is not None and experts is not None:
        chosen = routed_bytes(trunk) * experts.trunk / config.moe.num_experts
        draft += round(routed_bytes(mtp) * experts.draft / config.moe.num_experts)
    token_bytes = page_bytes(state_forms(config, dtype, fp8_pages=fp8_pages)) // BLOCK_TOKENS
    layer_bytes = page_bytes([attention_form(config, dtype, fp8=fp8_pages)]) // BLOCK_TOKENS
    mtp_token_bytes = layer_bytes if config.has_mtp else 0
    head_row = config.hidden_size * dtype.itemsize
    return StepBytes(
        weights=weights,
        experts=round(chosen),
        head=sizes.get(HEAD, config.vocab_size // rank.count * head_row),
        mtp=num_drafted * draft,
        draft_head=num_drafted * draft_head_bytes(config, -(-draft_vocab // rank.count), dtype, fp8=fp8_drafts),
        state=batch
        * (
            (num_drafted + num_copies + 2) * row_bytes(state_forms(config, dtype))
            if ring_emitted is None
            else ring_bytes(config, num_columns=num_drafted + num_copies + 1, emitted=ring_emitted, dtype=dtype)
        ),
        kv=round(batch * context * (token_bytes - mtp_token_bytes + num_drafted * mtp_token_bytes)),
    )


def ring_bytes(config: TextConfig, *, num_columns: int, emitted: float, dtype: torch.dtype) -> int:
    """State bytes that a step moves for a slot with a ring: one row read, a row written every FOLD_TOKENS tokens, the
    entries behind the row (without their convolution inputs, of which three are read), and an entry for each column."""
    forms = state_forms(config, dtype)
    replayed = sum(
        part.nbytes for form in forms for part in form.ring_parts if part.name.startswith(("ring_key", "ring_delta"))
    )
    num_entries = (FOLD_TOKENS - 1) / 2 + emitted
    rows = (1 + emitted / FOLD_TOKENS) * row_bytes(forms)
    return round(rows + num_entries * replayed + num_columns * entry_bytes(forms))


def parameter_bytes(
    config: TextConfig, dtype: torch.dtype, *, fp8_drafts: bool = False, rank: Rank = SINGLE_RANK
) -> dict[str, int]:
    """Bytes of a rank's part of every parameter on a GPU, by canonical name."""
    parameters = parameters_of(config, dtype=dtype, rank=rank)
    if fp8_drafts:
        quantize_mtp_layer(parameters)
    return {name: parameter.nbytes for name, parameter in parameters.items()}


def draft_head_bytes(config: TextConfig, num_rows: int, dtype: torch.dtype, *, fp8: bool) -> int:
    """Rows of the draft head. fp8: they are in 8 bits, if they don't keep the form of the head (models/heads.py)."""
    shape, scheme = (num_rows, config.hidden_size), head_scheme(config)
    if scheme is not None:
        rows = scheme.empty(shape, device=META, dtype=dtype, block_rows=SCALE_BLOCK)
        if rows.can_draft:
            return rows.nbytes
    return weight_bytes(shape, dtype, fp8=fp8)


def names_in_fp8(config: TextConfig, *, fp8_drafts: bool) -> frozenset[str]:
    """Parameters in 8 bits: the checkpoint's, and with fp8_drafts also the MTP layer's."""
    drafts = [name for name in parameter_shapes(config) if name.startswith("mtp.") and is_convertible(name)]
    stored = frozenset(name for name, scheme in quantized_schemes(config).items() if scheme.bits == 8)
    return stored.union(drafts if fp8_drafts else ())


def weight_bytes(shape: tuple[int, ...], dtype: torch.dtype, *, fp8: bool) -> int:
    """Bytes of a tensor, or of 8-bit values with their scales."""
    if not fp8:
        return math.prod(shape) * dtype.itemsize
    *stack, num_rows, depth = shape
    num_scales = math.prod(stack) * -(-num_rows // SCALE_BLOCK) * -(-depth // SCALE_BLOCK)
    return math.prod(shape) + num_scales * torch.float32.itemsize


def routed_bytes(sizes: dict[str, int]) -> int:
    """Bytes of all routed experts among these parameters."""
    return sum(size for name, size in sizes.items() if ROUTED in name)
