"""Qwen3.5 (dense and MoE) and Qwen3-Next with the MTP head: the StepModel that the runtime drives.

Owns the weights, the pools and the order of layers. Knows nothing of requests: rows and pages arrive as ids in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from agentspec import kernels
from agentspec.models.attention import GatedAttention
from agentspec.models.gated_delta import GatedDeltaNet
from agentspec.models.hf_config import TextConfig
from agentspec.models.layers import PrefillInputs, RMSNorm, Rope, StateRows, StepInputs, SwiGLU
from agentspec.models.moe import MixtureOfExperts
from agentspec.models.protocol import PrefillChunk, VerifyBatch
from agentspec.models.state import StatePools, allocate_pools
from agentspec.models.tensors import ParameterScope
from agentspec.types import ModelSpec

Mixer = GatedAttention | GatedDeltaNet


class DecoderLayer:
    """x + mixer(norm(x)), then x + ffn(norm(x)). The model calls the mixer: only it knows the pools."""

    def __init__(self, config: TextConfig, parameters: ParameterScope, mixer: Mixer, pool_index: int) -> None:
        self.mixer = mixer
        self.pool_index = pool_index
        """Index of the layer among those of its kind: the layer dimension of its pool."""
        self.input_norm = RMSNorm(parameters.take("input_layernorm.weight"), config.rms_norm_eps)
        self.post_norm = RMSNorm(parameters.take("post_attention_layernorm.weight"), config.rms_norm_eps)
        ffn = parameters.under("mlp.")
        self.ffn = SwiGLU(ffn) if config.moe is None else MixtureOfExperts(config.moe, ffn)


class MtpHead:
    """One full-attention layer over pairs (embedding of token p, hidden of token p-1), sharing embedding and head with the trunk."""

    def __init__(self, config: TextConfig, parameters: ParameterScope) -> None:
        eps = config.rms_norm_eps
        self.embedding_norm = RMSNorm(parameters.take("pre_fc_norm_embedding.weight"), eps)
        self.hidden_norm = RMSNorm(parameters.take("pre_fc_norm_hidden.weight"), eps)
        self.fc = parameters.take("fc.weight")
        layer = parameters.under("layers.0.")
        self.attention = GatedAttention(config, layer.under("self_attn."))
        self.layer = DecoderLayer(config, layer, self.attention, config.num_attention_layers)
        self.norm = RMSNorm(parameters.take("norm.weight"), eps)

    def join(self, embedding_NH: Tensor, hidden_NH: Tensor) -> Tensor:
        """The layer's input for each pair; the embedding comes first."""
        return linear(torch.cat([self.embedding_norm(embedding_NH), self.hidden_norm(hidden_NH)], -1), self.fc)


