"""The router's scores of many tokens on Hopper's matrix units, in Gluon: the function of routing._many_scores_kernel.

A program scores 256 experts for 64 tokens, over some of the features. One warp fetches steps of 64 features by TMA. Two
groups of four warps multiply, one the even steps, the other the odd ones, each into its own sums of all scores. A group
converts its next step's tokens in its registers, to a high and a low half of the input times the norm's gain, while
the matrix units multiply its step before. A group alone could not keep them busy: its four warps, one on each of the
SM's schedulers, would leave the latencies of a conversion open. At the end each group gives the other one half of its
sums, and adds and stores the other half. With 128 experts a program would convert everything twice.

Tokens and the router's rows have buffers of their own: tokens are only needed until they are converted, a step of the
group before their products end. So there can be more steps of them on the way.

The tokens may be a sum that nothing has added yet: a prompt's residual and the product of the mixer before. A step is
then loaded of both, added where it is converted, put back in the place of the residual's, and from there stored by the
warp that fetches. So the sum's traffic is hidden behind the products. It goes to a new tensor: several programs read
a token's residual, if there are more experts than one has.

Shape letters as in routing.py.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from agentspec.kernels.triton.bfloat16_pairs import in_float32, sum_of
from agentspec.kernels.triton.gluon_names import (
    await_previous,
    copy_block,
    copy_out,
    reinterpret,
    release_next,
    warp_barrier,
)
from agentspec.kernels.triton.launch import INTERPRETED, overlapped
from agentspec.kernels.triton.machine import machine_of

TOKENS, EXPERTS, FEATURES = 64, 256, 64
"""Of a step."""
_BLOCK_N, _BLOCK_X, _BLOCK_H = gl.constexpr(TOKENS), gl.constexpr(EXPERTS), gl.constexpr(FEATURES)
_ROW_STAGES = gl.constexpr(4)
"""Steps of the router's rows in shared memory. Even: a group's steps, and so its stages, are every second one."""
_TOKEN_STAGES = gl.constexpr(5)
"""Steps of tokens in shared memory."""
_LEAST_STEPS = 4
"""Of a program: fewer are not worth a launch's begin and end."""
_MOST_STEPS = 64
"""Of a program: shared memory has no room for the gains of more."""
REGISTERS: dict[str, Any] = {"REGISTERS": 240, "FETCH_REGISTERS": 24}
"""Of a thread of the second group and of the fetching warp; the first group gets the rest of 504."""


def is_supported(x_NH: Tensor, router_XH: Tensor, norm_H: Tensor) -> bool:
    """Whether the kernel can score these tokens on this device."""
    if INTERPRETED or any(x.dtype != torch.bfloat16 for x in (x_NH, router_XH, norm_H)):
        return False
    is_whole = router_XH.shape[0] % EXPERTS == 0 and x_NH.shape[1] % FEATURES == 0
    has_room = x_NH.shape[1] <= _MOST_STEPS * FEATURES
    has_rows = x_NH.stride(1) == 1 and x_NH.stride(0) % 8 == 0 and x_NH.data_ptr() % 16 == 0
    return is_whole and has_room and has_rows and machine_of(x_NH.device).capability[0] == 9


