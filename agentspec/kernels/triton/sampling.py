"""Sampling in Triton: the argmax of each row, and draws with masks, bias, penalties and filters. See backend.Backend,
`sample` and `argmax`.

A row is one column of a slot; its vocabulary is split over many programs. `sample` finds its thresholds without a
sort, in five launches:

    span tops   the largest logit of every span of the vocabulary, after mask, bias and penalties. Later kernels
                process a span only if its top is high enough, and recompute its logits: with a filter few spans
                qualify, and no second vocabulary-sized tensor is written.
    collect     rows with top-k or top-p: list the tempered logits above a lower bound that follows from the tops
    select      those rows: find the exact threshold by bisecting an interval of order keys
    draw        the best noisy token of each program's share of the kept tokens
    best        the best of those

A row without top-k and top-p passes `collect` and `select` at the cost of a launch. Only integers are added across
programs, so results do not depend on timing. Knows nothing of acceptance.

Differences from kernels/reference/sampling.py, which has the formulas: probability masses are integers in units of
2**-44 of the largest token's mass (smaller ones are 0), where the reference adds float64. So top-p may cut elsewhere
if a partial sum is within about 1e-6 of top_p. Noise is the same: computed in float64 from the same bits, rounded to
float32; implementations of log may differ in the last bit of float32 for one token in 10**8.

Shape letters: N rows (B * T, or those of LiveColumns), B slots in the step, T columns per slot, V vocabulary, S slots
of the tables, F fields, W = max k + 1, X = ceil(V / 32) words, G spans, C programs per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels import slots
from agentspec.kernels.reference import philox
from agentspec.kernels.reference import sampling as reference
from agentspec.kernels.slots import LiveColumns, SamplingTable
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next
from agentspec.kernels.triton.ranking import (
    KEY_OF_MINUS_INFINITY,
    LOWEST_KEY,
    LOWEST_RANK,
    order_key,
    rank,
    token_of_rank,
    value_of_key,
)

ARGMAX_BLOCK = 4096
SPAN = 512
"""Tokens of a span. The tops bound top-k only if there are at least k of them: a vocabulary of 248,320 has enough up
to k = 485."""
SPANS_A_PROGRAM = 8
PROGRAMS = 1056
"""Programs of `collect` and of `draw` over all rows: 8 on each of an H100's 132 multiprocessors."""
SELECT_CHUNK = 4096

_TEMPERATURE, _TOP_P, _LOG_MIN_P, _REPETITION, _FREQUENCY, _PRESENCE = (
    tl.constexpr(column)
    for column in (
        slots.TEMPERATURE,
        slots.TOP_P,
        slots.LOG_MIN_P,
        slots.REPETITION,
        slots.FREQUENCY,
        slots.PRESENCE,
    )
)
_SEED, _TOP_K = tl.constexpr(slots.SEED), tl.constexpr(slots.TOP_K)
_LEAST_DIVISOR: tl.constexpr = tl.constexpr(reference.LEAST_DIVISOR)
_PURPOSE: tl.constexpr = tl.constexpr(philox.PURPOSE_TOKEN)

_MASS_ONE: tl.constexpr = tl.constexpr(2.0**44)
"""The largest token's probability mass."""
_MAX_VOCAB = 2**18
"""This many tokens of the largest mass sum to 2**62."""
_MASSLESS: tl.constexpr = tl.constexpr(-31.0)
"""exp(-31) is below 2**-44: a tempered logit this far below the largest has mass 0."""
_NOISE_REACH: tl.constexpr = tl.constexpr(20.5)
"""Upper bound of the largest minus the least Gumbel noise: 25 ln 2 = 17.33 and -log(25 ln 2) = -2.86."""
_FLOOR: tl.constexpr = tl.constexpr(0)
"""Column: tempered logits from here on are listed."""
_THRESHOLD: tl.constexpr = tl.constexpr(1)
"""Column: tempered logits from here on are kept."""
_REACH: tl.constexpr = tl.constexpr(2)
"""Column: logits below this cannot win against the largest, whatever their noise."""


