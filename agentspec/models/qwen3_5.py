"""Qwen3.5 (dense and MoE) and Qwen3-Next with the MTP head: the StepModel that the runtime drives.

Owns the weights, the pools and the order of layers. Knows nothing of requests: rows and pages arrive as ids in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from agentspec import kernels
from agentspec.models.attention import GatedAttention
from agentspec.models.fp8_drafts import in_fp8, quantize_mtp_layer
from agentspec.models.gated_delta import GatedDeltaNet
from agentspec.models.hf_config import TextConfig
from agentspec.models.layers import StateRows, StepInputs, SwiGLU, rope_table
from agentspec.models.moe import MixtureOfExperts
from agentspec.models.protocol import VerifyBatch
from agentspec.models.state import StatePools, allocate_pools
from agentspec.models.tensors import ParameterScope
from agentspec.types import ModelSpec

Mixer = GatedAttention | GatedDeltaNet


class DecoderLayer:
    """A mixer and an FFN, each with the norm in front of it. The model calls the mixer: only it knows the pools."""

    def __init__(self, config: TextConfig, ops: kernels.Backend, parameters: ParameterScope, mixer: Mixer, pool_index: int) -> None:
        self.mixer = mixer
        self.pool_index = pool_index
        """Index of the layer among those of its kind: the layer dimension of its pool."""
        self.input_norm = kernels.Norm(weight=parameters.take_tensor("input_layernorm.weight"), eps=config.rms_norm_eps)
        self.post_norm = kernels.Norm(weight=parameters.take_tensor("post_attention_layernorm.weight"), eps=config.rms_norm_eps)
        ffn = parameters.under("mlp.")
        self.ffn = SwiGLU(ops, ffn) if config.moe is None else MixtureOfExperts(config.moe, ops, ffn)


class MtpHead:
    """One full-attention layer over pairs (embedding of token p, hidden of token p-1), sharing embedding and head with the trunk."""

    def __init__(self, config: TextConfig, ops: kernels.Backend, parameters: ParameterScope) -> None:
        self._ops = ops
        eps = config.rms_norm_eps
        self.embedding_norm = kernels.Norm(weight=parameters.take_tensor("pre_fc_norm_embedding.weight"), eps=eps)
        self.hidden_norm = kernels.Norm(weight=parameters.take_tensor("pre_fc_norm_hidden.weight"), eps=eps)
        self.fc = parameters.take("fc.weight")
        layer = parameters.under("layers.0.")
        self.attention = GatedAttention(config, ops, layer.under("self_attn."))
        self.layer = DecoderLayer(config, ops, layer, self.attention, config.num_attention_layers)
        self.norm = kernels.Norm(weight=parameters.take_tensor("norm.weight"), eps=eps)

    def join(self, tokens_N: Tensor, embedding_VH: Tensor, hidden_NH: Tensor) -> Tensor:
        """The layer's input for each pair; the embedding comes first."""
        return self._ops.linear(self._ops.pair_norms(tokens_N, embedding_VH, hidden_NH, self.embedding_norm, self.hidden_norm), self.fc)


