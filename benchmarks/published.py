"""Published sizes of Qwen3.5 as configs in code, models of them with made-up weights, and the bytes that one of their steps must move.

Knows shapes alone: no checkpoint, no tokenizer, no text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agentspec.kernels import PrefillBatch
from agentspec.models.hf_config import TextConfig, parse_text_config
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.state import page_bytes, row_bytes
from agentspec.models.tensors import parameter_dtype, parameter_shapes, random_parameters
from agentspec.types import BLOCK_TOKENS, ZERO_ROW, ModelSpec

NUM_REAL_TOKENS = 248_077
"""Ids of the family's tokenizer; the rows of the embedding above them are padding."""

STATE_SCALE = 0.05
"""Standard deviation of made-up recurrent states: what they read out is of the size of what a few written tokens do."""


def _dense(hidden: int, layers: int, heads: tuple[int, int], value_heads: int, ffn: int, *, tied: bool) -> TextConfig:
    text = {
        "vocab_size": 248_320,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "intermediate_size": ffn,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "full_attention_interval": 4,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    }
    return parse_text_config({"model_type": "qwen3_5", "tie_word_embeddings": tied, "text_config": text})


CONFIGS = {
    "0.8B": _dense(1024, 24, (8, 2), 16, 3584, tied=True),
    "4B": _dense(2560, 32, (16, 4), 32, 9216, tied=True),
    "9B": _dense(4096, 32, (16, 4), 32, 12288, tied=False),
    "27B": _dense(5120, 64, (24, 4), 48, 17408, tied=False),
}


class PrefilledModel(Qwen3_5Model):
    """A model whose prompts may count as computed: then prefill does nothing, and the rows and pages that it would have written hold random values.

    So a long context costs no time to reach, and a step on top of it does exactly what it would after a real prefill. What a graph recorded it
    does, whatever was chosen since."""

    computes_prompts: bool = False
    """Prefill does its work."""

    def allocate(self, *, num_rows: int, num_pages: int) -> None:
        self._pools = None  # a second allocation must not stand beside the first
        super().allocate(num_rows=num_rows, num_pages=num_pages)
        generator = torch.Generator(self.device).manual_seed(0)
        for tensor in self.pools.tensors():
            tensor.normal_(0.0, 1.0, generator=generator)
        self.pools.ssm_LRVDK.mul_(STATE_SCALE)
        self.pools.ssm_LRVDK[:, ZERO_ROW] = 0
        self.pools.conv_LR3C[:, ZERO_ROW] = 0
        self.pools.hidden_RH[ZERO_ROW] = 0

    def prefill(self, batch: PrefillBatch) -> Tensor:
        if self.computes_prompts:
            return super().prefill(batch)
        return self.pools.hidden_RH.new_zeros(len(batch.token_ids_N), self.pools.hidden_RH.shape[1])

    def mtp_prefill(self, batch: PrefillBatch, previous_NH: Tensor) -> None:
        if self.computes_prompts:
            super().mtp_prefill(batch, previous_NH)

    def release(self) -> None:
        """Let go of the pools."""
        self._pools = None


def spec_of(name: str, config: TextConfig, dtype: torch.dtype) -> ModelSpec:
    """No stop ids: made-up weights would say one now and then."""
    return ModelSpec(
        name=name,
        vocab_size=config.vocab_size,
        num_real_tokens=min(NUM_REAL_TOKENS, config.vocab_size),
        max_context=config.max_context,
        has_mtp=config.has_mtp,
        stop_token_ids=(),
        row_bytes=row_bytes(config, dtype),
        page_bytes=page_bytes(config, dtype),
    )


def make_model(name: str, config: TextConfig, *, device: torch.device, dtype: torch.dtype) -> PrefilledModel:
    """The model with weights made on the device."""
    parameters = random_parameters(config, device=device, dtype=dtype, seed=0)
    return PrefilledModel(config, spec_of(name, config, dtype), parameters, dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBytes:
    """Bytes that a decode step can't do without, each read once where one pass over it serves the whole batch."""

    weights: int
    """Layers and final norm of the trunk."""
    head: int
    mtp: int
    """The MTP layer, once for each of the k drafts: each needs the one before."""
    draft_head: int
    """The head's rows of the draft vocabulary, likewise."""
    state: int
    """One row read and k + 1 written, for each slot."""
    kv: int
    """Keys and values of the context, in the trunk's attention layers once and in the MTP layer k times, for each slot."""

    @property
    def total(self) -> int:
        return self.weights + self.head + self.mtp + self.draft_head + self.state + self.kv


def step_bytes(
    config: TextConfig, *, batch: int, num_drafted: int, context: float, draft_vocab: int, dtype: torch.dtype = torch.bfloat16
) -> StepBytes:
    """context: tokens in each slot's state. draft_vocab: tokens that drafts are chosen from. Dense models; activations are small and left out."""
    assert config.moe is None, "which experts a step reads is not known from shapes"
    sizes = {name: math.prod(shape) * parameter_dtype(name, dtype).itemsize for name, shape in parameter_shapes(config).items()}
    token_bytes = page_bytes(config, dtype) // BLOCK_TOKENS
    mtp_token_bytes = 2 * config.num_kv_heads * config.head_dim * dtype.itemsize if config.has_mtp else 0
    head_row = config.hidden_size * dtype.itemsize
    return StepBytes(
        weights=sum(size for name, size in sizes.items() if name.startswith(("model.layers.", "model.norm."))),
        head=config.vocab_size * head_row,
        mtp=num_drafted * sum(size for name, size in sizes.items() if name.startswith("mtp.")),
        draft_head=num_drafted * draft_vocab * head_row,
        state=batch * (num_drafted + 2) * row_bytes(config, dtype),
        kv=round(batch * context * (token_bytes - mtp_token_bytes + num_drafted * mtp_token_bytes)),
    )
