"""A model whose whole state is hashes, so that any wrong row, stale page or early publish changes what it says.

With t the token at position p and r, a, b random odd 64-bit constants of tokens and positions, everything modulo 2**64:

    state      s_p = s_{p-1} + r[t]*a[p]            recurrent: lives in the row
    attention  x_p = sum over q <= p of r[t_q]*b[q]  each term lives in the page of its position
                                                     and is read back through the page table
    hidden     h_p = s_p + x_p                       its top bits pick a row of a fixed table of logits
    MTP pair   w_p = h_{p-1}*r[t] + a[p]             lives in the MTP page of its position (position 0 has none)
    checksum   c_p = sum over 1 <= q <= p of w_q     second half of the hidden: what the MTP pages must add up to

The MTP layer can compute h_p from the pair (h_{p-1}, t), and adds the difference between its pages' sum and the
checksum: one stale pair makes all its drafts junk. Where everything is right, the draft is the target's greedy choice
with probability `draft_accuracy`, decided by h_p. Storage that was never written holds poison. On the CPU it reads
lengths on the host, to be fast; on CUDA it reads nothing there.

Shape letters as in models/protocol.py; H is 2: (h, c).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentspec.kernels import LiveColumns, PrefillBatch
from agentspec.kernels.prefill_batch import (
    BLOCK_COUNT,
    BLOCK_OFFSET,
    COUNT,
    NO_ROW,
    OFFSET,
    READ_ROW,
    SAVE_ROW,
    SECOND_SAVE_ROW,
    START,
)
from agentspec.kernels.reference.sampling import DrawInputs, PenaltyInputs, draw, penalise
from agentspec.models.protocol import VerifyBatch
from agentspec.models.state import Rings
from agentspec.types import SCRATCH_PAGE, SCRATCH_ROW, ZERO_ROW, ModelSpec, SamplingParams

Int64s = npt.NDArray[np.int64]

_TABLE_BITS = 14
_POISON = 0x5EED_DEAD_BEEF_0BAD
_SLACK = 64
"""Positions beyond the context that a last window may touch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRequest:
    """What `reference_streams` runs: a request alone, as the engine would see it."""

    prompt: Sequence[int]
    sampling: SamplingParams
    seed: int
    length_limit: int
    stop_ids: tuple[int, ...] = ()
    allowed_after: Callable[[Sequence[int]], npt.NDArray[np.bool_]] | None = None
    """For a constrained request: bool [V], what may come after the tokens emitted so far. Nothing: the request ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceState:
    """The state after a from-scratch prefill of a token sequence."""

    row: Int64s
    """[3]: s, h and c of the last token."""
    attention_N: Int64s
    mtp_N: Int64s
    """Position 0 holds nothing of meaning."""


class _Constants(NamedTuple):
    """Random odd numbers for the hashes: one per token and two per position."""

    of_token: Int64s
    of_position: Int64s
    of_attention: Int64s


class HashChainModel:
    """StepModel over hashes; see the module's docstring."""

    def __init__(
        self,
        *,
        seed: int = 0,
        num_real_tokens: int = 48,
        num_padding_tokens: int = 4,
        block_tokens: int = 16,
        max_context: int = 2048,
        draft_accuracy: float = 0.8,
        stop_chance: float = 0.0,
        has_mtp: bool = True,
        device: torch.device | None = None,
    ) -> None:
        """device: None: the CPU.
        stop_chance: share of contexts in which the stop id is by far the likeliest token; elsewhere it is by far the
        unlikeliest."""
        assert block_tokens & (block_tokens - 1) == 0, "a shift and a mask find the cell of a position"
        self._block = block_tokens
        self._block_bits = block_tokens.bit_length() - 1
        self._device = torch.device("cpu") if device is None else device
        stop_id = num_real_tokens - 1
        self._spec = ModelSpec(
            name="hash-chain",
            vocab_size=num_real_tokens + num_padding_tokens,
            num_real_tokens=num_real_tokens,
            max_context=max_context,
            hidden_size=2,
            has_mtp=has_mtp,
            stop_token_ids=(stop_id,),
            row_bytes=3 * 8,
            entry_bytes=3 * 8,
            page_bytes=2 * 8 * block_tokens,
            block_tokens=block_tokens,
        )
        generator = np.random.default_rng(seed)

        def constants(size: int) -> Int64s:
            return generator.integers(-(2**63), 2**63, size=size, dtype=np.int64) | 1

        self._reference = _Constants(
            of_token=constants(self._spec.vocab_size),
            of_position=constants(max_context + _SLACK),
            of_attention=constants(max_context + _SLACK),
        )
        self._of_token, self._of_position, self._of_attention = (
            torch.from_numpy(values).to(self._device) for values in self._reference
        )
        self._of_both = self._of_position + self._of_attention
        rows = 1 << _TABLE_BITS
        table = generator.normal(0.0, 2.0, size=(rows, self._spec.vocab_size)).astype(np.float32)
        table[:, stop_id] = np.where(generator.random(rows) < stop_chance, 40.0, -40.0)
        table[:, num_real_tokens:] = -np.inf
        self._reference_table = torch.from_numpy(table)
        self._table = self._reference_table.to(self._device)
        greedy = table.argmax(1)
        wrong = (greedy + 1 + generator.integers(0, num_real_tokens - 1, size=rows)) % num_real_tokens
        self._draft_table = torch.from_numpy(np.where(generator.random(rows) < draft_accuracy, greedy, wrong)).to(
            self._device
        )
        self._full_draft_table = self._draft_table
        self._position = torch.arange(max_context + _SLACK, device=self._device)
        self._mtp_position = self._position.clone()
        self._mtp_position[0] = 2**62  # never below a length: MTP attention skips position 0

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def fp8_drafts(self) -> bool:
        return False

    def allocate(self, *, num_rows: int, num_pages: int, rings: Rings | None = None) -> None:
        self.rows_R3 = torch.full((num_rows, 3), _POISON, device=self._device)
        self.rows_R3[ZERO_ROW] = 0
        self.attention_PS = torch.full((num_pages, self._block), _POISON, device=self._device)
        self.mtp_PS = torch.full((num_pages, self._block), _POISON, device=self._device)
        num_entries = 0 if rings is None else rings.num_slots * rings.capacity
        self.entries_E3 = torch.full((num_entries, 3), _POISON, device=self._device)
        """What each token added to s, and its h and c."""
        self.ring_capacity = 0 if rings is None else rings.capacity

    def row_tensors(self) -> tuple[Tensor, ...]:
        return (self.rows_R3,)

    def page_tensors(self) -> tuple[Tensor, ...]:
        return self.attention_PS, self.mtp_PS

    def verify(self, batch: VerifyBatch) -> Tensor:
        num_columns = batch.tokens_BT.shape[1]
        position_BT = batch.length_B[:, None] + self._position[:num_columns]
        token_BT = self._of_token.take(batch.tokens_BT)
        row_B3 = self._committed_rows(batch)
        before_B1 = self._sum_pages(self.attention_PS, self._position, batch.page_table_BP, batch.length_B)
        attention_BT = token_BT * self._of_attention.take(position_BT)
        in_row_BT = self._of_position.take(position_BT)
        added_BT = token_BT * in_row_BT
        s_BT = row_B3[:, :1] + added_BT.cumsum(1)
        h_BT = s_BT + before_B1 + attention_BT.cumsum(1)
        previous_BT = torch.cat((row_B3[:, 1:2], h_BT[:, :-1]), dim=1)
        pair_BT = (previous_BT * token_BT + in_row_BT) * (position_BT > 0)
        row_BT3 = torch.stack((s_BT, h_BT, row_B3[:, 2:] + pair_BT.cumsum(1)), dim=2)
        if batch.live is not None:
            return self._live_rows(batch, batch.live, attention_BT, torch.cat((added_BT[..., None], row_BT3), dim=2))
        self._write_pages(self.attention_PS, batch.page_table_BP, position_BT, attention_BT)
        if batch.ring is None:
            self.rows_R3.index_copy_(0, batch.write_rows_BT.flatten(), row_BT3.flatten(0, 1))
        else:
            entry_BT3 = torch.cat((added_BT[..., None], row_BT3[:, :, 1:]), dim=2)
            self.entries_E3.index_copy_(0, batch.ring.entries_BT.flatten(), entry_BT3.flatten(0, 1))
        return row_BT3[:, :, 1:]

    def _live_rows(self, batch: VerifyBatch, live: LiveColumns, attention_BT: Tensor, column_BT4: Tensor) -> Tensor:
        """Store what the live columns leave, and return (h, c) by the forward's rows: [1, N, 2]. Dead rows hold poison,
        and are stored to scratch. column_BT4: what each column adds to s, and its s, h and c."""
        num_columns = attention_BT.shape[1]
        slot_N, column_N = live.cell_N // num_columns, live.cell_N % num_columns
        is_live_N = self._position[: len(slot_N)] < live.count_B.sum()
        position_N = batch.length_B.take(slot_N) + column_N
        page_N = batch.page_table_BP[slot_N, position_N >> self._block_bits].where(is_live_N, SCRATCH_PAGE)
        cell_N = (page_N.long() << self._block_bits) + (position_N & (self._block - 1))
        self.attention_PS.view(-1).index_copy_(0, cell_N, attention_BT.flatten().take(live.cell_N))
        column_N4 = column_BT4.flatten(0, 1).index_select(0, live.cell_N).where(is_live_N[:, None], _POISON)
        # No list of columns: it would become a tensor on the host, which a graph can't capture.
        self.entries_E3.index_copy_(0, live.entry_N, torch.cat((column_N4[:, :1], column_N4[:, 2:]), dim=1))
        return column_N4[None, :, 2:]

    def _committed_rows(self, batch: VerifyBatch) -> Tensor:
        """(s, h, c) at the start of every window: [B, 3]. With rings: the read row and the entries behind it; the state
        at the fold length is stored on the way."""
        row_B3, ring = self.rows_R3.index_select(0, batch.read_row_B), batch.ring
        if ring is None:
            return row_B3
        offset_C = self._position[: self.ring_capacity]
        position_BC = ring.read_length_B[:, None] + offset_C
        entry_BC3 = self.entries_E3[ring.slot_B[:, None] * self.ring_capacity + position_BC % self.ring_capacity]

        def advanced(length_B: Tensor) -> Tensor:
            is_before_BC1 = (position_BC < length_B[:, None])[..., None]
            s_B1 = row_B3[:, :1] + (entry_BC3[:, :, :1] * is_before_BC1).sum(1)
            last_B11 = (length_B - ring.read_length_B - 1).clamp(min=0)[:, None, None]
            last_B2 = entry_BC3[:, :, 1:].gather(1, last_B11.expand(-1, 1, 2))[:, 0]
            has_entry_B1 = (length_B > ring.read_length_B)[:, None]
            return torch.cat((s_B1, torch.where(has_entry_B1, last_B2, row_B3[:, 1:])), dim=1)

        folded_B3, row_B3 = advanced(ring.fold_length_B), advanced(ring.start_B)
        self.rows_R3.index_copy_(0, ring.fold_row_B, folded_B3)
        return row_B3

    def prefill(self, batch: PrefillBatch) -> Tensor:
        offset_U, start_U, rows_U3 = (
            batch.spans_UF[:, OFFSET],
            batch.spans_UF[:, START],
            self.rows_R3.index_select(0, batch.spans_UF[:, READ_ROW]),
        )
        span_N, is_token_N = self._spans_of_tokens(batch)
        token_N = self._of_token.take(batch.token_ids_N) * is_token_N
        in_row_N = self._of_position.take(batch.position_N)
        attention_N = token_N * self._of_attention.take(batch.position_N)

        def sum_spans(terms_N: Tensor, before_U: Tensor) -> Tensor:
            """Running sums of each span's terms, from what stands before them: differences of one running sum are exact
            modulo 2**64."""
            sum_N = terms_N.cumsum(0)
            return sum_N + (before_U - (sum_N - terms_N).take(offset_U)).take(span_N)

        s_N = sum_spans(token_N * in_row_N, rows_U3[:, 0])
        h_N = s_N + sum_spans(
            attention_N, self._sum_pages(self.attention_PS, self._position, batch.page_table_UP, start_U)[:, 0]
        )
        previous_N = torch.cat((rows_U3[:, 1], h_N)).take(batch.previous_N)
        pair_N = (previous_N * token_N + in_row_N) * (is_token_N & (batch.position_N > 0))
        row_N3 = torch.stack((s_N, h_N, sum_spans(pair_N, rows_U3[:, 2])), dim=1)
        self._store_tokens(self.attention_PS, batch, attention_N)
        last_M = (batch.blocks_MF[:, BLOCK_OFFSET] + batch.blocks_MF[:, BLOCK_COUNT] - 1).clamp(min=0)
        for field in (SAVE_ROW, SECOND_SAVE_ROW):
            row_M = batch.blocks_MF[:, field]
            is_wanted_M = (row_M != NO_ROW) & (batch.blocks_MF[:, BLOCK_COUNT] > 0)
            self.rows_R3.index_copy_(0, row_M.where(is_wanted_M, SCRATCH_ROW), row_N3.index_select(0, last_M))
        return row_N3[:, 1:]

    def ride(self, prompts: PrefillBatch, windows: VerifyBatch) -> tuple[Tensor, Tensor]:
        """Runs the windows first: neither may read what the other writes."""
        hidden_BTH = self.verify(windows)
        return self.prefill(prompts), hidden_BTH

    def mtp(
        self,
        tokens_BT: Tensor,
        hidden_BTH: Tensor,
        start_B: Tensor,
        page_table_BP: Tensor,
        *,
        last_B: Tensor | None = None,
    ) -> Tensor:
        position_BT = start_B[:, None] + self._position[: tokens_BT.shape[1]]
        token_BT = self._of_token.take(tokens_BT)
        h_BT, c_BT = hidden_BTH.unbind(2)
        pair_BT = h_BT * token_BT + self._of_position.take(position_BT)
        before_B1 = self._sum_pages(self.mtp_PS, self._mtp_position, page_table_BP, start_B)
        self._write_pages(self.mtp_PS, page_table_BP, position_BT, pair_BT)
        c_BT = c_BT + pair_BT
        wrong_BT = before_B1 + pair_BT.cumsum(1) - c_BT
        m_BT2 = torch.stack((h_BT + token_BT * self._of_both.take(position_BT) + wrong_BT, c_BT), dim=2)
        return m_BT2 if last_B is None else m_BT2.gather(1, last_B[:, None, None].expand(-1, 1, 2))

    def mtp_prefill(self, batch: PrefillBatch, previous_NH: Tensor) -> None:
        pair_N = previous_NH[:, 0] * self._of_token.take(batch.token_ids_N) + self._of_position.take(batch.position_N)
        self._store_tokens(self.mtp_PS, batch, pair_N)

    def read_hidden(self, rows_B: Tensor) -> Tensor:
        return self.rows_R3.index_select(0, rows_B)[:, 1:]

    def window_hidden(self, batch: VerifyBatch) -> Tensor:
        if batch.ring is None:
            return self.rows_R3[batch.write_rows_BT, 1:]
        return self.entries_E3[batch.ring.entries_BT, 1:]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._table[self._table_row(hidden)]

    def limit_drafts(self, ids: Sequence[int]) -> int:
        """A draft that is not among `ids` is replaced by the best of them."""
        among = torch.tensor(ids, device=self._device)
        nearest = among[self._table[:, among].argmax(1)]
        self._draft_table = torch.where(torch.isin(self._full_draft_table, among), self._full_draft_table, nearest)
        return 0

    def draft_head(self, m: Tensor) -> Tensor:
        return self._draft_table.take(self._table_row(m))

    def _table_row(self, hidden: Tensor) -> Tensor:
        return (hidden[..., 0] >> (64 - _TABLE_BITS)) & ((1 << _TABLE_BITS) - 1)

    def _sum_pages(self, pages_PS: Tensor, position: Tensor, page_table_BP: Tensor, length_B: Tensor) -> Tensor:
        """Sum of what the pages hold at positions below each length: [B, 1]."""
        # A captured step can't read lengths on the host: it sums all pages, whatever they hold beyond the length.
        num_blocks = (
            page_table_BP.shape[1] if self._device.type == "cuda" else -(-max(length_B.tolist()) // self._block)
        )
        if num_blocks == 0:
            return torch.zeros_like(length_B)[:, None]
        values = pages_PS.index_select(0, page_table_BP[:, :num_blocks].flatten()).view(len(length_B), -1)
        return (values * (position[: values.shape[1]] < length_B[:, None])).sum(1, keepdim=True)

    def _write_pages(self, pages_PS: Tensor, page_table_BP: Tensor, position_BT: Tensor, values_BT: Tensor) -> None:
        cell_BT = (page_table_BP.gather(1, position_BT >> self._block_bits) << self._block_bits) + (
            position_BT & (self._block - 1)
        )
        pages_PS.view(-1).index_copy_(0, cell_BT.view(-1), values_BT.reshape(-1))

    def _spans_of_tokens(self, batch: PrefillBatch) -> tuple[Tensor, Tensor]:
        """(span of each token, whether it is a token: padding is not)."""
        first_U = batch.spans_UF[:, OFFSET]
        index_N1 = torch.arange(len(batch.token_ids_N), device=self._device)[:, None]
        is_inside_NU = (index_N1 >= first_U) & (index_N1 < first_U + batch.spans_UF[:, COUNT])
        return is_inside_NU.int().argmax(1), is_inside_NU.any(1)

    def _store_tokens(self, pages_PS: Tensor, batch: PrefillBatch, values_N: Tensor) -> None:
        """Store each token's value in its position's cell. Padding goes to scratch."""
        span_N, is_token_N = self._spans_of_tokens(batch)
        page_N = batch.page_table_UP[span_N, batch.position_N >> self._block_bits].where(is_token_N, SCRATCH_PAGE)
        cell_N = (page_N.long() << self._block_bits) + (batch.position_N & (self._block - 1))
        pages_PS.view(-1).index_copy_(0, cell_N, values_N)

    def reference_state(self, tokens: Sequence[int]) -> ReferenceState:
        """Row and page contents of a from-scratch prefill of `tokens` (at least one)."""
        ids = np.array(tokens, dtype=np.int64)
        of_token = self._reference.of_token[ids]
        of_position = self._reference.of_position[: len(ids)]
        attention = of_token * self._reference.of_attention[: len(ids)]
        state = np.cumsum(of_token * of_position)
        hidden = state + np.cumsum(attention)
        pairs = np.concatenate(([0], hidden[:-1])) * of_token + of_position
        row = np.array([state[-1], hidden[-1], pairs[1:].sum()])
        return ReferenceState(row=row, attention_N=attention, mtp_N=pairs)

    def reference_hidden(self, tokens: Sequence[int]) -> Int64s:
        """h after each of `tokens`: int64 [N]."""
        ids = np.array(tokens, dtype=np.int64)
        in_row, in_page = self._reference.of_position[: len(ids)], self._reference.of_attention[: len(ids)]
        hidden: Int64s = np.cumsum(self._reference.of_token[ids] * (in_row + in_page))
        return hidden

    def check_row(self, row: int, tokens: Sequence[int], *, context: str = "") -> None:
        """Raise AssertionError unless the row is exactly the state after `tokens`."""
        held, expected = self.rows_R3[row].cpu().numpy(), self.reference_state(tokens).row
        wrong = [
            name
            for name, is_wrong in zip(("state", "hidden", "MTP checksum"), held != expected, strict=True)
            if is_wrong
        ]
        assert not wrong, f"{context} row {row} is not the state after {len(tokens)} tokens: {', '.join(wrong)} differ"

    def check_pages(
        self, page_ids: Sequence[int], tokens: Sequence[int], *, with_mtp: bool = True, context: str = ""
    ) -> None:
        """Raise AssertionError unless the pages hold exactly what a prefill of `tokens` writes (K/V, and MTP K/V if MTP
        runs at all)."""
        expected = self.reference_state(tokens)
        pages = torch.tensor(page_ids, device=self._device)
        held = self.attention_PS[pages].flatten()[: len(tokens)].cpu().numpy()
        wrong = np.flatnonzero(held != expected.attention_N)
        assert not wrong.size, (
            f"{context} pages {list(page_ids)}: K/V at positions {wrong.tolist()} of {len(tokens)} is not the tokens'"
        )
        if with_mtp:
            held = self.mtp_PS[pages].flatten()[: len(tokens)].cpu().numpy()
            wrong = 1 + np.flatnonzero((held != expected.mtp_N)[1:])
            assert not wrong.size, (
                f"{context} pages {list(page_ids)}: "
                f"MTP K/V at positions {wrong.tolist()} of {len(tokens)} is not the pairs'"
            )

    def reference_stream(self, request: ReferenceRequest) -> list[int]:
        """The tokens that this request must get, computed without cache, drafts or batch."""
        return self.reference_streams([request])[0]

    @torch.inference_mode()
    def reference_streams(self, requests: Sequence[ReferenceRequest]) -> list[list[int]]:
        """`reference_stream` of many requests, one token of each at a time."""
        streams: list[list[int]] = [[] for _ in requests]
        hidden = np.array([self.reference_state(request.prompt).row[1] for request in requests], dtype=np.int64)
        lengths = np.array([len(request.prompt) for request in requests], dtype=np.int64)
        tables = SamplingTables(requests, self._spec.vocab_size)
        of_token, of_both = self._reference.of_token, self._reference.of_position + self._reference.of_attention
        alive = np.array(
            [i for i, request in enumerate(requests) if len(request.prompt) < request.length_limit], dtype=np.int64
        )
        while alive.size:
            allowed = {
                i: allows(streams[i]) for i in alive.tolist() if (allows := requests[i].allowed_after) is not None
            }
            alive = np.array([i for i in alive.tolist() if i not in allowed or allowed[i].any()], dtype=np.int64)
            logits = self._reference_table[
                torch.from_numpy((hidden[alive] >> (64 - _TABLE_BITS)) & ((1 << _TABLE_BITS) - 1))
            ]
            for row, i in enumerate(alive.tolist()):
                if i in allowed:
                    logits[row, torch.from_numpy(~allowed[i])] = -torch.inf
            chosen = tables.choose(torch.from_numpy(alive), logits, torch.from_numpy(lengths[alive]))
            hidden[alive] += of_token[chosen] * of_both[lengths[alive]]
            lengths[alive] += 1
            goes_on = []
            for i, token in zip(alive.tolist(), chosen.tolist(), strict=True):
                streams[i].append(token)
                goes_on.append(token not in requests[i].stop_ids and lengths[i] < requests[i].length_limit)
            alive = alive[np.array(goes_on, dtype=np.bool_)]
        return streams


class SamplingTables:
    """Sampling parameters of reference requests as tensors, and their running token counts, which start at none."""

    def __init__(self, requests: Sequence[ReferenceRequest], vocab_size: int) -> None:
        parameters = [request.sampling for request in requests]
        self._counts = torch.zeros(len(requests), vocab_size, dtype=torch.int32)
        self._seen = torch.zeros(len(requests), vocab_size, dtype=torch.bool)
        self._bias = torch.zeros(len(requests), vocab_size)
        for i, request in enumerate(requests):
            self._seen[i, list(request.prompt)] = True
            for token, bias in request.sampling.logit_bias.items():
                self._bias[i, token] = bias
        self._temperature = torch.tensor([p.temperature for p in parameters])
        self._top_k = torch.tensor([p.top_k or vocab_size for p in parameters])
        self._top_p = torch.tensor([p.top_p if p.top_p < 1 else np.inf for p in parameters])
        self._log_min_p = torch.tensor([p.min_p for p in parameters]).log()
        self._repetition = torch.tensor([p.repetition_penalty for p in parameters])
        self._frequency = torch.tensor([p.frequency_penalty for p in parameters])
        self._presence = torch.tensor([p.presence_penalty for p in parameters])
        self._seed = torch.tensor([request.seed for request in requests])

    def choose(self, i: Tensor, logits: Tensor, position: Tensor) -> Int64s:
        """The next token of each request in `i`, which is counted as emitted: int64 [B]."""
        no_drafts = torch.empty(len(i), 0, dtype=torch.int64)
        chosen = self.choose_after(i, logits[:, None], no_drafts, position[:, None])[:, 0]
        self._counts[i, chosen] += 1
        result: Int64s = chosen.numpy()
        return result

    def choose_after(self, i: Tensor, logits_BTV: Tensor, known_Bk: Tensor, position_BT: Tensor) -> Tensor:
        """The tokens of each request in `i` at these positions, each after the known tokens before it: int64 BT.

        logits_BTV: float32. known_Bk: int64, k = T - 1; what column t is for follows known tokens 0..t-1."""
        penalties = PenaltyInputs(
            counts_BV=self._counts[i],
            prompt_seen_BV=self._seen[i],
            bias_BV=self._bias[i],
            repetition_B=self._repetition[i],
            frequency_B=self._frequency[i],
            presence_B=self._presence[i],
        )
        inputs = DrawInputs(
            temperature_B=self._temperature[i],
            top_k_B=self._top_k[i],
            top_p_B=self._top_p[i],
            log_min_p_B=self._log_min_p[i],
            seed_B=self._seed[i],
        )
        return draw(penalise(logits_BTV, known_Bk, penalties), position_BT, inputs)
