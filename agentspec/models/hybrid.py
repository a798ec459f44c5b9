"""A model of blocks, each a mixer and an FFN, with an MTP head: the StepModel that the runtime drives.

Owns the pools and the order of blocks; which mixers there are is the family's business (models/qwen3_5.py). Knows
nothing of requests: rows and pages arrive as ids in each call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import embedding

from agentspec import kernels
from agentspec.models.attention import GatedAttention
from agentspec.models.fp8_drafts import in_fp8, quantize_mtp_layer
from agentspec.models.heads import draft_head_bytes, draft_rows, rows_of_tied_head
from agentspec.models.hf_config import TextConfig
from agentspec.models.layers import Mixer, SwiGLU, rope_table
from agentspec.models.moe import MixtureOfExperts
from agentspec.models.protocol import VerifyBatch
from agentspec.models.state import Memory, Rings, StatePools, hidden_form
from agentspec.models.tensors import ParameterScope
from agentspec.types import ModelSpec

MixerCore = Callable[[Mixer, Tensor, kernels.Norm, Memory], Tensor | kernels.ProductInput]
"""Computes the mixed values from a layer's input: by the mixer's `project` and its `step`, its `prefill`, or both."""


class DecoderLayer:
    """A mixer and an FFN, each with its input norm."""

    def __init__(self, config: TextConfig, ops: kernels.Backend, parameters: ParameterScope, mixer: Mixer) -> None:
        self._ops = ops
        self.mixer = mixer
        in_proj, in_proj_extra = mixer.in_projs
        self.input_norm = kernels.Norm(
            weight=parameters.take_tensor("input_layernorm.weight"),
            eps=config.rms_norm_eps,
            product_OH=in_proj,
            extra_EH=in_proj_extra,
        )
        ffn = parameters.under("mlp.")
        self.ffn = SwiGLU(ops, ffn) if config.moe is None else MixtureOfExperts(config.moe, ops, ffn)
        self.post_norm = kernels.Norm(
            weight=parameters.take_tensor("post_attention_layernorm.weight"),
            eps=config.rms_norm_eps,
            product_OH=self.ffn.gate_up_proj if isinstance(self.ffn, SwiGLU) else None,
        )
        # A mixture norms its input itself, while it scores the experts.
        self._norm_with_sum = self.post_norm if isinstance(self.ffn, SwiGLU) else None

    def mix(self, x_NH: Tensor, memory: Memory, core: MixerCore, column_B: Tensor | None = None) -> Tensor:
        """x plus the mixer's output. column_B: of which column of each slot's window; None: of all."""
        mixed_NX = core(self.mixer, x_NH, self.input_norm, memory)
        if column_B is not None:
            assert isinstance(mixed_NX, Tensor)
            x_NH, mixed_NX = self._ops.take_columns(x_NH, mixed_NX, column_B)
        return self._ops.add_linear(x_NH, mixed_NX, self.mixer.out_proj, self._norm_with_sum)

    def run(self, x_NH: Tensor, memory: Memory, core: MixerCore, next_norm: kernels.Norm | None) -> Tensor:
        """x plus the outputs of both blocks, with the same bits as one after the other."""
        if isinstance(self.ffn, SwiGLU):
            return self.ffn.add_to(self.mix(x_NH, memory, core), self.post_norm, next_norm)
        mixed_NX = core(self.mixer, x_NH, self.input_norm, memory)
        x = self._ops.add_linear_before_experts(x_NH, mixed_NX, self.mixer.out_proj, self.post_norm, self.ffn.weights)
        return self.ffn.add_to(x, self.post_norm, next_norm)


class MtpHead:
    """One full-attention layer over pairs (embedding of token p, hidden of token p-1), sharing embedding and head with
    the trunk."""

    def __init__(
        self,
        config: TextConfig,
        ops: kernels.Backend,
        parameters: ParameterScope,
        rope: kernels.RopeTable,
        *,
        fp8_pages: bool,
        rank: int,
    ) -> None:
        self._ops = ops
        eps = config.rms_norm_eps
        self.embedding_norm = kernels.Norm(weight=parameters.take_tensor("pre_fc_norm_embedding.weight"), eps=eps)
        self.hidden_norm = kernels.Norm(weight=parameters.take_tensor("pre_fc_norm_hidden.weight"), eps=eps)
        self.fc = parameters.take("fc.weight")
        """All columns, or this rank's equal part of them."""
        num_columns = self.fc.shape[1]
        is_part = num_columns < 2 * config.hidden_size
        self._columns = slice(rank * num_columns, (rank + 1) * num_columns) if is_part else None
        layer = parameters.under("layers.0.")
        attention = layer.under("self_attn.")
        self.attention = GatedAttention(config, ops, attention, rope, first_position=1, fp8_pages=fp8_pages)
        self.layer = DecoderLayer(config, ops, layer, self.attention)
        self.norm = kernels.Norm(weight=parameters.take_tensor("norm.weight"), eps=eps)

    def join(self, tokens_N: Tensor, embedding_VH: Tensor, hidden_NH: Tensor) -> Tensor:
        """The layer's input for each pair; the embedding comes first."""
        pairs_NK = self._ops.pair_norms(tokens_N, embedding_VH, hidden_NH, self.embedding_norm, self.hidden_norm)
        if self._columns is None:
            return self._ops.linear(pairs_NK, self.fc)
        return self._ops.add_linear(None, pairs_NK[:, self._columns], self.fc, self.layer.input_norm)