class Qwen3_5Model:  # noqa: N801  the family's name has an underscore
    """A loaded model. See models/protocol.py for what each operation promises."""

    def __init__(self, config: TextConfig, spec: ModelSpec, parameters: dict[str, Tensor], *, dtype: torch.dtype) -> None:
        """Takes ownership of `parameters` (canonical names, models/tensors.py) and leaves it empty."""
        scope = ParameterScope(parameters)
        trunk = scope.under("model.")
        self._config, self._spec, self._dtype = config, spec, dtype
        self._embedding_VH = trunk.take("embed_tokens.weight")
        self._device = self._embedding_VH.device
        self._rope = Rope(config, self._device)
        self._layers: list[DecoderLayer] = []
        for i, layer_type in enumerate(config.layer_types):
            layer = trunk.under(f"layers.{i}.")
            if layer_type == "linear_attention":
                mixer: Mixer = GatedDeltaNet(config, layer.under("linear_attn."))
            else:
                mixer = GatedAttention(config, layer.under("self_attn."))
            self._layers.append(DecoderLayer(config, layer, mixer, config.layer_types[:i].count(layer_type)))
        self._norm = RMSNorm(trunk.take("norm.weight"), config.rms_norm_eps)
        self._head_VH = self._embedding_VH if config.tied else scope.take("lm_head.weight")
        self._mtp = MtpHead(config, scope.under("mtp.")) if config.has_mtp else None
        self._pools: StatePools | None = None
        scope.finish()

    @property
    def spec(self) -> ModelSpec:
        return self._spec

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

    def verify(self, batch: VerifyBatch) -> Tensor:
        num_slots, num_tokens = batch.tokens_BT.shape
        inputs = self._step_inputs(num_slots, num_tokens, batch.length_B, batch.page_table_BP)
        rows = StateRows(read_row_B=batch.read_row_B, write_rows_BT=batch.write_rows_BT)
        pools = self.pools

        def mix(layer: DecoderLayer, x_NH: Tensor) -> Tensor:
            mixer, index = layer.mixer, layer.pool_index
            if isinstance(mixer, GatedAttention):
                return mixer.step(x_NH, pools.kv_AP2SGD[index], inputs)
            return mixer.step(x_NH, pools.ssm_LRVDK[index], pools.conv_LR3C[index], inputs, rows)

        hidden_BTH: Tensor = torch.unflatten(self._run_layers(batch.tokens_BT.flatten(), mix), 0, (num_slots, num_tokens))
        kernels.write_hidden(pools.hidden_RH, hidden_BTH, batch.write_rows_BT)
        return hidden_BTH

    def prefill(self, chunks: Sequence[PrefillChunk]) -> list[Tensor]:
        inputs = self._prefill_inputs(chunks)
        pools = self.pools

        def mix(layer: DecoderLayer, x_NH: Tensor) -> Tensor:
            mixer, index = layer.mixer, layer.pool_index
            if isinstance(mixer, GatedAttention):
                return mixer.prefill(x_NH, pools.kv_AP2SGD[index], inputs)
            return mixer.prefill(x_NH, pools.ssm_LRVDK[index], pools.conv_LR3C[index], inputs)

        hidden_NH = self._run_layers(torch.cat([chunk.token_ids for chunk in chunks]), mix)
        kernels.write_hidden_prefill(pools.hidden_RH, hidden_NH, inputs.spans)
        return list(torch.split(hidden_NH, [span.count for span in inputs.spans]))

    def mtp(self, tokens_BT: Tensor, hidden_BTH: Tensor, start_B: Tensor, page_table_BP: Tensor) -> Tensor:
        head = self._mtp_head()
        num_slots, num_tokens = tokens_BT.shape
        inputs = self._step_inputs(num_slots, num_tokens, start_B, page_table_BP)
        kv_P2SGD = self.pools.kv_AP2SGD[head.layer.pool_index]
        x_NH = head.join(embedding(tokens_BT.flatten(), self._embedding_VH), hidden_BTH.flatten(0, 1))
        x_NH = x_NH + head.attention.step(head.layer.input_norm(x_NH), kv_P2SGD, inputs, first_position=1)
        x_NH = x_NH + head.layer.ffn(head.layer.post_norm(x_NH))
        m_BTH: Tensor = torch.unflatten(head.norm(x_NH), 0, (num_slots, num_tokens))
        return m_BTH

    def mtp_prefill(self, chunks: Sequence[PrefillChunk], previous_NH: Sequence[Tensor]) -> None:
        head = self._mtp_head()
        inputs = self._prefill_inputs(chunks)
        tokens_N = torch.cat([chunk.token_ids for chunk in chunks])
        x_NH = head.join(embedding(tokens_N, self._embedding_VH), torch.cat(list(previous_NH)))
        # The head has one layer, so its keys and values need neither its attention nor its FFN.
        head.attention.prefill_keys_values(head.layer.input_norm(x_NH), self.pools.kv_AP2SGD[head.layer.pool_index], inputs)

    def read_hidden(self, rows_B: Tensor) -> Tensor:
        return kernels.read_hidden(self.pools.hidden_RH, rows_B)

    def logits(self, hidden: Tensor) -> Tensor:
        scores = linear(hidden, self._head_VH).float()
        scores[..., self._spec.num_real_tokens :] = -torch.inf
        return scores

    def draft_head(self, m: Tensor) -> Tensor:
        return linear(m, self._head_VH[: self._spec.num_real_tokens]).argmax(-1)

    def _mtp_head(self) -> MtpHead:
        assert self._mtp is not None, "the checkpoint has no MTP head: spec.has_mtp is False"
        return self._mtp

    def _run_layers(self, tokens_N: Tensor, mix: Callable[[DecoderLayer, Tensor], Tensor]) -> Tensor:
        """Post-final-norm hidden_NH; `mix` runs a layer's mixer on its normed input."""
        x_NH = embedding(tokens_N, self._embedding_VH)
        for layer in self._layers:
            x_NH = x_NH + mix(layer, layer.input_norm(x_NH))
            x_NH = x_NH + layer.ffn(layer.post_norm(x_NH))
        return self._norm(x_NH)

    def _step_inputs(self, num_slots: int, num_tokens: int, start_B: Tensor, page_table_BP: Tensor) -> StepInputs:
        positions_BT = start_B[:, None] + torch.arange(num_tokens, device=self._device)
        cos_NA, sin_NA = self._rope(positions_BT.flatten())
        return StepInputs(num_slots=num_slots, num_tokens=num_tokens, start_B=start_B, page_table_BP=page_table_BP, cos_NA=cos_NA, sin_NA=sin_NA)

    def _prefill_inputs(self, chunks: Sequence[PrefillChunk]) -> PrefillInputs:
        spans: list[kernels.Span] = []
        positions: list[Tensor] = []
        offset = 0
        for chunk in chunks:
            count = chunk.token_ids.shape[0]
            assert chunk.state_writes[-1][0] == count, "the last state write stands at the chunk's end"
            spans.append(
                kernels.Span(
                    offset=offset,
                    count=count,
                    start=chunk.start,
                    read_row=chunk.read_row,
                    state_writes=chunk.state_writes,
                    page_ids=chunk.page_ids,
                )
            )
            positions.append(torch.arange(chunk.start, chunk.start + count, device=self._device))
            offset += count
        cos_NA, sin_NA = self._rope(torch.cat(positions))
        return PrefillInputs(spans=spans, cos_NA=cos_NA, sin_NA=sin_NA)