def argmax(logits_NV: Tensor) -> Tensor:
    assert logits_NV.is_contiguous()
    num_rows, vocab_size = logits_NV.shape
    num_blocks = triton.cdiv(vocab_size, ARGMAX_BLOCK)
    best_NC = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=logits_NV.device)
    _block_best[(num_rows, num_blocks)](
        logits_NV, best_NC, V=vocab_size, BLOCK=ARGMAX_BLOCK, num_warps=8, **overlapped()
    )
    return _tokens_of_best(best_NC)


def sample(
    logits_BTV: Tensor,
    tokens_BT: Tensor,
    position_BT: Tensor,
    slot_ids_B: Tensor,
    table: SamplingTable,
    *,
    constrained: bool,
    live: LiveColumns | None = None,
) -> Tensor:
    assert position_BT.is_contiguous()
    cell_N = None if live is None else live.cell_N
    launch = _Launch.of(logits_BTV, tokens_BT, slot_ids_B, table, constrained, cell_N)
    tops_NG, bounds_N3 = _find_bounds(launch)
    num_rows, num_programs = launch.shares
    best_NC = torch.empty(num_rows, num_programs, dtype=torch.int64, device=logits_BTV.device)
    _draw[launch.shares](
        *launch.parameters,
        *launch.logits,
        position_BT,
        tops_NG,
        bounds_N3,
        best_NC,
        **launch.shape,
        **launch.width,
        num_warps=4,
        **launch.options,
    )
    chosen_N = _tokens_of_best(best_NC)
    return chosen_N.view(tokens_BT.shape) if live is None else chosen_N[live.row_BT]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launch:
    """Arguments of the kernels of one `sample`."""

    parameters: tuple[Any, ...]
    """Cells, slot ids and sampling parameters."""
    logits: tuple[Any, ...]
    """Operands of the adjusted logits."""
    shape: dict[str, int]
    width: dict[str, int]
    """Of the mask; for kernels that compute adjusted logits."""
    options: dict[str, Any]
    shares: tuple[int, int]
    """Grid (rows, programs per row) of the kernels that process few spans."""

    @classmethod
    def of(
        cls,
        logits_BTV: Tensor,
        tokens_BT: Tensor,
        slot_ids_B: Tensor,
        table: SamplingTable,
        constrained: bool,
        cell_N: Tensor | None = None,
    ) -> Self:
        num_rows, vocab_size = logits_BTV.shape[:2].numel(), logits_BTV.shape[2]
        mask_SWX = table.mask_SWX if constrained else None
        logits = (
            logits_BTV,
            tokens_BT,
            table.counts_SV,
            table.prompt_seen_SV.view(torch.uint8),
            table.bias_SV,
            mask_SWX,
        )
        assert all(tensor is None or tensor.is_contiguous() for tensor in (*logits, slot_ids_B))
        assert table.limits_SF.stride(1) == table.sampling_SF.stride(1) == 1
        assert vocab_size <= _MAX_VOCAB
        return cls(
            parameters=(
                cell_N,
                slot_ids_B,
                table.limits_SF,
                table.limits_SF.stride(0),
                table.sampling_SF,
                table.sampling_SF.stride(0),
            ),
            logits=logits,
            shape={"V": vocab_size, "T": tokens_BT.shape[1], "SPAN": SPAN},
            width={"W": table.mask_SWX.shape[1]},
            # The reference rounds after the product and after the sum; a fused multiply-add would round once.
            options={"enable_fp_fusion": False, **overlapped()},
            shares=(num_rows, min(triton.cdiv(PROGRAMS, num_rows), triton.cdiv(vocab_size, SPAN))),
        )


