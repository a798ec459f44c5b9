"""Products of 16 tokens and more with block-scaled weights or 4-bit integers on Hopper's matrix units, in Gluon: one
launch, with a SwiGLU or a residual after it.

Weights are stationary, as in linear_tiles.py: a tile is 128 or 256 rows of W (of SwiGLU, 128 of gate and 128 of up) by
all tokens of a block. There is one program per multiprocessor. One of its warps fetches: weights and tokens of 128
columns at a time, by TMA, into a ring in shared memory. Two groups of four warps have half of a tile's rows each: they
decode weights in their registers, multiply them with the tokens in shared memory, and accumulate. So a program reads
the tokens once for all rows of a tile, and the next steps arrive while one group decodes and the other multiplies. In
linear_kernels.py a program has 64 rows, and at 64 tokens reads twice as many bytes of tokens as of weights.

The steps of all tiles, one tile after the other, are divided evenly between the programs, so a tile may belong to
several. Their sums are added in the order of K by the last one to arrive. Bits depend on the number of programs, which
is the plan's, never on timing.

Both factors of a product are exact, and the sum of each block of columns with one scale is multiplied by it in float32,
as in linear_tiles.walk_scaled. Shape letters as in linear_layers.py.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import TypeGuard

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from agentspec.kernels.four_bit_tiles import FourBitTiles
from agentspec.kernels.triton.four_bit_columns import in_order_of_words
from agentspec.kernels.triton.gluon_names import await_previous, copy_block, release_next, warp_barrier
from agentspec.kernels.triton.launch import INTERPRETED, NUM_COUNTERS, arrival_counters, overlapped
from agentspec.kernels.triton.linear_plans import Plan
from agentspec.kernels.triton.linear_tiles import E4M3_PAIR
from agentspec.kernels.triton.machine import machine_of
from agentspec.kernels.triton.norm_ahead import NormAhead, norm_operands, to_fill
from agentspec.kernels.triton.tensor_maps import reads_256_bytes
from agentspec.kernels.weights import SCALE_BLOCK, BlockScaled, Weight

ROWS = 64
_ROWS = gl.constexpr(ROWS)
"""Rows of a block: of a matrix instruction. A group of four warps has one or two blocks of a tile."""
_COLUMNS = gl.constexpr(SCALE_BLOCK)
"""Columns of a step, which have one scale."""
_REGISTERS, _FETCH_REGISTERS = 232, 40
"""Of a thread that multiplies and of one that fetches."""


def supports(plan: Plan, x_NK: Tensor, weight_OK: Weight) -> bool:
    """Whether the kernel can compute a product by a plan with `programs`, on this device."""
    if INTERPRETED or x_NK.dtype != torch.bfloat16 or not isinstance(weight_OK, BlockScaled):
        return False
    is_whole = weight_OK.shape[0] % plan.block_o == 0 and weight_OK.shape[1] % SCALE_BLOCK == 0
    has_blocks = weight_OK.block_rows % ROWS == 0 and weight_OK.values.is_contiguous()
    return is_whole and has_blocks and machine_of(x_NK.device).capability[0] == 9


def launch_product(
    plan: Plan,
    x_NK: Tensor,
    weight_OK: BlockScaled,
    *,
    residual_NO: Tensor | None = None,
    is_swiglu: bool = False,
    ahead: NormAhead | None = None,
    following: NormAhead | None = None,
) -> Tensor:
    """x W^T of few tokens, plus the residual, or silu(gate) * up of [gate | up]. [N, O] or [N, O / 2] in x's dtype.
    ahead: what a norm before the product has left, of which x has the gain. following: to fill with the norm of the
    result, in parts of 64 features."""
    num_tokens, num_rows = len(x_NK), weight_OK.shape[0]
    out = torch.empty(num_tokens, num_rows // (1 + is_swiglu), dtype=x_NK.dtype, device=x_NK.device)
    if num_tokens == 0:
        return out
    if x_NK.stride(1) != 1 or x_NK.stride(0) % 8 or x_NK.data_ptr() % 16:
        x_NK = x_NK.clone(memory_format=torch.contiguous_format)  # TMA reads rows from multiples of 16 bytes on
    _launch(
        plan,
        out,
        x_NK,
        reads_256_bytes(_blocks_of(weight_OK.values.view(torch.uint16), ROWS, gl.uint16)),
        weight_OK.shape,
        weight_OK.scales,
        residual_NO,
        block_rows=weight_OK.block_rows,
        is_swiglu=is_swiglu,
        ahead=ahead,
        following=following,
    )
    return out


def supports_four_bit(x_NK: Tensor, weight_OK: Weight) -> TypeGuard[FourBitTiles]:
    """Whether `launch_four_bit` can compute a product on this device, by a plan whose tiles divide the weight's rows:
    with integers in groups of 128 without zero points."""
    if INTERPRETED or x_NK.dtype != torch.bfloat16 or not isinstance(weight_OK, FourBitTiles):
        return False
    form = weight_OK.form
    is_integer = form.kind == "int4" and form.group == SCALE_BLOCK and not form.has_zeros
    is_whole = weight_OK.values.is_contiguous()
    return is_integer and is_whole and machine_of(x_NK.device).capability[0] == 9


def launch_four_bit(
    plan: Plan,
    x_NK: Tensor,
    weight_OK: FourBitTiles,
    out: Tensor,
    residual_NO: Tensor | None = None,
    *,
    is_swiglu: bool = False,
) -> None:
    """The product with 4-bit integers in tiles, into the first columns of `out`. As four_bit_layers.launch_product."""
    num_rows, depth = weight_OK.shape
    if len(x_NK) == 0:
        return
    assert weight_OK.form.kind == "int4", f"{weight_OK.form}"
    assert weight_OK.form.group == SCALE_BLOCK, f"{weight_OK.form}"
    assert not weight_OK.form.has_zeros, f"{weight_OK.form}"
    assert weight_OK.values.is_contiguous()
    assert weight_OK.scales.is_contiguous()
    assert out.stride(1) == 1
    words = _blocks_of(weight_OK.values.view(num_rows // 8, depth // 32, 32), 8, gl.int32)
    _launch(
        plan,
        out,
        in_order_of_words(x_NK),
        words,
        weight_OK.shape,
        weight_OK.scales,
        residual_NO,
        block_rows=1,
        is_swiglu=is_swiglu,
    )


def _launch(
    plan: Plan,
    out: Tensor,
    x_NK: Tensor,
    weights: TensorDescriptor,
    shape: torch.Size,
    scales: Tensor,
    residual_NO: Tensor | None,
    *,
    block_rows: int,
    is_swiglu: bool,
    ahead: NormAhead | None = None,
    following: NormAhead | None = None,
) -> None:
    """shape: of the weight, [O, K]. The rest as in the kernel."""
    num_tokens, (num_rows, depth) = len(x_NK), shape
    assert num_rows % plan.block_o == 0, f"{num_rows} rows in tiles of {plan.block_o}"
    assert not is_swiglu or plan.block_o == 4 * ROWS
    assert residual_NO is None or residual_NO.is_contiguous()
    assert following is None or residual_NO is not None
    tiles, groups, blocks = num_rows // plan.block_o, depth // SCALE_BLOCK, triton.cdiv(num_tokens, plan.block_m)
    assert 2 * tiles * blocks <= NUM_COUNTERS, f"{tiles * blocks} tiles"
    # Every program has a step: an empty one between two of a tile would be waited for.
    programs = min(plan.programs, tiles * groups)
    size = 2 * programs * blocks * plan.block_o * plan.block_m
    product_kernel[(programs, blocks)](
        out,
        out.stride(0),
        _blocks_of(x_NK, plan.block_m, gl.bfloat16),
        weights,
        scales,
        residual_NO,
        *norm_operands(None, ahead)[1:],
        *to_fill(following),
        torch.empty(size, dtype=torch.float32, device=x_NK.device),
        arrival_counters(x_NK.device),
        num_tokens,
        num_rows // (1 + is_swiglu),
        tiles,
        groups,
        plan.release,
        PARTS=1 if ahead is None else ahead.padded_parts,
        BLOCK_ROWS=block_rows,
        SWIGLU=is_swiglu,
        BLOCKS=plan.block_o // (2 * ROWS),
        BLOCK_M=plan.block_m,
        STAGES=plan.stages,
        REGISTERS=_REGISTERS,
        FETCH_REGISTERS=_FETCH_REGISTERS,
        num_warps=4,
        **overlapped(),
    )


def _blocks_of(values: Tensor, rows: int, dtype: gl.dtype) -> TensorDescriptor:
    """TMA descriptor of [*, K], in blocks of `rows` rows: of tokens all columns of a step, of weights as pairs of bytes
    likewise. Of words [rows of tiles, K / 32, 32], those of a step."""
    if dtype == gl.int32:
        block = [rows, 4, 32]
    else:
        block = [rows, SCALE_BLOCK if dtype == gl.bfloat16 else SCALE_BLOCK // 2]
    return TensorDescriptor.from_tensor(values, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


@gluon.constexpr_function
def _mma_layout(block_m: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, block_m, 16])


@gluon.constexpr_function
def _pairs_layout() -> gl.DistributedLinearLayout:
    """Pairs [64, 64] of adjacent columns, each in the lane that needs it as part of a left operand."""
    registers = [[8, 0], [0, 4], [0, 8], [0, 16], [0, 32]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 64])


@gluon.jit
def _decoded(pairs, MMA: gl.constexpr):  # type: ignore[no-untyped-def]
    """Decode pairs of 8-bit floats [64, 64], exactly, to the left operand [64, 128]. See linear_tiles.decode_e4m3."""
    first, second = gl.inline_asm_elementwise(
        E4M3_PAIR, "=h,=h,h", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )
    w = gl.join(first, second).reshape((_ROWS, _COLUMNS))
    return gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


_FOUR_BIT_PAIRS = "\n".join(
    f"shr.u32 s, $8, {4 * pair}; lop3.b32 s, s, 0x000F000F, 0x43004300, 0xEA; "
    f"fma.rn.bf16x2 s, s, one, minus; mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, s;"
    for pair in range(4)
)
_INT4 = gl.constexpr(
    "{ .reg .b32 s, one, minus; mov.b32 one, 0x3F803F80; mov.b32 minus, 0xC308C308; " + _FOUR_BIT_PAIRS + " }"
)


@gluon.constexpr_function
def _words_layout() -> gl.DistributedLinearLayout:
    """Words [8, 4, 32] of eight rows of tiles, each in the lane that needs it as part of a left operand; the last two
    axes are [row 8, t 4, i 4] of four_bit_tiles.py."""
    registers = [[0, 0, 1], [0, 0, 2], [1, 0, 0]]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[2, 0, 0], [4, 0, 0]], [], [8, 4, 32])


@gluon.jit
def _decoded_words(words):  # type: ignore[no-untyped-def]
    """A word's eight integers without their offset of 8, exactly: four pairs of columns."""
    return gl.inline_asm_elementwise(
        _INT4,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _four_bit_operand(words, MMA: gl.constexpr):  # type: ignore[no-untyped-def]
    """Decode words [8, 4, 32] to the left operand [64, 128], whose columns are in the order of four_bit_columns.py.
    Moves nothing."""
    v = _decoded_words(words)
    w = gl.join(
        gl.join(gl.join(v[0], v[4]), gl.join(v[2], v[6])),
        gl.join(gl.join(v[1], v[5]), gl.join(v[3], v[7])),
    )
    # row of tiles, row, lane of four, word, half of a word, half of an instruction's columns, odd
    w = w.reshape((8, 8, 4, 4, 2, 2, 2)).permute((0, 1, 3, 4, 5, 2, 6)).reshape((_ROWS, _COLUMNS))
    return gl.convert_layout(w, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)


@gluon.jit
def _share_begin(program, units):  # type: ignore[no-untyped-def]
    """The first of a program's steps."""
    return units * program // gl.num_programs(0)


@gluon.jit
def _program_of(unit, units):  # type: ignore[no-untyped-def]
    """The program that has a step."""
    return ((unit + 1) * gl.num_programs(0) - 1) // units


@gluon.jit
def _first_row(tile, num_outputs, GROUP: gl.constexpr, BLOCK: gl.constexpr, SWIGLU: gl.constexpr, BLOCKS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The first row of W of one of a group's blocks in a tile."""
    if SWIGLU:
        return tile * (2 * _ROWS) + GROUP * _ROWS + BLOCK * num_outputs
    return tile * (2 * BLOCKS * _ROWS) + (2 * BLOCK + GROUP) * _ROWS


@gluon.jit
def _copy_weights(  # type: ignore[no-untyped-def]
    weights, buffers, ready, stage, unit, num_outputs, groups, SWIGLU: gl.constexpr, BLOCKS: gl.constexpr,
    FOUR_BIT: gl.constexpr
):  # fmt: skip
    """Start the copies of a step's weights: each group's blocks."""
    tile, column = unit // groups, unit % groups
    for group in gl.static_range(2):
        for block in gl.static_range(BLOCKS):
            row = _first_row(tile, num_outputs, group, block, SWIGLU, BLOCKS)
            buffer = buffers.index(2 * BLOCKS * stage + BLOCKS * group + block)
            if FOUR_BIT:
                copy_block(weights, [row // 8, column * 4, 0], ready, buffer)
            else:
                copy_block(weights, [row, column * (_COLUMNS // 2)], ready, buffer)


@gluon.jit
def _fetch(  # type: ignore[no-untyped-def]
    operands, shared, SWIGLU: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    FOUR_BIT: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """The warp that fetches. Weights of the first steps are asked for before the previous kernel has ended."""
    x, weights, num_outputs, tiles, groups, release = operands
    x_buffers, weight_buffers, full, empty = shared
    BYTES: gl.constexpr = (2 * BLOCKS * _ROWS // (2 if FOUR_BIT else 1) + 2 * BLOCK_M) * _COLUMNS
    begin = _share_begin(gl.program_id(0), tiles * groups)
    count = _share_begin(gl.program_id(0) + 1, tiles * groups) - begin
    token = gl.program_id(1) * BLOCK_M
    ahead = gl.minimum(count, STAGES)
    for turn in range(ahead):
        ready = full.index(turn)
        mbarrier.expect(ready, BYTES)
        _copy_weights(weights, weight_buffers, ready, turn, begin + turn, num_outputs, groups, SWIGLU, BLOCKS, FOUR_BIT)
    await_previous(PDL)
    for turn in range(ahead):
        copy_block(x, [token, (begin + turn) % groups * _COLUMNS], full.index(turn), x_buffers.index(turn))
    releasing = gl.maximum(count - release, ahead)
    for turn in range(ahead, count):
        if turn == releasing:
            release_next(PDL)
        stage = turn % STAGES
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, BYTES)
        _copy_weights(
            weights, weight_buffers, ready, stage, begin + turn, num_outputs, groups, SWIGLU, BLOCKS, FOUR_BIT
        )
        copy_block(x, [token, (begin + turn) % groups * _COLUMNS], ready, x_buffers.index(stage))


@gluon.jit
def _multiply(  # type: ignore[no-untyped-def]
    scales, turn, steps, shared, GROUP: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Return (each block's sum over some steps, float32 [64, BLOCK_M], next turn). scales: pointers to each block's
    first."""
    _x_buffers, _weight_buffers, full, empty = shared
    MMA: gl.constexpr = _mma_layout(BLOCK_M)
    zeros = gl.zeros([_ROWS, BLOCK_M], gl.float32, MMA)
    sums, next_scales = (), ()
    for block in gl.static_range(BLOCKS):
        sums += (zeros,)
        next_scales += (gl.load(scales[block]),)
    for step in range(steps):
        stage = turn % STAGES
        scale, products = next_scales, ()
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        # Loaded one step ahead: too small for an asynchronous copy, and too slow to wait for.
        next_scales = _later_scales(scales, gl.minimum(step + 1, steps - 1), BLOCKS)
        for block in gl.static_range(BLOCKS):
            products += (_product(shared, stage, block, zeros, GROUP, BLOCKS, MMA),)
        new_sums = ()
        for block in gl.static_range(BLOCKS):
            product = warpgroup_mma_wait(BLOCKS - 1 - block, deps=[products[block]])
            if block == BLOCKS - 1:
                mbarrier.arrive(empty.index(stage), count=1)
            new_sums += (gl.fma(product, scale[block], sums[block]),)
        sums = new_sums
        turn += 1
    return sums, turn


@gluon.jit
def _later_scales(scales, step, BLOCKS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Each block's scale of a step."""
    loaded = ()
    for block in gl.static_range(BLOCKS):
        loaded += (gl.load(scales[block] + step),)
    return loaded


@gluon.jit
def _product(shared, stage, BLOCK: gl.constexpr, zeros, GROUP: gl.constexpr, BLOCKS: gl.constexpr, MMA: gl.constexpr):  # type: ignore[no-untyped-def]
    """Start a block's product with the tokens of a stage."""
    x_buffers, weight_buffers, _full, _empty = shared
    PAIRS: gl.constexpr = _pairs_layout()
    w = _decoded(weight_buffers.index(2 * BLOCKS * stage + BLOCKS * GROUP + BLOCK).load(PAIRS), MMA)
    x = x_buffers.index(stage).permute((1, 0))
    return warpgroup_mma(w, x, zeros, use_acc=False, is_async=True)


_EARLY = gl.constexpr(4)
"""Steps by which scales of rows are loaded ahead: 16 bytes of each row of tiles, of which one step in eight has to
wait for memory."""


@gluon.jit
def _multiply_four_bit(  # type: ignore[no-untyped-def]
    scales, turn, steps, shared, GROUP: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """`_multiply` of 4-bit integers. scales: pointers [64, 1] to those of each block's rows."""
    x_buffers, weight_buffers, full, empty = shared
    MMA: gl.constexpr = _mma_layout(BLOCK_M)
    WORDS: gl.constexpr = _words_layout()
    zeros = gl.zeros([_ROWS, BLOCK_M], gl.float32, MMA)
    sums, early = (), ()
    for _block in gl.static_range(BLOCKS):
        sums += (zeros,)
    for step in gl.static_range(_EARLY):
        for block in gl.static_range(BLOCKS):
            early += (gl.load(scales[block] + gl.minimum(step, steps - 1) * 8),)
    for step in range(steps):
        stage = turn % STAGES
        products, later = (), ()
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        for i in gl.static_range(BLOCKS, len(early)):
            later += (early[i],)
        x = x_buffers.index(stage).permute((1, 0))
        for block in gl.static_range(BLOCKS):
            words = weight_buffers.index(2 * BLOCKS * stage + BLOCKS * GROUP + block).load(WORDS)
            w = _four_bit_operand(words, MMA)
            products += (warpgroup_mma(w, x, zeros, use_acc=False, is_async=True),)
            later += (gl.load(scales[block] + gl.minimum(step + _EARLY, steps - 1) * 8),)
        new_sums = ()
        for block in gl.static_range(BLOCKS):
            product = warpgroup_mma_wait(BLOCKS - 1 - block, deps=[products[block]])
            if block == BLOCKS - 1:
                mbarrier.arrive(empty.index(stage), count=1)
            new_sums += (gl.fma(product, early[block].to(gl.float32), sums[block]),)
        sums, early = new_sums, later
        turn += 1
    return sums, turn


@gluon.jit
def _sum_parts(  # type: ignore[no-untyped-def]
    sums, tile, begins_tile, partial_ptr, arrivals_ptr, tiles, groups, GROUP: gl.constexpr, BLOCKS: gl.constexpr,
    BLOCK_M: gl.constexpr
):  # fmt: skip
    """Return (sums over all programs of a tile, whether this program is the last to arrive and has them).

    A program that ends a tile's first part comes long after the others, so it first looks whether all are there: then
    it need not store its own. partial_ptr: float32 [token blocks, programs, 2, 2 groups, BLOCKS, 64, BLOCK_M]: a
    program shares at most two tiles, one that it does not begin and one that it does not end. arrivals_ptr: int32
    [token blocks, tiles, 2 groups], all zero before; the last program resets it."""
    MMA: gl.constexpr = _mma_layout(BLOCK_M)
    SIZE: gl.constexpr = _ROWS * BLOCK_M
    TILE: gl.constexpr = 2 * BLOCKS * SIZE
    NUM: gl.constexpr = len(sums)
    program, units = gl.program_id(0), tiles * groups
    first, last = _program_of(tile * groups, units), _program_of(tile * groups + groups - 1, units)
    has_all = first == last
    if first != last:
        o = gl.expand_dims(gl.arange(0, _ROWS, layout=gl.SliceLayout(1, MMA)), 1)
        m = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, MMA)), 0)
        parts = partial_ptr + gl.program_id(1) * gl.num_programs(0) * (2 * TILE) + GROUP * (BLOCKS * SIZE)
        # In 64 bits, so that a lane's addresses differ by constants.
        parts += o.to(gl.int64) * BLOCK_M + m.to(gl.int64)
        arrivals = arrivals_ptr + (gl.program_id(1) * tiles + tile) * 2 + GROUP
        has_all = gl.atomic_add(arrivals, 0, sem="acq_rel", scope="gpu") == last - first
        if not has_all:
            for block in gl.static_range(NUM):
                gl.store(parts + (2 * program + begins_tile) * TILE + block * SIZE, sums[block])
            # The barrier orders every thread's store before the one thread's release.
            warp_barrier()
            has_all = gl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == last - first
        if has_all:
            gl.store(arrivals, 0)
            mine, sums = sums, ()
            for block in gl.static_range(NUM):
                total = mine[block]
                if first != program:
                    # .cg: L1 is not coherent with other SMs' stores.
                    total = gl.load(parts + (2 * first + 1) * TILE + block * SIZE, cache_modifier=".cg")
                for other in range(first + 1, last + 1):
                    part = mine[block]
                    if other != program:
                        part = gl.load(parts + 2 * other * TILE + block * SIZE, cache_modifier=".cg")
                    total += part
                sums += (total,)
    return sums, has_all


@gluon.jit
def _store_block(  # type: ignore[no-untyped-def]
    acc, out, out_stride, residual, following, first_row, num_tokens, num_outputs, BLOCK_M: gl.constexpr
):
    """Store 64 outputs of a block of tokens, with the residual added, and what the next norm needs of them.
    following: (gain, result times gain, sums of squares) or Nones."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    token = gl.program_id(1) * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT))
    n = gl.expand_dims(token, 0)
    o = first_row + gl.expand_dims(gl.arange(0, _ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    is_real = n < num_tokens
    if residual is not None:
        y = gl.convert_layout(acc, LAYOUT)
        y += gl.load(residual + n * num_outputs + o, mask=is_real, other=0.0).to(gl.float32)
        rounded = y.to(out.dtype.element_ty)
        gl.store(out + n * out_stride + o, rounded, mask=is_real)
        next_norm, next_gained, next_squares = following
        if next_norm is not None:
            y = rounded.to(gl.float32)
            gained = y * (1.0 + gl.load(next_norm + o).to(gl.float32))
            gl.store(next_gained + n * num_outputs + o, gained.to(out.dtype.element_ty), mask=is_real)
            to = next_squares + first_row // _ROWS * num_tokens + token
            gl.store(to, gl.sum(y * y, axis=0), mask=token < num_tokens)
    else:
        y = gl.convert_layout(acc.to(out.dtype.element_ty), LAYOUT)
        gl.store(out + n * out_stride + o, y, mask=is_real)


@gluon.jit
def _store_factors(factors, ahead, num_tokens, groups, PARTS: gl.constexpr, BLOCK_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """Store 1 / rms of each token of the block, from the sums of squares of PARTS parts at most, for `_scaled`. ahead:
    (sums of squares, parts, eps)."""
    squares, num_parts, eps = ahead
    LANES: gl.constexpr = min(32, BLOCK_M)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [4, 1], [1, 0])
    part = gl.expand_dims(gl.arange(0, PARTS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    n = gl.program_id(1) * BLOCK_M + gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT)), 0)
    is_real = (part < num_parts) & (n < num_tokens)
    total = gl.sum(gl.load(squares + part * num_tokens + n, mask=is_real, other=0.0), axis=0)
    factors.store(gl.rsqrt(total / (groups * _COLUMNS) + eps))
    warp_barrier()


@gluon.jit
def _scaled(sums, factors, BLOCK_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """The sums times each token's factor."""
    factor = gl.expand_dims(factors.load(gl.SliceLayout(0, _mma_layout(BLOCK_M))), 0)
    scaled = ()
    for block in gl.static_range(len(sums)):
        scaled += (sums[block] * factor,)
    return scaled


@gluon.jit
def _compute_tile(  # type: ignore[no-untyped-def]
    operands, norms, shared, unit, stop, turn, GROUP: gl.constexpr, BLOCK_ROWS: gl.constexpr, SWIGLU: gl.constexpr,
    BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Compute some steps of a tile, and store it where it is complete. Return the next turn."""
    out, out_stride, scales, residual, partial_ptr, arrivals_ptr, num_tokens, num_outputs, tiles, groups = operands
    tile = unit // groups
    column = unit - tile * groups
    scale_at = ()
    if BLOCK_ROWS == 1:
        o = gl.expand_dims(gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _mma_layout(BLOCK_M))), 1)
        for block in gl.static_range(BLOCKS):
            rows = _first_row(tile, num_outputs, GROUP, block, SWIGLU, BLOCKS) + o
            scale_at += (scales + (rows // 8 * groups + column) * 8 + rows % 8,)
        sums, turn = _multiply_four_bit(scale_at, turn, stop - unit, shared, GROUP, BLOCKS, BLOCK_M, STAGES)
    else:
        for block in gl.static_range(BLOCKS):
            row = _first_row(tile, num_outputs, GROUP, block, SWIGLU, BLOCKS)
            scale_at += (scales + row // BLOCK_ROWS * groups + column,)
        sums, turn = _multiply(scale_at, turn, stop - unit, shared, GROUP, BLOCKS, BLOCK_M, STAGES)
    begins_tile = (column == 0).to(gl.int32)
    sums, has_all = _sum_parts(
        sums, tile, begins_tile, partial_ptr, arrivals_ptr, tiles, groups, GROUP, BLOCKS, BLOCK_M
    )
    if has_all:
        ahead, factors, following = norms
        if ahead[0] is not None:
            sums = _scaled(sums, factors.index(GROUP), BLOCK_M)
        if SWIGLU:
            row = _first_row(tile, num_outputs, GROUP, 0, SWIGLU, BLOCKS)
            y = sums[0] / (1.0 + gl.exp(-sums[0])) * sums[1]
            _store_block(y, out, out_stride, None, following, row, num_tokens, num_outputs, BLOCK_M)
        else:
            for block in gl.static_range(BLOCKS):
                row = _first_row(tile, num_outputs, GROUP, block, SWIGLU, BLOCKS)
                _store_block(sums[block], out, out_stride, residual, following, row, num_tokens, num_outputs, BLOCK_M)
    return turn


@gluon.jit
def _compute(  # type: ignore[no-untyped-def]
    operands, norms, shared, GROUP: gl.constexpr, PARTS: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    SWIGLU: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """One of the two groups of warps that multiply."""
    tiles, groups = operands[8], operands[9]
    units = tiles * groups
    unit, end = _share_begin(gl.program_id(0), units), _share_begin(gl.program_id(0) + 1, units)
    turn = unit * 0
    await_previous(PDL)
    if norms[0][0] is not None:
        _store_factors(norms[1].index(GROUP), norms[0], operands[6], groups, PARTS, BLOCK_M)
    while unit < end:
        stop = gl.minimum(end, (unit // groups + 1) * groups)
        turn = _compute_tile(
            operands, norms, shared, unit, stop, turn, GROUP, BLOCK_ROWS, SWIGLU, BLOCKS, BLOCK_M, STAGES
        )
        unit = stop


# Triton 3.6 fails to compile a constant in place of `groups`, which a specialized argument of 1 is.
@gluon.jit(do_not_specialize=["num_parts", "num_tokens", "tiles", "groups", "release"])
def product_kernel(  # type: ignore[no-untyped-def]
    out, out_stride, x, weights, scales, residual, squares, num_parts, eps, next_norm, next_gained, next_squares,
    partial_ptr, arrivals_ptr, num_tokens, num_outputs, tiles, groups, release, PARTS: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, SWIGLU: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, FETCH_REGISTERS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """squares, num_parts, eps: what a norm before the product has left, of which x has the gain; next_norm,
    next_gained, next_squares: to compute of the next one (norm_ahead.py); None: there is none. num_outputs: of SwiGLU,
    those of gate alone. tiles: of rows of W. groups: steps of a tile. release: steps before the last one is asked for,
    at which the next kernel may start. PARTS: at least num_parts. BLOCK_ROWS: of a scale; 1: 4-bit integers in tiles,
    of which weights are blocks of [O / 8, K / 32, 32] words. BLOCKS: of rows, of a group of warps."""
    x_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, _COLUMNS], x.layout)
    if BLOCK_ROWS == 1:
        weight_buffers = gl.allocate_shared_memory(gl.int32, [2 * BLOCKS * STAGES, 8, 4, 32], weights.layout)
    else:
        weight_buffers = gl.allocate_shared_memory(
            gl.uint16, [2 * BLOCKS * STAGES, _ROWS, _COLUMNS // 2], weights.layout
        )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    shared = (x_buffers, weight_buffers, full, empty)
    operands = (out, out_stride, scales, residual, partial_ptr, arrivals_ptr, num_tokens, num_outputs, tiles, groups)
    factors = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    norms = ((squares, num_parts, eps), factors, (next_norm, next_gained, next_squares))
    fetched = (x, weights, num_outputs, tiles, groups, release)
    gl.warp_specialize(
        [
            (_compute, (operands, norms, shared, 0, PARTS, BLOCK_ROWS, SWIGLU, BLOCKS, BLOCK_M, STAGES, PDL)),
            (_compute, (operands, norms, shared, 1, PARTS, BLOCK_ROWS, SWIGLU, BLOCKS, BLOCK_M, STAGES, PDL)),
            (_fetch, (fetched, shared, SWIGLU, BLOCKS, BLOCK_M, STAGES, BLOCK_ROWS == 1, PDL)),
        ],
        [4, 1],
        [REGISTERS, FETCH_REGISTERS],
    )
