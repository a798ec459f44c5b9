"""Routing: the router's scores, then the top experts of each token and their weights.

Scores are computed from the normed input before it is rounded, in float32: near-ties decide which expert runs. The
shared expert may be one more visit of every token, weighted by its gate. Nothing is read on the host. The kernel that
scores many tokens on Hopper also adds the product of the mixer before to them (`takes_open_sum`). Knows nothing of
experts' weights.

Shape letters: N tokens, H hidden size, X experts, J chosen experts, C visits per token: J, or J + 1 with the shared
expert, S parts of H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from agentspec.kernels.backend import MixtureWeights, Norm, OpenSum
from agentspec.kernels.triton import routing_hopper
from agentspec.kernels.triton.fp8_activations import GROUP, ScaledTokens, empty_scaled, group_scale, to_fp8
from agentspec.kernels.triton.launch import await_previous, overlapped, release_next
from agentspec.kernels.triton.linear_tiles import prefetch_first_steps
from agentspec.kernels.triton.machine import machine_of
from agentspec.kernels.triton.ranking import LOWEST_KEY, order_key, value_of_key
from agentspec.kernels.weights import SCALE_BLOCK

FEW_SCORES = 16
"""Up to this many tokens, a program scores some experts for some tokens, and loads all its weights before it waits for
the tokens; above, tiles are multiplied."""
_TOKENS = 4
"""Most tokens of such a program."""
_FEW_PROGRAMS = 128
"""About as many such programs share the experts: one for each SM."""
_BLOCK_H = 2048
"""Features of each of its one or two blocks, or half of all if that is more."""
_ROW_BLOCK = 4096
"""Features per step of a program that norms a row beside those that score."""
_NORM_BLOCK = 1024
"""The same where the programs that norm are of one warp."""
_FEW_TILES = 256
"""Tokens. Up to this many, tiles are small, so that there are enough of them."""
_PROGRAMS = 264
"""Two for each SM of an H100: the limit up to which splitting H pays."""
_LEAST_PART = 128
_AHEAD = 4
"""Steps whose router rows are prefetched to L2 before waiting for the tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTiles:
    """Tiling of the scores of many tokens: a program scores block_x experts for block_n tokens, over one of `split`
    parts of H."""

    block_n: int
    block_x: int
    block_k: int
    split: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Every token's visits, most likely first. If the shared expert is a visit, it is last and has id X."""

    ids_NC: Tensor
    """int32."""
    weights_NC: Tensor
    """float32. Routed experts: their probabilities, normalised if the model says so; shared expert: the sigmoid of its
    gate."""
    gate_N: Tensor | None
    """float32, the shared gate's logit; None if the shared expert is a visit."""
    normed: Tensor | ScaledTokens
    """The normed input [N, H] in its dtype; or the same values rounded to 8 bits."""
    summed_NH: Tensor | None = None
    """The input, if that was an open sum: a new tensor."""


def takes_open_sum(residual_NH: Tensor, norm: Norm, weights: MixtureWeights) -> bool:
    """Whether `route` takes the sum of such a residual and a product, which is added with the scores."""
    return residual_NH.is_contiguous() and _scores_on_hopper(residual_NH, norm, weights)