def split_of(num_tokens: int, num_experts: int, width: int, most_programs: int) -> int:
    """Parts of the features: as many as programs fit on the device at once."""
    tiles, steps, split = triton.cdiv(num_tokens, TOKENS) * (num_experts // EXPERTS), width // FEATURES, 1
    while 2 * split * tiles <= most_programs and steps % (2 * split) == 0 and steps // (2 * split) >= _LEAST_STEPS:
        split *= 2
    return split


def score(
    x_NH: Tensor,
    router_XH: Tensor,
    norm_H: Tensor,
    parts_SNX: Tensor,
    squares_SN: Tensor,
    product_NH: Tensor | None = None,
    summed_NH: Tensor | None = None,
) -> None:
    """As `routing._many_scores`, into parts [S, N, X] and squares [S, N]. With a product, x + product is scored,
    rounded to x's dtype, and stored to summed. Both are contiguous; summed shares no memory with the others."""
    (num_tokens, width), num_experts, split = x_NH.shape, router_XH.shape[0], len(parts_SNX)
    assert (width // FEATURES) % split == 0, f"{width} features in {split} parts"
    assert (product_NH is None) == (summed_NH is None)
    for other_NH in (product_NH, summed_NH):
        assert other_NH is None or (other_NH.is_contiguous() and other_NH.shape == x_NH.shape)
        assert other_NH is None or other_NH.dtype == x_NH.dtype
    scores_kernel[(triton.cdiv(num_tokens, TOKENS), num_experts // EXPERTS, split)](
        parts_SNX,
        squares_SN,
        _blocks_of(x_NH, TOKENS),
        None if product_NH is None else _blocks_of(product_NH, TOKENS),
        None if summed_NH is None else _blocks_of(summed_NH, TOKENS),
        _blocks_of(router_XH, EXPERTS),
        norm_H,
        num_tokens,
        num_experts,
        STEPS=width // FEATURES // split,
        ROOM=triton.next_power_of_2(triton.cdiv(width // FEATURES // split, 2)),
        **REGISTERS,
        num_warps=4,
        **overlapped(),
    )


def _blocks_of(values: Tensor, rows: int) -> TensorDescriptor:
    block = [rows, FEATURES]
    return TensorDescriptor.from_tensor(values, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


@gluon.constexpr_function
def _sums_layout(experts: int = EXPERTS) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, experts, 16])


@gluon.constexpr_function
def _tokens_layout() -> gl.DistributedLinearLayout:
    """Tokens of a step, each pair of adjacent features in the lane that needs it as part of a left operand."""
    registers = [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [TOKENS, FEATURES])


@gluon.jit
def _converted(x_buffers, gain_buffer, stage, ADDS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (high half, low half) of a step's tokens times the gain, as left operands, and the sums of their
    squares. ADDS: the tokens are sums, which take the residual's place."""
    TOKENS_LAYOUT: gl.constexpr = _tokens_layout()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, _sums_layout(), 2)
    tokens = x_buffers.index(stage).load(TOKENS_LAYOUT)
    if ADDS:
        tokens = sum_of(tokens, x_buffers.index(_TOKEN_STAGES + stage).load(TOKENS_LAYOUT))
    x = in_float32(tokens)
    squares = gl.sum(x * x, axis=1)
    x *= gl.expand_dims(gain_buffer.load(gl.SliceLayout(0, TOKENS_LAYOUT)), 0)
    high = x.to(gl.bfloat16)
    low = (x - in_float32(high)).to(gl.bfloat16)
    if ADDS:
        # Last: of what comes behind it, the compiler would leave a part for after the wait for the products.
        x_buffers.index(stage).store(tokens)
        fence_async_shared()
    high = gl.convert_layout(high, OPERAND, assert_trivial=True)
    return high, gl.convert_layout(low, OPERAND, assert_trivial=True), squares


@gluon.jit
def _load_rows(router, shared, step, place):  # type: ignore[no-untyped-def]
    """Ask for a step's rows of the router."""
    router_buffers, full = shared[1], shared[4]
    _, row, first = place
    stage = step % _ROW_STAGES
    mbarrier.expect(full.index(stage), router.block_type.nbytes)
    copy_block(router, [row, first + step * _BLOCK_H], full.index(stage), router_buffers.index(stage))


@gluon.jit
def _load_tokens(x, product, shared, step, place):  # type: ignore[no-untyped-def]
    """Ask for a step's tokens, and for what is to be added to them."""
    BYTES: gl.constexpr = x.block_type.nbytes * (1 if product is None else 2)
    x_buffers, full = shared[0], shared[2]
    n, _, first = place
    stage = step % _TOKEN_STAGES
    mbarrier.expect(full.index(stage), BYTES)
    copy_block(x, [n, first + step * _BLOCK_H], full.index(stage), x_buffers.index(stage))
    if product is not None:
        copy_block(product, [n, first + step * _BLOCK_H], full.index(stage), x_buffers.index(_TOKEN_STAGES + stage))


@gluon.jit
def _fetch(x, product, summed, router, shared, STEPS: gl.constexpr, PDL: gl.constexpr):  # type: ignore[no-untyped-def]
    """The fetching warp. The router's rows of the first steps are asked for before the previous kernel has ended."""
    converted = shared[3]
    place = gl.program_id(0) * _BLOCK_N, gl.program_id(1) * _BLOCK_X, gl.program_id(2) * (STEPS * _BLOCK_H)
    for step in gl.static_range(STEPS if STEPS < _ROW_STAGES else _ROW_STAGES):
        _load_rows(router, shared, step, place)
    await_previous(PDL)
    for step in gl.static_range(STEPS if STEPS < _TOKEN_STAGES else _TOKEN_STAGES):
        _load_tokens(x, product, shared, step, place)
    # A sum's place is free once it has been stored, which the following step's need not wait for.
    LATER: gl.constexpr = 0 if summed is None else 1
    for step in range(STEPS):
        mbarrier.wait(converted.index(step % _TOKEN_STAGES), step // _TOKEN_STAGES & 1)
        # It also says that the products of the group's step before, step - 2, have ended.
        if step >= 2 and step - 2 + _ROW_STAGES < STEPS:
            _load_rows(router, shared, step - 2 + _ROW_STAGES, place)
        if summed is not None:
            _store_sums(summed, shared, step, place)
        if step >= LATER and step - LATER + _TOKEN_STAGES < STEPS:
            _load_tokens(x, product, shared, step - LATER + _TOKEN_STAGES, place)
    if summed is not None:
        tma.store_wait(0)


@gluon.jit
def _store_sums(summed, shared, step, place):  # type: ignore[no-untyped-def]
    """Begin to store the sums of a step. When it returns, the place of those of the step before is free. Programs of
    the first experts do so."""
    n, row, first = place
    if row == 0:
        copy_out(summed, [n, first + step * _BLOCK_H], shared[0].index(step % _TOKEN_STAGES))
        tma.store_wait(1)


@gluon.jit
def _score(  # type: ignore[no-untyped-def]
    out, norm_H, gains, exchange, shared, GROUP: gl.constexpr, STEPS: gl.constexpr, ROOM: gl.constexpr,
    ADDS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """One of the two groups of four warps that convert and multiply: steps GROUP, GROUP + 2 and so on."""
    x_buffers, router_buffers, tokens_full, converted, rows_full = shared
    _load_gains(norm_H, gains, GROUP, STEPS, ROOM)
    await_previous(PDL)
    if GROUP == 0:
        release_next(PDL)
    sums = gl.zeros([_BLOCK_N, _BLOCK_X], gl.float32, _sums_layout())
    squares = gl.zeros([_BLOCK_N], gl.float32, gl.SliceLayout(1, _tokens_layout()))
    # The second group has nothing to do if there is but one step.
    if GROUP < STEPS:
        mbarrier.wait(tokens_full.index(GROUP), 0)
        high, low, squares = _converted(x_buffers, gains.index(GROUP * ROOM), GROUP, ADDS)
        mbarrier.arrive(converted.index(GROUP), count=1)
        for step in range(GROUP, STEPS - 2, 2):
            stage, following = step % _ROW_STAGES, step + 2
            next_stage = following % _TOKEN_STAGES
            mbarrier.wait(rows_full.index(stage), step // _ROW_STAGES & 1)
            rows = router_buffers.index(stage).permute((1, 0))
            sums = warpgroup_mma(high, rows, sums, is_async=True)
            sums = warpgroup_mma(low, rows, sums, is_async=True)
            mbarrier.wait(tokens_full.index(next_stage), following // _TOKEN_STAGES & 1)
            gain = gains.index(GROUP * ROOM + following // 2)
            next_high, next_low, more = _converted(x_buffers, gain, next_stage, ADDS)
            squares += more
            # The next operands depend on it so that the compiler does not wait before they are computed.
            sums, high, low = warpgroup_mma_wait(0, deps=[sums, next_high, next_low])
            mbarrier.arrive(converted.index(next_stage), count=1)
        LAST: gl.constexpr = STEPS - 1 - (STEPS - 1 - GROUP) % 2
        mbarrier.wait(rows_full.index(LAST % _ROW_STAGES), LAST // _ROW_STAGES & 1)
        rows = router_buffers.index(LAST % _ROW_STAGES).permute((1, 0))
        sums = warpgroup_mma(high, rows, sums, is_async=True)
        sums = warpgroup_mma(low, rows, sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
    _store_total(out, sums, squares, router_buffers, exchange, GROUP)


@gluon.jit
def _load_gains(norm_H, gains, GROUP: gl.constexpr, STEPS: gl.constexpr, ROOM: gl.constexpr):  # type: ignore[no-untyped-def]
    """Put 1 + the norm's weight of a group's steps to shared memory."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    step = 2 * gl.expand_dims(gl.arange(0, ROOM, layout=gl.SliceLayout(1, ROWS)), 1) + GROUP
    h = step * _BLOCK_H + gl.expand_dims(gl.arange(0, _BLOCK_H, layout=gl.SliceLayout(0, ROWS)), 0)
    gain = gl.load(norm_H + gl.program_id(2) * (STEPS * _BLOCK_H) + h, mask=step < STEPS, other=0.0).to(gl.float32)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    reinterpret(gains, gl.float32, [2, ROOM, _BLOCK_H], plain).index(GROUP).store(1.0 + gain)
    warp_barrier()


@gluon.jit
def _store_total(out, sums, squares, router_buffers, exchange, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store both groups' total, each group that of one half of the experts, and the first group that of the squares.
    The sums for the other group go through the stage of the router's rows with the group's number: only this group's
    products have read it, and all have ended."""
    TOKENS_LAYOUT: gl.constexpr = _tokens_layout()
    HALF: gl.constexpr = _BLOCK_X // 2
    LAYOUT: gl.constexpr = _sums_layout(HALF)
    parts, squares_ptr, num_tokens, num_experts = out
    given_squares, given = exchange
    # Eight values of a row are adjacent, and those of four rows in different banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    given_sums = reinterpret(router_buffers, gl.float32, [_ROW_STAGES, _BLOCK_N, HALF], swizzled)
    lower, upper = gl.split(gl.permute(gl.reshape(sums, [_BLOCK_N, 2, HALF]), (0, 2, 1)))
    # All of the group's warps have to have ended their products.
    warp_barrier()
    if GROUP == 0:
        own, other = lower, upper
    else:
        own, other = upper, lower
        given_squares.store(squares)
    given_sums.index(GROUP).store(gl.convert_layout(other, LAYOUT, assert_trivial=True))
    mbarrier.arrive(given.index(GROUP), count=1)
    mbarrier.wait(given.index(1 - GROUP), 0)
    own = gl.convert_layout(own, LAYOUT, assert_trivial=True) + given_sums.index(1 - GROUP).load(LAYOUT)
    part = gl.program_id(2)
    n = gl.program_id(0) * _BLOCK_N + gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.program_id(1) * _BLOCK_X + GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, LAYOUT))
    place = (part.to(gl.int64) * num_tokens + n) * num_experts
    # In 64 bits, so that a lane's addresses differ by constants.
    to = gl.expand_dims(parts + place, 1) + gl.expand_dims(column, 0).to(gl.int64)
    gl.store(to, own, mask=gl.expand_dims(n < num_tokens, 1))
    if GROUP == 0 and gl.program_id(1) == 0:
        token = gl.program_id(0) * _BLOCK_N + gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(1, TOKENS_LAYOUT))
        squares += given_squares.load(gl.SliceLayout(1, TOKENS_LAYOUT))
        gl.store(squares_ptr + part * num_tokens + token, squares, mask=token < num_tokens)


@gluon.jit
def _barriers():  # type: ignore[no-untyped-def]
    """Allocate barriers. Of a stage: its tokens are there; they have been converted, and the products of the group's
    step before have ended; its rows are there. Of a group: it has given its sums to the other."""
    tokens_full = gl.allocate_shared_memory(gl.int64, [_TOKEN_STAGES, 1], mbarrier.MBarrierLayout())
    converted = gl.allocate_shared_memory(gl.int64, [_TOKEN_STAGES, 1], mbarrier.MBarrierLayout())
    rows_full = gl.allocate_shared_memory(gl.int64, [_ROW_STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    # In turn: the compiler lets all warps wait between two of one allocation.
    for i in gl.static_range(_TOKEN_STAGES):
        mbarrier.init(tokens_full.index(i), count=1)
        mbarrier.init(converted.index(i), count=1)
        if i < _ROW_STAGES:
            mbarrier.init(rows_full.index(i), count=1)
        if i < 2:
            mbarrier.init(given.index(i), count=1)
    return tokens_full, converted, rows_full, given


@gluon.jit(do_not_specialize=["num_tokens"])
def scores_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, squares_ptr, x, product, summed, router, norm_H, num_tokens, num_experts, STEPS: gl.constexpr,
    ROOM: gl.constexpr, REGISTERS: gl.constexpr, FETCH_REGISTERS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """STEPS: of a program. ROOM: the next power of two of a group's. product, summed: None if the tokens are x
    itself."""
    ADDS: gl.constexpr = product is not None
    # A stage's product is behind all stages' tokens.
    NUM_TOKENS: gl.constexpr = 2 * _TOKEN_STAGES if ADDS else _TOKEN_STAGES
    x_buffers = gl.allocate_shared_memory(gl.bfloat16, [NUM_TOKENS, _BLOCK_N, _BLOCK_H], x.layout)
    router_buffers = gl.allocate_shared_memory(gl.bfloat16, [_ROW_STAGES, _BLOCK_X, _BLOCK_H], router.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gains = gl.allocate_shared_memory(gl.float32, [2 * ROOM, _BLOCK_H], plain)
    given_squares = gl.allocate_shared_memory(gl.float32, [1, _BLOCK_N], plain).index(0)
    tokens_full, converted, rows_full, given = _barriers()
    shared = x_buffers, router_buffers, tokens_full, converted, rows_full
    exchange = given_squares, given
    out = parts_ptr, squares_ptr, num_tokens, num_experts
    gl.warp_specialize(
        [
            (_score, (out, norm_H, gains, exchange, shared, 0, STEPS, ROOM, ADDS, PDL)),
            (_score, (out, norm_H, gains, exchange, shared, 1, STEPS, ROOM, ADDS, PDL)),
            (_fetch, (x, product, summed, router, shared, STEPS, PDL)),
        ],
        [4, 1],
        [REGISTERS, FETCH_REGISTERS],
    )
