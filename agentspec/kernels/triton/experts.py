"""Experts for few tokens: the weights of every chosen expert are read once, for all tokens that chose it.

A program owns some rows of one expert and multiplies them with all the tokens that visit it (`linear_tiles` has the
loop along K). With up to FEW_TOKENS tokens a program finds these in the table of ids itself: there is one program for
each pair of token and visit, and only the first of an expert works. With more, expert_groups has listed them. The
shared expert may be one of the visits, with id X. Each visit's result is kept in float32, and a token's results are
added in the order of its visits, so its bits depend on the number of tokens but not on what the others are.

Shape letters: N tokens, H hidden size, I FFN width, X experts, C visits per token, P = N * C pairs of token and visit,
token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.triton.expert_groups import COUNT, EXPERT, FIELDS, FIRST, ExpertGroups
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next
from agentspec.kernels.triton.linear_tiles import SCALE_COLUMNS, prefetch_first_steps, walk_either, weight_rows_at
from agentspec.kernels.weights import SCALE_BLOCK, BlockScaled, Weight

FEW_TOKENS = 16
"""With up to this many tokens, programs find an expert's visitors themselves."""
_SUM_BLOCK = 512
_NO_PAIR: tl.constexpr = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tiling of one of the two products: a program owns block_o rows of an expert and loops over K in steps of
    block_k."""

    block_o: int
    block_k: int
    warps: int
    stages: int
    """Pipeline stages: steps in shared memory."""
    ahead: int = 0
    """Down only: steps whose weights are prefetched to L2 before waiting for the gate and up projections."""
    release: int = 1
    """Steps before the end at which the next kernel may start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Visits:
    """The experts that each token visits."""

    ids_NC: Tensor
    """int32; X is the shared expert."""
    weights_NC: Tensor
    """float32."""
    groups: ExpertGroups | None
    """None for few tokens."""
    block_m: int
    """Visits per program."""
    all_held: bool = True
    """Whether all visited experts are there. Others have id -1 among few tokens, and no tiles otherwise; their visits
    give zeros."""

    @property
    def num_blocks(self) -> int:
        return self.ids_NC.numel() if self.groups is None else len(self.groups.tiles_T4)


def gate_up(tiles: Tiles, x_NH: Tensor, weight_X2IH: Weight, shared_2IH: Weight | None, visits: Visits) -> Tensor:
    """silu(gate x) * up x of every pair, [P, I] in x's dtype, one launch. shared_2IH: expert X, if the ids contain
    it."""
    (num_tokens, num_visits), depth, width = visits.ids_NC.shape, x_NH.shape[1], weight_X2IH.shape[1] // 2
    assert x_NH.is_contiguous()
    h_PI = torch.empty(num_tokens * num_visits, width, dtype=x_NH.dtype, device=x_NH.device)
    half = tiles.block_o // 2
    _gate_up_kernel[(triton.cdiv(width, half), visits.num_blocks)](
        h_PI,
        x_NH,
        *_operands(weight_X2IH),
        *_operands(shared_2IH),
        *lists_of(visits),
        num_tokens,
        weight_X2IH.shape[0],
        width,
        depth,
        tiles.release,
        ONE_BLOCK=_block_rows(weight_X2IH) % half == 0 and width % half == 0,
        **_blocks(tiles, visits, weight_X2IH, depth),
    )
    return h_PI


def down(tiles: Tiles, h_PI: Tensor, weight_XHI: Weight, shared_HI: Weight | None, visits: Visits) -> Tensor:
    """Every pair's output times its weight: float32 [P, H], one launch.

    The visits are read while the previous launch still runs. So that launch must have waited for the kernel that wrote
    them, as `gate_up` does."""
    num_experts, num_outputs, depth = weight_XHI.shape
    empty = torch.empty if visits.all_held else torch.zeros
    parts_PH = empty(h_PI.shape[0], num_outputs, dtype=torch.float32, device=h_PI.device)
    _down_kernel[(triton.cdiv(num_outputs, tiles.block_o), visits.num_blocks)](
        parts_PH,
        h_PI,
        *_operands(weight_XHI),
        *_operands(shared_HI),
        *lists_of(visits),
        visits.weights_NC,
        visits.ids_NC.shape[0],
        num_experts,
        num_outputs,
        depth,
        tiles.ahead,
        tiles.release,
        ONE_BLOCK=_block_rows(weight_XHI) % tiles.block_o == 0,
        **_blocks(tiles, visits, weight_XHI, depth),
    )
    return parts_PH