def route(
    x: Tensor | OpenSum,
    norm: Norm,
    weights: MixtureWeights,
    *,
    visit_shared: bool,
    in_fp8: bool = False,
    absent: int | None = None,
) -> Routing:
    """Route every token. Two launches: scores, then choices; the first also norms few tokens, unless in_fp8, and the
    second all others. x: an open sum only if `takes_open_sum`. visit_shared: the shared expert is one more visit of
    every token. in_fp8: return the normed input in 8 bits only. absent: the id of experts that `weights` hasn't, if it
    has but some; ids are then places in its stack, and X is its size."""
    to_add = x if isinstance(x, OpenSum) else None
    x_NH = torch.empty_like(x.residual_NH) if isinstance(x, OpenSum) else x
    (num_tokens, width), num_experts = x_NH.shape, weights.router_XH.shape[0]
    assert x_NH.stride(1) == 1
    assert not (visit_shared and in_fp8), "the shared expert as a visit needs tokens in their own dtype"
    num_visits = weights.top_k + int(visit_shared)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=x_NH.device)

    scaled = empty_scaled(num_tokens, width, x_NH.device, by_token=True) if in_fp8 else None
    routing = Routing(
        ids_NC=empty(num_tokens, num_visits, dtype=torch.int32),
        weights_NC=empty(num_tokens, num_visits, dtype=torch.float32),
        gate_N=None if visit_shared else empty(num_tokens, dtype=torch.float32),
        normed=scaled or empty(num_tokens, width, dtype=x_NH.dtype),
        summed_NH=None if to_add is None else x_NH,
    )
    normed = scaled.values_RK if scaled else routing.normed
    assert isinstance(normed, Tensor)
    is_few = num_tokens <= FEW_SCORES
    assert to_add is None or not is_few
    normed_with_scores = is_few and not in_fp8
    if is_few:
        parts_SNX, squares_SN = _few_scores(x_NH, norm, weights, routing, normed if normed_with_scores else None)
    else:
        parts_SNX, squares_SN = _many_scores(x_NH, norm, weights, to_add)
    _choose_kernel[(len(normed), 1 if normed_with_scores else 2)](
        routing.ids_NC,
        routing.weights_NC,
        routing.gate_N,
        normed,
        *((scaled.scales_GR, scaled.scales_RG) if scaled else (None, None)),
        parts_SNX,
        squares_SN,
        x_NH,
        x_NH.stride(0),
        norm.weight,
        weights.shared_gate_1H,
        norm.eps,
        num_tokens,
        len(normed),
        num_experts,
        weights.first_expert or 0,
        0 if absent is None else weights.gate_up_X2IH.shape[0],
        absent or 0,
        H=width,
        J=weights.top_k,
        C=num_visits,
        SPLIT=len(parts_SNX),
        NORMALIZE=weights.normalize,
        PARTIAL=absent is not None,
        NORMS=not normed_with_scores,
        BLOCK_X=triton.next_power_of_2(num_experts),
        BLOCK_C=triton.next_power_of_2(num_visits),
        BLOCK_H=max(min(triton.next_power_of_2(width), _NORM_BLOCK), SCALE_BLOCK if in_fp8 else 1),
        num_warps=1,
        **overlapped(),
    )
    return routing


def score_tiles(num_tokens: int, num_experts: int, width: int, element_bytes: int) -> ScoreTiles:
    if element_bytes == 4:
        return ScoreTiles(block_n=32, block_x=32, block_k=32, split=1, warps=4, stages=2)
    if num_tokens > _FEW_TILES:
        block_n, block_x, block_k, stages = 64, 128, 32, 4
    else:
        block_n, block_x, block_k, stages = (32, 32, 64, 3) if num_tokens <= 64 else (64, 64, 64, 3)
    tiles = triton.cdiv(num_tokens, block_n) * triton.cdiv(num_experts, block_x)
    split = 1
    while 2 * split * tiles <= _PROGRAMS and width // (2 * split) >= _LEAST_PART:
        split *= 2
    return ScoreTiles(block_n=block_n, block_x=block_x, block_k=block_k, split=split, warps=4, stages=stages)


