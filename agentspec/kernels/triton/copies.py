"""Copies of a sequence's own tokens as drafts, in Triton. See backend.Backend; the rule for one slot is in
mtp/copies.py.

`draft_copies` is one launch. The candidates of a match are the positions where it may end. Many programs of one warp
share a slot's: each compares block by block, and goes back in the text only as long as some candidate of its block
still matches. Match length and position are packed into one integer, so that an atomic maximum finds the longest match
and the most recent one of several. The slot's last program to arrive writes the copies.

Shape letters: as in reference/copies.py; E candidates of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels import slots
from agentspec.kernels.slots import OutcomeRows
from agentspec.kernels.triton.launch import NUM_COUNTERS, arrival_counters, await_previous, overlapped, release_next
from agentspec.types import MAX_COPY_MATCH

_MAX_TEXT = 2**25
"""Maximum width of a text: positions below it and match lengths up to MAX_COPY_MATCH are packed into an int32."""
_BLOCK = 512
"""Candidates that a warp compares at a time: 16 a lane. Few enough that a common last token does not make a block go
back far."""
_MOST_PROGRAMS = 2048
"""Of a launch: about 16 warps for each multiprocessor of a large GPU. That is one wave, and enough loads in flight."""

_LENGTH, _NUM_EMITTED, _SCALARS = (
    tl.constexpr(slots.LENGTH),
    tl.constexpr(slots.NUM_EMITTED),
    tl.constexpr(slots.SCALARS),
)
_OUTCOME_TOKENS = tl.constexpr(slots.SCALARS + slots.TOKENS)
_PACK, _MAX_MATCH = tl.constexpr(_MAX_TEXT), tl.constexpr(MAX_COPY_MATCH)


def append_text(text_SL: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor) -> None:
    assert text_SL.stride(1) == 1
    assert outcome_BF.is_contiguous()
    num_columns = OutcomeRows.of(outcome_BF).tokens_BT.shape[1]
    _append_text[(len(slot_ids_B),)](
        text_SL,
        text_SL.stride(0),
        slot_ids_B,
        outcome_BF,
        F=outcome_BF.shape[1],
        T=num_columns,
        BLOCK_T=triton.next_power_of_2(num_columns),
        num_warps=1,
        **overlapped(),
    )


def draft_copies(
    text_SL: Tensor, slot_ids_B: Tensor, outcome_BF: Tensor, drafts_Bk: Tensor, *, num_copies: int, min_match: int
) -> tuple[Tensor, Tensor]:
    (num_slots, num_drafts), num_positions, device = drafts_Bk.shape, text_SL.shape[1], text_SL.device
    assert num_copies >= 1
    assert 1 <= min_match <= MAX_COPY_MATCH
    assert num_positions + num_drafts <= _MAX_TEXT
    assert 2 * num_slots <= NUM_COUNTERS
    assert text_SL.stride(1) == 1
    assert outcome_BF.is_contiguous()
    copies_Bc = torch.empty(num_slots, num_copies, dtype=torch.int64, device=device)
    num_copies_B = torch.empty(num_slots, dtype=torch.int64, device=device)
    num_programs = min(triton.cdiv(num_positions, _BLOCK), max(_MOST_PROGRAMS // num_slots, 1))
    _draft_copies[(num_programs, num_slots)](
        text_SL,
        text_SL.stride(0),
        num_positions,
        slot_ids_B,
        outcome_BF,
        drafts_Bk,
        drafts_Bk.stride(0),
        drafts_Bk.stride(1),
        copies_Bc,
        num_copies_B,
        arrival_counters(device),
        min_match,
        F=outcome_BF.shape[1],
        K=num_drafts,
        C=num_copies,
        BLOCK_E=_BLOCK,
        BLOCK_K=triton.next_power_of_2(max(num_drafts, 1)),
        BLOCK_C=triton.next_power_of_2(num_copies),
        num_warps=1,
        **overlapped(),
    )
    return copies_Bc, num_copies_B


@triton.jit
def _append_text(  # type: ignore[no-untyped-def]
    text_SL,
    text_stride,
    slot_ids_B,
    outcome_BF,
    F: tl.constexpr,
    T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    release_next(PDL)
    await_previous(PDL)
    b = tl.program_id(0).to(tl.int64)
    outcome, t = outcome_BF + b * F, tl.arange(0, BLOCK_T)
    num_emitted = tl.load(outcome + _NUM_EMITTED)
    token_T = tl.load(outcome + _OUTCOME_TOKENS + t, mask=t < T, other=0)
    first = tl.load(outcome + _SCALARS + _LENGTH) - num_emitted + 1
    text = text_SL + tl.load(slot_ids_B + b) * text_stride
    tl.store(text + first + t, token_T.to(tl.int32), mask=t < num_emitted)


@triton.jit(do_not_specialize=["min_match"])
def _draft_copies(  # type: ignore[no-untyped-def]
    text_SL,
    text_stride,
    num_positions,
    slot_ids_B,
    outcome_BF,
    drafts_Bk,
    drafts_stride_b,
    drafts_stride_k,
    copies_Bc,
    num_copies_B,
    counters,
    min_match,
    F: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, b) has blocks i, i + programs, ... of slot b's text. Those beyond its end do nothing, and are not
    counted. `counters` holds the arrivals of each slot, then its longest match."""
    release_next(PDL)
    await_previous(PDL)
    part, num_parts, b = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    outcome = outcome_BF + b * F
    is_active = tl.load(outcome + _NUM_EMITTED) > 0
    text_length = tl.where(is_active, tl.load(outcome + _SCALARS + _LENGTH) + 1, 0).to(tl.int32)
    text = text_SL + tl.load(slot_ids_B + b) * text_stride
    drafts = drafts_Bk + b * drafts_stride_b
    last = tl.where(is_active, text_length + K - 1, 0)
    num_ends = tl.minimum(text_length, last)
    num_blocks = tl.cdiv(num_ends, BLOCK_E)
    num_busy = tl.maximum(tl.minimum(num_blocks, num_parts), 1)
    if part < num_busy:
        best = _longest_in_text(text, drafts, drafts_stride_k, part, num_parts, num_ends, num_positions, text_length,
                                last, K, BLOCK_E)  # fmt: skip
        if K > 1 and part == 0:
            end_K = text_length + tl.arange(0, BLOCK_K)
            token_K = _tokens(text, drafts, drafts_stride_k, end_K, end_K < last, text_length, K)
            best = tl.maximum(
                best, _longest(text, drafts, drafts_stride_k, end_K, end_K < last, token_K, text_length, last, K, K)
            )
        longest = counters + tl.num_programs(1) + b
        if best >= min_match * _PACK:
            tl.atomic_max(longest, best, sem="relaxed")
        if tl.atomic_add(counters + b, 1, sem="acq_rel") == num_busy - 1:
            tl.store(counters + b, 0)
            best = tl.atomic_xchg(longest, 0, sem="relaxed")
            _write_copies(text, drafts, drafts_stride_k, best, text_length, last, copies_Bc + b * C, num_copies_B + b,
                          K, C, BLOCK_C)  # fmt: skip


