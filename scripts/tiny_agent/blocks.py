"""The parts of a decoder layer before and after its mixer: functions of whole tensors and a dict of weights, which
torch.compile may fuse.

Activations have the compute dtype (bfloat16 in training); norms, gates and rotations are float32 inside. Names as in
the engine's models/.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as _linear
from torch.nn.functional import pad, sigmoid, silu, softplus

from agentspec.models.hf_config import TextConfig

Weights = dict[str, Tensor]

_L2_EPS = 1e-6


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return _linear(x, weight.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm with zero-centred weights: the gain is 1 + weight."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * (1.0 + weight)).to(x.dtype)


def rope_tables(positions_T: Tensor, config: TextConfig) -> tuple[Tensor, Tensor]:
    """float32 cosines and sines [T, rotary_dim / 2]."""
    exponents = (
        torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=positions_T.device) / config.rotary_dim
    )
    angles = positions_T.float()[:, None] / config.rope_theta**exponents
    return angles.cos(), angles.sin()


def gated_delta_inputs(x_TH: Tensor, positions_T: Tensor, layer: Weights, config: TextConfig) -> tuple[Tensor, ...]:
    """(q, k [T, V, K] normalised and repeated to the value heads, v [T, V, D], g, beta float32 [T, V], z [T, V, D])."""
    x_TH = rms_norm(x_TH, layer["input_layernorm.weight"], config.rms_norm_eps)
    qkv_TC = _causal_conv(
        linear(x_TH, layer["linear_attn.in_proj_qkv.weight"]), layer["linear_attn.conv1d.weight"], positions_T
    )
    keys, heads = config.num_key_heads * config.key_dim, config.num_value_heads
    q, k, v_TVD = (
        part.unflatten(-1, (-1, config.key_dim)) for part in qkv_TC.split([keys, keys, heads * config.value_dim], -1)
    )
    v_TVD = v_TVD.reshape(-1, heads, config.value_dim)
    q_TVK, k_TVK = (_l2_normalized(part).repeat_interleave(heads // config.num_key_heads, 1) for part in (q, k))
    a_TV = linear(x_TH, layer["linear_attn.in_proj_a.weight"]).float()
    b_TV = linear(x_TH, layer["linear_attn.in_proj_b.weight"]).float()
    g_TV = -layer["linear_attn.A_log"].exp() * softplus(a_TV + layer["linear_attn.dt_bias"])
    z_TVD = linear(x_TH, layer["linear_attn.in_proj_z.weight"]).unflatten(-1, (heads, config.value_dim))
    return q_TVK.contiguous(), k_TVK.contiguous(), v_TVD.contiguous(), g_TV, sigmoid(b_TV), z_TVD


def gated_delta_output(x_TH: Tensor, o_TVD: Tensor, z_TVD: Tensor, layer: Weights, config: TextConfig) -> Tensor:
    """The layer's output: gated norm, projection and residual of the mixer, then the FFN."""
    o32 = o_TVD.float()
    normed = (
        o32 * torch.rsqrt(o32.square().mean(-1, keepdim=True) + config.rms_norm_eps) * layer["linear_attn.norm.weight"]
    )
    gated_TVD = (normed * silu(z_TVD.float())).to(x_TH.dtype)
    return _ffn(x_TH + linear(gated_TVD.flatten(1), layer["linear_attn.out_proj.weight"]), layer, config)