def _few_scores(
    x_NH: Tensor, norm: Norm, weights: MixtureWeights, routing: Routing, normed_NH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `_many_scores`, with S = 1. If a tensor is given for the normed rows, also stores them, and the shared gates
    in the routing."""
    (num_tokens, width), num_experts = x_NH.shape, weights.router_XH.shape[0]
    assert weights.router_XH.is_contiguous()
    parts_SNX, squares_SN = _empty_scores(1, x_NH, weights)
    block_h = max(min(triton.next_power_of_2(width), _BLOCK_H), triton.next_power_of_2(triton.cdiv(width, 2)))
    tokens = 1 if num_tokens == 1 else _TOKENS
    rows = max(triton.next_power_of_2(num_experts) // _FEW_PROGRAMS, 1)
    num_norms = 0 if normed_NH is None else num_tokens
    _few_scores_kernel[(num_norms + triton.cdiv(num_experts, rows) * triton.cdiv(num_tokens, tokens),)](
        parts_SNX,
        squares_SN,
        routing.weights_NC,
        routing.gate_N,
        normed_NH,
        x_NH,
        x_NH.stride(0),
        weights.router_XH,
        norm.weight,
        weights.shared_gate_1H,
        norm.eps,
        num_tokens,
        num_experts,
        H=width,
        J=weights.top_k,
        C=routing.ids_NC.shape[1],
        TOKENS=tokens,
        ROWS=rows,
        BLOCK_H=block_h,
        ROW_BLOCK=min(triton.next_power_of_2(width), _ROW_BLOCK),
        num_warps=min(max(block_h // 256, 1), 16),
        **overlapped(),
    )
    return parts_SNX, squares_SN


def _scores_on_hopper(x_NH: Tensor, norm: Norm, weights: MixtureWeights) -> bool:
    return len(x_NH) > _FEW_TILES and routing_hopper.is_supported(x_NH, weights.router_XH, norm.weight)


def _many_scores(
    x_NH: Tensor, norm: Norm, weights: MixtureWeights, to_add: OpenSum | None = None
) -> tuple[Tensor, Tensor]:
    """Return float32 ([S, N, X] each part's share of the router's logits before the division by the norm, [S, N] its
    share of the sum of squares). to_add: x's values, which are stored to it here."""
    (num_tokens, width), num_experts = x_NH.shape, weights.router_XH.shape[0]
    assert weights.router_XH.is_contiguous()
    if _scores_on_hopper(x_NH, norm, weights):
        most = machine_of(x_NH.device).num_multiprocessors
        split = routing_hopper.split_of(num_tokens, num_experts, width, most)
        parts_SNX, squares_SN = _empty_scores(split, x_NH, weights)
        operands = weights.router_XH, norm.weight, parts_SNX, squares_SN
        if to_add is None:
            routing_hopper.score(x_NH, *operands)
        else:
            routing_hopper.score(to_add.residual_NH, *operands, to_add.product_NH, x_NH)
        return parts_SNX, squares_SN
    assert to_add is None
    tiles = score_tiles(num_tokens, num_experts, width, x_NH.element_size())
    parts_SNX, squares_SN = _empty_scores(tiles.split, x_NH, weights)
    grid = (triton.cdiv(num_tokens, tiles.block_n), triton.cdiv(num_experts, tiles.block_x), tiles.split)
    _many_scores_kernel[grid](
        parts_SNX,
        squares_SN,
        x_NH,
        x_NH.stride(0),
        weights.router_XH,
        norm.weight,
        num_experts,
        num_tokens,
        H=width,
        SHARE=triton.cdiv(triton.cdiv(width, tiles.split), tiles.block_k) * tiles.block_k,
        BLOCK_N=tiles.block_n,
        BLOCK_X=tiles.block_x,
        BLOCK_K=tiles.block_k,
        AHEAD=_AHEAD,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **overlapped(),
    )
    return parts_SNX, squares_SN


def _empty_scores(split: int, x_NH: Tensor, weights: MixtureWeights) -> tuple[Tensor, Tensor]:
    shape = (split, len(x_NH), weights.router_XH.shape[0])
    parts_SNX = torch.empty(shape, dtype=torch.float32, device=x_NH.device)
    return parts_SNX, torch.empty(shape[:2], dtype=torch.float32, device=x_NH.device)


@triton.jit(do_not_specialize=["num_tokens"])
def _few_scores_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    squares_ptr,
    weights_ptr,
    gates_ptr,
    normed_ptr,
    x_ptr,
    x_stride,
    router_ptr,
    norm_ptr,
    shared_gate_ptr,
    eps,
    num_tokens,
    num_experts,
    H: tl.constexpr,
    J: tl.constexpr,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """If there is a tensor for the normed rows, program n stores token n's normed row and gate: first, for it takes
    longest. The others score ROWS experts for TOKENS tokens each."""
    release_next(PDL)
    place = tl.program_id(0)
    num_norms = 0
    if normed_ptr is not None:
        num_norms = num_tokens
    if place >= num_norms:
        place -= num_norms
        num_places = tl.cdiv(num_experts, ROWS)
        row, first = place % num_places * ROWS, place // num_places * TOKENS
        _score_experts(
            parts_ptr, squares_ptr, x_ptr, x_stride, router_ptr, norm_ptr, row, first, num_tokens, num_experts, H,
            TOKENS, ROWS, BLOCK_H, PDL
        )  # fmt: skip
    elif normed_ptr is not None:
        n = place.to(tl.int64)
        gate = _store_normed(
            normed_ptr + n * H, x_ptr + n * x_stride, norm_ptr, shared_gate_ptr, eps, H, ROW_BLOCK, PDL
        )
        _store_gate(weights_ptr, gates_ptr, n, gate, J, C)


@triton.jit
def _score_experts(  # type: ignore[no-untyped-def]
    parts_ptr, squares_ptr, x_ptr, x_stride, router_ptr, norm_ptr, first_row, first_token, num_tokens, num_experts,
    H: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Score some tokens against some experts. Programs of the first experts also store the tokens' sums of squares. All
    weights are loaded before the wait, and all tokens at once behind it."""
    row = first_row + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK_H)
    rows = (router_ptr + tl.minimum(row, num_experts - 1).to(tl.int64) * H)[:, None] + h[None, :]
    w, gain = _rows_and_gains(rows, norm_ptr + h, h, H)
    next_w, next_gain = w, gain
    if H > BLOCK_H:
        next_w, next_gain = _rows_and_gains(rows + BLOCK_H, norm_ptr + BLOCK_H + h, BLOCK_H + h, H)
    await_previous(PDL)
    tokens = _load_tokens(x_ptr, x_stride, first_token, num_tokens, H, TOKENS, BLOCK_H)
    BLOCKS: tl.constexpr = 2 if H > BLOCK_H else 1
    for t in tl.static_range(TOKENS):
        x = tokens[t * BLOCKS].to(tl.float32)
        squares = x * x
        products = w.to(tl.float32) * (x * (1.0 + gain.to(tl.float32)))[None, :]
        if H > BLOCK_H:
            x = tokens[t * BLOCKS + 1].to(tl.float32)
            squares += x * x
            products += next_w.to(tl.float32) * (x * (1.0 + next_gain.to(tl.float32)))[None, :]
        n = (first_token + t).to(tl.int64)
        num_stored = tl.where(n < num_tokens, num_experts, 0)
        tl.store(parts_ptr + n * num_experts + row, tl.sum(products, axis=1), mask=row < num_stored)
        if first_row < tl.minimum(num_stored, 1):
            tl.store(squares_ptr + n, tl.sum(squares, axis=0))


@triton.jit
def _load_tokens(  # type: ignore[no-untyped-def]
    x_ptr, x_stride, first, num_tokens, H: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """The one or two blocks of each of some tokens, a tuple of tensors [B]. All loads are in flight together."""
    h = tl.arange(0, BLOCK_H)
    blocks = ()
    for t in tl.static_range(TOKENS):
        n = tl.minimum(first + t, num_tokens - 1).to(tl.int64)
        for start in tl.static_range(0, H, BLOCK_H):
            x = tl.load(x_ptr + n * x_stride + start + h, mask=start + h < H, other=0.0)
            blocks = blocks + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@triton.jit
def _rows_and_gains(rows, gains, h, H: tl.constexpr):  # type: ignore[no-untyped-def]
    """A block of some router rows, and of the norm's weight. rows [R, B], gains [B]: pointers to features h."""
    return tl.load(rows, mask=(h < H)[None, :], other=0.0), tl.load(gains, mask=h < H, other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _many_scores_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    squares_ptr,
    x_ptr,
    x_stride,
    router_ptr,
    norm_ptr,
    num_experts,
    num_tokens,
    H: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """16-bit inputs are multiplied as a high and a low half, so that almost nothing of the float32 normed input is
    lost."""
    part = tl.program_id(2)
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
    k = part * SHARE + tl.arange(0, BLOCK_K)
    first_rows = router_ptr + tl.minimum(row, num_experts - 1).to(tl.int64) * H
    rows = first_rows[:, None]
    prefetch_first_steps(first_rows + part * SHARE, AHEAD, SHARE // BLOCK_K, H - part * SHARE, BLOCK_X, BLOCK_K)
    tokens = (x_ptr + tl.minimum(n, num_tokens - 1) * x_stride)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_X), tl.float32)
    squares = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    next_gain = tl.load(norm_ptr + k, mask=k < H, other=0.0)
    await_previous(PDL)
    release_next(PDL)
    for first in range(0, SHARE, BLOCK_K):
        at = first + k
        if H % SHARE == 0:
            w = tl.load(rows + at[None, :])
            x = tl.load(tokens + at[None, :]).to(tl.float32)
        else:
            w = tl.load(rows + at[None, :], mask=(at < H)[None, :], other=0.0)
            x = tl.load(tokens + at[None, :], mask=(at < H)[None, :], other=0.0).to(tl.float32)
        # Loaded one step ahead: too few bytes per thread for an asynchronous copy, and too slow to wait for.
        gain, next_gain = next_gain, tl.load(norm_ptr + at + BLOCK_K, mask=at + BLOCK_K < H, other=0.0)
        squares += x * x
        x *= 1.0 + gain.to(tl.float32)[None, :]
        high = x.to(w.dtype)
        acc = tl.dot(high, w.T, acc, input_precision="ieee")
        if w.dtype.primitive_bitwidth == 16:
            acc = tl.dot((x - high.to(tl.float32)).to(w.dtype), w.T, acc)
    place = part.to(tl.int64) * num_tokens + n
    tl.store(
        parts_ptr + place[:, None] * num_experts + row[None, :],
        acc,
        mask=(n < num_tokens)[:, None] & (row < num_experts)[None, :],
    )
    if tl.program_id(1) == 0:
        tl.store(squares_ptr + place, tl.sum(squares, axis=1), mask=n < num_tokens)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "first_expert", "num_held", "absent"])
