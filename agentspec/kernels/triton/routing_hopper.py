"""The router's scores of many tokens on Hopper's matrix units, in Gluon: the function of routing._many_scores_kernel.

A program scores 256 experts for 64 tokens, over some of the features. One warp fetches steps of 64 features by TMA.
The others convert a step's tokens in their registers, to a high and a low half of the input times the norm's gain,
while the matrix units multiply those of the step before. With 128 experts a program would convert everything twice.

The tokens may be a sum that nothing has added yet: a prompt's residual and the product of the mixer before. A step is
then loaded of both, added where it is converted, put back in the place of the residual's, and from there stored by the
warp that fetches. So the sum's traffic is hidden behind the products. It goes to a new tensor: several programs read
a token's residual, if there are more experts than one has.

Shape letters as in routing.py.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

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
_STAGES = gl.constexpr(4)
_LEAST_STEPS = 4
"""Of a program: fewer are not worth a launch's begin and end."""
_FETCH_REGISTERS = 40


def is_supported(x_NH: Tensor, router_XH: Tensor, norm_H: Tensor) -> bool:
    """Whether the kernel can score these tokens on this device."""
    if INTERPRETED or any(x.dtype != torch.bfloat16 for x in (x_NH, router_XH, norm_H)):
        return False
    is_whole = router_XH.shape[0] % EXPERTS == 0 and x_NH.shape[1] % FEATURES == 0
    has_rows = x_NH.stride(1) == 1 and x_NH.stride(0) % 8 == 0 and x_NH.data_ptr() % 16 == 0
    return is_whole and has_rows and machine_of(x_NH.device).capability[0] == 9


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
        ROOM=triton.next_power_of_2(width // FEATURES // split),
        FETCH_REGISTERS=_FETCH_REGISTERS,
        num_warps=4,
        **overlapped(),
    )


def _blocks_of(values: Tensor, rows: int) -> TensorDescriptor:
    block = [rows, FEATURES]
    return TensorDescriptor.from_tensor(values, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


@gluon.constexpr_function
def _sums_layout() -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, EXPERTS, 16])


@gluon.constexpr_function
def _tokens_layout() -> gl.DistributedLinearLayout:
    """Tokens of a step, each pair of adjacent features in the lane that needs it as part of a left operand."""
    registers = [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [TOKENS, FEATURES])


