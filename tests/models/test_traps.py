"""Known mistakes in implementing this model family, planted one at a time: each must change the logits (or the MTP
logits) compared to transformers'.

A comparison that passes in spite of the mistake would be useless. Every mistake is tested on the same path: prefill, a
window whose second draft is rejected, a window that resumes, the MTP head.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import softplus

from agentspec.kernels import Plain, PrefillBatch, Weight
from agentspec.kernels.reference import fused, norms
from agentspec.kernels.reference import gated_delta as reference_gated_delta
from agentspec.kernels.reference.attention import paged_attention
from agentspec.kernels.reference.causal_conv import causal_conv_prefill
from agentspec.kernels.reference.spans import read_spans
from agentspec.models import layers
from agentspec.models.hf_config import TextConfig, load_text_config
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.registry import model_spec
from agentspec.models.weights import Checkpoint
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.hf_reference import Reference
from tests.fakes.sequence_driver import Driver

CPU = torch.device("cpu")


@dataclasses.dataclass
class Parts:
    """The parts of a model before it is built, which a planted mistake may change."""

    directory: Path
    config: TextConfig
    parameters: dict[str, Any]
    patch: pytest.MonkeyPatch

    def each(self, suffix: str, change: Callable[[Tensor], Tensor]) -> None:
        names = [name for name in self.parameters if name.endswith(suffix)]
        assert names, suffix
        for name in names:
            self.parameters[name] = change(self.parameters[name])

    def build(self) -> Qwen3_5Model:
        spec = model_spec(self.directory, self.config, torch.float32)
        parameters: dict[str, Weight] = {name: Plain(tensor) for name, tensor in self.parameters.items()}
        return Qwen3_5Model(self.config, spec, parameters)


@pytest.fixture
def parts_of(checkpoint_root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Parts]:
    def make(family: str) -> Parts:
        directory = checkpoint_root / family
        config = load_text_config(directory).with_mtp_layers(1)
        with Checkpoint(directory) as checkpoint:
            parameters = {
                name: weight.tensor for name, weight in checkpoint.load(config, device=CPU, dtype=torch.float32).items()
            }
        return Parts(directory, config, parameters, monkeypatch)

    return make


def errors(model: Qwen3_5Model, reference: Reference, prompt: Sequence[int]) -> tuple[float, float]:
    """Relative errors of logits and of MTP logits on the standard path; NaN counts as infinite."""
    driver = Driver(model)
    hidden = driver.prefill(prompt[:70], (33,))
    first = driver.verify([[prompt[70], prompt[71], (prompt[72] + 1) % 160, 0]], [1])[0, :2]
    second = driver.verify([prompt[72:76]], [3])[0]
    hidden = torch.cat([hidden, first, second])
    driver.mtp_prefill(prompt[:40], hidden)
    m = driver.mtp(prompt[40:48], hidden[39:47], 40)
    logits_error = relative_error(model.logits(hidden), reference.logits[:76])
    mtp_error = relative_error(model.logits(m), reference.mtp_logits[39:47])
    return math.inf if math.isnan(logits_error) else logits_error, math.inf if math.isnan(mtp_error) else mtp_error


def plain_gain_norm(parts: Parts) -> None:
    right = norms.rms_norm
    parts.patch.setattr(norms, "rms_norm", lambda x, weight, eps: right(x, weight - 1, eps))


def zero_centred_gated_norm(parts: Parts) -> None:
    parts.each("linear_attn.norm.weight", lambda w: w + 1)


def gate_before_norm(parts: Parts) -> None:
    def wrong(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
        gated = o * torch.nn.functional.silu(z)
        return gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps) * weight

    parts.patch.setattr(norms, "gated_rms_norm", wrong)


def sigmoid_output_gate(parts: Parts) -> None:
    parts.config = dataclasses.replace(parts.config, output_gate="sigmoid")


def queries_and_gates_in_halves(parts: Parts) -> None:
    heads, dim = parts.config.num_heads, parts.config.head_dim
    parts.each("q_proj.weight", lambda w: w.view(2, heads, dim, -1).transpose(0, 1).reshape(w.shape))


def attention_gate_dropped(parts: Parts) -> None:
    heads, dim = parts.config.num_heads, parts.config.head_dim

    def without_gates(weight: Tensor) -> Tensor:
        weight = weight.view(heads, 2, dim, -1).clone()
        weight[:, 1] = 0
        return weight.flatten(0, 2)

    parts.each("q_proj.weight", without_gates)


def key_heads_tiled(parts: Parts) -> None:
    parts.patch.setattr(torch.Tensor, "repeat_interleave", lambda self, n, dim: torch.cat([self] * n, dim))


def rope_exponent_over_head_dim(parts: Parts) -> None:
    def wrong(config: TextConfig) -> tuple[Tensor, float]:
        return 1.0 / config.rope_theta ** (torch.arange(0, config.rotary_dim, 2) / config.head_dim), 1.0

    parts.patch.setattr(layers, "rope_frequencies", wrong)


def rope_over_whole_head(parts: Parts) -> None:
    parts.config = dataclasses.replace(parts.config, rotary_dim=parts.config.head_dim)


def rope_theta_default(parts: Parts) -> None:
    parts.config = dataclasses.replace(parts.config, rope_theta=10_000.0)


def rope_interleaved_pairs(parts: Parts) -> None:
    def wrong(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        dims = 2 * cos.shape[-1]
        even, odd = x[..., 0:dims:2], x[..., 1:dims:2]
        cos, sin = cos[:, None], sin[:, None]
        rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
        return torch.cat([rotated, x[..., dims:]], -1)

    parts.patch.setattr(fused, "apply_rope", wrong)


def query_norm_skipped(parts: Parts) -> None:
    parts.each("q_norm.weight", torch.zeros_like)


def gate_and_up_swapped(parts: Parts) -> None:
    for name in [name for name in parts.parameters if name.endswith("mlp.gate_proj.weight")]:
        up = name.replace("gate_proj", "up_proj")
        parts.parameters[name], parts.parameters[up] = parts.parameters[up], parts.parameters[name]


def expert_gate_and_up_swapped(parts: Parts) -> None:
    parts.each("experts.gate_up_proj", lambda w: torch.cat(w.chunk(2, 1)[::-1], 1))


def _with_moe(parts: Parts, **changes: Any) -> None:
    assert parts.config.moe is not None
    parts.config = dataclasses.replace(parts.config, moe=dataclasses.replace(parts.config.moe, **changes))


def one_expert_fewer(parts: Parts) -> None:
    _with_moe(parts, top_k=2)


def experts_not_renormalised(parts: Parts) -> None:
    _with_moe(parts, normalize_top_k=False)


def shared_expert_ungated(parts: Parts) -> None:
    parts.each("shared_expert.down_proj.weight", lambda w: 2 * w)
    parts.each("shared_expert_gate.weight", torch.zeros_like)


def flawed_recurrence(flaw: str) -> Callable[[Parts], None]:
    """A token-by-token prefill with one flaw; without a flaw it equals the real one (tested below)."""

    def plant(parts: Parts) -> None:
        def prefill(
            qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, ssm: Tensor, batch: PrefillBatch
        ) -> Tensor:
            _, heads, value_dim, key_dim = ssm.shape
            if flaw == "no L2 norm":
                parts.patch.setattr(reference_gated_delta, "_l2_normalize", lambda x: x.float())
            q, k, v = reference_gated_delta.split_heads(qkv, heads, value_dim, key_dim)
            if flaw == "no query scale":
                q = q * key_dim**0.5
            bias = torch.zeros_like(dt_bias) if flaw == "no dt_bias" else dt_bias
            decay, beta = torch.exp(-a_log.exp() * softplus(a + bias)), b.sigmoid()
            out = torch.empty_like(v)
            for span in read_spans(batch):
                state = ssm[span.read_row].clone()
                for t in range(span.begin, span.end):
                    if flaw != "decay after write":
                        state = state * decay[t, :, None, None]
                    if flaw == "read before write":
                        out[t] = (state @ q[t, :, :, None]).squeeze(-1)
                    delta = (v[t] - (state @ k[t, :, :, None]).squeeze(-1)) * beta[t, :, None]
                    state = state + delta[..., None] * k[t, :, None]
                    if flaw == "decay after write":
                        state = state * decay[t, :, None, None]
                    if flaw != "read before write":
                        out[t] = (state @ q[t, :, :, None]).squeeze(-1)
                    for row in [row for block in span.blocks if block.end == t + 1 for row in block.save_rows]:
                        ssm[row] = state.transpose(-1, -2) if flaw == "transposed state" else state
            return out

        parts.patch.setattr(fused, "gated_delta_blocks", prefill)

    return plant


def conv_state_after_convolution(parts: Parts) -> None:
    right = causal_conv_prefill

    def wrong(x: Tensor, weight: Tensor, conv: Tensor, batch: PrefillBatch) -> Tensor:
        y = right(x, weight, conv, batch)
        for block in [block for span in read_spans(batch) for block in span.blocks]:
            for row in block.save_rows:
                conv[row] = y[block.end - 3 : block.end]
        return y

    parts.patch.setattr(fused, "causal_conv_prefill", wrong)


def conv_taps_reversed(parts: Parts) -> None:
    parts.each("conv1d.weight", lambda w: w.flip(-1))


def decay_rounded_to_bfloat16(parts: Parts) -> None:
    parts.each("A_log", lambda w: w.bfloat16().float())


def packed_projections_split_contiguously(parts: Parts) -> None:
    raw = load_file(parts.directory / "model.safetensors")
    for name in [name for name in raw if name.endswith("in_proj_qkvz.weight")]:
        prefix = name.removesuffix("qkvz.weight")
        qkv, z = raw[name].split([parts.config.conv_channels, len(raw[name]) - parts.config.conv_channels])
        b, a = raw[f"{prefix}ba.weight"].chunk(2)
        for part, tensor in (("qkv", qkv), ("z", z), ("b", b), ("a", a)):
            parts.parameters[f"{prefix}{part}.weight"] = tensor


def no_trap(parts: Parts) -> None:
    pass


LOGIT_TRAPS: list[tuple[Callable[[Parts], None], str]] = [
    (plain_gain_norm, "dense"),
    (zero_centred_gated_norm, "dense"),
    (gate_before_norm, "dense"),
    (sigmoid_output_gate, "dense"),
    (queries_and_gates_in_halves, "dense"),
    (attention_gate_dropped, "dense"),
    (key_heads_tiled, "dense"),
    (key_heads_tiled, "next"),
    (rope_exponent_over_head_dim, "dense"),
    (rope_over_whole_head, "dense"),
    (rope_theta_default, "dense"),
    (rope_interleaved_pairs, "dense"),
    (query_norm_skipped, "dense"),
    (gate_and_up_swapped, "dense"),
    (expert_gate_and_up_swapped, "moe"),
    (expert_gate_and_up_swapped, "next"),
    (one_expert_fewer, "moe"),
    (experts_not_renormalised, "moe"),
    (shared_expert_ungated, "moe"),
    (conv_state_after_convolution, "dense"),
    (conv_taps_reversed, "dense"),
    (decay_rounded_to_bfloat16, "dense"),
    (packed_projections_split_contiguously, "next"),
]
FLAWS = ("transposed state", "decay after write", "read before write", "no L2 norm", "no query scale", "no dt_bias")


def _measure(
    plant: Callable[[Parts], None], parts: Parts, reference: Reference, prompt: Sequence[int]
) -> tuple[float, float]:
    plant(parts)
    return errors(parts.build(), reference, prompt)


@pytest.mark.parametrize(("plant", "family_name"), LOGIT_TRAPS, ids=lambda value: getattr(value, "__name__", value))
def test_planted_mistake_changes_logits(
    plant: Callable[[Parts], None],
    family_name: str,
    parts_of: Callable[[str], Parts],
    references: dict[str, Reference],
    prompt: list[int],
) -> None:
    logits_error, _ = _measure(plant, parts_of(family_name), references[family_name], prompt)
    assert logits_error > 5 * TOLERANCE


@pytest.mark.parametrize("flaw", FLAWS)
def test_flawed_recurrence_changes_logits(
    flaw: str, parts_of: Callable[[str], Parts], references: dict[str, Reference], prompt: list[int]
) -> None:
    logits_error, _ = _measure(flawed_recurrence(flaw), parts_of("dense"), references["dense"], prompt)
    assert logits_error > 5 * TOLERANCE


@pytest.mark.parametrize("plant", [no_trap, flawed_recurrence("none")], ids=["real kernels", "recurrence without flaw"])
def test_without_planted_mistake_within_tolerance(
    plant: Callable[[Parts], None],
    parts_of: Callable[[str], Parts],
    references: dict[str, Reference],
    prompt: list[int],
) -> None:
    assert max(_measure(plant, parts_of("dense"), references["dense"], prompt)) < TOLERANCE


def mtp_hidden_before_embedding(parts: Parts) -> None:
    parts.each("mtp.fc.weight", lambda w: torch.cat(w.chunk(2, 1)[::-1], 1))


def mtp_norms_swapped(parts: Parts) -> None:
    a, b = "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"
    parts.parameters[a], parts.parameters[b] = parts.parameters[b], parts.parameters[a]


def mtp_output_norm_skipped(parts: Parts) -> None:
    parts.each("mtp.norm.weight", torch.zeros_like)


@pytest.mark.parametrize("plant", [mtp_hidden_before_embedding, mtp_norms_swapped, mtp_output_norm_skipped])
@pytest.mark.parametrize("family_name", ["dense", "moe", "next"])
def test_planted_mtp_mistake_changes_only_mtp_logits(
    plant: Callable[[Parts], None],
    family_name: str,
    parts_of: Callable[[str], Parts],
    references: dict[str, Reference],
    prompt: list[int],
) -> None:
    logits_error, mtp_error = _measure(plant, parts_of(family_name), references[family_name], prompt)
    assert logits_error < TOLERANCE
    assert mtp_error > 100 * TOLERANCE


def test_mtp_with_pre_norm_hidden_is_detected(
    parts_of: Callable[[str], Parts], references: dict[str, Reference], prompt: list[int]
) -> None:
    parts = parts_of("dense")
    parts.parameters["model.norm.weight"] = torch.zeros_like(parts.parameters["model.norm.weight"])
    # A final norm of gain 1 under RMSNorm's own scaling differs from the pre-norm hidden by a factor per row, which the
    # head's hidden norm removes: the same pairs as a head fed pre-norm.
    _, mtp_error = errors(parts.build(), references["dense"], prompt)
    assert mtp_error > 100 * TOLERANCE


def test_mtp_pairs_shifted_by_one_are_detected(
    parts_of: Callable[[str], Parts], references: dict[str, Reference], prompt: list[int]
) -> None:
    """Token p is paired with hidden p instead of hidden p-1."""
    model = parts_of("dense").build()
    driver = Driver(model)
    hidden = driver.prefill(prompt)
    driver.mtp_prefill(prompt[:40], hidden)
    m = driver.mtp(prompt[40:48], hidden[40:48], 40)
    assert relative_error(model.logits(m), references["dense"].mtp_logits[39:47]) > 100 * TOLERANCE


def test_mtp_reading_position_zero_is_detected(
    monkeypatch: pytest.MonkeyPatch,
    parts_of: Callable[[str], Parts],
    references: dict[str, Reference],
    prompt: list[int],
) -> None:
    right = paged_attention

    def wrong(*args: Any, first_position: int, **kwargs: Any) -> Tensor:
        return right(*args, first_position=0, **kwargs)

    monkeypatch.setattr(fused, "paged_attention", wrong)
    _, mtp_error = errors(parts_of("dense").build(), references["dense"], prompt)
    assert mtp_error > TOLERANCE
