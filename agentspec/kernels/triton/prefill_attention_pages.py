"""What the two Gluon kernels of prefill_attention.py's second launch share: which page comes when, the softmax of a
page's scores, and the program's share of the line. See prefill_attention_groups_hopper.py and
prefill_attention_hopper.py.

Knows nothing of shared memory and products. Shape letters: as in prefill_attention.py.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from agentspec.kernels.triton import prefill_line
from agentspec.kernels.triton.shares import share_of

_share_of = gluon.jit(share_of.fn)
_shares_of = gluon.jit(prefill_line.shares_of.fn)
_unit_at = gluon.jit(prefill_line.unit_at.fn)


@gluon.jit
def place_at(j, num_full, turned):  # type: ignore[no-untyped-def]
    """Return the place in a run of the j-th page that a program processes of it: the first `num_full` in rotated order,
    starting at page `turned`, then the others."""
    turn = gl.where(j + turned < num_full, j + turned, j + turned - num_full)
    return gl.where(j < num_full, turn, j)


@gluon.jit
def page_at(pages, j, num_pages, num_full, turned):  # type: ignore[no-untyped-def]
    """Return the id of the page at `place_at`."""
    return gl.load(pages + place_at(j, num_full, turned), mask=j < num_pages, other=0)


@gluon.jit
def softmax(scores, largest, exponentials, scale):  # type: ignore[no-untyped-def]
    """Add the scores of one more page. Return (weights [M, S], largest [M], exponentials [M], factor [M] for previous
    sums)."""
    new_largest = gl.maximum(largest, gl.max(scores, axis=1) * scale)
    # A row that has seen no key yet has a largest score of minus infinity.
    base = gl.where(new_largest == float("-inf"), 0.0, new_largest)
    shrink = gl.exp2(largest - base)
    weight = gl.exp2(scores * scale - gl.expand_dims(base, 1))
    return weight, new_largest, exponentials * shrink + gl.sum(weight, axis=1), shrink


@gluon.jit
def masked_scores(scores, page_position, query_position_M, layout: gl.constexpr, PAGE: gl.constexpr):  # type: ignore[no-untyped-def]
    position = page_position + gl.arange(0, PAGE, layout=gl.SliceLayout(0, layout))
    return gl.where(gl.expand_dims(position, 0) <= gl.expand_dims(query_position_M, 1), scores, float("-inf"))


@gluon.jit
def rescaled(values, factor_M, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    return values * gl.expand_dims(gl.convert_layout(factor_M, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def share_on_line(line_4I, most_tiles, program, num_programs, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """As prefill_attention._share."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    total = gl.load(line_4I + most_tiles)
    num_tiles = program * 0
    for first in range(0, most_tiles, prefill_line.SEARCH):
        i = first + gl.arange(0, prefill_line.SEARCH, layout=layout)
        num_tiles += gl.sum((gl.load(line_4I + i, mask=i < most_tiles, other=2147483647) < total).to(gl.int32), axis=0)
    begin, end = _share_of(program, _shares_of(total, num_programs), total + prefill_line.TILE_COST * num_tiles)
    begin_tile = program * 0 - 1
    end_tile = program * 0 - 1
    for first in range(0, most_tiles, prefill_line.SEARCH):
        i = first + gl.arange(0, prefill_line.SEARCH, layout=layout)
        cost = gl.where(
            i < most_tiles, gl.load(line_4I + i, mask=i < most_tiles, other=0) + prefill_line.TILE_COST * i, 2147483647
        )
        begin_tile += gl.sum((cost <= begin).to(gl.int32), axis=0)
        end_tile += gl.sum((cost <= end).to(gl.int32), axis=0)
    return _unit_at(line_4I, begin_tile, begin), _unit_at(line_4I, end_tile, end)


@gluon.jit
def tiles_of_share(line_4I, most_tiles, begin, end, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """As prefill_attention._tiles_of_share."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    first_tile = begin * 0 - 1
    last_tile = begin * 0 - 1
    for first in range(0, most_tiles, prefill_line.SEARCH):
        i = first + gl.arange(0, prefill_line.SEARCH, layout=layout)
        units = gl.load(line_4I + i, mask=i < most_tiles, other=2147483647)
        first_tile += gl.sum((units <= begin).to(gl.int32), axis=0)
        last_tile += gl.sum((units < end).to(gl.int32), axis=0)
    return first_tile, last_tile - first_tile + 1