class Qwen3_5Model:  # noqa: N801  the family's name has an underscore
    """A loaded model. See models/protocol.py for what each operation promises."""

    def __init__(
        self,
        config: TextConfig,
        spec: ModelSpec,
        parameters: dict[str, kernels.Weight],
        *,
        dtype: torch.dtype,
        fp8_drafts: bool = False,
        group: kernels.Group | None = None,
    ) -> None:
        """Takes ownership of `parameters` (canonical names, models/tensors.py) and leaves it empty.

        fp8_drafts: quantise the MTP layer here, and the draft head in `limit_drafts`.
        group: the ranks that hold the model together. Config and parameters are then what this rank has of it (shards.py)."""
        if fp8_drafts:
            quantize_mtp_layer(parameters)
        self._fp8_drafts = fp8_drafts
        scope = ParameterScope(parameters)
        trunk = scope.under("model.")
        self._config, self._spec, self._dtype = config, spec, dtype
        self._embedding_VH = trunk.take_tensor("embed_tokens.weight")
        self._device = self._embedding_VH.device
        self._ops = ops = kernels.within(group, kernels.backend(self._device))
        self._rope = rope_table(config, self._device)
        self._layers: list[DecoderLayer] = []
        for i, layer_type in enumerate(config.layer_types):
            layer = trunk.under(f"layers.{i}.")
            if layer_type == "linear_attention":
                mixer: Mixer = GatedDeltaNet(config, ops, layer.under("linear_attn."))
            else:
                mixer = GatedAttention(config, ops, layer.under("self_attn."))
            self._layers.append(DecoderLayer(config, ops, layer, mixer, config.layer_types[:i].count(layer_type)))
        self._norm = kernels.Norm(weight=trunk.take_tensor("norm.weight"), eps=config.rms_norm_eps)
        self._head_VH = self._embedding_VH if config.tied else scope.take_tensor("lm_head.weight")
        self._mtp = MtpHead(config, ops, scope.under("mtp.")) if config.has_mtp else None
        self._pools: StatePools | None = None
        self._draft_head_OH: kernels.Weight = kernels.Plain(self._head_VH[: spec.num_real_tokens])
        self._draft_ids_O: Tensor | None = None
        """The token of each row of the draft head; None: row o stands for token o."""
        scope.finish()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def fp8_drafts(self) -> bool:
        return self._fp8_drafts

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def pools(self) -> StatePools:
        """The state pools; their form is this model's, their ids are the cache's."""
        assert self._pools is not None, "allocate() comes first"
        return self._pools

    def allocate(self, *, num_rows: int, num_pages: int) -> None:
        self._pools = allocate_pools(self._config, num_rows=num_rows, num_pages=num_pages, device=self._device, dtype=self._dtype)

    def row_tensors(self) -> tuple[Tensor, ...]:
        return self.pools.row_tensors()

    def page_tensors(self) -> tuple[Tensor, ...]:
        return self.pools.page_tensors()

    def verify(self, batch: VerifyBatch) -> Tensor:
        inputs = StepInputs(start_B=batch.length_B, page_table_BP=batch.page_table_BP, rope=self._rope)
        rows = StateRows(read_row_B=batch.read_row_B, write_rows_BT=batch.write_rows_BT)
        pools = self.pools

        def mix(layer: DecoderLayer, x_NH: Tensor) -> Tensor:
            mixer, index = layer.mixer, layer.pool_index
            if isinstance(mixer, GatedAttention):
                return mixer.step(x_NH, layer.input_norm, pools.kv_AP2SGD[index], inputs)
            return mixer.step(x_NH, layer.input_norm, pools.ssm_LRVDK[index], pools.conv_LR3C[index], rows)

        x_NH = self._run_layers(batch.tokens_BT.flatten(), mix)
        hidden_NH = self._ops.norm_to_rows(x_NH, self._norm, pools.hidden_RH, batch.write_rows_BT.flatten())
        return hidden_NH.view(*batch.tokens_BT.shape, -1)

    def prefill(self, batch: kernels.PrefillBatch) -> Tensor:
        pools = self.pools

        def mix(layer: DecoderLayer, x_NH: Tensor) -> Tensor:
            mixer, index = layer.mixer, layer.pool_index
            if isinstance(mixer, GatedAttention):
                return mixer.prefill(x_NH, layer.input_norm, pools.kv_AP2SGD[index], self._rope, batch)
            return mixer.prefill(x_NH, layer.input_norm, pools.ssm_LRVDK[index], pools.conv_LR3C[index], batch)

        hidden_NH = self._ops.rms_norm(self._run_layers(batch.token_ids_N, mix), self._norm)
        self._ops.save_hidden(hidden_NH, pools.hidden_RH, batch)
        return hidden_NH

    def ride(self, prompts: kernels.PrefillBatch, windows: VerifyBatch) -> tuple[Tensor, Tensor]:
        inputs = StepInputs(start_B=windows.length_B, page_table_BP=windows.page_table_BP, rope=self._rope)
        rows = StateRows(read_row_B=windows.read_row_B, write_rows_BT=windows.write_rows_BT)
        pools, num_tokens = self.pools, len(prompts.token_ids_N)

        def mix(layer: DecoderLayer, x_NH: Tensor) -> Tensor:
            mixer, index = layer.mixer, layer.pool_index
            if isinstance(mixer, GatedAttention):
                return mixer.ride(x_NH, layer.input_norm, pools.kv_AP2SGD[index], self._rope, prompts, inputs)
            return mixer.ride(x_NH, layer.input_norm, pools.ssm_LRVDK[index], pools.conv_LR3C[index], prompts, rows)

        x_NH = self._run_layers(torch.cat((prompts.token_ids_N, windows.tokens_BT.flatten())), mix)
        hidden_NH = self._ops.rms_norm(x_NH[:num_tokens], self._norm)
        self._ops.save_hidden(hidden_NH, pools.hidden_RH, prompts)
        window_NH = self._ops.norm_to_rows(x_NH[num_tokens:], self._norm, pools.hidden_RH, windows.write_rows_BT.flatten())
        return hidden_NH, window_NH.view(*windows.tokens_BT.shape, -1)

    def mtp(self, tokens_BT: Tensor, hidden_BTH: Tensor, start_B: Tensor, page_table_BP: Tensor) -> Tensor:
        head = self._mtp_head()
        inputs = StepInputs(start_B=start_B, page_table_BP=page_table_BP, rope=self._rope)
        kv_P2SGD = self.pools.kv_AP2SGD[head.layer.pool_index]
        x_NH = head.join(tokens_BT.flatten(), self._embedding_VH, hidden_BTH.flatten(0, 1))
        x_NH = head.attention.step(x_NH, head.layer.input_norm, kv_P2SGD, inputs, first_position=1)
        x_NH = head.layer.ffn.add_to(x_NH, head.layer.post_norm)
        return self._ops.rms_norm(x_NH, head.norm).view_as(hidden_BTH)

    def mtp_prefill(self, batch: kernels.PrefillBatch, previous_NH: Tensor) -> None:
        head = self._mtp_head()
        x_NH = head.join(batch.token_ids_N, self._embedding_VH, previous_NH)
        # The head has one layer, so its keys and values need neither its attention nor its FFN.
        head.attention.prefill_keys_values(x_NH, head.layer.input_norm, self.pools.kv_AP2SGD[head.layer.pool_index], self._rope, batch)

    def read_hidden(self, rows_B: Tensor) -> Tensor:
        return kernels.read_hidden(self.pools.hidden_RH, rows_B)

    def logits(self, hidden: Tensor) -> Tensor:
        scores_NV = self._ops.logits(hidden.reshape(-1, hidden.shape[-1]), self._head_VH, self._spec.num_real_tokens)
        return scores_NV.view(*hidden.shape[:-1], -1)

    def limit_drafts(self, ids: Sequence[int]) -> int:
        head_VH, num_bytes = kernels.Plain(self._head_VH), 0
        if len(ids) == self._spec.num_real_tokens:
            rows_OH, self._draft_ids_O = head_VH.cut((slice(0, len(ids)),)), None
        else:
            # Their rows lie all over the head: a copy can be read at full bandwidth, and is, once for every draft.
            self._draft_ids_O = torch.tensor(ids, dtype=torch.int64, device=self._device)
            rows_OH = head_VH.take_rows(self._draft_ids_O)
            num_bytes = self._draft_ids_O.nbytes
        self._draft_head_OH = in_fp8(rows_OH) if self._fp8_drafts else rows_OH
        if self._fp8_drafts or self._draft_ids_O is not None:
            num_bytes += self._draft_head_OH.nbytes
        return num_bytes

    def draft_head(self, m: Tensor) -> Tensor:
        nearest_N = self._ops.nearest_token(m.reshape(-1, m.shape[-1]), self._draft_head_OH, self._draft_ids_O)
        return nearest_N.view(m.shape[:-1])

    def _mtp_head(self) -> MtpHead:
        assert self._mtp is not None, "the checkpoint has no MTP head: spec.has_mtp is False"
        return self._mtp

    def _run_layers(self, tokens_N: Tensor, mix: Callable[[DecoderLayer, Tensor], Tensor]) -> Tensor:
        """The residual stream after the last layer; `mix` adds a layer's mixer to it."""
        x_NH = embedding(tokens_N, self._embedding_VH)
        for layer in self._layers:
            x_NH = layer.ffn.add_to(mix(layer, x_NH), layer.post_norm)
        return x_NH
