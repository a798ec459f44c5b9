"""The family's whole forward in plain torch, from raw checkpoint tensors: one sequence, float32, no cache, no batching.

Shares no code with agentspec or transformers; reads config.json and safetensors itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu, softplus


class Oracle:
    def __init__(self, directory: Path) -> None:
        raw = json.loads((directory / "config.json").read_text())
        self.c = raw.get("text_config", raw)
        self.tied = raw.get("tie_word_embeddings", False)
        self.w: dict[str, Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            self.w |= {
                name.replace("model.language_model.", "model."): tensor.float()
                for name, tensor in load_file(path).items()
            }
        interval, num_layers = self.c.get("full_attention_interval", 4), self.c["num_hidden_layers"]
        self.full = [(i + 1) % interval == 0 for i in range(num_layers)]
        if "layer_types" in self.c:
            self.full = [kind == "full_attention" for kind in self.c["layer_types"]]
        self.states: dict[int, Tensor] = {}
        """Recurrent state after the last `hidden` call, by layer, [heads, value dim, key dim]."""

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """[N, H] after the final norm."""
        x = self.w["model.embed_tokens.weight"][list(tokens)]
        for i, full in enumerate(self.full):
            x = self._layer(x, f"model.layers.{i}.", full, first_position=0, index=i)
        return self._norm(x, "model.norm.weight")

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.w["model.embed_tokens.weight" if self.tied else "lm_head.weight"].T

    def mtp(self, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """m for the pairs (hidden[t], tokens[t + 1]): one fewer than tokens."""
        embedded = self._norm(self.w["model.embed_tokens.weight"][list(tokens[1:])], "mtp.pre_fc_norm_embedding.weight")
        joined = torch.cat([embedded, self._norm(hidden[: len(tokens) - 1], "mtp.pre_fc_norm_hidden.weight")], -1)
        x = joined @ self.w["mtp.fc.weight"].T
        return self._norm(self._layer(x, "mtp.layers.0.", True, first_position=1, index=-1), "mtp.norm.weight")

    def _norm(self, x: Tensor, weight: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * (1 + self.w[weight])

    def _layer(self, x: Tensor, prefix: str, full: bool, *, first_position: int, index: int) -> Tensor:
        normed = self._norm(x, f"{prefix}input_layernorm.weight")
        x = x + (
            self._attention(normed, f"{prefix}self_attn.", first_position)
            if full
            else self._delta(normed, f"{prefix}linear_attn.", index)
        )
        return x + self._ffn(self._norm(x, f"{prefix}post_attention_layernorm.weight"), f"{prefix}mlp.")

    def _rotate(self, x: Tensor, first_position: int) -> Tensor:
        rope = self.c["rope_parameters"]
        dims = int(x.shape[-1] * rope["partial_rotary_factor"])
        half = dims // 2
        out = x.clone()
        for t in range(x.shape[0]):
            for j in range(half):
                angle = torch.tensor((t + first_position) * rope["rope_theta"] ** (-2 * j / dims), dtype=torch.float64)
                cos, sin = angle.cos().float(), angle.sin().float()
                out[t, :, j] = x[t, :, j] * cos - x[t, :, j + half] * sin
                out[t, :, j + half] = x[t, :, j + half] * cos + x[t, :, j] * sin
        return out

    def _attention(self, x: Tensor, prefix: str, first_position: int) -> Tensor:
        count, dim = x.shape[0], self.c["head_dim"]
        heads, groups = self.c["num_attention_heads"], self.c["num_key_value_heads"]
        queries = (x @ self.w[f"{prefix}q_proj.weight"].T).view(count, heads, 2, dim)
        keys = (x @ self.w[f"{prefix}k_proj.weight"].T).view(count, groups, dim)
        values = (x @ self.w[f"{prefix}v_proj.weight"].T).view(count, groups, dim)
        q = self._rotate(self._norm(queries[:, :, 0], f"{prefix}q_norm.weight"), first_position)
        k = self._rotate(self._norm(keys, f"{prefix}k_norm.weight"), first_position)
        out = torch.zeros(count, heads, dim)
        causal = torch.ones(count, count).tril().bool()
        for h in range(heads):
            g = h * groups // heads
            scores = (q[:, h] @ k[:, g].T / dim**0.5).masked_fill(~causal, -torch.inf)
            out[:, h] = scores.softmax(-1) @ values[:, g] * queries[:, h, 1].sigmoid()
        return out.view(count, -1) @ self.w[f"{prefix}o_proj.weight"].T

    def _unpacked(self, x: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if f"{prefix}in_proj_qkv.weight" in self.w:
            qkv, z, b, a = (x @ self.w[f"{prefix}in_proj_{part}.weight"].T for part in ("qkv", "z", "b", "a"))
            return qkv, z, b, a
        heads, dim = self.c["linear_num_key_heads"], self.c["linear_key_head_dim"]
        share = self.c["linear_num_value_heads"] // heads
        wide = share * self.c["linear_value_head_dim"]
        parts: list[list[Tensor]] = [[], [], [], [], [], []]
        packed_qkvz = (x @ self.w[f"{prefix}in_proj_qkvz.weight"].T).chunk(heads, -1)
        packed_ba = (x @ self.w[f"{prefix}in_proj_ba.weight"].T).chunk(heads, -1)
        for qkvz, ba in zip(packed_qkvz, packed_ba, strict=True):
            for i, part in enumerate([*qkvz.split([dim, dim, wide, wide], -1), *ba.split([share, share], -1)]):
                parts[i].append(part)
        q, k, v, z, b, a = (torch.cat(part, -1) for part in parts)
        return torch.cat([q, k, v], -1), z, b, a

    def _delta(self, x: Tensor, prefix: str, index: int) -> Tensor:
        count, key_heads, heads = x.shape[0], self.c["linear_num_key_heads"], self.c["linear_num_value_heads"]
        key_dim, value_dim = self.c["linear_key_head_dim"], self.c["linear_value_head_dim"]
        qkv, z, b, a = self._unpacked(x, prefix)
        padded = torch.cat([torch.zeros(3, qkv.shape[1]), qkv])
        taps = self.w[f"{prefix}conv1d.weight"]
        qkv = silu(sum(padded[j : j + count] * taps[:, 0, j] for j in range(4)))  # type: ignore[arg-type]
        q, k, v = qkv.split([key_heads * key_dim, key_heads * key_dim, heads * value_dim], -1)
        q, k, v, z = (
            q.view(count, key_heads, -1),
            k.view(count, key_heads, -1),
            v.view(count, heads, -1),
            z.view(count, heads, -1),
        )
        q, k = (y / (y.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        decay = torch.exp(-self.w[f"{prefix}A_log"].exp() * softplus(a + self.w[f"{prefix}dt_bias"]))
        out = torch.zeros(count, heads, value_dim)
        states = torch.zeros(heads, value_dim, key_dim)
        for h in range(heads):
            key_head = h // (heads // key_heads)
            state = states[h]
            for t in range(count):
                state = decay[t, h] * state
                error = b[t, h].sigmoid() * (v[t, h] - state @ k[t, key_head])
                state = state + torch.outer(error, k[t, key_head])
                out[t, h] = state @ q[t, key_head] / key_dim**0.5
            states[h] = state
        self.states[index] = states
        gate = torch.sigmoid(z) if self.c.get("output_gate_type") == "sigmoid" else silu(z)
        normed = (
            out / (out.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt() * self.w[f"{prefix}norm.weight"]
        )
        return (normed * gate).view(count, -1) @ self.w[f"{prefix}out_proj.weight"].T

    def _swiglu(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _named_swiglu(self, x: Tensor, prefix: str) -> Tensor:
        return self._swiglu(x, *(self.w[f"{prefix}{part}_proj.weight"] for part in ("gate", "up", "down")))

    def _expert(self, x: Tensor, prefix: str, e: int) -> Tensor:
        if f"{prefix}experts.gate_up_proj" not in self.w:
            return self._named_swiglu(x, f"{prefix}experts.{e}.")
        width = self.c["moe_intermediate_size"]
        fused = self.w[f"{prefix}experts.gate_up_proj"][e]
        return self._swiglu(x, fused[:width], fused[width:], self.w[f"{prefix}experts.down_proj"][e])

    def _ffn(self, x: Tensor, prefix: str) -> Tensor:
        if f"{prefix}gate.weight" not in self.w:
            return self._named_swiglu(x, prefix)
        probabilities = (x @ self.w[f"{prefix}gate.weight"].T).softmax(-1)
        out = torch.sigmoid(x @ self.w[f"{prefix}shared_expert_gate.weight"].T) * self._named_swiglu(
            x, f"{prefix}shared_expert."
        )
        for t in range(x.shape[0]):
            chosen = probabilities[t].argsort(descending=True)[: self.c["num_experts_per_tok"]]
            total = probabilities[t, chosen].sum() if self.c.get("norm_topk_prob", True) else torch.tensor(1.0)
            for e in chosen.tolist():
                out[t] += probabilities[t, e] / total * self._expert(x[t], prefix, e)
        return out