def _choose_kernel(  # type: ignore[no-untyped-def]
    ids_ptr, weights_ptr, gates_ptr, normed_ptr, scales_GR, scales_RG, parts_ptr, squares_ptr, x_ptr, x_stride,
    norm_ptr, shared_gate_ptr, eps, num_tokens, num_rows, num_experts, first_expert, num_held, absent, H: tl.constexpr,
    J: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, NORMALIZE: tl.constexpr, PARTIAL: tl.constexpr,
    NORMS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """If NORMS, program (n, 0) stores token n's normed row and gate, and program (n, 1) chooses its experts; otherwise
    program (n, 0) does. Rows after the tokens are the padding of 8-bit rows."""
    release_next(PDL)
    n = tl.program_id(0).to(tl.int64)
    if not NORMS:
        _choose(
            ids_ptr, weights_ptr, parts_ptr, squares_ptr, n, eps, num_tokens, num_experts, first_expert, num_held,
            absent, H, J, C, SPLIT, NORMALIZE, PARTIAL, BLOCK_X, BLOCK_C, PDL
        )  # fmt: skip
    elif tl.program_id(1) == 0:
        if scales_GR is not None:
            is_token = n < num_tokens
            gate = _store_scaled(
                normed_ptr + n * H,
                scales_GR + n,
                scales_RG + n * (H // GROUP),
                num_rows,
                x_ptr + n * x_stride,
                is_token,
                norm_ptr,
                shared_gate_ptr,
                eps,
                H,
                BLOCK_H,
                PDL,
            )
            tl.store(gates_ptr + n, gate, mask=is_token)
        else:
            gate = _store_normed(
                normed_ptr + n * H, x_ptr + n * x_stride, norm_ptr, shared_gate_ptr, eps, H, BLOCK_H, PDL
            )
            _store_gate(weights_ptr, gates_ptr, n, gate, J, C)
    elif n < num_tokens:
        _choose(
            ids_ptr, weights_ptr, parts_ptr, squares_ptr, n, eps, num_tokens, num_experts, first_expert, num_held,
            absent, H, J, C, SPLIT, NORMALIZE, PARTIAL, BLOCK_X, BLOCK_C, PDL
        )  # fmt: skip
    else:
        await_previous(PDL)


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    ids_ptr, weights_ptr, parts_ptr, squares_ptr, n, eps, num_tokens, num_experts, first_expert, num_held, absent,
    H: tl.constexpr, J: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr, NORMALIZE: tl.constexpr,
    PARTIAL: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Choose token n's experts, lower id on ties."""
    await_previous(PDL)
    x = tl.arange(0, BLOCK_X)
    score = tl.zeros((BLOCK_X,), tl.float32)
    squares = 0.0
    for part in tl.static_range(SPLIT):
        place = part * num_tokens + n
        score += tl.load(parts_ptr + place * num_experts + x, mask=x < num_experts, other=0.0)
        squares += tl.load(squares_ptr + place)
    score *= tl.rsqrt(squares / H + eps)
    # The key of a NaN must not equal the key that marks chosen experts.
    keys = tl.where(x < num_experts, tl.maximum(order_key(score), LOWEST_KEY + 1), LOWEST_KEY)
    c = tl.arange(0, BLOCK_C)
    ids = tl.full((BLOCK_C,), num_experts, tl.int32)
    chosen = tl.full((BLOCK_C,), LOWEST_KEY, tl.int32)
    for j in tl.static_range(J):
        key = tl.max(keys, axis=0)
        best = tl.min(tl.where(keys == key, x, BLOCK_X), axis=0)
        keys = tl.where(x == best, LOWEST_KEY, keys)
        ids = tl.where(c == j, best, ids)
        chosen = tl.where(c == j, key, chosen)
        if j == 0:
            highest = value_of_key(key)
    weights = tl.where(c < J, tl.exp(value_of_key(chosen) - highest), 0.0)
    if NORMALIZE:
        weights /= tl.sum(weights, axis=0)
    else:
        weights /= tl.sum(tl.where(x < num_experts, tl.exp(score - highest), 0.0), axis=0)
    if PARTIAL:
        place = ids - first_expert
        place = tl.where((place >= 0) & (place < num_held), place, absent)
        ids = tl.where(c < J, place, num_held)
    tl.store(ids_ptr + n * C + c, ids, mask=c < C)
    tl.store(weights_ptr + n * C + c, weights, mask=c < J)


@triton.jit
def _store_normed(  # type: ignore[no-untyped-def]
    normed_ptr, x_ptr, norm_ptr, shared_gate_ptr, eps, H: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):
    """Store a token's normed row. Returns its score against the shared gate's row, computed before rounding."""
    h = tl.arange(0, BLOCK_H)
    if H <= BLOCK_H:
        gain = 1.0 + tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        shared_gate = tl.load(shared_gate_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        await_previous(PDL)
        x = tl.load(x_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
        tl.store(normed_ptr + h, (x * scale * gain).to(normed_ptr.dtype.element_ty), mask=h < H)
        product = tl.sum(x * gain * shared_gate, axis=0)
    else:
        squares, products = tl.zeros((BLOCK_H,), tl.float32), tl.zeros((BLOCK_H,), tl.float32)
        await_previous(PDL)
        for first in tl.static_range(0, H, BLOCK_H):
            x = tl.load(x_ptr + first + h, mask=first + h < H, other=0.0).to(tl.float32)
            gain = 1.0 + tl.load(norm_ptr + first + h, mask=first + h < H, other=0.0).to(tl.float32)
            squares += x * x
            shared_gate = tl.load(shared_gate_ptr + first + h, mask=first + h < H, other=0.0).to(tl.float32)
            products += x * gain * shared_gate
        scale = tl.rsqrt(tl.sum(squares, axis=0) / H + eps)
        for first in tl.static_range(0, H, BLOCK_H):
            x = tl.load(x_ptr + first + h, mask=first + h < H, other=0.0).to(tl.float32)
            gain = 1.0 + tl.load(norm_ptr + first + h, mask=first + h < H, other=0.0).to(tl.float32)
            tl.store(normed_ptr + first + h, (x * scale * gain).to(normed_ptr.dtype.element_ty), mask=first + h < H)
        product = tl.sum(products, axis=0)
    return product * scale


@triton.jit
def _store_gate(weights_ptr, gates_ptr, n, gate, J: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store the shared expert's logit; its weight, if it is a visit."""
    if C > J:
        tl.store(weights_ptr + n * C + J, 1.0 / (1.0 + tl.exp(-gate)))
    else:
        tl.store(gates_ptr + n, gate)


@triton.jit
def _store_scaled(  # type: ignore[no-untyped-def]
    values_ptr,
    scales_G,
    token_scales_G,
    num_rows,
    x_ptr,
    is_token,
    norm_ptr,
    shared_gate_ptr,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """`_store_normed` with the row rounded to x's dtype and then to 8 bits. A padding row is zeros. Its scales are
    num_rows apart in the first place for them, adjacent in the second."""
    g, k = tl.arange(0, BLOCK_H // GROUP), tl.arange(0, GROUP)
    squares, products = tl.zeros((BLOCK_H // GROUP, GROUP), tl.float32), tl.zeros((BLOCK_H // GROUP, GROUP), tl.float32)
    await_previous(PDL)
    for first in tl.static_range(0, H, BLOCK_H):
        h = first + g[:, None] * GROUP + k[None, :]
        x = tl.load(x_ptr + h, mask=h < tl.where(is_token, H, 0), other=0.0).to(tl.float32)
        gain = 1.0 + tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        squares += x * x
        products += x * gain * tl.load(shared_gate_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares) / H + eps)
    for first in tl.static_range(0, H, BLOCK_H):
        h = first + g[:, None] * GROUP + k[None, :]
        x = tl.load(x_ptr + h, mask=h < tl.where(is_token, H, 0), other=0.0).to(tl.float32)
        gain = 1.0 + tl.load(norm_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        normed = (x * scale * gain).to(x_ptr.dtype.element_ty).to(tl.float32)
        multiplier, inverse = group_scale(tl.max(tl.abs(normed), axis=1))
        tl.store(values_ptr + h, to_fp8(normed * inverse[:, None]), mask=h < H)
        group, is_group = g + first // GROUP, g * GROUP + first < H
        tl.store(scales_G + group.to(tl.int64) * num_rows, multiplier, mask=is_group)
        tl.store(token_scales_G + group, multiplier, mask=is_group)
    return tl.sum(products) * scale
