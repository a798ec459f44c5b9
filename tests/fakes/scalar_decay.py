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
        self.in_projs: tuple[kernels.Weight, Tensor | None] = (
            parameters.take_rows("in_proj_qkv.weight", "in_proj_z.weight", "in_proj_b.weight", "in_proj_a.weight"),
            None,
        )
        self.taps_2C = parameters.take_tensor("conv1d.weight")[:, 0, -2:].T
        self.a_log_V = parameters.take_tensor("A_log")
        self.bias_V = parameters.take_tensor("dt_bias")
        self.norm_D = parameters.take_tensor("norm.weight")
        self.out_proj = parameters.take("out_proj.weight")
        self.form = decay_form(config, self.taps_2C.dtype)

    def project(self, x_NH: Tensor, norm: kernels.Norm) -> Tensor:
        return self._ops.norm_linear(x_NH, norm, *self.in_projs)

    def step(self, projected_NP: Tensor, memory: Memory, windows: VerifyBatch) -> Tensor:
        rows_BT = windows.write_rows_BT
        state = tuple(part_R[windows.read_row_B] for part_R in memory)
        states, y_BTO = self._advance(state, projected_NP.view(*rows_BT.shape, -1))
        for t in range(rows_BT.shape[1]):  # in order, because inert slots write all columns to one row
            self._save(memory, rows_BT[:, t], tuple(part_BT[:, t] for part_BT in states))
        return y_BTO.flatten(0, 1)

    def mix_prompt(self, x_NH: Tensor, norm: kernels.Norm, memory: Memory, batch: kernels.PrefillBatch) -> Tensor:
        return self.prefill(self.project(x_NH, norm), memory, batch)

    def prefill(self, projected_NP: Tensor, memory: Memory, batch: kernels.PrefillBatch) -> Tensor:
        out_NO = projected_NP.new_zeros(len(projected_NP), self._heads[0] * self._heads[1])
        for span in read_spans(batch):
            state = tuple(part_R[[span.read_row]] for part_R in memory)
            states, y_1TO = self._advance(state, projected_NP[None, span.begin : span.end])
            out_NO[span.begin : span.end] = y_1TO[0]
            for block in span.blocks:
                saved = tuple(part_1T[:, block.end - 1 - span.begin] for part_1T in states)
                for row in block.save_rows:
                    self._save(memory, [row], saved)
        return out_NO

    def _save(self, memory: Memory, rows: Tensor | list[int], state: Memory) -> None:
        for part_R, part_B in zip(memory, state, strict=True):
            part_R[rows] = part_B

    def _advance(self, state: Memory, projected_BTP: Tensor) -> tuple[Memory, Tensor]:
        """(The states after each of T more tokens of each sequence, the tokens' mixed values.)"""
        state_BVKD, width_BV, last_BC = state
        num_heads, value_dim = self._heads
        now_BTC, z, skip_BTV, dt_BTV = projected_BTP.split(
            [last_BC.shape[1], num_heads * value_dim, num_heads, num_heads], -1
        )
        before_BTC = torch.cat((last_BC[:, None], now_BTC[:, :-1]), dim=1)
        mixed_BTC = silu(before_BTC * self.taps_2C[0] + now_BTC * self.taps_2C[1])
        c, b, x = mixed_BTC.split([self._keys[0] * self._keys[1]] * 2 + [num_heads * value_dim], -1)
        c_BTVK, b_BTVK = (
            part.unflatten(-1, self._keys).repeat_interleave(num_heads // self._keys[0], 2).float() for part in (c, b)
        )
        x_BTVD = x.unflatten(-1, self._heads).float()
        w_BTV = softplus(dt_BTV.float() + self.bias_V)
        decay_BTV = torch.exp(-self.a_log_V.exp() * w_BTV)
        added_BTVKD = w_BTV[..., None, None] * b_BTVK[..., None] * x_BTVD[..., None, :]
        states, widths = [], []
        for decay_BV, added_BVKD, w_BV in zip(decay_BTV.unbind(1), added_BTVKD.unbind(1), w_BTV.unbind(1), strict=True):
            state_BVKD = decay_BV[..., None, None] * state_BVKD + added_BVKD
            width_BV = decay_BV * width_BV + w_BV
            states.append(state_BVKD)
            widths.append(width_BV)
        states_BTVKD, widths_BTV = torch.stack(states, 1), torch.stack(widths, 1)
        y_BTVD = (c_BTVK[..., None, :] @ states_BTVKD).squeeze(3) / (1 + widths_BTV[..., None])
        y_BTVD = y_BTVD + skip_BTV.float().sigmoid()[..., None] * x_BTVD
        y_BTVD = y_BTVD * torch.rsqrt(y_BTVD.square().mean(-1, keepdim=True) + 1e-6) * self.norm_D
        return (states_BTVKD, widths_BTV, now_BTC), (y_BTVD.flatten(2) * silu(z)).to(projected_BTP.dtype)


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