@triton.jit
def _longest_in_text(  # type: ignore[no-untyped-def]
    text, drafts, drafts_stride_k, part, num_parts, num_ends, num_positions, text_length, last,
    K: tl.constexpr, BLOCK_E: tl.constexpr
):  # fmt: skip
    """The longest match that ends in the text, among the blocks of a part."""
    best = 0
    end_E = part * BLOCK_E + tl.arange(0, BLOCK_E)
    # The masks of these loads are multiples of 16 where the buffer's width is, so that a lane loads 16 bytes. What they
    # load beyond the text is not compared.
    token_E = tl.load(text + end_E, mask=end_E < num_positions, other=-1)
    for start in range(part * BLOCK_E, num_ends, num_parts * BLOCK_E):
        next_start = start + num_parts * BLOCK_E
        next_E, limit = next_start + tl.arange(0, BLOCK_E), tl.where(next_start < num_ends, num_positions, 0)
        next_token_E = tl.load(text + next_E, mask=next_E < limit, other=-1)
        end_E = start + tl.arange(0, BLOCK_E)
        best = tl.maximum(
            best, _longest(text, drafts, drafts_stride_k, end_E, end_E < num_ends, token_E, text_length, last, K, 0)
        )
        token_E = next_token_E
    return best


@triton.jit
def _longest(  # type: ignore[no-untyped-def]
    text, drafts, drafts_stride_k, end_E, is_match_E, token_E, text_length, last, K: tl.constexpr, REACHES: tl.constexpr
):  # fmt: skip
    """Return the longest match that ends at one of the candidates: its length times _PACK plus its end, or 0.

    token_E: the token of each candidate. REACHES: 0 if no candidate lies in the drafts, otherwise K."""
    best, depth = 0, 0
    is_match_E &= token_E == _tokens(text, drafts, drafts_stride_k, last, last >= 0, text_length, K)
    end = tl.max(tl.where(is_match_E, end_E, -1), axis=0)
    while end >= 0:
        depth += 1
        best = depth * _PACK + end
        is_match_E &= end_E >= tl.where(depth < _MAX_MATCH, depth, _PACK)
        token_E = _tokens(text, drafts, drafts_stride_k, end_E - depth, is_match_E, text_length, REACHES)
        is_match_E &= token_E == _tokens(text, drafts, drafts_stride_k, last - depth, last >= depth, text_length, K)
        end = tl.max(tl.where(is_match_E, end_E, -1), axis=0)
    return best


@triton.jit
def _tokens(text, drafts, drafts_stride_k, position, is_wanted, text_length, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the tokens at positions of the text and the K drafts behind it, int32; -1 where they are not wanted."""
    token = tl.load(text + position, mask=is_wanted & (position < text_length), other=-1)
    if K > 0:
        draft = drafts + (position - text_length).to(tl.int64) * drafts_stride_k
        is_draft = is_wanted & (position >= text_length)
        token = tl.where(is_draft, tl.load(draft, mask=is_draft, other=-1).to(tl.int32), token)
    return token


@triton.jit
def _write_copies(  # type: ignore[no-untyped-def]
    text, drafts, drafts_stride_k, best, text_length, last, copies_c, num_copies,
    K: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    num_found, end, i = tl.where(best > 0, C, 0), best % _PACK, tl.arange(0, BLOCK_C)
    place = end + 1 + i % tl.maximum(last - end, 1)
    copy = _tokens(text, drafts, drafts_stride_k, place, i < num_found, text_length, K)
    tl.store(copies_c + i, tl.where(i < num_found, copy, 0).to(tl.int64), mask=i < C)
    tl.store(num_copies, num_found.to(tl.int64))