def add_visits(
    residual_NH: Tensor | None,
    parts_PH: Tensor,
    num_visits: int,
    gate_N: Tensor | None,
    shared_NH: Tensor | None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """The residual, if given, plus the token's visits, plus sigmoid(gate) * shared if given: [N, H] in `dtype`, one
    launch."""
    num_tokens, width = parts_PH.shape[0] // num_visits, parts_PH.shape[1]
    assert residual_NH is None or residual_NH.is_contiguous()
    assert shared_NH is None or shared_NH.is_contiguous()
    out_NH = torch.empty(num_tokens, width, dtype=dtype, device=parts_PH.device)
    grid = (triton.cdiv(width, _SUM_BLOCK), num_tokens)
    operands = (out_NH, residual_NH, parts_PH, gate_N, shared_NH)
    _add_visits_kernel[grid](*operands, width, C=num_visits, BLOCK_O=_SUM_BLOCK, num_warps=4, **overlapped())
    return out_NH


def _operands(weight: Weight | None) -> tuple[Tensor | None, Tensor | None]:
    """Return (values, as bytes if they are 8-bit floats; scales or None)."""
    if isinstance(weight, BlockScaled):
        return weight.values.view(torch.uint8), weight.scales
    assert weight is None or weight.tensor.is_contiguous()
    return None if weight is None else weight.tensor, None


def _block_rows(weight: Weight) -> int:
    return weight.block_rows if isinstance(weight, BlockScaled) else SCALE_BLOCK


def lists_of(visits: Visits) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(ids, pairs, tiles) as the kernels take them."""
    if visits.groups is None:
        return visits.ids_NC, None, None
    return visits.ids_NC, visits.groups.pairs_P, visits.groups.tiles_T4


def _blocks(tiles: Tiles, visits: Visits, weight: Weight, depth: int) -> dict[str, int | bool]:
    num_visits = visits.ids_NC.shape[1]
    return {
        "C": num_visits,
        "BLOCK_ROWS": _block_rows(weight),
        "BLOCK_O": tiles.block_o,
        "BLOCK_M": visits.block_m,
        "BLOCK_K": tiles.block_k,
        "BLOCK_C": triton.next_power_of_2(num_visits),
        "EVEN": depth % tiles.block_k == 0,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **overlapped(),
    }


@triton.jit
def _visitors(ids_ptr, pairs_ptr, tiles_ptr, num_tokens, C: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (expert, pairs [BLOCK_M], which of them are real, whether there is work) of this program.

    Loads bypass L1: if this is called before the wait, L1 may still hold lines from before an earlier kernel's
    writes."""
    m = tl.arange(0, BLOCK_M)
    if tiles_ptr is None:
        mine = tl.program_id(1)
        expert = tl.load(ids_ptr + mine, cache_modifier=".cg")
        c = tl.arange(0, BLOCK_C)
        pair = m[:, None] * C + c[None, :]
        ids = tl.load(ids_ptr + pair, mask=(m < num_tokens)[:, None] & (c < C)[None, :], other=-1, cache_modifier=".cg")
        pairs = tl.min(tl.where(ids == expert, pair, _NO_PAIR), axis=1)
        is_real = pairs < _NO_PAIR
        works = (tl.min(pairs, axis=0) == mine) & (expert >= 0)
        pairs = tl.where(is_real, pairs, 0)
    else:
        tile = tiles_ptr + tl.program_id(1) * FIELDS
        expert = tl.load(tile + EXPERT, cache_modifier=".cg")
        count = tl.load(tile + COUNT, cache_modifier=".cg")
        is_real = m < count
        works = count > 0
        first = tl.load(tile + FIRST, cache_modifier=".cg")
        pairs = tl.load(pairs_ptr + first + m, mask=is_real, other=0, cache_modifier=".cg")
    return expert, pairs, is_real, works


@triton.jit
def _matrix(stack_ptr, shared_ptr, expert, num_experts, size):  # type: ignore[no-untyped-def]
    """Pointer to the expert's matrix of `size` elements."""
    matrix = stack_ptr + expert.to(tl.int64) * size
    if shared_ptr is not None:
        matrix = tl.where(expert < num_experts, matrix, shared_ptr)
    return matrix


@triton.jit
def _rows(stack_ptr, shared_ptr, expert, num_experts, rows, num_rows, depth):  # type: ignore[no-untyped-def]
    """Pointers to rows of the expert's matrix, which has num_rows rows."""
    if shared_ptr is not None:
        stack_ptr = tl.where(expert < num_experts, stack_ptr, shared_ptr)
        expert = tl.where(expert < num_experts, expert, 0)
    return weight_rows_at(stack_ptr, expert.to(tl.int64) * num_rows + rows, depth, 0)


@triton.jit(do_not_specialize=["num_tokens", "release"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    h_ptr,
    x_ptr,
    stack_ptr,
    scales_ptr,
    shared_ptr,
    shared_scales_ptr,
    ids_ptr,
    pairs_ptr,
    tiles_ptr,
    num_tokens,
    num_experts,
    width,
    depth,
    release,
    C: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile holds the gate and up rows of BLOCK_O / 2 outputs, alternating in groups of 8: a thread of a 16-row
    matrix fragment has rows r and r + 8, so a gate and its up are in one thread."""
    HALF: tl.constexpr = BLOCK_O // 2
    await_previous(PDL)
    expert, pairs, is_visited, works = _visitors(ids_ptr, pairs_ptr, tiles_ptr, num_tokens, C, BLOCK_M, BLOCK_C)
    if works:
        r = tl.arange(0, BLOCK_O)
        i = tl.minimum(tl.program_id(0) * HALF + r // 16 * 8 + r % 8, width - 1)
        is_up = r // 8 % 2
        rows = i + is_up * width
        gate_scales, up_scales = None, None
        if scales_ptr is not None:
            columns = tl.cdiv(depth, SCALE_COLUMNS)
            scales = _matrix(
                scales_ptr, shared_scales_ptr, expert, num_experts, tl.cdiv(2 * width, BLOCK_ROWS) * columns
            )
            if ONE_BLOCK:
                gate_scales = scales + tl.program_id(0) * HALF // BLOCK_ROWS * columns
                up_scales = scales + (width + tl.program_id(0) * HALF) // BLOCK_ROWS * columns
            else:
                gate_scales = scales + rows // BLOCK_ROWS * columns
        acc, _ = walk_either(
            x_ptr + (pairs // C).to(tl.int64) * depth,
            is_visited,
            _rows(stack_ptr, shared_ptr, expert, num_experts, rows, 2 * width, depth),
            gate_scales,
            0,
            None,
            tl.cdiv(depth, BLOCK_K),
            depth,
            0,
            release,
            BLOCK_O,
            BLOCK_M,
            BLOCK_K,
            EVEN,
            False,
            PDL,
            up_scales,
            is_up,
        )
        gate, up = acc.reshape(BLOCK_O // 16, 2, 8, BLOCK_M).permute(0, 2, 3, 1).split()
        y = (gate / (1.0 + tl.exp(-gate)) * up).reshape(HALF, BLOCK_M)
        o = tl.program_id(0) * HALF + tl.arange(0, HALF)
        to = h_ptr + pairs.to(tl.int64)[None, :] * width + o[:, None]
        tl.store(to, y.to(h_ptr.dtype.element_ty), mask=(o < width)[:, None] & is_visited[None, :])


@triton.jit(do_not_specialize=["num_tokens", "ahead", "release"])
def _down_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    h_ptr,
    stack_ptr,
    scales_ptr,
    shared_ptr,
    shared_scales_ptr,
    ids_ptr,
    pairs_ptr,
    tiles_ptr,
    weights_ptr,
    num_tokens,
    num_experts,
    num_outputs,
    depth,
    ahead,
    release,
    C: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """The visits are read before the wait: they were complete before the previous kernel (gate and up) released this
    one."""
    expert, pairs, is_visited, works = _visitors(ids_ptr, pairs_ptr, tiles_ptr, num_tokens, C, BLOCK_M, BLOCK_C)
    tile = tl.program_id(0)
    o = tile * BLOCK_O + tl.arange(0, BLOCK_O)
    rows = tl.minimum(o, num_outputs - 1)
    num_steps = tl.cdiv(depth, BLOCK_K)
    weight_rows = _rows(stack_ptr, shared_ptr, expert, num_experts, rows, num_outputs, depth)
    prefetch_first_steps(weight_rows, tl.where(works, ahead, 0), num_steps, depth, BLOCK_O, BLOCK_K)
    await_previous(PDL)
    if works:
        scale_rows = None
        if scales_ptr is not None:
            columns = tl.cdiv(depth, SCALE_COLUMNS)
            scales = _matrix(
                scales_ptr, shared_scales_ptr, expert, num_experts, tl.cdiv(num_outputs, BLOCK_ROWS) * columns
            )
            scale_rows = scales + (tile * BLOCK_O if ONE_BLOCK else rows) // BLOCK_ROWS * columns
        acc, _ = walk_either(
            h_ptr + pairs.to(tl.int64) * depth,
            is_visited,
            weight_rows,
            scale_rows,
            0,
            None,
            num_steps,
            depth,
            0,
            release,
            BLOCK_O,
            BLOCK_M,
            BLOCK_K,
            EVEN,
            False,
            PDL,
        )
        acc *= tl.load(weights_ptr + pairs, mask=is_visited, other=0.0)[None, :]
        to = parts_ptr + pairs.to(tl.int64)[None, :] * num_outputs + o[:, None]
        tl.store(to, acc, mask=(o < num_outputs)[:, None] & is_visited[None, :])


@triton.jit
def _add_visits_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    residual_ptr,
    parts_ptr,
    gate_ptr,
    shared_ptr,
    width,
    C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PDL: tl.constexpr,
):
    release_next(PDL)
    await_previous(PDL)
    n = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    is_real = o < width
    total = tl.zeros((BLOCK_O,), tl.float32)
    for c in tl.static_range(C):
        total += tl.load(parts_ptr + (n * C + c) * width + o, mask=is_real, other=0.0)
    if shared_ptr is not None:
        gate = tl.load(gate_ptr + n)
        total += tl.load(shared_ptr + n * width + o, mask=is_real, other=0.0).to(tl.float32) / (1.0 + tl.exp(-gate))
    if residual_ptr is not None:
        total += tl.load(residual_ptr + n * width + o, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out_ptr + n * width + o, total.to(out_ptr.dtype.element_ty), mask=is_real)