def attention_inputs(
    x_TH: Tensor, cos_TA: Tensor, sin_TA: Tensor, layer: Weights, config: TextConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v [T, N, D], keys and values repeated to the N query heads, output gate [T, N * D])."""
    eps, repeats = config.rms_norm_eps, config.num_heads // config.num_kv_heads
    x_TH = rms_norm(x_TH, layer["input_layernorm.weight"], eps)
    q_TND, gate_TND = (
        linear(x_TH, layer["self_attn.q_proj.weight"])
        .unflatten(-1, (config.num_heads, 2 * config.head_dim))
        .chunk(2, -1)
    )
    k_TGD, v_TGD = (
        linear(x_TH, layer[f"self_attn.{name}.weight"]).unflatten(-1, (-1, config.head_dim))
        for name in ("k_proj", "v_proj")
    )
    q_TND = _rotated(rms_norm(q_TND, layer["self_attn.q_norm.weight"], eps), cos_TA, sin_TA)
    k_TGD = _rotated(rms_norm(k_TGD, layer["self_attn.k_norm.weight"], eps), cos_TA, sin_TA)
    k_TND, v_TND = (x.repeat_interleave(repeats, 1).contiguous() for x in (k_TGD, v_TGD))
    return q_TND.contiguous(), k_TND, v_TND, gate_TND.flatten(1)


def attention_output(x_TH: Tensor, o_TND: Tensor, gate_TN: Tensor, layer: Weights, config: TextConfig) -> Tensor:
    """The layer's output: gate, projection and residual of the mixer, then the FFN."""
    gated = (o_TND.flatten(1) * sigmoid(gate_TN.float())).to(x_TH.dtype)
    return _ffn(x_TH + linear(gated, layer["self_attn.o_proj.weight"]), layer, config)


def mtp_join(embedding_TH: Tensor, hidden_TH: Tensor, mtp: Weights, config: TextConfig) -> Tensor:
    """The MTP layer's input for each pair of a token's embedding and the hidden of the token before; the embedding
    comes first."""
    eps = config.rms_norm_eps
    embedding_TH = rms_norm(embedding_TH, mtp["pre_fc_norm_embedding.weight"], eps)
    hidden_TH = rms_norm(hidden_TH, mtp["pre_fc_norm_hidden.weight"], eps)
    return linear(torch.cat([embedding_TH, hidden_TH], -1), mtp["fc.weight"])


def add_keys(q_TND: Tensor, o_TND: Tensor, lse_TN: Tensor, k_JTND: Tensor, v_JTND: Tensor, scale: float) -> Tensor:
    """Attention output over more keys: `o_TND` over earlier ones, with log-sum-exp `lse_TN`, and J further keys of each
    token's own."""
    scores = torch.cat([lse_TN[None], (q_TND.float() * k_JTND.float()).sum(-1) * scale])
    shares = scores.softmax(0)[..., None]
    return (shares[0] * o_TND.float() + (shares[1:] * v_JTND.float()).sum(0)).to(o_TND.dtype)


def _ffn(x_TH: Tensor, layer: Weights, config: TextConfig) -> Tensor:
    normed = rms_norm(x_TH, layer["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate = silu(linear(normed, layer["mlp.gate_proj.weight"]).float()).to(x_TH.dtype)
    return x_TH + linear(gate * linear(normed, layer["mlp.up_proj.weight"]), layer["mlp.down_proj.weight"])


def _causal_conv(x_TC: Tensor, weight_C14: Tensor, positions_T: Tensor) -> Tensor:
    """SiLU of the depthwise convolution; the last tap weighs the current token, and no tap reaches into the sequence
    before."""
    x32, taps = x_TC.float(), weight_C14.squeeze(1).t()
    y_TC = x32 * taps[-1]
    for back in range(1, taps.shape[0]):
        earlier = pad(x32, (0, 0, back, 0))[: x32.shape[0]]
        y_TC = y_TC + torch.where((positions_T >= back)[:, None], earlier, 0.0) * taps[-1 - back]
    return silu(y_TC).to(x_TC.dtype)


def _l2_normalized(x: Tensor) -> Tensor:
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + _L2_EPS)).to(x.dtype)


def _rotated(x_TND: Tensor, cos_TA: Tensor, sin_TA: Tensor) -> Tensor:
    half = cos_TA.shape[-1]
    cos, sin = cos_TA[:, None], sin_TA[:, None]
    low, high = x_TND[..., :half].float(), x_TND[..., half : 2 * half].float()
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
    return torch.cat([rotated.to(x_TND.dtype), x_TND[..., 2 * half :]], -1)