class HybridModel(ABC):
    """See models/protocol.py for the contract of each operation. A subclass chooses the mixer of each layer."""

    def __init__(
        self,
        config: TextConfig,
        spec: ModelSpec,
        parameters: dict[str, kernels.Weight],
        *,
        fp8_drafts: bool = False,
        fp8_pages: bool = False,
        group: kernels.Group | None = None,
    ) -> None:
        """Takes ownership of `parameters` (canonical names, models/tensors.py) and leaves it empty.

        fp8_drafts: quantise the MTP layer here, and the draft head in `limit_drafts`.
        fp8_pages: store keys and values in 8 bits, those of the MTP layer too.
        group: the ranks that hold the model together. Config and parameters are then what this rank has of it
        (shards.py)."""
        if fp8_drafts:
            quantize_mtp_layer(parameters)
        scope = ParameterScope(parameters)
        trunk = scope.under("model.")
        self.spec, self.fp8_drafts, self._fp8_pages = spec, fp8_drafts, fp8_pages
        self._embedding_VH = trunk.take_tensor("embed_tokens.weight")
        self.device = self._embedding_VH.device
        self._ops = ops = kernels.within(group, kernels.backend(self.device))
        rope = rope_table(config, self.device)
        self._layers: list[DecoderLayer] = []
        for i in range(len(config.layer_types)):
            layer = trunk.under(f"layers.{i}.")
            self._layers.append(DecoderLayer(config, ops, layer, self._mixer(config, i, layer, rope)))
        self._norm = kernels.Norm(weight=trunk.take_tensor("norm.weight"), eps=config.rms_norm_eps)
        self._tied, self._group = config.tied, None if group is None or group.size == 1 else group
        if config.tied:
            self._head_VH: kernels.Weight = kernels.Plain(rows_of_tied_head(self._embedding_VH, self._group))
        else:
            self._head_VH = scope.take("lm_head.weight")
        """This rank's rows of the target head."""
        self._mtp = None
        if config.has_mtp:
            rank = 0 if group is None else group.rank
            self._mtp = MtpHead(config, ops, scope.under("mtp."), rope, fp8_pages=fp8_pages, rank=rank)
        self._pools: StatePools | None = None
        self._draft_head_OH: kernels.Weight | None = None
        self._draft_ids_O: Tensor | None = None
        """This rank's rows of the draft head, and the token of each; None: row o is token o."""
        # Rows of a head that can't draft are a copy, which `limit_drafts` or the first draft makes.
        if self._head_VH.can_draft:
            self._draft_head_OH, self._draft_ids_O = self._draft_rows(range(spec.num_real_tokens))
        scope.finish()

    @abstractmethod
    def _mixer(self, config: TextConfig, index: int, parameters: ParameterScope, rope: kernels.RopeTable) -> Mixer:
        """The mixer of the trunk's layer `index`, built from that layer's parameters."""

    @property
    def pools(self) -> StatePools:
        """The state pools; their form is this model's, their ids are the cache's."""
        assert self._pools is not None, "allocate() comes first"
        return self._pools

    def allocate(self, *, num_rows: int, num_pages: int, rings: Rings | None = None) -> None:
        layers = [*self._layers, *([] if self._mtp is None else [self._mtp.layer])]
        forms = [*(layer.mixer.form for layer in layers), hidden_form(len(self._norm.weight), self._embedding_VH.dtype)]
        self._pools = StatePools(forms, num_rows=num_rows, num_pages=num_pages, rings=rings, device=self.device)

    def row_tensors(self) -> tuple[Tensor, ...]:
        return self.pools.row_tensors()

    def page_tensors(self) -> tuple[Tensor, ...]:
        return self.pools.page_tensors()

    def verify(self, batch: VerifyBatch) -> Tensor:
        tokens_N = batch.tokens_BT.flatten() if batch.live is None else batch.live.token_N

        def core(mixer: Mixer, x_NH: Tensor, norm: kernels.Norm, memory: Memory) -> Tensor:
            return mixer.step(mixer.project(x_NH, norm), memory, batch)

        x_NH = self._run_layers(tokens_N, core)
        return self._window_hidden(x_NH, batch)

    def prefill(self, batch: kernels.PrefillBatch) -> Tensor:
        x_NH = self._run_layers(
            batch.token_ids_N, lambda mixer, x_NH, norm, memory: mixer.mix_prompt(x_NH, norm, memory, batch)
        )
        hidden_NH = self._ops.rms_norm(x_NH, self._norm)
        self._ops.save_hidden(hidden_NH, self.pools.hidden_RH, batch)
        return hidden_NH

    def ride(self, prompts: kernels.PrefillBatch, windows: VerifyBatch) -> tuple[Tensor, Tensor]:
        num_tokens = len(prompts.token_ids_N)

        def core(mixer: Mixer, x_NH: Tensor, norm: kernels.Norm, memory: Memory) -> Tensor:
            x_NP = mixer.project(x_NH, norm)
            prompts_ND = mixer.prefill(x_NP[:num_tokens], memory, prompts)
            return torch.cat((prompts_ND, mixer.step(x_NP[num_tokens:], memory, windows)))

        x_NH = self._run_layers(torch.cat((prompts.token_ids_N, windows.tokens_BT.flatten())), core)
        hidden_NH = self._ops.rms_norm(x_NH[:num_tokens], self._norm)
        self._ops.save_hidden(hidden_NH, self.pools.hidden_RH, prompts)
        return hidden_NH, self._window_hidden(x_NH[num_tokens:], windows)

    def mtp(
        self,
        tokens_BT: Tensor,
        hidden_BTH: Tensor,
        start_B: Tensor,
        page_table_BP: Tensor,
        *,
        last_B: Tensor | None = None,
    ) -> Tensor:
        head = self._mtp_head()
        num_slots, num_columns = tokens_BT.shape
        x_NH = head.join(tokens_BT.flatten(), self._embedding_VH, hidden_BTH.flatten(0, 1))
        x_NH = head.layer.mix(
            x_NH,
            self.pools.layers[-1],
            lambda mixer, x_NH, norm, memory: head.attention.attend(
                mixer.project(x_NH, norm), memory, start_B, page_table_BP
            ),
            last_B if num_columns > 1 else None,
        )
        x_NH = head.layer.ffn.add_to(x_NH, head.layer.post_norm, head.norm)
        return self._ops.rms_norm(x_NH, head.norm).view(num_slots, -1, hidden_BTH.shape[2])

    def mtp_prefill(self, batch: kernels.PrefillBatch, previous_NH: Tensor) -> None:
        head = self._mtp_head()
        x_NH = head.join(batch.token_ids_N, self._embedding_VH, previous_NH)
        # The head has one layer, so its keys and values need neither its attention nor its FFN.
        head.attention.prefill_keys_values(x_NH, head.layer.input_norm, self.pools.layers[-1], batch)

    def read_hidden(self, rows_B: Tensor) -> Tensor:
        return kernels.read_hidden(self.pools.hidden_RH, rows_B)

    def window_hidden(self, batch: VerifyBatch) -> Tensor:
        stored, ids_N = self._hidden_places(batch)
        return kernels.read_hidden(stored, ids_N).view(*batch.tokens_BT.shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        scores_NV = self._ops.logits(hidden.reshape(-1, hidden.shape[-1]), self._head_VH, self.spec.num_real_tokens)
        return scores_NV.view(*hidden.shape[:-1], -1)

    def limit_drafts(self, ids: Sequence[int]) -> int:
        rows_OH, self._draft_ids_O = self._draft_rows(ids)
        self._draft_head_OH = in_fp8(rows_OH) if self.fp8_drafts else rows_OH
        return draft_head_bytes(self._draft_head_OH, self._draft_ids_O, self._head_VH)

    def _draft_rows(self, ids: Sequence[int]) -> tuple[kernels.Weight, Tensor | None]:
        return draft_rows(
            self._head_VH, self._embedding_VH, ids, self.spec.num_real_tokens, self._group, tied=self._tied
        )

    def draft_head(self, m: Tensor) -> Tensor:
        if self._draft_head_OH is None:
            self.limit_drafts(range(self.spec.num_real_tokens))
        assert self._draft_head_OH is not None
        nearest_N = self._ops.draft_argmax(m.reshape(-1, m.shape[-1]), self._draft_head_OH, self._draft_ids_O)
        return nearest_N.view(m.shape[:-1])

    def _window_hidden(self, x_NH: Tensor, batch: VerifyBatch) -> Tensor:
        """Norm the windows' residual stream: [B, T, H], with live columns [1, N, H]. Stores what the next steps read of
        it."""
        stored, ids_N = self._hidden_places(batch)
        if batch.ring is not None and self.pools.hidden_SCH is not None:
            self._ops.fold_hidden(self.pools.hidden_RH, self.pools.hidden_SCH, batch.ring)
        hidden_NH = self._ops.norm_to_rows(x_NH, self._norm, stored, ids_N)
        return hidden_NH[None] if batch.live is not None else hidden_NH.view(*batch.tokens_BT.shape, -1)

    def _hidden_places(self, batch: VerifyBatch) -> tuple[Tensor, Tensor]:
        """Where the hiddens of the windows' columns are: a tensor of hiddens, and the row of each column in it."""
        if batch.ring is None:
            return self.pools.hidden_RH, batch.write_rows_BT.flatten()
        assert self.pools.hidden_SCH is not None, "allocate() was called without rings"
        ids_N = batch.ring.entries_BT.flatten() if batch.live is None else batch.live.entry_N
        return self.pools.hidden_SCH.flatten(0, 1), ids_N

    def _mtp_head(self) -> MtpHead:
        assert self._mtp is not None, "the checkpoint has no MTP head: spec.has_mtp is False"
        return self._mtp

    def _run_layers(self, tokens_N: Tensor, core: MixerCore) -> Tensor:
        """The residual stream after the last layer."""
        x_NH = embedding(tokens_N, self._embedding_VH)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), None]
        # The pools have one more memory, of the MTP layer.
        for layer, memory, next_norm in zip(self._layers, self.pools.layers, next_norms, strict=False):
            x_NH = layer.run(x_NH, memory, core, next_norm)
        return x_NH
