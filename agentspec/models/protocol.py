"""The interface between runtime and model: device operations over rows and pages. Says nothing about layers.

Shape letters: B slots in the step, T tokens per slot (k+1 in a verify), N tokens of a prefill, H hidden size, V
vocabulary, P pages per sequence. Token ids, rows, lengths and positions are int64; page ids int32.

On CUDA no method that a step or a prefill calls reads device memory on the host, so a graph can record it. Row and page
ids are pointers; no method copies the state of one row to another.

State rules for every implementation (tests compare the engine with the hash-chain model in tests/fakes, which keeps
them too):

- Row r holds all recurrent state of a prefix of length n: recurrent state, conv rows, and `hidden`, the post-final-norm
  hidden of token n-1. Row ZERO_ROW is the empty prefix: all zeros.
- Attention K/V of the token at position p is in page page_table[p // block], at offset p % block.
- MTP K/V at position p belongs to the pair (hidden of token p-1, token p), so it depends only on tokens 0..p. Position
  0 has no pair, and MTP attention never reads it.
- One call may read and write the same row: a program loads the row before it stores to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from agentspec.kernels import LiveColumns, PrefillBatch, RingWindow
from agentspec.models.state import Rings
from agentspec.types import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyBatch:
    """Input of a target forward over the windows of all slots in a decode step."""

    tokens_BT: Tensor
    """int64. Column 0: the last emitted token, not yet in the state. Columns 1..k: drafts."""
    length_B: Tensor
    """int64. Tokens already in the state: the position of column 0."""
    read_row_B: Tensor
    """int64. Row with the state after `length` tokens."""
    write_rows_BT: Tensor
    """int64. Row to write the state after column t to. SCRATCH_ROW throughout for inert slots."""
    page_table_BP: Tensor
    """int32. Pages of the sequence in block order; SCRATCH_PAGE throughout for inert slots. Covers at least length + T
    + k tokens."""
    ring: RingWindow | None = None
    """For slots with rings: what is read and written instead of the write rows."""
    live: LiveColumns | None = None
    """Which columns the forward has; None: all. Only for slots with rings."""


class StepModel(Protocol):
    """A model that the runtime can drive. The real ones are in models/hybrid.py."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def fp8_drafts(self) -> bool:
        """True when drafts are computed with 8-bit weights: those of the MTP layer, and after `limit_drafts` those of
        the draft head."""

    def allocate(self, *, num_rows: int, num_pages: int, rings: Rings | None = None) -> None:
        """Allocate the state pools. ZERO_ROW is zeroed; everything else must be written before it is read.

        rings: None: slots have no rings; otherwise every window comes with a RingWindow. Only for models whose
        `spec.entry_bytes` is above 0."""

    def row_tensors(self) -> Sequence[Tensor]:
        """All tensors that store rows: element r of each is contiguous, and a part of row r."""

    def page_tensors(self) -> Sequence[Tensor]:
        """All tensors that store pages, in the same form."""

    def verify(self, batch: VerifyBatch) -> Tensor:
        """Target forward over the windows of all slots. Returns hidden_BTH, after the final norm; with live columns
        hidden_1NH, by the forward's rows.

        Writes attention K/V at positions length..length+T-1, and after column t the whole state (recurrent, conv,
        hidden) to write_rows_BT[:, t], or an entry to the slot's ring."""

    def prefill(self, batch: PrefillBatch) -> Tensor:
        """Target forward over prompt tokens of distinct sequences. Returns hidden_NH, after the final norm; writes K/V
        and the requested states."""

    def ride(self, prompts: PrefillBatch, windows: VerifyBatch) -> tuple[Tensor, Tensor]:
        """`prefill` and `verify` in one forward: (hidden_NH, hidden_BTH). Neither may write a row or page that the
        other reads."""

    def mtp(
        self,
        tokens_BT: Tensor,
        hidden_BTH: Tensor,
        start_B: Tensor,
        page_table_BP: Tensor,
        *,
        last_B: Tensor | None = None,
    ) -> Tensor:
        """MTP layer over pairs: column t pairs hidden_BTH[:, t] (of the previous token) with tokens_BT[:, t] at
        position start+t.

        Writes MTP K/V at positions start..start+T-1, attends to positions 1..start+t. Returns m_BTH, after mtp.norm:
        the input of `draft_head`, and the hidden to pair with the drafted token at the next position.

        last_B: int64; return only this column of each slot, m_B1H. The layer then runs its FFN for no other."""

    def mtp_prefill(self, batch: PrefillBatch, previous_NH: Tensor) -> None:
        """MTP K/V for every prompt token of the batch: previous_NH[n] is the hidden of the token before token n in its
        sequence."""

    def read_hidden(self, rows_B: Tensor) -> Tensor:
        """hidden_BH of these rows (a gather of one vector each)."""

    def window_hidden(self, batch: VerifyBatch) -> Tensor:
        """hidden_BTH that `verify` or `ride` has left for these windows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V] scores of the target head; -inf for padding ids (>= num_real_tokens)."""

    def limit_drafts(self, ids: Sequence[int]) -> int:
        """Restrict `draft_head` to these ids. Call before any graph capture. Returns the device memory that this takes,
        in bytes.

        ids: distinct real tokens, ascending; all real tokens remove the restriction."""

    def draft_head(self, m: Tensor) -> Tensor:
        """int64 [...]: the most likely next token by the MTP head, among those of `limit_drafts` (initially all real
        tokens); the lowest id on ties."""