def _find_bounds(launch: _Launch) -> tuple[Tensor, Tensor]:
    """Return (int32 [N, G] order keys of the largest adjusted logit of each span, float32 [N, 3] bounds of what each
    row keeps)."""
    (num_rows, _), vocab_size, device = launch.shares, launch.shape["V"], launch.logits[0].device
    num_spans = triton.cdiv(vocab_size, SPAN)
    tops_NG = torch.empty(num_rows, num_spans, dtype=torch.int32, device=device)
    tally_N2 = torch.empty(num_rows, 2, dtype=torch.int64, device=device)
    listed_NV = torch.empty(num_rows, vocab_size, dtype=torch.int32, device=device)
    bounds_N3 = torch.empty(num_rows, 3, dtype=torch.float32, device=device)
    lists, block = (tops_NG, tally_N2, listed_NV, bounds_N3), {"BLOCK_G": triton.next_power_of_2(num_spans)}
    common = {**launch.shape, **launch.options}
    _span_tops[(num_rows, triton.cdiv(num_spans, SPANS_A_PROGRAM))](
        *launch.parameters,
        *launch.logits,
        tops_NG,
        tally_N2,
        SPANS=SPANS_A_PROGRAM,
        num_warps=8,
        **launch.width,
        **common,
    )
    _collect[launch.shares](*launch.parameters, *launch.logits, *lists, num_warps=4, **block, **launch.width, **common)
    _select[(num_rows,)](*launch.parameters, *lists, CHUNK=SELECT_CHUNK, num_warps=16, **block, **common)
    return tops_NG, bounds_N3


def _tokens_of_best(best_NC: Tensor) -> Tensor:
    num_rows, num_programs = best_NC.shape
    out_N = torch.empty(num_rows, dtype=torch.int64, device=best_NC.device)
    _best[(num_rows,)](
        best_NC, num_programs, out_N, BLOCK_C=triton.next_power_of_2(num_programs), num_warps=4, **overlapped()
    )
    return out_N


