"""The line of all work of a prompt's attention: where every tile stands in it, and how it is shared out. See
prefill_attention.py.

A tile is BLOCK_M query rows of one span and key/value head; it has one unit of work for every page of keys that its
rows see. The tiles of all spans and heads lie one behind the other, and programs take shares of their units, which are
equal if TILE_COST units more are counted at the beginning of every tile.

Knows nothing of queries, keys and values. Shape letters: as in prefill_attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from agentspec.kernels import prefill_batch

_COUNT = tl.constexpr(prefill_batch.COUNT)
_START = tl.constexpr(prefill_batch.START)
_FIELDS = tl.constexpr(prefill_batch.NUM_SPAN_FIELDS)

NOT_SPECIALIZED = ("num_tokens", "num_spans", "num_pages", "most_tiles", "num_programs")
"""Arguments that change from call to call: kernels are not compiled once more for those that happen to be multiples of
16."""
SEARCH = tl.constexpr(1024)
"""Places of the line that a program looks at, at once, for its share."""
_MIN_SHARE = tl.constexpr(4)
"""Units of a program, if there are so many: shorter tiles aren't worth cutting."""
TILE_COST = tl.constexpr(5)
"""Units that take as long as beginning and ending a tile, on an H100: a program with many short tiles gets fewer
units."""


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
    """Fill line_4I, [4, most_tiles + 1]: for every place of the line the units before it, and which span, key/value
    head and tile of it stands there.

    Behind the last tile stands the number of all units, up to the end."""
    u = tl.arange(0, BLOCK_U)
    count_U = tl.load(spans_UF + u * _FIELDS + _COUNT, mask=u < num_spans, other=0).to(tl.int32)
    places_U = tl.cdiv(count_U * SHARES, BLOCK_M) * G
    end_U = tl.cumsum(places_U, axis=0)
    num_tiles = tl.sum(places_U, axis=0)
    num_units = tl.zeros((), tl.int32)
    for first in tl.range(0, most_tiles + 1, BLOCK_I, num_stages=1):
        i = first + tl.arange(0, BLOCK_I)
        is_tile = i < num_tiles
        span = tl.sum((end_U[None, :] <= i[:, None]).to(tl.int32), axis=1)
        before = tl.max(tl.where(u[None, :] < span[:, None], end_U[None, :], 0), axis=1)
        count = tl.load(spans_UF + span * _FIELDS + _COUNT, mask=is_tile, other=1).to(tl.int32)
        start = tl.load(spans_UF + span * _FIELDS + _START, mask=is_tile, other=0).to(tl.int32)
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
    """Which of a span's tiles, counted head by head, stands at place i of its part of the line.

    The line is made of groups, one for about every program, of equally many tiles, give or take one. The first tiles of
    all groups are neighbours in the span, then the second ones, and so on, from the last group to the first and back:
    what programs do at one time is of one head and of about one length, and so is all that each of them has done
    before. The last ones, too, go the other way than those before them: else a prompt of two tiles a program would give
    some of them all short ones, and a tile costs time of its own."""
    fewest = num_tiles // num_groups
    group = ((i + 1) * num_groups - 1) // num_tiles
    begin = group * num_tiles // num_groups
    turn = i - begin
    in_turn = tl.where(turn % 2 == 1, num_groups - 1 - group, group)
    # Only some groups have one more tile than the fewest: so many, and so many before this one.
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
    """The first unit that is not before a cut: `cost` units from the beginning, in this tile, TILE_COST counted with
    each."""
    unit = tl.load(line_4I + tile)
    return unit + tl.maximum(cost - unit - TILE_COST * (tile + 1), 0)
