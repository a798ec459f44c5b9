"""The second launch of chunked_delta.py for Hopper's matrix units, in Gluon: the function of
chunked_delta_blocks.solve_blocks, for heads of 128 by 128, and the convolution of v.

Both launches are bound by memory, and v is half of the convolution's channels: a program computes its tile of v itself,
from what the first launch would read for it, rather than read what that has stored. Bits are those of
chunked_delta_blocks.convolve_blocks.

A program's time is that of a chain of small steps, so each of them is short:

- Results of a product are scaled, split into halves and used as the left operand of the next product without leaving
  the registers.
- The diagonal blocks of 16 are inverted by substitution in float32, a thread for each column. All that passes through
  shared memory is L, whose columns every thread reads four values at a time, and the inverses.
- Two steps of joining remain, whose products have just the columns that are not zero.
- v is convolved while the first products run. What it needs is loaded before everything else.

Three programs are resident per multiprocessor. Tiles of keys are loaded by TMA, and results stored by it; u takes the
place of v in shared memory, and w that of k.

Knows nothing of how operands are computed: see chunked_delta_blocks.py, also for terms and shape letters.
"""

# mypy: disable-error-code="assignment"
# Tuples grow in unrolled loops of kernels, which changes their type.

from __future__ import annotations

import math

import torch
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

from agentspec.kernels.triton import chunked_delta_blocks as blocks
from agentspec.kernels.triton import chunked_delta_hopper
from agentspec.kernels.triton.bfloat16_pairs import in_float32
from agentspec.kernels.triton.chunked_delta_hopper import HEAD_DIM, as_rows
from agentspec.kernels.triton.gluon_names import (
    await_previous,
    copy_block,
    copy_out,
    reinterpret,
    release_next,
    warp_barrier,
)
from agentspec.kernels.triton.prefill_columns import (
    BLOCK_COUNT,
    BLOCK_OFFSET,
    BLOCK_SPAN,
    NUM_BLOCK_FIELDS,
    NUM_SPAN_FIELDS,
    OFFSET,
    READ_ROW,
)
from agentspec.types import BLOCK_TOKENS

NUM_WARPS = 4
MAX_REGISTERS = 168
"""So that three programs are resident per multiprocessor."""

