"""What the runtime asks of a model: five device operations over rows and pages, and nothing about layers.

Shape letters: B slots in the step, T tokens a slot (k+1 in a verify), N tokens of a prefill, H hidden size, V
vocabulary, P pages a sequence. Token ids, rows, lengths and positions are int64; page ids int32.

On CUDA no method that a step or a prefill calls reads on the host, so that a graph may record it. Row and page ids are
pointers; no method copies the state of one row to another.

State rules that every implementation keeps (the hash-chain model in tests/fakes proves the engine against them):

- Row r holds everything recurrent about a prefix of length n: recurrent state, conv rows, and `hidden`, the
  post-final-norm hidden of token n-1. Row ZERO_ROW stands for the empty prefix: all zeros.
- Attention K/V of the token at position p lies in page page_table[p // block], offset p % block.
- MTP K/V at position p belongs to the pair (hidden of token p-1, token p), so it depends on tokens 0..p alone. Position
  0 has no pair: MTP attention never reads position 0.
- Reading and writing the same row in one call is allowed: a program loads a row before it stores to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from agentspec.kernels import PrefillBatch
from agentspec.types import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyBatch:
    """Input of one target forward over the window of every slot of a decode step."""

    tokens_BT: Tensor
    """int64. Column 0: the last emitted token, not yet in the state. Columns 1..k: drafts."""
    length_B: Tensor
    """int64. Tokens already in the state: position of column 0."""
    read_row_B: Tensor
    """int64. Row that holds the state after `length` tokens."""
    write_rows_BT: Tensor
    """int64. Row that receives the state after column t. SCRATCH_ROW throughout for inert slots."""
    page_table_BP: Tensor
    """int32. Pages of the sequence, in block order; SCRATCH_PAGE throughout for inert slots. Covers length + T + k
    tokens at least."""


class StepModel(Protocol):
    """A model that the runtime can drive. models/hybrid.py has the real ones."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def fp8_drafts(self) -> bool:
        """Drafts are made by weights in 8-bit floats: the MTP layer's, and from `limit_drafts` on the draft head's."""
        ...

    def allocate(self, *, num_rows: int, num_pages: int) -> None:
        """Allocate the state pools. ZERO_ROW is zeroed; nothing else may be read before it was written."""
        ...

    def row_tensors(self) -> Sequence[Tensor]:
        """All that rows consist of: element r of each tensor is contiguous, and a part of row r."""
        ...

    def page_tensors(self) -> Sequence[Tensor]:
        """All that pages consist of, in the same form."""
        ...

    def verify(self, batch: VerifyBatch) -> Tensor:
        """Target forward over every slot's window. Returns hidden_BTH, post final norm.

        Writes attention K/V at positions length..length+T-1, and after column t the whole state (recurrent, conv,
        hidden) to write_rows_BT[:, t]."""
        ...

    def prefill(self, batch: PrefillBatch) -> Tensor:
        """Target forward over prompt tokens of distinct sequences. Returns hidden_NH, post final norm; writes K/V and
        the wanted states."""
        ...

    def ride(self, prompts: PrefillBatch, windows: VerifyBatch) -> tuple[Tensor, Tensor]:
        """`prefill` and `verify` in one forward: (hidden_NH, hidden_BTH). Neither may write a row or page that the
        other one reads."""
        ...

    def mtp(self, tokens_BT: Tensor, hidden_BTH: Tensor, start_B: Tensor, page_table_BP: Tensor) -> Tensor:
        """MTP layer over pairs: column t pairs hidden_BTH[:, t] (of the token before) with tokens_BT[:, t] at position
        start+t.

        Writes MTP K/V at positions start..start+T-1, attends to positions 1..start+t. Returns m_BTH, post mtp.norm:
        what `draft_head` scores, and the hidden to pair with the drafted token at the next position."""
        ...

    def mtp_prefill(self, batch: PrefillBatch, previous_NH: Tensor) -> None:
        """MTP K/V for every prompt token of the batch: previous_NH[n] is the hidden of the token before token n in its
        sequence."""
        ...

    def read_hidden(self, rows_B: Tensor) -> Tensor:
        """hidden_BH of the given rows (a gather of one vector each)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V] scores of the target head; padding ids (>= num_real_tokens) are -inf."""
        ...

    def limit_drafts(self, ids: Sequence[int]) -> int:
        """From now on `draft_head` chooses among these ids alone. Call before any capture. Returns the bytes that this
        takes on the device.

        ids: distinct real tokens, ascending; all of them lift the limit."""
        ...

    def draft_head(self, m: Tensor) -> Tensor:
        """int64 [...]: the most likely next token by the MTP head, among those of `limit_drafts`, at first all real
        tokens; the lowest id on ties."""
        ...