@gluon.jit
def _converted(x_buffers, gain_buffer, stage, is_again, ADDS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (high half, low half) of a step's tokens times the gain, as left operands, and the sums of their
    squares. ADDS: the tokens are sums, which take the residual's place. is_again: that has been done, and the values
    are for nothing; the place of the product, which nothing reads any more, then gets them."""
    TOKENS_LAYOUT: gl.constexpr = _tokens_layout()
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, _sums_layout(), 2)
    tokens = x_buffers.index(stage).load(TOKENS_LAYOUT)
    if ADDS:
        tokens = sum_of(tokens, x_buffers.index(_STAGES + stage).load(TOKENS_LAYOUT))
    x = in_float32(tokens)
    squares = gl.sum(x * x, axis=1)
    x *= gl.expand_dims(gain_buffer.load(gl.SliceLayout(0, TOKENS_LAYOUT)), 0)
    high = x.to(gl.bfloat16)
    low = (x - in_float32(high)).to(gl.bfloat16)
    if ADDS:
        # Last: of what comes behind it, the compiler would leave a part for after the wait for the products.
        x_buffers.index(gl.where(is_again, _STAGES + stage, stage)).store(tokens)
        fence_async_shared()
    high = gl.convert_layout(high, OPERAND, assert_trivial=True)
    return high, gl.convert_layout(low, OPERAND, assert_trivial=True), squares


@gluon.jit
def _load_rows(router, shared, step, place, BYTES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for a step's rows of the router. BYTES: of all that its stage gets."""
    _, router_buffers, full, _ = shared
    _, row, first = place
    stage = step % _STAGES
    mbarrier.expect(full.index(stage), BYTES)
    copy_block(router, [row, first + step * _BLOCK_H], full.index(stage), router_buffers.index(stage))


@gluon.jit
def _load_tokens(x, product, shared, step, place):  # type: ignore[no-untyped-def]
    x_buffers, _, full, _ = shared
    n, _, first = place
    stage = step % _STAGES
    copy_block(x, [n, first + step * _BLOCK_H], full.index(stage), x_buffers.index(stage))
    if product is not None:
        copy_block(product, [n, first + step * _BLOCK_H], full.index(stage), x_buffers.index(_STAGES + stage))


@gluon.jit
def _fetch(x, product, summed, router, shared, STEPS: gl.constexpr, PDL: gl.constexpr):  # type: ignore[no-untyped-def]
    """The fetching warp. The router's rows of the first steps are asked for before the previous kernel has ended."""
    empty = shared[3]
    BYTES: gl.constexpr = x.block_type.nbytes * (1 if product is None else 2) + router.block_type.nbytes
    AHEAD: gl.constexpr = STEPS if STEPS < _STAGES else _STAGES
    place = gl.program_id(0) * _BLOCK_N, gl.program_id(1) * _BLOCK_X, gl.program_id(2) * (STEPS * _BLOCK_H)
    for step in gl.static_range(AHEAD):
        _load_rows(router, shared, step, place, BYTES)
    await_previous(PDL)
    for step in gl.static_range(AHEAD):
        _load_tokens(x, product, shared, step, place)
    if summed is None:
        for step in range(AHEAD, STEPS):
            mbarrier.wait(empty.index(step % _STAGES), (step // _STAGES & 1) ^ 1)
            _load_rows(router, shared, step, place, BYTES)
            _load_tokens(x, product, shared, step, place)
    else:
        for step in range(STEPS):
            # When a step's products have ended, the sums of the following step are in their place.
            mbarrier.wait(empty.index(step % _STAGES), step // _STAGES & 1)
            if step + _STAGES < STEPS:
                _load_rows(router, shared, step + _STAGES, place, BYTES)
            _store_sums(summed, shared, step, place, STEPS)
            if step + _STAGES < STEPS:
                _load_tokens(x, product, shared, step + _STAGES, place)
        tma.store_wait(0)


@gluon.jit
def _store_sums(summed, shared, step, place, STEPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin to store the sums of the step that follows `step`, those of the first step with them. When it returns, the
    place of `step`'s is free. Programs of the first experts do so."""
    x_buffers = shared[0]
    n, row, first = place
    if row == 0:
        if step == 0:
            copy_out(summed, [n, first], x_buffers.index(0))
        if step + 1 < STEPS:
            following = step + 1
            copy_out(summed, [n, first + following * _BLOCK_H], x_buffers.index(following % _STAGES))
        tma.store_wait(1)


@gluon.jit
def _score(  # type: ignore[no-untyped-def]
    parts, squares_ptr, norm_H, num_tokens, num_experts, gains, shared, STEPS: gl.constexpr, ROOM: gl.constexpr,
    ADDS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """The four warps that convert and multiply."""
    x_buffers, router_buffers, full, empty = shared
    ROWS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    part = gl.program_id(2)
    step = gl.expand_dims(gl.arange(0, ROOM, layout=gl.SliceLayout(1, ROWS)), 1)
    h = step * _BLOCK_H + gl.expand_dims(gl.arange(0, _BLOCK_H, layout=gl.SliceLayout(0, ROWS)), 0)
    gain = gl.load(norm_H + part * (STEPS * _BLOCK_H) + h, mask=step < STEPS, other=0.0).to(gl.float32)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    reinterpret(gains, gl.float32, [1, ROOM, _BLOCK_H], plain).index(0).store(1.0 + gain)
    warp_barrier()
    await_previous(PDL)
    release_next(PDL)
    mbarrier.wait(full.index(0), 0)
    high, low, squares = _converted(x_buffers, gains.index(0), 0, False, ADDS)
    sums = gl.zeros([_BLOCK_N, _BLOCK_X], gl.float32, _sums_layout())
    for step in range(STEPS):
        stage = step % _STAGES
        # Behind the last step the same once more, for nothing.
        following = gl.minimum(step + 1, STEPS - 1)
        mbarrier.wait(full.index(following % _STAGES), following // _STAGES & 1)
        rows = router_buffers.index(stage).permute((1, 0))
        sums = warpgroup_mma(high, rows, sums, is_async=True)
        sums = warpgroup_mma(low, rows, sums, is_async=True)
        is_again = step + 1 == STEPS
        next_high, next_low, more = _converted(x_buffers, gains.index(following), following % _STAGES, is_again, ADDS)
        squares += gl.where(step + 1 < STEPS, more, 0.0)
        # The next operands depend on it so that the compiler does not wait before they are computed.
        sums, high, low = warpgroup_mma_wait(0, deps=[sums, next_high, next_low])
        mbarrier.arrive(empty.index(stage), count=1)
    _store_scores(parts, sums, num_tokens, num_experts)
    if gl.program_id(1) == 0:
        n = gl.program_id(0) * _BLOCK_N + gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(1, _tokens_layout()))
        gl.store(squares_ptr + part * num_tokens + n, squares, mask=n < num_tokens)


@gluon.jit
def _store_scores(parts, sums, num_tokens, num_experts):  # type: ignore[no-untyped-def]
    SUMS: gl.constexpr = _sums_layout()
    n = gl.program_id(0) * _BLOCK_N + gl.arange(0, _BLOCK_N, layout=gl.SliceLayout(1, SUMS))
    column = gl.program_id(1) * _BLOCK_X + gl.arange(0, _BLOCK_X, layout=gl.SliceLayout(0, SUMS))
    place = (gl.program_id(2).to(gl.int64) * num_tokens + n) * num_experts
    # In 64 bits, so that a lane's addresses differ by constants.
    to = gl.expand_dims(parts + place, 1) + gl.expand_dims(column, 0).to(gl.int64)
    gl.store(to, sums, mask=gl.expand_dims(n < num_tokens, 1))


@gluon.jit(do_not_specialize=["num_tokens"])
def scores_kernel(  # type: ignore[no-untyped-def]
    parts_ptr, squares_ptr, x, product, summed, router, norm_H, num_tokens, num_experts, STEPS: gl.constexpr,
    ROOM: gl.constexpr, FETCH_REGISTERS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """STEPS: of a program. ROOM: the next power of two. product, summed: None if the tokens are x itself."""
    ADDS: gl.constexpr = product is not None
    # A stage's product is behind all stages' tokens.
    x_buffers = gl.allocate_shared_memory(gl.bfloat16, [2 * _STAGES if ADDS else _STAGES, _BLOCK_N, _BLOCK_H], x.layout)
    router_buffers = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, _BLOCK_X, _BLOCK_H], router.layout)
    gains = gl.allocate_shared_memory(gl.float32, [ROOM, _BLOCK_H], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    shared = (x_buffers, router_buffers, full, empty)
    gl.warp_specialize(
        [
            (_score, (parts_ptr, squares_ptr, norm_H, num_tokens, num_experts, gains, shared, STEPS, ROOM, ADDS, PDL)),
            (_fetch, (x, product, summed, router, shared, STEPS, PDL)),
        ],
        [1],
        [FETCH_REGISTERS],
    )