_T = gl.constexpr(BLOCK_TOKENS)
_K = gl.constexpr(HEAD_DIM)
_SIZE = gl.constexpr(16)
"""Side of a diagonal block that is inverted by substitution."""
_BLOCKS = gl.constexpr(BLOCK_TOKENS // 16)
_AT_ONCE = gl.constexpr(4)
"""Rows of L in one load from shared memory, so of one tensor in the substitution."""
_CHUNKS = gl.constexpr(16 // 4)
_SWIZZLE = gl.constexpr(2)
"""Columns of L in shared memory with one order of chunks. The next ones have another, lest threads that store need the
same bank."""
_RUN = gl.constexpr(8)
_RUNS = gl.constexpr(BLOCK_TOKENS // 8)
"""Adjacent tokens of v per thread: it loads each row of x once for the four outputs that it enters. And the number of
such runs."""

_BETA, _HIGH, _LOW, _FROM_START, _NUM_GATES = (
    gl.constexpr(gate.value) for gate in (blocks.BETA, blocks.HIGH, blocks.LOW, blocks.FROM_START, blocks.NUM_GATES)
)
_NUM_LOADED = gl.constexpr(4)
_HALVES = gl.constexpr(
    "{ .reg .b32 first, second; cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 first, $0, 16; and.b32 second, $0, 0xffff0000; "
    "sub.f32 first, $2, first; sub.f32 second, $3, second; cvt.rn.bf16x2.f32 $1, second, first; }"
)
"""Of two neighbours. From Triton's own operations some of its versions make a sixth more instructions."""
_LOG2_E = gl.constexpr(math.log2(math.e))
_sigmoid = gluon.jit(blocks.fast_sigmoid.fn)
assert max(_BETA.value, _HIGH.value, _LOW.value, _FROM_START.value) < _NUM_LOADED.value, "these gates are the first"


def is_supported(dtype: torch.dtype, value_dim: int, key_dim: int, device: torch.device) -> bool:
    """Whether this kernel supports such heads on this device."""
    return chunked_delta_hopper.is_supported(dtype, value_dim, key_dim, device)


def operands(
    keys_METK: Tensor, values_MVTD: Tensor, w_MVTK: Tensor, reads_MVTT: Tensor
) -> tuple[TensorDescriptor, ...]:
    """TMA descriptors of solve_blocks' operands and results."""
    return (
        as_rows(keys_METK, HEAD_DIM),
        as_rows(values_MVTD, HEAD_DIM),
        as_rows(w_MVTK, HEAD_DIM),
        as_rows(reads_MVTT, BLOCK_TOKENS),
    )


@gluon.constexpr_function
def _product_layout(columns: int) -> gl.NVMMADistributedLayout:
    """Of a product's results with BLOCK_TOKENS rows, in four warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def _tile(ROWS: gl.constexpr, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Allocate shared memory for an operand.

    One by one: the compiler would take the use of a part of an allocation for a use of all, and put barriers of the
    warps between."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.bfloat16)
    return gl.allocate_shared_memory(gl.bfloat16, [1, ROWS, COLUMNS], layout).index(0)


@gluon.jit
def _room(tile, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Two operands of COLUMNS columns in the memory of another. Those of other sizes lie beside them."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_T, COLUMNS], gl.bfloat16)
    operands = reinterpret(tile, gl.bfloat16, [_K // COLUMNS, _T, COLUMNS], layout)
    return operands.index(2 if COLUMNS > _SIZE else 0), operands.index(3 if COLUMNS > _SIZE else 1)


@gluon.jit
def _arrival():  # type: ignore[no-untyped-def]
    """Allocate a barrier of one arrival."""
    barrier = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def _gate(gates, GATE: gl.constexpr, AXIS: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """A gate of every token: of rows (AXIS 0) or of columns (AXIS 1), to be broadcast."""
    return gl.expand_dims(gates.slice(GATE * _T, _T).load(gl.SliceLayout(1 - AXIS, layout)), 1 - AXIS)


@gluon.jit
def _power(x):  # type: ignore[no-untyped-def]
    """2^x. Triton's own takes four times as many instructions, for results below 2^-126."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _ratios(gates, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """e^(G_t - G_j) for j <= t, else 0."""
    t = gl.expand_dims(gl.arange(0, _T, layout=gl.SliceLayout(1, layout)), 1)
    j = gl.expand_dims(gl.arange(0, _T, layout=gl.SliceLayout(0, layout)), 0)
    difference = _gate(gates, _HIGH, 0, layout) - _gate(gates, _HIGH, 1, layout)
    difference += _gate(gates, _LOW, 0, layout) - _gate(gates, _LOW, 1, layout)
    return _power(gl.where(t >= j, difference * _LOG2_E, float("-inf")))


@gluon.jit
def _row(COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The rows of a product's results with COLUMNS columns, to be broadcast."""
    return gl.expand_dims(gl.arange(0, _T, layout=gl.SliceLayout(1, _product_layout(COLUMNS))), 1)


@gluon.jit
def _store_coupling(coupling, diagonal, near, far):  # type: ignore[no-untyped-def]
    """Store L's diagonal blocks, transposed, and halves of what joins add: `near`, the blocks right under them in every
    second row of blocks, and `far`, the lower left quarter. coupling: L, with any diagonal."""
    left, right = _sides(coupling, _T)
    first, second = _sides(left, 2 * _SIZE)
    third, fourth = _sides(right, 2 * _SIZE)
    t, j = _row(_SIZE), gl.arange(0, _SIZE, layout=gl.SliceLayout(0, _product_layout(_SIZE)))
    is_upper = t < 2 * _SIZE
    blocks = gl.where(is_upper, gl.where(t < _SIZE, first, second), gl.where(t < 3 * _SIZE, third, fourth))
    diagonal.permute((1, 0)).store(gl.where(t % _SIZE > gl.expand_dims(j, 0), blocks, 0.0))
    _store_halves(gl.where(is_upper, first, third), near)
    _store_halves(left, far)


@gluon.jit
def _store_halves(x, tiles):  # type: ignore[no-untyped-def]
    high, low = _halves(x)
    tiles[0].store(high)
    tiles[1].store(low)


@gluon.jit
def _halves(x):  # type: ignore[no-untyped-def]
    """Split x into a leading and a trailing bf16 half. The leading half is rounded, unlike that of
    chunked_delta_blocks._halves, so that the product of two trailing halves, which is left out, is a quarter as
    large."""
    return gl.inline_asm_elementwise(_HALVES, "=r,=r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2)


@gluon.jit
def _left(half, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """A half as the left operand of a product with COLUMNS columns, which moves nothing between threads."""
    return gl.convert_layout(half, gl.DotOperandLayout(0, _product_layout(COLUMNS), 2))


@gluon.jit
def _sides(x, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the left and the right half of the columns of a product's results."""
    left, right = gl.split(gl.permute(gl.reshape(x, [_T, 2, COLUMNS // 2]), (0, 2, 1)))
    layout: gl.constexpr = _product_layout(COLUMNS // 2)
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _beside(left, right, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse of `_sides`."""
    x = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [_T, COLUMNS])
    return gl.convert_layout(x, _product_layout(COLUMNS))


@gluon.jit
def _row_of(chunk, ROW: gl.constexpr):  # type: ignore[no-untyped-def]
    """One row of a chunk, [blocks, columns]."""
    even, odd = gl.split(gl.reshape(chunk, [_BLOCKS, _SIZE, 2, 2]))
    if ROW % 2 == 0:
        low, high = gl.split(even)
    else:
        low, high = gl.split(odd)
    if ROW // 2 == 0:
        row = low
    else:
        row = high
    return row


@gluon.jit
def _substituted(diagonal):  # type: ignore[no-untyped-def]
    """Return the inverses of the diagonal blocks of I + L, one above the other [_T, _SIZE], in the layout of a
    product's results. diagonal: L there, transposed.

    A thread has a column of an inverse, in tensors of _AT_ONCE rows [blocks, columns, rows]. When a row is complete,
    all later ones lose their share of it: at any time many sums are independent."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, _AT_ONCE], [1, 32, 1], [4, 1, 1], [2, 1, 0])
    vector: gl.constexpr = gl.SliceLayout(2, layout)
    of_block: gl.constexpr = gl.SliceLayout(1, layout)
    columns = reinterpret(diagonal, gl.float32, [_SIZE, _BLOCKS, _SIZE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    column = gl.expand_dims(gl.expand_dims(gl.arange(0, _SIZE, layout=gl.SliceLayout(0, vector)), 0), 2)
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, _AT_ONCE, layout=gl.SliceLayout(0, of_block)), 0), 1)
    nothing = gl.zeros([_BLOCKS, _SIZE, _AT_ONCE], gl.float32, layout)
    chunks = ()
    for chunk in gl.static_range(_CHUNKS):
        chunks += (nothing + gl.where(column == row + chunk * _AT_ONCE, 1.0, 0.0),)
    for j in gl.static_range(_SIZE - 1):
        complete = gl.expand_dims(gl.convert_layout(_row_of(chunks[j // _AT_ONCE], j % _AT_ONCE), vector), 2)
        of_j = columns.index(j)
        later = ()
        for chunk in gl.static_range(_CHUNKS):
            if chunk < (j + 1) // _AT_ONCE:
                later += (chunks[chunk],)
            else:
                # Zeros in rows up to j.
                factor = of_j.slice((chunk ^ (j // _SWIZZLE % _CHUNKS)) * _AT_ONCE, _AT_ONCE, 1).load(of_block)
                later += (chunks[chunk] - gl.expand_dims(factor, 1) * complete,)
        chunks = later
    # [blocks, columns, rows of a chunk, the chunk's number in two bits]
    chunks = gl.join(gl.join(chunks[0], chunks[2]), gl.join(chunks[1], chunks[3]))  # type: ignore[misc]
    # Not convert_layout, whose buffer might lie where a copy to memory still reads.
    passed = reinterpret(
        diagonal, gl.float32, [_T, _SIZE], gl.SwizzledSharedLayout(_AT_ONCE, _SWIZZLE, _CHUNKS, [1, 0])
    )
    passed.store(gl.reshape(gl.permute(chunks, (0, 3, 4, 2, 1)), [_T, _SIZE]))
    return passed.load(_product_layout(_SIZE))


@gluon.jit
def _product(left, right, FIRST: gl.constexpr, SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin a product of matrices in halves. right: in shared memory, of which SIZE rows from FIRST on count."""
    nothing = gl.zeros([_T, SIZE], gl.float32, _product_layout(SIZE))
    left_high, left_low = _left(left[0], SIZE), _left(left[1], SIZE)
    right_high, right_low = right[0].slice(FIRST, SIZE), right[1].slice(FIRST, SIZE)
    sums = warpgroup_mma(left_low, right_high, nothing, use_acc=False, is_async=True)
    sums = warpgroup_mma(left_high, right_low, sums, is_async=True)
    return warpgroup_mma(left_high, right_high, sums, is_async=True)


@gluon.jit
def _products(left, right, SIZE: gl.constexpr, IS_SECOND: gl.constexpr):  # type: ignore[no-untyped-def]
    """For every two diagonal blocks of SIZE the product of the rows of `left` beside them with the rows of `right`
    beside the first (IS_SECOND: the second) of them."""
    first = _product(left, right, IS_SECOND * SIZE, SIZE)
    if SIZE == _SIZE:
        second = _product(left, right, (2 + IS_SECOND) * SIZE, SIZE)
        first, second = warpgroup_mma_wait(0, deps=[first, second])
        product = gl.where(_row(SIZE) < 2 * SIZE, first, second)
    else:
        product = warpgroup_mma_wait(0, deps=[first])
    return product


@gluon.jit
def _joined(inverses, under, tiles, SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the inverses of diagonal blocks of 2 SIZE, one above the other, from those of SIZE: [[A, 0], [C, B]] has
    the inverse [[A', 0], [-B' C A', B']].

    under: halves of every C, in the rows of its B. tiles: room for those of the inverses."""
    halves = _halves(inverses)
    tiles[0].store(halves[0])
    tiles[1].store(halves[1])
    fence_async_shared()
    warp_barrier()
    # Only B's rows of these are of use.
    taken = _products(halves, under, SIZE, 1)
    between = _products(_halves(taken), tiles, SIZE, 0)
    is_second = _row(SIZE) // SIZE % 2 == 1
    return _beside(gl.where(is_second, -between, inverses), gl.where(is_second, inverses, 0.0), 2 * SIZE)


@gluon.constexpr_function
def _runs_layout() -> gl.BlockedLayout:
    """Of a row of x, or of v, for each run [runs, channels]. A thread has eight channels, which 16-byte loads need."""
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.jit
def _rows_of_x(  # type: ignore[no-untyped-def]
    projected_NP, x_stride, conv_R3C, conv_stride, spans_UF, block, m, count, channel, C: gl.constexpr
):
    """Load the rows of x of which v of block m is computed, in tensors with a row for each run: those of the three
    tokens before it, then those of its own. The block's last token stands for those after it.

    In the usual case, that the block before has the three tokens before this one, the loads wait for `block` only.
    Rows before the span take other addresses: a choice between loaded values would wait for these."""
    offset, span = gl.load(block + BLOCK_OFFSET).to(gl.int32), gl.load(block + BLOCK_SPAN)
    earlier_span = gl.load(block - NUM_BLOCK_FIELDS + BLOCK_SPAN, mask=m > 0, other=-1)
    earlier_count = gl.load(block - NUM_BLOCK_FIELDS + BLOCK_COUNT, mask=m > 0, other=0)
    start = gl.arange(0, _RUNS, layout=gl.SliceLayout(1, _runs_layout())) * _RUN
    last = gl.maximum(count, 1) - 1
    own = ()
    for i in gl.static_range(_RUN):
        token = offset + gl.minimum(start + i, last)
        own += (gl.load(_row_at(projected_NP + token.to(gl.int64) * x_stride, channel)),)
    is_first = (earlier_span != span) | (earlier_count < 3) | (count == 0)  # padding's place is token 0
    of_span = spans_UF + span * NUM_SPAN_FIELDS
    before = offset - gl.load(of_span + OFFSET, mask=is_first, other=-3).to(gl.int32)
    past = conv_R3C + gl.load(of_span + READ_ROW, mask=is_first, other=0) * conv_stride
    earlier = ()
    for i in gl.static_range(3):
        token = gl.minimum(start + (i - 3), last)
        in_span = _row_at(projected_NP + (offset + token).to(gl.int64) * x_stride, channel)
        in_past = _row_at(past + (before + token + 3) * C, channel)
        earlier += (gl.load(gl.where(gl.expand_dims(before + token < 0, 1), in_past, in_span)),)
    return earlier + own


@gluon.jit
def _row_at(places, channel):  # type: ignore[no-untyped-def]
    return gl.expand_dims(places, 1) + gl.expand_dims(channel, 0)


@gluon.jit
def _weights(conv_C4, first_channel):  # type: ignore[no-untyped-def]
    """Load the convolution's weights of a head: four of a channel, then those of the next."""
    return gl.load(conv_C4 + first_channel * 4 + gl.arange(0, 4 * _K, layout=gl.BlockedLayout([32], [32], [4], [0])))


@gluon.jit
def _convolved(rows, weights):  # type: ignore[no-untyped-def]
    """v [_T, _K] of `_rows_of_x`: SiLU of the convolution, with the operations of chunked_delta_blocks._store_runs."""
    layout: gl.constexpr = _runs_layout()
    even, odd = gl.split(gl.reshape(in_float32(weights), [_K, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    taps = (first, second, third, fourth)
    v = ()
    for i in gl.static_range(_RUN):
        y = gl.zeros([_RUNS, _K], gl.float32, layout)
        for tap in gl.static_range(4):
            weight = gl.convert_layout(taps[tap], gl.SliceLayout(0, layout))
            y += in_float32(rows[i + tap]) * gl.expand_dims(weight, 0)
        v += ((y * _sigmoid(y)).to(gl.bfloat16),)
    # [runs, channels, the token's number in its run in three bits]
    even = gl.join(gl.join(v[0], v[4]), gl.join(v[2], v[6]))  # type: ignore[misc]
    odd = gl.join(gl.join(v[1], v[5]), gl.join(v[3], v[7]))  # type: ignore[misc]
    return gl.reshape(gl.permute(gl.join(even, odd), (0, 2, 3, 4, 1)), [_T, _K])


@gluon.constexpr_function
def _layout_of(x):  # type: ignore[no-untyped-def]
    return x.type.layout


@gluon.jit
def _store_values(v, count, v_tile):  # type: ignore[no-untyped-def]
    """Store v, with zeros after the block's last token."""
    if count < _T:
        t = gl.arange(0, _T, layout=gl.SliceLayout(1, _layout_of(v)))
        v = gl.where(gl.expand_dims(t < count, 1), v, 0.0)
    v_tile.store(v)


@gluon.jit
def _applied(high, low, x):  # type: ignore[no-untyped-def]
    """Begin the product of a matrix in halves with x in shared memory."""
    nothing = gl.zeros([_T, _K], gl.float32, _product_layout(_K))
    sums = warpgroup_mma(_left(low, _K), x, nothing, use_acc=False, is_async=True)
    return warpgroup_mma(_left(high, _K), x, sums, is_async=True)


@gluon.jit
def _load_keys_and_gates(  # type: ignore[no-untyped-def]
    keys, gates_MVGT, k_tile, q_tile, gates, m, head, V: gl.constexpr, REPEATS: gl.constexpr
):
    """Load k, q and the gates of a head in block m, and wait for them."""
    keys_here = _arrival()
    key_row = (m * (2 * (V // REPEATS)) + head // REPEATS) * _T
    place = gl.arange(0, _NUM_LOADED * _T, layout=gl.BlockedLayout([2], [32], [4], [0]))
    loaded = gl.load(gates_MVGT + (m * V + head).to(gl.int64) * (_NUM_GATES * _T) + place)
    mbarrier.expect(keys_here, 2 * keys.block_type.nbytes)
    copy_block(keys, [key_row + V // REPEATS * _T, 0], keys_here, k_tile)
    copy_block(keys, [key_row, 0], keys_here, q_tile)
    gates.store(loaded)
    mbarrier.wait(keys_here, 0)


@gluon.jit
def solve_blocks(  # type: ignore[no-untyped-def]
    projected_NP,
    x_stride,
    conv_C4,
    conv_R3C,
    conv_stride,
    spans_UF,
    blocks_MF,
    keys,
    values,
    w,
    reads,
    gates_MVGT,
    V: gl.constexpr,
    REPEATS: gl.constexpr,
    PDL: gl.constexpr,
):
    """A program has one value head in one block: it computes w, reads and u. x and tables as of convolve_blocks."""
    release_next(PDL)
    layout: gl.constexpr = _product_layout(_T)
    m, head = gl.program_id(1), gl.program_id(0)
    KEY_CHANNELS: gl.constexpr = 2 * (V // REPEATS) * _K
    first_channel = KEY_CHANNELS + head * _K
    weights = _weights(conv_C4, first_channel)
    # What is no result of the launch before may be read already: that one releases this one when it has waited itself.
    block = blocks_MF + m.to(gl.int64) * NUM_BLOCK_FIELDS
    count = gl.load(block + BLOCK_COUNT).to(gl.int32)
    channel = first_channel + gl.arange(0, _K, layout=gl.SliceLayout(0, _runs_layout()))
    rows = _rows_of_x(
        projected_NP, x_stride, conv_R3C, conv_stride, spans_UF, block, m, count, channel, KEY_CHANNELS + V * _K
    )
    await_previous(PDL)
    if count == 0:
        return
    k_tile, q_tile, v_tile, read_tile = _tile(_T, _K), _tile(_T, _K), _tile(_T, _K), _tile(_T, _T)
    near, far = (_tile(_T, _SIZE), _tile(_T, _SIZE)), (_tile(_T, 2 * _SIZE), _tile(_T, 2 * _SIZE))
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(_AT_ONCE, _SWIZZLE, _CHUNKS, [1, 0])
    diagonal = gl.allocate_shared_memory(gl.float32, [1, _SIZE, _T], swizzled).index(0)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gates = gl.allocate_shared_memory(gl.float32, [1, _NUM_LOADED * _T], plain).index(0)
    row = (m * V + head) * _T
    _load_keys_and_gates(keys, gates_MVGT, k_tile, q_tile, gates, m, head, V, REPEATS)
    nothing = gl.zeros([_T, _T], gl.float32, layout)
    of_keys = warpgroup_mma(k_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    of_queries = warpgroup_mma(q_tile, k_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    # Always; but without the branch the compiler moves parts up, between those of the products or even before the
    # loads of keys, where they wait for x.
    if count > 0:
        _store_values(_convolved(rows, weights), count, v_tile)
    ratio = _ratios(gates, layout)
    beta = _gate(gates, _BETA, 0, layout)
    of_keys = warpgroup_mma_wait(1, deps=[of_keys])
    _store_coupling(beta * ratio * of_keys, diagonal, near, far)
    of_queries = warpgroup_mma_wait(0, deps=[of_queries])
    read_tile.store((ratio * of_queries).to(gl.bfloat16))
    fence_async_shared()
    warp_barrier()
    copy_out(reads, [row, 0], read_tile)

    # Every product that reads q is over.
    inverses = _joined(_substituted(diagonal), near, _room(q_tile, _SIZE), _SIZE)
    inverse = _joined(inverses, far, _room(q_tile, 2 * _SIZE), 2 * _SIZE)
    beta = _gate(gates, _BETA, 1, layout)
    u_high, u_low = _halves(inverse * beta)
    u = _applied(u_high, u_low, v_tile)
    w_high, w_low = _halves(inverse * (beta * _gate(gates, _FROM_START, 1, layout)))
    u = warpgroup_mma_wait(0, deps=[u]).to(gl.bfloat16)
    warp_barrier()  # every warp must have read v
    v_tile.store(u)
    of_w = _applied(w_high, w_low, k_tile)
    fence_async_shared()
    warp_barrier()
    copy_out(values, [row, 0], v_tile)
    of_w = warpgroup_mma_wait(0, deps=[of_w]).to(gl.bfloat16)
    warp_barrier()  # every warp must have read k
    k_tile.store(of_w)
    fence_async_shared()
    warp_barrier()
    copy_out(w, [row, 0], k_tile)
    tma.store_wait(0)
