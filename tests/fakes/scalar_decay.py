"""A mixer that only tests have, with another form of state: a recurrence with one decay per head, as in Mamba2 (arXiv
2405.21060).

Per head, with a step width w = softplus(dt + bias) and a decay a = exp(-exp(A_log) w):

    S <- a S + w B x^T;    n <- a n + w;    y = S^T C / (1 + n) + sigmoid(skip) x

C, B and x pass a convolution over two tokens first. It reuses the parameters of a Gated DeltaNet with another meaning,
so every checkpoint that tests write is also one of a model with this mixer.

Shape letters: as in kernels/__init__.py. K is the width of B and C, and stands before D here.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from agentspec import kernels
from agentspec.kernels.reference.spans import read_spans
from agentspec.models.hf_config import TextConfig
from agentspec.models.layers import Mixer
from agentspec.models.protocol import VerifyBatch
from agentspec.models.qwen3_5 import Qwen3_5Model, state_forms
from agentspec.models.registry import model_spec, resolved_config
from agentspec.models.state import Memory, Part, StateForm, row_bytes
from agentspec.models.tensors import ParameterScope
from agentspec.models.weights import Checkpoint


def decay_form(config: TextConfig, dtype: torch.dtype) -> StateForm:
    """Three parts: S, n, and the last token's [C | B | x] before the convolution."""
    state = Part("decayed_LRVKD", (config.num_value_heads, config.key_dim, config.value_dim), torch.float32)
    width = Part("width_LRV", (config.num_value_heads,), torch.float32)
    return StateForm(row_parts=(state, width, Part("last_LRC", (config.conv_channels,), dtype)))


class ScalarDecay:
    def __init__(self, config: TextConfig, ops: kernels.Backend, parameters: ParameterScope) -> None:
        self._ops = ops
        self._heads = (config.num_value_heads, config.value_dim)
        self._keys = (config.num_key_heads, config.key_dim)
        self.in_proj = parameters.take_rows(
            "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"
        )
        self.taps_2C = parameters.take_tensor("conv1d.weight")[:, 0, -2:].T
        self.a_log_V = parameters.take_tensor("A_log")
        self.bias_V = parameters.take_tensor("dt_bias")
        self.norm_D = parameters.take_tensor("norm.weight")
        self.out_proj = parameters.take("out_proj.weight")
        self.form = decay_form(config, self.taps_2C.dtype)

    def project(self, x_NH: Tensor, norm: kernels.Norm) -> Tensor:
        return self._ops.norm_linear(x_NH, norm, self.in_proj)

    def step(self, projected_NP: Tensor, memory: Memory, windows: VerifyBatch) -> Tensor:
        num_slots, num_columns = windows.write_rows_BT.shape
        state = tuple(part_R[windows.read_row_B] for part_R in memory)
        columns = []
        for t, projected_BP in enumerate(projected_NP.view(num_slots, num_columns, -1).unbind(1)):
            state, y_BO = self._advance(state, projected_BP)
            self._save(memory, windows.write_rows_BT[:, t], state)
            columns.append(y_BO)
        return torch.stack(columns, 1).flatten(0, 1)

    def prefill(self, projected_NP: Tensor, memory: Memory, batch: kernels.PrefillBatch) -> Tensor:
        out_NO = projected_NP.new_zeros(len(projected_NP), self._heads[0] * self._heads[1])
        for span in read_spans(batch):
            state = tuple(part_R[[span.read_row]] for part_R in memory)
            for block in span.blocks:
                for n in range(block.begin, block.end):
                    state, out_NO[n] = self._advance(state, projected_NP[[n]])
                for row in block.save_rows:
                    self._save(memory, [row], state)
        return out_NO

    def _save(self, memory: Memory, rows: Tensor | list[int], state: Memory) -> None:
        for part_R, part_B in zip(memory, state, strict=True):
            part_R[rows] = part_B

    def _advance(self, state: Memory, projected_BP: Tensor) -> tuple[Memory, Tensor]:
        """(The state after one more token of each sequence, its mixed values.)"""
        state_BVKD, width_BV, last_BC = state
        num_heads, value_dim = self._heads
        now_BC, z, skip_BV, dt_BV = projected_BP.split(
            [last_BC.shape[1], num_heads * value_dim, num_heads, num_heads], -1
        )
        mixed_BC = silu(last_BC * self.taps_2C[0] + now_BC * self.taps_2C[1])
        c, b, x = mixed_BC.split([self._keys[0] * self._keys[1]] * 2 + [num_heads * value_dim], -1)
        c_BVK, b_BVK = (
            part.unflatten(-1, self._keys).repeat_interleave(num_heads // self._keys[0], 1).float() for part in (c, b)
        )
        x_BVD = x.unflatten(-1, self._heads).float()
        w_BV = softplus(dt_BV.float() + self.bias_V)
        decay_BV = torch.exp(-self.a_log_V.exp() * w_BV)
        state_BVKD = (
            decay_BV[..., None, None] * state_BVKD + w_BV[..., None, None] * b_BVK[..., None] * x_BVD[:, :, None]
        )
        width_BV = decay_BV * width_BV + w_BV
        y_BVD = (c_BVK[:, :, None] @ state_BVKD).squeeze(2) / (1 + width_BV[..., None]) + skip_BV.float().sigmoid()[
            ..., None
        ] * x_BVD
        y_BVD = y_BVD * torch.rsqrt(y_BVD.square().mean(-1, keepdim=True) + 1e-6) * self.norm_D
        return (state_BVKD, width_BV, now_BC), (y_BVD.flatten(1) * silu(z)).to(projected_BP.dtype)


class DecayModel(Qwen3_5Model):
    """A Qwen3.5 in which every other recurrent layer, from the first one on, decays: mixers of three forms, where there
    are three such layers."""

    def _mixer(self, config: TextConfig, index: int, parameters: ParameterScope, rope: kernels.RopeTable) -> Mixer:
        if _decays(config, index):
            return ScalarDecay(config, self._ops, parameters.under("linear_attn."))
        return super()._mixer(config, index, parameters, rope)


def load_decay_model(path: Path, device: torch.device) -> DecayModel:
    """The model of a checkpoint in float32."""
    dtype = torch.float32
    config = resolved_config(path, random_weights=False)
    with Checkpoint(path) as checkpoint:
        parameters = checkpoint.load(config, device=device, dtype=dtype)
    forms = state_forms(config, dtype)
    for index in filter(lambda index: _decays(config, index), range(len(config.layer_types))):
        forms[index] = decay_form(config, dtype)
    spec = dataclasses.replace(model_spec(path, config, dtype), row_bytes=row_bytes(forms))
    return DecayModel(config, spec, parameters)


def _decays(config: TextConfig, index: int) -> bool:
    return config.layer_types[index] == "linear_attention" and index % 2 == 0
