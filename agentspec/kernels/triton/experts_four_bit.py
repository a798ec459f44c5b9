"""Experts in 4 bits for few tokens, in Gluon: gate and up with SwiGLU, and down, one launch each.

The walks of experts.py with the products of linear_four_bit.py: a program owns some rows of one expert and multiplies
them with all the tokens that visit it. Its lanes load the codes that they need as operands, so no weight passes through
shared memory; of the tokens, only those that visit are loaded.

Shape letters as in experts.py.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from agentspec.kernels.triton.expert_groups import COUNT, EXPERT, FIELDS, FIRST
from agentspec.kernels.triton.gluon_names import await_previous, release_next
from agentspec.kernels.triton.linear_four_bit import (
    gated,
    has_zeros,
    index_along,
    layout_of,
    mma_layout,
    scales_of,
    tokens_layout,
    walk,
)

_NO_PAIR = tl.constexpr(0x7FFFFFFF)
_WORDS = tl.constexpr(128)
"""32-bit words of a tile."""
_COLUMNS_OF_TABLE = tl.constexpr(16)
"""Most visits of a token."""


@gluon.jit
def four_bit_gate_up_kernel(  # type: ignore[no-untyped-def]
    h, x, words, scales, zeros, multipliers, shared_words, shared_scales, shared_zeros, shared_multipliers, ids, pairs,
    tiles, num_tokens, num_experts, width, C: gl.constexpr, GROUPS: gl.constexpr, FORMAT: gl.constexpr,
    BLOCK_O: gl.constexpr, BLOCK_M: gl.constexpr, AHEAD: gl.constexpr, SHARES: gl.constexpr,
    WARPS: gl.constexpr, UNROLL: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """A program has BLOCK_O / 2 rows of gate and the same of up, eight in turn. GROUPS: of 128 columns, of a row of x.
    FORMAT: as in linear_four_bit.py."""
    await_previous(PDL)
    release_next(PDL)
    M: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, mma_layout(SHARES, WARPS)))
    expert, m_pair, m_is_real, works = _visitors(ids, pairs, tiles, num_tokens, C, BLOCK_M, WARPS, M)
    if works:
        num_tiles = width // 4 * GROUPS
        words = _of_expert(words, shared_words, expert, num_experts, num_tiles * _WORDS)
        scales = _of_expert(scales, shared_scales, expert, num_experts, num_tiles * scales_of(FORMAT))
        if has_zeros(FORMAT):
            zeros = _of_expert(zeros, shared_zeros, expert, num_experts, num_tiles * scales_of(FORMAT))
        if FORMAT == "e2m1":
            multipliers = _of_expert(multipliers, shared_multipliers, expert, num_experts, 2 * width)
        X: gl.constexpr = tokens_layout(FORMAT, BLOCK_M, 1, SHARES, WARPS)
        acc_OM = walk(
            x, gl.convert_layout(m_pair // C * (GROUPS * 64), X), gl.convert_layout(m_is_real, X), words, scales,
            zeros, multipliers, gl.program_id(0), 0, width, GROUPS, 1, FORMAT, True, BLOCK_O // 8, BLOCK_M, AHEAD,
            SHARES, WARPS, UNROLL, UNROLL, False,
        )  # fmt: skip
        y = gated(acc_OM, BLOCK_O, BLOCK_M)
        _store(h, y, m_pair, m_is_real, gl.program_id(0), width, BLOCK_O // 2, BLOCK_M)


@gluon.jit
def four_bit_down_kernel(  # type: ignore[no-untyped-def]
    parts, h, words, scales, zeros, multipliers, shared_words, shared_scales, shared_zeros, shared_multipliers, ids,
    pairs, tiles, weights, num_tokens, num_experts, num_outputs, C: gl.constexpr, GROUPS: gl.constexpr,
    FORMAT: gl.constexpr, BLOCK_O: gl.constexpr, BLOCK_M: gl.constexpr, AHEAD: gl.constexpr, SHARES: gl.constexpr,
    WARPS: gl.constexpr, UNROLL: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """The visits are read before the wait: they were complete before the previous kernel (gate and up) released this
    one. So are the first weights."""
    release_next(PDL)
    M: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, mma_layout(SHARES, WARPS)))
    expert, m_pair, m_is_real, works = _visitors(ids, pairs, tiles, num_tokens, C, BLOCK_M, WARPS, M)
    if works:
        num_tiles = num_outputs // 8 * GROUPS
        words = _of_expert(words, shared_words, expert, num_experts, num_tiles * _WORDS)
        scales = _of_expert(scales, shared_scales, expert, num_experts, num_tiles * scales_of(FORMAT))
        if has_zeros(FORMAT):
            zeros = _of_expert(zeros, shared_zeros, expert, num_experts, num_tiles * scales_of(FORMAT))
        if FORMAT == "e2m1":
            multipliers = _of_expert(multipliers, shared_multipliers, expert, num_experts, num_outputs)
        X: gl.constexpr = tokens_layout(FORMAT, BLOCK_M, 1, SHARES, WARPS)
        m_weight = gl.load(weights + m_pair, mask=m_is_real, other=0.0, cache_modifier=".cg")
        acc_OM = walk(
            h, gl.convert_layout(m_pair * (GROUPS * 64), X), gl.convert_layout(m_is_real, X), words, scales, zeros,
            multipliers, gl.program_id(0), 0, num_outputs, GROUPS, 1, FORMAT, False, BLOCK_O // 8, BLOCK_M, AHEAD,
            SHARES, WARPS, UNROLL, UNROLL, PDL,
        )  # fmt: skip
        LAYOUT: gl.constexpr = layout_of(acc_OM)
        acc_OM *= gl.expand_dims(gl.convert_layout(m_weight, gl.SliceLayout(0, LAYOUT)), 0)
        _store(parts, acc_OM, m_pair, m_is_real, gl.program_id(0), num_outputs, BLOCK_O, BLOCK_M)
    else:
        await_previous(PDL)


@gluon.jit
def _visitors(  # type: ignore[no-untyped-def]
    ids, pairs, tiles, num_tokens, C: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr, LAYOUT: gl.constexpr
):
    """experts._visitors: (expert, pairs [BLOCK_M], which of them are real, whether there is work) of this program."""
    m = gl.arange(0, BLOCK_M, layout=LAYOUT)
    if tiles is None:
        mine = gl.program_id(1)
        expert = gl.load(ids + mine, cache_modifier=".cg")
        # All programs read the same few bytes of L2, so each reads them once, not each of its threads.
        TABLE: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
        n = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, TABLE)), 1)
        c = gl.expand_dims(gl.arange(0, _COLUMNS_OF_TABLE, layout=gl.SliceLayout(0, TABLE)), 0)
        gl.static_assert(C <= _COLUMNS_OF_TABLE)
        id = gl.load(ids + n * C + c, mask=(n < num_tokens) & (c < C), other=-1, cache_modifier=".cg")
        m_pair = gl.min(gl.where(id == expert, n * C + c, _NO_PAIR), axis=1)
        works = (gl.min(m_pair, axis=0) == mine) & (expert >= 0)
        m_pair = gl.convert_layout(m_pair, LAYOUT)
        m_is_real = m_pair < _NO_PAIR
        m_pair = gl.where(m_is_real, m_pair, 0)
    else:
        tile = tiles + gl.program_id(1) * FIELDS
        expert = gl.load(tile + EXPERT, cache_modifier=".cg")
        count = gl.load(tile + COUNT, cache_modifier=".cg")
        first = gl.load(tile + FIRST, cache_modifier=".cg")
        m_is_real = m < count
        works = count > 0
        m_pair = gl.load(pairs + first + m, mask=m_is_real, other=0, cache_modifier=".cg")
    return expert, m_pair, m_is_real, works


@gluon.jit
def _of_expert(routed, shared, expert, num_experts, size):  # type: ignore[no-untyped-def]
    """Pointer to the expert's part of what holds `size` elements for each; those of the shared expert are apart."""
    if shared is not None:
        routed, expert = gl.where(expert < num_experts, routed, shared), gl.where(expert < num_experts, expert, 0)
    return routed + expert.to(gl.int64) * size


@gluon.jit
def _store(  # type: ignore[no-untyped-def]
    out, y, m_pair, m_is_real, tile, num_outputs, ROWS: gl.constexpr, BLOCK_M: gl.constexpr
):
    """Store a tile [ROWS, BLOCK_M] to the rows of its pairs."""
    LAYOUT: gl.constexpr = layout_of(y)
    m_pair = gl.expand_dims(gl.convert_layout(m_pair, gl.SliceLayout(0, LAYOUT)), 0)
    m_is_real = gl.expand_dims(gl.convert_layout(m_is_real, gl.SliceLayout(0, LAYOUT)), 0)
    o = tile * ROWS + index_along(ROWS, 0, 2, LAYOUT)
    gl.store(out + m_pair * num_outputs + o, y.to(out.dtype.element_ty), mask=m_is_real & (o >= 0))
