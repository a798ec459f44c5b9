"""Every layer equals the oracle's, given the oracle's input: models with experts in each checkpoint layout, and 8-bit
models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.types import ZERO_ROW
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.loaded import load_model
from tests.fakes.oracle import Oracle
from tests.fakes.prompt_run import Run, batch_of

CPU = torch.device("cpu")
NUM_TOKENS = 24
SMALL: dict[str, Any] = {"num_hidden_layers": 4, "full_attention_interval": 2}
EIGHT_OF_32: dict[str, Any] = {"num_experts": 32, "num_experts_per_tok": 8}
VARIANTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "fused experts": ("moe", {"experts": "fused", "mtp_experts": "fused"}),
    "experts one by one": ("moe", {"experts": "split", "mtp_experts": "split"}),
    "8 of 32 experts": ("moe", EIGHT_OF_32),
    "every expert": ("moe", {"num_experts": 4, "num_experts_per_tok": 4}),
    "next": ("next", {}),
    "next, not renormalised": ("next", {"norm_topk_prob": False}),
}
IN_8_BITS: dict[str, tuple[Family, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "fused experts": ("moe", {"experts": "fused", "mtp_experts": "fused"}),
    "experts one by one": ("moe", {"experts": "split", "mtp_experts": "split"}),
    "wider than a block": (
        "moe",
        {"hidden_size": 192, "moe_intermediate_size": 160, "experts": "split", **EIGHT_OF_32},
    ),
    "a few modules in full": (
        "moe",
        {"plain": ("model.layers.1.self_attn.o_proj", "model.layers.2.mlp.shared_expert.down_proj")},
    ),
}


def check_layers(oracle: Oracle, model: Qwen3_5Model) -> None:
    """Compare every layer of the trunk, and the MTP layer's FFN."""
    model.allocate(num_rows=3, num_pages=2)
    tokens = torch.randint(
        model.spec.num_real_tokens, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    batch = batch_of(
        [Run(token_ids=tokens, start=0, read_row=ZERO_ROW, state_writes=((NUM_TOKENS, 2),), page_ids=[1])], CPU
    )
    x_NH = oracle.w["model.embed_tokens.weight"][tokens]
    for i, (layer, full) in enumerate(zip(model._layers, oracle.full, strict=True)):
        mixed_NH = layer.mix(
            x_NH.clone(),
            model.pools.layers[i],
            lambda mixer, x_NH, norm, memory: mixer.prefill(mixer.project(x_NH, norm), memory, batch),
        )
        got_NH = layer.ffn.add_to(mixed_NH, layer.post_norm)
        x_NH = oracle._layer(x_NH, f"model.layers.{i}.", full, first_position=0, index=i)
        assert relative_error(got_NH, x_NH) < TOLERANCE, f"layer {i}"
    assert relative_error(model.logits(x_NH), oracle.logits(x_NH)) < TOLERANCE
    mtp = model._mtp_head().layer
    normed_NH = oracle._norm(x_NH, "mtp.layers.0.post_attention_layernorm.weight")
    assert (
        relative_error(mtp.ffn.add_to(x_NH.clone(), mtp.post_norm), x_NH + oracle._ffn(normed_NH, "mtp.layers.0.mlp."))
        < TOLERANCE
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_layer_equals_oracle(variant: str, tmp_path: Path) -> None:
    family, options = VARIANTS[variant]
    directory = write_checkpoint(tmp_path, family, vision=False, **SMALL, **options)
    check_layers(Oracle(directory), load_model(directory, device=CPU, dtype=torch.float32))


@pytest.mark.parametrize("variant", IN_8_BITS)
def test_every_fp8_layer_equals_oracle_on_dequantized_values(variant: str, tmp_path: Path) -> None:
    family, options = IN_8_BITS[variant]
    stored, expanded = (
        write_checkpoint(tmp_path / how, family, vision=False, fp8=how, **SMALL, **options)
        for how in ("stored", "expanded")
    )
    check_layers(Oracle(expanded), load_model(stored, device=CPU, dtype=torch.float32))
