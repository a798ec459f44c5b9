"""How far rounding goes in one block of a model: a block in 16 bits beside the same block in float32, both on the same inputs.

Inputs are forced: what a block gets is the exact result of the block before it, rounded once. So errors never add up over layers, and a bound on
them means the same for 4 layers as for 64. States, keys and values are random.

Shape letters: as in models/qwen3_5.py.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import embedding

from agentspec import kernels
from agentspec.kernels import reference
from agentspec.models.attention import GatedAttention
from agentspec.models.hf_config import TextConfig
from agentspec.models.layers import StateRows, StepInputs
from agentspec.models.qwen3_5 import DecoderLayer, Qwen3_5Model
from agentspec.models.tensors import random_parameters
from agentspec.types import BLOCK_TOKENS, ZERO_ROW, ModelSpec
from tests.fakes.compare import relative_error

STATE_SCALE = 0.05
"""Standard deviation of made-up recurrent states: what they read out is of the size of what a few written tokens do."""


def random_twins(config: TextConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> tuple[Qwen3_5Model, Qwen3_5Model]:
    """(in `dtype` on the device's kernels, the same weights in float32 on reference kernels), both on the device."""
    parameters = random_parameters(config, device=device, dtype=dtype, seed=0)
    exact = {name: parameter.float() for name, parameter in parameters.items()}
    with patch.object(kernels, "backend", lambda _: reference):
        exact_model = Qwen3_5Model(config, spec, exact, dtype=torch.float32)
    return Qwen3_5Model(config, spec, parameters, dtype=dtype), exact_model


class ForcedBlocks:
    """One decode window of both twins, block by block. `errors` has each result's error by name, relative to the largest of the exact values."""

    def __init__(self, rounded: Qwen3_5Model, exact: Qwen3_5Model, *, starts: list[int], num_columns: int, seed: int) -> None:
        """starts: position of column 0 of each slot."""
        self.errors: dict[str, float] = {}
        self._twins = (rounded, exact)
        self._dtype = rounded._dtype
        num_slots, num_pages = len(starts), -(-(max(starts) + num_columns) // BLOCK_TOKENS)
        generator = torch.Generator().manual_seed(seed)
        rows_BR = torch.randperm(num_slots * (num_columns + 1), generator=generator).view(num_slots, -1) + 2
        pages_BP = (torch.randperm(num_slots * num_pages, generator=generator).view(num_slots, -1) + 1).to(torch.int32)
        for model in self._twins:
            model.allocate(num_rows=2 + rows_BR.numel(), num_pages=1 + pages_BP.numel())
        scales = (STATE_SCALE, 1.0, 1.0, 1.0)
        for ours, theirs, scale in zip(rounded.pools.tensors(), exact.pools.tensors(), scales, strict=True):
            ours.copy_(torch.randn(ours.shape, generator=generator) * scale)
            theirs.copy_(ours)
        self._write_rows_N = rows_BR[:, 1:].flatten()
        self._windows = [
            (
                StepInputs(start_B=torch.tensor(starts, device=model.device), page_table_BP=pages_BP.to(model.device), rope=model._rope),
                StateRows(read_row_B=rows_BR[:, 0].contiguous().to(model.device), write_rows_BT=rows_BR[:, 1:].contiguous().to(model.device)),
            )
            for model in self._twins
        ]
        vocab = rounded.spec.num_real_tokens
        self._tokens_N = torch.randint(vocab, (num_slots * num_columns,), generator=generator)
        assert ZERO_ROW not in rows_BR

    @torch.inference_mode()
    def run(self) -> dict[str, float]:
        rounded, exact = self._twins
        x_NH = embedding(self._tokens_N.to(rounded.device), rounded._embedding_VH)
        for i, layers in enumerate(zip(rounded._layers, exact._layers, strict=True)):
            x_NH = self._layer(f"layer {i}", layers, x_NH, first_position=0)
        norms = [model._norm for model in self._twins]
        hidden_NH = self._block("final norm", x_NH, lambda i, x: self._twins[i]._ops.rms_norm(x, norms[i]))
        self._block("logits", hidden_NH, lambda i, x: self._twins[i].logits(x)[:, : rounded.spec.num_real_tokens])
        if rounded._mtp is not None:
            self._mtp(hidden_NH)
        return self.errors

    def _mtp(self, hidden_NH: Tensor) -> None:
        heads = [model._mtp_head() for model in self._twins]
        embeddings = [model._embedding_VH for model in self._twins]
        x_NH = self._block("MTP, join", hidden_NH, lambda i, x: heads[i].join(self._tokens_N.to(x.device), embeddings[i], x))
        x_NH = self._layer("MTP", (heads[0].layer, heads[1].layer), x_NH, first_position=1)
        self._block("MTP, norm", x_NH, lambda i, x: self._twins[i]._ops.rms_norm(x, heads[i].norm))

    def _layer(self, name: str, layers: tuple[DecoderLayer, DecoderLayer], x_NH: Tensor, *, first_position: int) -> Tensor:
        is_attention = isinstance(layers[0].mixer, GatedAttention)
        x_NH = self._block(f"{name}, {'attention' if is_attention else 'delta rule'}", x_NH, lambda i, x: self._mix(i, layers[i], x, first_position))
        states = [
            model.pools.kv_AP2SGD[layers[i].pool_index]
            if is_attention
            else model.pools.ssm_LRVDK[layers[i].pool_index, self._write_rows_N.to(model.device)]
            for i, model in enumerate(self._twins)
        ]
        self.errors[f"{name}, {'keys and values' if is_attention else 'states'}"] = relative_error(states[0].to(states[1].device), states[1])
        return self._block(f"{name}, FFN", x_NH, lambda i, x: layers[i].ffn.add_to(x, layers[i].post_norm))

    def _mix(self, i: int, layer: DecoderLayer, x_NH: Tensor, first_position: int) -> Tensor:
        pools, (inputs, rows) = self._twins[i].pools, self._windows[i]
        mixer, index = layer.mixer, layer.pool_index
        if isinstance(mixer, GatedAttention):
            return mixer.step(x_NH, layer.input_norm, pools.kv_AP2SGD[index], inputs, first_position=first_position)
        return mixer.step(x_NH, layer.input_norm, pools.ssm_LRVDK[index], pools.conv_LR3C[index], rows)

    def _block(self, name: str, x_NH: Tensor, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
        """compute(which twin, its input). Notes the error and returns the exact result, rounded, on the first twin's device."""
        device = self._twins[1].device
        got, exact = compute(0, x_NH), compute(1, x_NH.to(device, torch.float32))
        self.errors[name] = relative_error(got.to(device), exact)
        return exact.to(x_NH.device, self._dtype)
