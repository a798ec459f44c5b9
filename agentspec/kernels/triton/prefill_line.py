"""The line: a flat work list of a prompt's attention, and how programs share it. See prefill_attention.py.

A tile is BLOCK_M query rows of one span and key/value head; it has one unit of work for every page of keys that its
rows see. The tiles of all spans and heads are concatenated in the line, and programs take shares of the units. Shares
are equal in cost, where every tile costs TILE_COST units more than it has.

Knows nothing of queries, keys and values. Shape letters: as in prefill_attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from agentspec.kernels.triton.prefill_columns import COUNT, NUM_SPAN_FIELDS, START

NOT_SPECIALIZED = ("num_tokens", "num_spans", "num_pages", "most_tiles", "num_programs", "capacity")
"""Arguments that change from call to call: kernels are not recompiled for values that happen to be multiples of 16."""
SEARCH = tl.constexpr(1024)
"""Places of the line that a program searches at once for its share."""
_MIN_SHARE = tl.constexpr(4)
"""Least units per program, if there are enough: cutting shorter tiles does not pay."""
TILE_COST = tl.constexpr(8)
"""Cost of starting and ending a tile, in units, on an H200: a program with many short tiles gets fewer units."""


@triton.jit
def lay_out(  # type: ignore[no-untyped-def]
    spans_UF,
    num_spans,
    line_4I,
    most_tiles,
    num_programs,
    G: tl.constexpr,
    SHARES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Fill line_4I, [4, most_tiles + 1]. For every place of the line: the number of units before it, then span,
    key/value head and tile at that place.

    The places after the last tile hold the total number of units."""
    u = tl.arange(0, BLOCK_U)
    count_U = tl.load(spans_UF + u * NUM_SPAN_FIELDS + COUNT, mask=u < num_spans, other=0).to(tl.int32)
    places_U = tl.cdiv(count_U * SHARES, BLOCK_M) * G
    end_U = tl.cumsum(places_U, axis=0)
    num_tiles = tl.sum(places_U, axis=0)
    num_units = tl.zeros((), tl.int32)
    for first in tl.range(0, most_tiles + 1, BLOCK_I, num_stages=1):
        i = first + tl.arange(0, BLOCK_I)
        is_tile = i < num_tiles
        span = tl.sum((end_U[None, :] <= i[:, None]).to(tl.int32), axis=1)
        before = tl.max(tl.where(u[None, :] < span[:, None], end_U[None, :], 0), axis=1)
        count = tl.load(spans_UF + span * NUM_SPAN_FIELDS + COUNT, mask=is_tile, other=1).to(tl.int32)
        start = tl.load(spans_UF + span * NUM_SPAN_FIELDS + START, mask=is_tile, other=0).to(tl.int32)
        tiles = tl.cdiv(count * SHARES, BLOCK_M)
        groups = tl.minimum(tl.maximum(tiles * G * num_programs // tl.maximum(num_tiles, 1), 1), tiles * G)
        place = _line_place(i - before, tiles * G, groups)
        tile = place % tiles
        last_token = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // SHARES, count - 1)
        units = tl.where(is_tile, (start + last_token) // PAGE + 1, 0)
        is_there = i <= most_tiles
        tl.store(line_4I + i, num_units + tl.cumsum(units, axis=0) - units, mask=is_there)
        line = line_4I + (most_tiles + 1) + i
        tl.store(line, span, mask=is_there)
        tl.store(line + (most_tiles + 1), place // tiles, mask=is_there)
        tl.store(line + 2 * (most_tiles + 1), tile, mask=is_there)
        num_units += tl.sum(units, axis=0)


@triton.jit
def _line_place(i, num_tiles, num_groups):  # type: ignore[no-untyped-def]
    """Return which of a span's tiles, counted head by head, is at place i of its part of the line.

    This part is made of groups, about one per program, whose numbers of tiles differ by at most one. The first tiles
    of all groups are neighbours in the span, then the second ones, and so on, in alternating direction (last group to
    first, first to last). So the tiles that programs process at the same time belong to one head and have similar
    lengths, and each program's total so far is similar too. The last round also reverses the direction of the round
    before: otherwise, with two tiles per program, some programs would get short tiles only, and every tile has a fixed
    cost."""
    fewest = num_tiles // num_groups
    group = ((i + 1) * num_groups - 1) // num_tiles
    begin = group * num_tiles // num_groups
    turn = i - begin
    in_turn = tl.where(turn % 2 == 1, num_groups - 1 - group, group)
    # Some groups have one tile more than the fewest: how many of all groups, and how many of those before this one.
    num_larger = num_tiles - fewest * num_groups
    larger_before = begin - group * fewest
    in_last = tl.where(fewest % 2 == 1, num_larger - 1 - larger_before, larger_before)
    return tl.where(turn < fewest, turn * num_groups + in_turn, fewest * num_groups + in_last)


@triton.jit
def shares_of(num_units, num_programs):  # type: ignore[no-untyped-def]
    return tl.minimum(num_programs, tl.cdiv(num_units, _MIN_SHARE))


@triton.jit
def tile_at(line_4I, most_tiles, i):  # type: ignore[no-untyped-def]
    """(span, key/value head, tile of the span) at a place of the line."""
    line = line_4I + (most_tiles + 1) + i
    return tl.load(line), tl.load(line + (most_tiles + 1)), tl.load(line + 2 * (most_tiles + 1))


@triton.jit
def unit_at(line_4I, tile, cost):  # type: ignore[no-untyped-def]
    """The first unit that is not before a cut. `cost`: of the cut, in units from the beginning, with TILE_COST for
    every tile; `tile`: the tile of the cut."""
    unit = tl.load(line_4I + tile)
    return unit + tl.maximum(cost - unit - TILE_COST * (tile + 1), 0)
