"""The operations of a forward and of a decode step: one signature each, shared by all implementations.

A backend is a module that has these functions. `reference` is plain torch for any device, and every other backend is
tested against it; `triton` runs on CUDA. Operations are as coarse as a model's mathematics allows, so that a backend
is free to fuse.

No operation of a step reads device data on the host (those of `reference` do where they say so), and all may be
captured in a CUDA graph. Results are new tensors unless "in place" is said. Vectors and tables of integers (ids, rows,
positions, page tables) are contiguous.

Shape letters: N tokens, B slots, T tokens per slot (N = B * T, slot by slot, unless slots.LiveColumns says which), H
hidden size, O output features, E extra outputs, I FFN width, X experts, J chosen experts, V vocabulary, R rows, P pages
per sequence, S slots of the tables, F fields, k drafts, c copies; in the recurrence V value heads, D value dim, K key
dim, C conv channels; in attention Q query heads, G key/value heads, D head dim, A half of the rotary dims, L positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.slots import Commit, LiveColumns, RingWindow, SamplingTable, SharedRows, Window
from agentspec.kernels.weights import Weight
from agentspec.types import RingShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """A zero-centred RMS norm: x / rms(x) * (1 + weight)."""

    weight: Tensor
    """[H]."""
    eps: float
    product_OH: Weight | None = None
    """The weight of the product that takes the normed x, for sums that prepare its input (`add_linear`'s next_norm);
    None: no sum does."""
    extra_EH: Tensor | None = None
    """That product's rows in full precision, if it has such."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeTable:
    """Cosines and sines of every position up to the longest context, float32 [L, A]. Dimension pairs are (j, j + A)."""

    cos_LA: Tensor
    sin_LA: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaWeights:
    """Parameters of one Gated DeltaNet layer besides its projections."""

    conv_C4: Tensor
    """[C, 4]; tap 3 multiplies the current token."""
    a_log_V: Tensor
    """float32."""
    dt_bias_V: Tensor
    """float32."""
    norm_D: Tensor
    """float32, plain gain."""
    eps: float
    gate: Literal["silu", "sigmoid"]


@dataclass(frozen=True, slots=True)
class DeltaRing:
    """The rings of one Gated DeltaNet layer: for each slot, what its latest tokens added to the state. The entry of
    position p is at p % C. S slots, C entries, G key heads."""

    key_SCGK: Tensor
    """float32, L2-normalised."""
    delta_SCVD: Tensor
    """float32. The state after a token is decay * state + delta key^T."""
    decay_SCV: Tensor
    """float32."""
    conv_SCX: Tensor
    """[S, C, conv channels]: inputs of the convolution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """Parameters of one gated attention layer besides its projections."""

    q_norm: Norm
    k_norm: Norm
    scale: float
    """Multiplies the scores."""
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureWeights:
    """Weights of one mixture-of-experts FFN. Gate rows come before up rows."""

    router_XH: Tensor
    top_k: int
    """Routed experts per token."""
    normalize: bool
    """Divide the probabilities of a token's experts by their sum."""
    gate_up_X2IH: Weight
    down_XHI: Weight
    shared_gate_1H: Tensor
    shared_gate_up_2IH: Weight
    """The shared expert's width may differ from that of the routed ones."""
    shared_down_HI: Weight
    first_expert: int | None = None
    """None: `gate_up` and `down` have all of the router's experts. Otherwise the id of the first that they have: only
    consecutive experts of theirs are computed, and the group's sum has them all."""


class ProductInput:
    """The input of one product, in a form of the backend's own, which is good for nothing else."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class OpenSum:
    """A sum that nobody has added yet: `add_experts` does so. A type of its own, so that nothing reads the residual as
    if it were the sum."""

    residual_NH: Tensor
    product_NH: Tensor
    """As the residual."""

    def closed(self) -> Tensor:
        """residual + product, rounded once and written over the residual. Call once, and read the sum no more."""
        return self.residual_NH.add_(self.product_NH)


@dataclass(frozen=True, slots=True, eq=False)
class OpenProduct:
    """A product some of whose columns nobody has computed yet: `gated_delta_prefill` does so. A type of its own, so
    that nothing reads them as if they were there."""

    values_NP: Tensor
    close: Callable[[], None]
    """Computes the missing columns, in place. Call once."""


class Backend(Protocol):
    # Dense blocks. Weights may have any form of weights.py that the backend supports, unless they are said to be
    # tensors. A product of many tokens with block-scaled weights may round its inputs to 8-bit floats too, with one
    # scale per token and group of 128 features

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm over the last dimension of x [..., H], in float32, then cast to x's dtype."""

    def linear(self, x_NH: Tensor, weight_OH: Weight) -> Tensor:
        """x W^T: [N, O] in x's dtype."""

    def norm_linear(self, x_NH: Tensor, norm: Norm | None, weight_OH: Weight, extra_EH: Tensor | None = None) -> Tensor:
        """`linear` of the normed input: [N, O], or [N, O + E] with the outputs of `extra` appended; those are never
        rounded to 8 bits. norm: None if the input is normed already."""

    def norm_linear_before_delta(
        self, x_NH: Tensor, norm: Norm | None, weight_OH: Weight, extra_EH: Tensor | None, gates: slice
    ) -> Tensor | OpenProduct:
        """`norm_linear`, for `gated_delta_prefill` of its result: that may compute the columns `gates`, which it reads
        last, beside the recurrence."""

    def norm_swiglu(self, x_NH: Tensor, norm: Norm | None, gate_up_2IH: Weight) -> Tensor:
        """silu(gate) * up of the normed input, [N, I] in x's dtype. gate_up holds the rows of gate, then those of
        up. norm: as of `norm_linear`."""

    def add_linear(
        self, residual_NH: Tensor | None, x_NO: Tensor | ProductInput, weight_HO: Weight, next_norm: Norm | None = None
    ) -> Tensor:
        """residual + x W^T: [N, H] in the residual's dtype. The residual may be overwritten by the result; None: zeros
        of x's dtype. x: a tensor, or what an operation of this backend has made for this weight. next_norm: the norm of
        the result that comes next, for groups of ranks (group.py) and kernels that compute it with the sum."""

    def add_linear_before_experts(
        self,
        residual_NH: Tensor,
        x_NO: Tensor | ProductInput,
        weight_HO: Weight,
        norm: Norm,
        weights: MixtureWeights,
    ) -> Tensor | OpenSum:
        """`add_linear`, for `add_experts` with this norm and mixture: that may add the two, while it reads them."""

    def add_ffn(
        self, residual_NH: Tensor, norm: Norm, gate_up_2IH: Weight, down_HI: Weight, next_norm: Norm | None = None
    ) -> Tensor:
        """residual + `norm_swiglu` of the residual times down^T: [N, H]. As `add_linear`."""

    def add_experts(
        self, residual_NH: Tensor | OpenSum, norm: Norm, weights: MixtureWeights, next_norm: Norm | None = None
    ) -> Tensor:
        """residual + the mixture of experts of the normed residual: [N, H]. The residual may be overwritten, or be a
        sum that `add_linear_before_experts` has left open for it. next_norm: as in `add_linear`.

        With y the normed residual: sum over the token's top_k experts of weight * expert(y), plus sigmoid(shared gate
        y) * shared expert(y), where an expert is down(silu(gate y) * up y). Weights are the softmax over ALL experts'
        router scores (float32), optionally normalised. Accumulation order is batch-invariant. Definition:
        kernels/reference/moe.py."""

    def expert_sum(self, x_NH: Tensor, norm: Norm, weights: MixtureWeights) -> Tensor:
        """The term that `add_experts` adds to x: [N, H]. x is not modified."""

    def norm_to_rows(self, x_NH: Tensor, norm: Norm, hidden_RH: Tensor, write_rows_N: Tensor) -> Tensor:
        """The final norm: [N, H]. Row n is also stored to hidden_RH[write_rows_N[n]], in place. Rows may repeat only
        at SCRATCH_ROW."""

    def logits(self, x_NH: Tensor, weight_VH: Weight, num_real: int) -> Tensor:
        """float32 [N, V] scores; minus infinity from token `num_real` on. weight_VH: plain, or in 4 bits."""

    def argmax(self, logits_NV: Tensor) -> Tensor:
        """int64 [N]: argmax of each row, lowest id on ties. logits_NV: float32."""

    # The MTP head

    def pair_norms(
        self, tokens_N: Tensor, embedding_VH: Tensor, hidden_NH: Tensor, embedding_norm: Norm, hidden_norm: Norm
    ) -> Tensor:
        """[norm(embedding of the token) | norm(hidden)]: [N, 2H]."""

    def take_columns(self, x_NH: Tensor, y_NX: Tensor, column_B: Tensor) -> tuple[Tensor, Tensor]:
        """One column of each slot's window, of two tensors of B windows of equal length: ([B, H], [B, X]).
        column_B: int64."""

    def draft_argmax(self, x_NH: Tensor, head_OH: Weight, ids_O: Tensor | None) -> Tensor:
        """Draft token of each x: int64 [N], ids[argmax of x head^T], lowest row on ties. ids_O: int64; None: row o of
        the head is token o."""

    def draft_best(self, x_NH: Tensor, head_OH: Weight, ids_O: Tensor) -> Tensor:
        """`draft_argmax` with its token's score, packed so that the better of two is a maximum: int64 [N, 1]. For
        Group.best; definition: kernels/reference/ranking.py."""

    # Mixers of a decode window

    def gated_delta_step(
        self,
        projected_NP: Tensor,
        weights: DeltaWeights,
        ssm_RVDK: Tensor,
        conv_R3C: Tensor,
        read_row_B: Tensor,
        write_rows_BT: Tensor,
    ) -> Tensor:
        """Short convolution, gated delta rule and gated norm over every slot's window: [N, V * D] in the projection's
        dtype.

        Args:
            projected_NP: [N, C + V * D + 2 V]: q, k, v before the convolution; the norm's gate z; write strength b;
                decay a.
            ssm_RVDK: pool of one layer, float32; conv_R3C: pool of one layer, oldest row first. Both in place: the
                state after column t is stored to row write_rows_BT[:, t]. A slot's read row may be one of its write
                rows. Write rows repeat only at SCRATCH_ROW.
            read_row_B: int64 [B]. write_rows_BT: int64 [B, T].
        Definitions: kernels/reference/gated_delta.py, causal_conv.py, norms.py (gated_rms_norm).
        """

    def gated_delta_ring_step(
        self,
        projected_NP: Tensor,
        weights: DeltaWeights,
        ssm_RVDK: Tensor,
        conv_R3C: Tensor,
        ring: DeltaRing,
        read_row_B: Tensor,
        window: RingWindow,
        live: LiveColumns | None = None,
        *,
        reads_early: bool = False,
    ) -> Tensor:
        """`gated_delta_step` for slots with rings: [N, V * D].

        Advances the state in the read row by the ring's entries from the read length to the start, then by the window.
        Stores the state at the fold length to the fold row (which may be the read row), and the window's entries to the
        ring, in place. Definition: kernels/reference/gated_delta_ring.py.

        live: the rows of `projected`, and so which columns there are; None: all. A dead row's output is zeros.

        reads_early: the window, and what it touches of the pools, may be read and stored while the kernels before this
        one still run: none of them touches that, and whatever wrote it had ended before one of them began."""

    def fold_hidden(self, hidden_RH: Tensor, hidden_SCH: Tensor, window: RingWindow) -> None:
        """For slots with rings: store the hidden of the last token before the fold length to the fold row, in place.
        hidden_SCH: rings of hiddens, [S, C, H]."""

    def attention_step(
        self,
        projected_NP: Tensor,
        weights: AttentionWeights,
        rope: RopeTable,
        kv_P2SGD: Tensor,
        page_table_BP: Tensor,
        start_B: Tensor,
        *,
        first_position: int,
        exponent_P2GS: Tensor | None = None,
        live: LiveColumns | None = None,
    ) -> Tensor:
        """Head norms, RoPE, K/V stores, causal attention and the output gate over every slot's window: [N, Q * D] in
        the projection's dtype.

        Args:
            projected_NP: [N, 2 Q D + 2 G D]: head by head q then its gate; then all k heads, then all v heads.
            kv_P2SGD: pool of one layer [P, 2, tokens per page, G, D], in place: keys and values of positions
                start..start+T-1 are stored, then read. In the projection's dtype, or float8_e4m3fn.
            exponent_P2GS: where the pool is float8_e4m3fn: int8 [P, 2, G, tokens per page], the power of two that
                each head of a token is multiplied by, stored and read like the pool (kernels/reference/fp8_pages.py).
            page_table_BP: int32 [B, P], pages in block order. start_B: int64 [B], position of column 0.
            first_position: earlier keys are never read (1 for the MTP layer); a query without keys gets zeros.
            live: the rows of `projected`, and so which positions are stored and read; None: all of the windows'. A dead
                row's output is zeros.
        Definitions: kernels/reference/attention.py, rope.py. A position that was never written may hold NaN: it must
        not be read, or must not affect the result.
        """

    # Prompts: the same layers over the spans of a PrefillBatch. Results of padding tokens are undefined and may be NaN;
    # nothing is stored for them

    def gated_delta_prefill(
        self,
        projected: Tensor | OpenProduct,
        weights: DeltaWeights,
        ssm_RVDK: Tensor,
        conv_R3C: Tensor,
        batch: PrefillBatch,
        *,
        out_weight: Weight | None = None,
    ) -> Tensor | ProductInput:
        """`gated_delta_step` over spans: [N, V * D]. Each span reads its READ_ROW. The state after a block is stored
        to the block's save rows only. projected: may lack columns of z (`norm_linear_before_delta`).

        out_weight: what `add_linear` multiplies the result with, which may then be a ProductInput for it. None: the
        result is a tensor.

        A span may save to the row that it reads, if no other span reads that row. Equal blocks give equal bits,
        whatever the batch and however the blocks are split over calls."""

    def attention_prefill(
        self,
        projected_NP: Tensor,
        weights: AttentionWeights,
        rope: RopeTable,
        kv_P2SGD: Tensor,
        batch: PrefillBatch,
        *,
        exponent_P2GS: Tensor | None = None,
    ) -> Tensor:
        """`attention_step` from position 0 over spans: [N, Q * D]. Stores every token's key and value, then reads the
        whole sequence's."""

    def store_keys_values(
        self,
        projected_NK: Tensor,
        weights: AttentionWeights,
        rope: RopeTable,
        kv_P2SGD: Tensor,
        batch: PrefillBatch,
        *,
        exponent_P2GS: Tensor | None = None,
    ) -> None:
        """Only the stores of `attention_prefill`. projected_NK: [N, 2 G D], all k heads, then all v heads."""

    def save_hidden(self, hidden_NH: Tensor, hidden_RH: Tensor, batch: PrefillBatch) -> None:
        """Store the hidden of each block's last token to the block's save rows, in place."""

    # Integer bookkeeping of a step

    def open_window(
        self,
        slots_SF: Tensor,
        page_table_SP: Tensor,
        slot_ids_B: Tensor,
        num_columns: int,
        ring: RingShape | None = None,
        shared: SharedRows | None = None,
    ) -> Window:
        """Gather the forward's inputs from the slots. ring: sizes of the slots' rings; None: they have none. shared:
        the forward's rows, for which each slot's live columns are chosen, only with rings; None: all columns have one.

        slots_SF: int64, see slots.SlotState. page_table_SP: int32. slot_ids_B: int64; the id of the padding slot may
        repeat."""

    def commit_window(
        self,
        slots_SF: Tensor,
        limits_SF: Tensor,
        slot_ids_B: Tensor,
        chosen_BT: Tensor,
        *,
        block_tokens: int,
        ring: RingShape | None = None,
        live: LiveColumns | None = None,
    ) -> Commit:
        """Decide how many tokens of each slot's window are accepted, and update its pointers, in place in slots_SF (an
        inert slot is not changed).

        Acceptance: the leading valid drafts that equal the target's tokens, cut after the first stop id and at the
        length limit. read_row becomes the write row of the last accepted column. Where the length crosses a multiple
        of block_tokens, the write row at that boundary becomes the newer rolling checkpoint, and the row of the older
        checkpoint replaces it among the write rows. With rings, the state that this step's forward has folded becomes
        the read row instead, and at a block boundary the newer checkpoint (reference/window.py).

        Column 0 of the next window is the last emitted token;
        `publish_drafts` adds the drafts.

        chosen_BT: int64, the target's token after every column. live: the columns that the forward had; drafts of the
        others count as not made, and what was chosen after them doesn't matter."""

    def force_acceptance(
        self,
        slots_SF: Tensor,
        limits_SF: Tensor,
        slot_ids_B: Tensor,
        chosen_BT: Tensor,
        rate_K: Tensor,
        live: LiveColumns | None = None,
    ) -> Tensor:
        """Benchmarks only, before `commit_window`: accept valid drafts at given rates. Returns the tokens to commit in
        place of chosen_BT.

        Draft i is accepted, whatever was chosen, if all earlier drafts are and the uniform of (seed, its position,
        token 0, PURPOSE_FORCED_ACCEPT) is below rate_K[i], float32. It then replaces the chosen token. Drafts from
        K on are accepted where they equal the chosen token. Valid drafts
        that are rejected become -1 in slots_SF, which no chosen token equals; `publish_drafts` overwrites them.
        live: as in `commit_window`."""

    def publish_drafts(
        self,
        slots_SF: Tensor,
        slot_ids_B: Tensor,
        outcome_BF: Tensor,
        drafts_Bk: Tensor,
        num_valid_B: Tensor | None = None,
    ) -> None:
        """Write the drafts of the next window, in place, to the active slots.

        drafts_Bk: int64; there may be more than this step's window had. num_valid_B: int64, how many leading drafts of
        each slot were made, also written to outcome_BF; None: as `commit_window` has left it, all of k."""

    # Copies behind the MTP drafts

    def append_text(self, text_SL: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor) -> None:
        """Store the tokens that a step emitted at their positions of the slots' texts, in place. A slot that emitted
        none keeps its text.

        text_SL: int32 [S, L], the token at each position of each slot's sequence, prompt and output. L: at least the
        length that the longest sequence ends at. Undefined behind the last emitted token. outcome_BF: see
        slots.OutcomeRows; the last emitted token is at position length_B."""

    def draft_copies(
        self,
        text_SL: Tensor,
        slot_ids_B: Tensor,
        outcome_BF: Tensor,
        drafts_Bk: Tensor,
        *,
        num_copies: int,
        min_match: int,
    ) -> tuple[Tensor, Tensor]:
        """After `append_text`: draft what followed the last tokens of text and drafts where they occurred before.
        Returns the copies, int64 [B, c], and how many of them each slot has, int64 [B]: num_copies, or 0 if there is
        no match of min_match tokens, or the slot emitted nothing. Then its copies are token 0.

        drafts_Bk: int64, of any strides; k may be 0. num_copies: c, at least 1. min_match: 1 to MAX_COPY_MATCH.
        Definition: mtp/copies.py."""

    # Sampling

    def sample(
        self,
        logits_BTV: Tensor,
        tokens_BT: Tensor,
        position_BT: Tensor,
        slot_ids_B: Tensor,
        table: SamplingTable,
        *,
        constrained: bool,
        live: LiveColumns | None = None,
    ) -> Tensor:
        """Sample the target's token after each column, by each slot's parameters: int64 BT. Order and formulas:
        kernels/reference/sampling.py.

        logits_BTV: float32, not changed. tokens_BT: int64, the window; row t's context is the tokens counted in the
        table plus tokens 1..t. position_BT: int64, position of the sampled token. constrained: apply the table's
        masks; otherwise they are not read. live: the columns that the forward had; logits_BTV is then [1, N, V], by its
        rows, and a dead column gets any token."""