@triton.jit
def _block_best(logits_NV, best_NC, V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    release_next(PDL)
    await_previous(PDL)
    row, block = tl.program_id(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    is_real = token < V
    score = tl.load(logits_NV + row.to(tl.int64) * V + token, mask=is_real, other=0.0)
    ranks = tl.where(is_real, rank(score, token), LOWEST_RANK)
    tl.store(best_NC + row * tl.num_programs(1) + block, tl.max(ranks))


@triton.jit
def _best(best_NC, num_programs, out_N, BLOCK_C: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    release_next(PDL)
    await_previous(PDL)
    row, program = tl.program_id(0), tl.arange(0, BLOCK_C)
    ranks = tl.load(best_NC + row * num_programs + program, mask=program < num_programs, other=LOWEST_RANK)
    tl.store(out_N + row, token_of_rank(tl.max(ranks)))


@triton.jit
def _cell(row, cell_N):  # type: ignore[no-untyped-def]
    """b * T + t of a row's slot and column."""
    cell = row
    if cell_N is not None:
        cell = tl.load(cell_N + row).to(tl.int32)
    return cell


@triton.jit
def _draw_parameters(slot, limits_SF, limits_stride, sampling_SF, sampling_stride):  # type: ignore[no-untyped-def]
    """Return (temperature, divisor of the logits, top-k, top-p, log min-p) of a slot."""
    sampling = sampling_SF + slot * sampling_stride
    temperature = tl.load(sampling + _TEMPERATURE)
    divisor = tl.where(temperature > 0, tl.maximum(temperature, _LEAST_DIVISOR), 1.0)
    top_k = tl.load(limits_SF + slot * limits_stride + _TOP_K)
    return temperature, divisor, top_k, tl.load(sampling + _TOP_P), tl.load(sampling + _LOG_MIN_P)


@triton.jit
def _needs_list(temperature, top_k, top_p, V: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the row's candidates must be listed. Not for min-p, whose threshold follows from the top, nor for
    temperature 0, which takes the top."""
    return (temperature > 0) & ((top_k < V) | (top_p < float("inf")))


@triton.jit
def _adjusted_logits(  # type: ignore[no-untyped-def]
    row,
    cell,
    slot,
    token,
    is_real,
    sampling_SF,
    sampling_stride,
    logits_BTV,
    tokens_BT,
    counts_SV,
    prompt_seen_SV,
    bias_SV,
    mask_SWX,
    V: tl.constexpr,
    T: tl.constexpr,
    W: tl.constexpr,
):
    """Logits of some tokens of a row after mask, bias and penalties. A column's context is the tokens counted in the
    table and the drafts up to the column."""
    column = cell % T
    logit = tl.load(logits_BTV + row.to(tl.int64) * V + token, mask=is_real, other=0.0)
    if mask_SWX is not None:
        word = tl.load(mask_SWX + (slot * W + column) * ((V + 31) // 32) + token // 32, mask=is_real, other=0)
        logit = tl.where(((word >> (token % 32)) & 1) != 0, logit, -float("inf"))
    logit += tl.load(bias_SV + slot * V + token, mask=is_real, other=0.0)
    sampling = sampling_SF + slot * sampling_stride
    repetition, frequency, presence = (
        tl.load(sampling + _REPETITION),
        tl.load(sampling + _FREQUENCY),
        tl.load(sampling + _PRESENCE),
    )
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        count = tl.load(counts_SV + slot * V + token, mask=is_real, other=0)
        for earlier in range(1, column + 1):
            count += (token == tl.load(tokens_BT + cell - column + earlier)).to(tl.int32)
        is_generated = count > 0
        is_prompt = tl.load(prompt_seen_SV + slot * V + token, mask=is_real, other=0) != 0
        factor = tl.where(is_generated | is_prompt, tl.maximum(repetition, _LEAST_DIVISOR), 1.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, factor), logit * factor)
        logit = logit - frequency * count.to(tl.float32) - presence * is_generated.to(tl.float32)
    return logit


@triton.jit
def _span_tops(  # type: ignore[no-untyped-def]
    cell_N,
    slot_ids_B,
    limits_SF,
    limits_stride,
    sampling_SF,
    sampling_stride,
    logits_BTV,
    tokens_BT,
    counts_SV,
    prompt_seen_SV,
    bias_SV,
    mask_SWX,
    tops_NG,
    tally_N2,
    V: tl.constexpr,
    T: tl.constexpr,
    W: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the order key of the largest adjusted logit of each span; zero the tally."""
    release_next(PDL)
    await_previous(PDL)
    NUM_SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0)
    cell = _cell(row, cell_N)
    slot = tl.load(slot_ids_B + cell // T)
    span = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    token = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    is_real = token < V
    logit = _adjusted_logits(
        row,
        cell,
        slot,
        token,
        is_real,
        sampling_SF,
        sampling_stride,
        logits_BTV,
        tokens_BT,
        counts_SV,
        prompt_seen_SV,
        bias_SV,
        mask_SWX,
        V,
        T,
        W,
    )
    top = tl.max(tl.where(is_real, order_key(logit), LOWEST_KEY), axis=1)
    tl.store(tops_NG + row * NUM_SPANS + span, top, mask=span < NUM_SPANS)
    if tl.program_id(1) == 0:
        tl.store(tally_N2 + row * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int64))


@triton.jit
def _top_of_row(row, tops_NG, NUM_SPANS: tl.constexpr, BLOCK_G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Order key of the row's largest adjusted logit."""
    span = tl.arange(0, BLOCK_G)
    return tl.max(tl.load(tops_NG + row * NUM_SPANS + span, mask=span < NUM_SPANS, other=LOWEST_KEY))


@triton.jit
def _kth_largest(keys, num_keys, k, low, high, WAYS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return a key that exactly k of `keys` reach, as far as results are concerned: the k-th largest, or a lower one
    that no further key reaches.

    keys: pointer to int32. low, high: at least k keys reach low, fewer reach high; both scalars, int64."""
    low, num_at_low = tl.zeros((), tl.int64) + low, tl.zeros((), tl.int64) + num_keys
    while (high - low > 1) & (num_at_low != k):
        step = (high - low + WAYS) // (WAYS + 1)
        candidate = low + step * (1 + tl.arange(0, WAYS))
        count = tl.zeros((WAYS,), tl.int64)
        for first in range(0, num_keys, CHUNK):
            place = first + tl.arange(0, CHUNK)
            key = tl.load(keys + place, mask=place < num_keys, other=LOWEST_KEY)
            count += tl.sum((key[:, None] >= candidate[None, :]).to(tl.int32), axis=0)
        num_at_low = tl.min(tl.where(count >= k, count, num_at_low))
        low += step * tl.sum((count >= k).to(tl.int64))
        high = tl.minimum(high, low + step)
    return low


@triton.jit
def _mass(tempered, tempered_top):  # type: ignore[no-untyped-def]
    """Probability mass in units of 2**-44 of the top's. 0 for a NaN, and in a row of nothing but minus infinity."""
    distance = tempered - tl.where(tempered_top > -float("inf"), tempered_top, 0.0)
    return (tl.where(distance <= 0, tl.exp(tl.minimum(distance, 0.0)), 0.0) * _MASS_ONE).to(tl.int64)


@triton.jit
def _above(keys, num_keys, candidate, tempered_top, WAYS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the number of `keys` above each candidate, and their mass: int64 [WAYS] each."""
    count, mass = tl.zeros((WAYS,), tl.int64), tl.zeros((WAYS,), tl.int64)
    for first in range(0, num_keys, CHUNK):
        place = first + tl.arange(0, CHUNK)
        is_real = place < num_keys
        key = tl.load(keys + place, mask=is_real, other=KEY_OF_MINUS_INFINITY)
        key_mass = _mass(value_of_key(key), tempered_top)
        is_above = is_real[:, None] & (key[:, None] > candidate[None, :])
        count += tl.sum(is_above.to(tl.int32), axis=0)
        mass += tl.sum(tl.where(is_above, key_mass[:, None], 0), axis=0)
    return count, mass


@triton.jit
def _top_p_key(  # type: ignore[no-untyped-def]
    keys, num_keys, cut_key, top_key, tail_mass, tempered_top, top_p, WAYS: tl.constexpr, CHUNK: tl.constexpr
):
    """Return the lowest key above which less than top_p of the mass lies, or another key that keeps the same of
    `keys`.

    The mass is that of the keys from cut_key on, plus tail_mass. cut_key, top_key: int64; top_key is the largest key
    and is always kept."""
    low, high = cut_key - 1, top_key
    count, mass = _above(keys, num_keys, low + tl.zeros((WAYS,), tl.int64), tempered_top, WAYS, CHUNK)
    target = top_p.to(tl.float64) * (tl.max(mass) + tail_mass).to(tl.float64)
    num_above_low, num_above_high = tl.max(count), tl.zeros((), tl.int64)
    while (high - low > 1) & (num_above_low - num_above_high > 1):
        step = (high - low + WAYS) // (WAYS + 1)
        count, mass = _above(keys, num_keys, low + step * (1 + tl.arange(0, WAYS)), tempered_top, WAYS, CHUNK)
        is_kept = mass.to(tl.float64) < target
        num_above_low = tl.min(tl.where(is_kept, num_above_low, count))
        num_above_high = tl.max(tl.where(is_kept, count, num_above_high))
        low += step * tl.sum((is_kept == 0).to(tl.int64))
        high = tl.minimum(high, low + step)
    return low + 1


@triton.jit
def _list_bounds(  # type: ignore[no-untyped-def]
    row, tops_NG, divisor, top_k, top_p, log_min_p, V: tl.constexpr, SPAN: tl.constexpr, BLOCK_G: tl.constexpr
):
    """Return (the least tempered logit that may be kept or has mass, the least that is listed, the largest).

    Every kept token is listed. A token between the two bounds only contributes mass; this happens only in rows without
    top-k."""
    NUM_SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    top_key = _top_of_row(row, tops_NG, NUM_SPANS, BLOCK_G)
    tempered_top = tl.div_rn(value_of_key(top_key), divisor)
    least = tempered_top + log_min_p
    floor = least
    if top_k == V:
        # The tail that top-p drops has more than 1 - p of the mass, which is at least 1, in at most V tokens, so its
        # largest token is above the mean. 0.1 is a margin for rounding.
        floor = tl.maximum(least, tempered_top + tl.log(tl.maximum(1.0 - top_p, 1e-30) / V) - 0.1)
        least = tl.maximum(least, tempered_top + _MASSLESS)
    elif top_k <= NUM_SPANS:
        tops = tops_NG + row * NUM_SPANS
        kth_key = _kth_largest(tops, NUM_SPANS, top_k, KEY_OF_MINUS_INFINITY, top_key.to(tl.int64) + 1, 16, BLOCK_G)
        floor = tl.maximum(least, tl.div_rn(value_of_key(kth_key.to(tl.int32)), divisor))
        least = floor
    return least, floor, tempered_top


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    cell_N,
    slot_ids_B,
    limits_SF,
    limits_stride,
    sampling_SF,
    sampling_stride,
    logits_BTV,
    tokens_BT,
    counts_SV,
    prompt_seen_SV,
    bias_SV,
    mask_SWX,
    tops_NG,
    tally_N2,
    listed_NV,
    bounds_N3,
    V: tl.constexpr,
    T: tl.constexpr,
    W: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    """List order keys of tempered logits, in any order; count them, and sum the mass of the tokens below the list."""
    release_next(PDL)
    await_previous(PDL)
    NUM_SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0)
    cell = _cell(row, cell_N)
    slot = tl.load(slot_ids_B + cell // T)
    temperature, divisor, top_k, top_p, log_min_p = _draw_parameters(
        slot, limits_SF, limits_stride, sampling_SF, sampling_stride
    )
    if _needs_list(temperature, top_k, top_p, V):
        least, floor, tempered_top = _list_bounds(row, tops_NG, divisor, top_k, top_p, log_min_p, V, SPAN, BLOCK_G)
        if tl.program_id(1) == 0:
            tl.store(bounds_N3 + row * 3 + _FLOOR, floor)
        listed = listed_NV + row.to(tl.int64) * V
        tail_mass = tl.zeros((SPAN,), tl.int64)
        for span in range(tl.program_id(1), NUM_SPANS, tl.num_programs(1)):
            if tl.div_rn(value_of_key(tl.load(tops_NG + row * NUM_SPANS + span)), divisor) >= least:
                token = span * SPAN + tl.arange(0, SPAN)
                is_real = token < V
                logit = _adjusted_logits(
                    row,
                    cell,
                    slot,
                    token,
                    is_real,
                    sampling_SF,
                    sampling_stride,
                    logits_BTV,
                    tokens_BT,
                    counts_SV,
                    prompt_seen_SV,
                    bias_SV,
                    mask_SWX,
                    V,
                    T,
                    W,
                )
                tempered = tl.div_rn(logit, divisor)
                is_listed = is_real & (tempered >= floor)
                rise = tl.cumsum(is_listed.to(tl.int32))
                first = tl.atomic_add(tally_N2 + row * 2, tl.max(rise).to(tl.int64))
                tl.store(listed + first + rise - 1, order_key(tempered), mask=is_listed)
                is_tail = is_real & (tempered >= least) & (tempered < floor)
                tail_mass += tl.where(is_tail, _mass(tempered, tempered_top), 0)
        if least < floor:
            tl.atomic_add(tally_N2 + row * 2 + 1, tl.sum(tail_mass))


@triton.jit
def _select(  # type: ignore[no-untyped-def]
    cell_N,
    slot_ids_B,
    limits_SF,
    limits_stride,
    sampling_SF,
    sampling_stride,
    tops_NG,
    tally_N2,
    listed_NV,
    bounds_N3,
    V: tl.constexpr,
    T: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store a row's bounds: its threshold on tempered logits, and the least logit that the noise can carry past the
    largest."""
    release_next(PDL)
    await_previous(PDL)
    row = tl.program_id(0)
    cell = _cell(row, cell_N)
    slot = tl.load(slot_ids_B + cell // T)
    temperature, divisor, top_k, top_p, log_min_p = _draw_parameters(
        slot, limits_SF, limits_stride, sampling_SF, sampling_stride
    )
    top = value_of_key(_top_of_row(row, tops_NG, (V + SPAN - 1) // SPAN, BLOCK_G))
    tempered_top = tl.div_rn(top, divisor)
    threshold = tempered_top + log_min_p
    if _needs_list(temperature, top_k, top_p, V):
        listed = listed_NV + row.to(tl.int64) * V
        num_listed = tl.load(tally_N2 + row * 2).to(tl.int32)
        floor_key = order_key(tl.load(bounds_N3 + row * 3 + _FLOOR)).to(tl.int64)
        top_key = order_key(tempered_top).to(tl.int64)
        cut_key = floor_key
        if (top_k < V) & (num_listed >= top_k):
            cut_key = _kth_largest(listed, num_listed, top_k, floor_key, top_key + 1, 4, CHUNK)
        if top_p < float("inf"):
            tail_mass = tl.load(tally_N2 + row * 2 + 1)
            cut_key = _top_p_key(listed, num_listed, cut_key, top_key, tail_mass, tempered_top, top_p, 4, CHUNK)
        threshold = value_of_key(cut_key.to(tl.int32))
    tl.store(bounds_N3 + row * 3 + _THRESHOLD, threshold)
    # Includes scores that become equal by rounding, where the lower token wins: 2**-20 of the score exceeds its
    # rounding error.
    tl.store(bounds_N3 + row * 3 + _REACH, top - temperature * _NOISE_REACH - tl.abs(top) * 2.0**-20)


@triton.jit
def _gumbel_noise(seed, position, span, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Standard Gumbel noise of a span's tokens, float32 [SPAN]; kernels/reference/philox.py has the counter's layout.
    SPAN: a multiple of 4."""
    group = (span * (SPAN // 4) + tl.arange(0, SPAN // 4)).to(tl.uint32)
    position = tl.zeros_like(group) + position.to(tl.uint32)
    purpose = tl.zeros_like(group) + _PURPOSE
    word_0, word_1, word_2, word_3 = tl.philox(seed, group, position, purpose, tl.zeros_like(group))
    words = tl.interleave(tl.interleave(word_0, word_2), tl.interleave(word_1, word_3))
    uniform = ((words >> 8).to(tl.float64) + 0.5) * 2.0**-24
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    cell_N,
    slot_ids_B,
    limits_SF,
    limits_stride,
    sampling_SF,
    sampling_stride,
    logits_BTV,
    tokens_BT,
    counts_SV,
    prompt_seen_SV,
    bias_SV,
    mask_SWX,
    position_BT,
    tops_NG,
    bounds_N3,
    best_NC,
    V: tl.constexpr,
    T: tl.constexpr,
    W: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the rank of the best noisy logit among a program's spans. Comparisons are written so that a NaN is kept:
    then some token always is."""
    release_next(PDL)
    await_previous(PDL)
    NUM_SPANS: tl.constexpr = (V + SPAN - 1) // SPAN
    row = tl.program_id(0)
    cell = _cell(row, cell_N)
    slot = tl.load(slot_ids_B + cell // T)
    temperature, divisor, _, _, _ = _draw_parameters(slot, limits_SF, limits_stride, sampling_SF, sampling_stride)
    seed, position = tl.load(limits_SF + slot * limits_stride + _SEED), tl.load(position_BT + cell)
    threshold, reach = tl.load(bounds_N3 + row * 3 + _THRESHOLD), tl.load(bounds_N3 + row * 3 + _REACH)
    best = tl.full((SPAN,), LOWEST_RANK, tl.int64)
    for span in range(tl.program_id(1), NUM_SPANS, tl.num_programs(1)):
        top = value_of_key(tl.load(tops_NG + row * NUM_SPANS + span))
        is_hopeless = (top < reach) | (tl.div_rn(top, divisor) < threshold)
        if is_hopeless == 0:
            token = span * SPAN + tl.arange(0, SPAN)
            is_real = token < V
            logit = _adjusted_logits(
                row,
                cell,
                slot,
                token,
                is_real,
                sampling_SF,
                sampling_stride,
                logits_BTV,
                tokens_BT,
                counts_SV,
                prompt_seen_SV,
                bias_SV,
                mask_SWX,
                V,
                T,
                W,
            )
            is_dropped = (is_real == 0) | (tl.div_rn(logit, divisor) < threshold)
            if temperature > 0:
                logit += temperature * _gumbel_noise(seed, position, span, SPAN)
            best = tl.maximum(best, tl.where(is_dropped, LOWEST_RANK, rank(logit, token)))
    tl.store(best_NC + row * tl.num_programs(1) + tl.program_id(1), tl.max(best))
