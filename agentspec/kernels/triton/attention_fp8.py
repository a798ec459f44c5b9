"""Attention of a decode window over pages in FP8, in Gluon: the second launch of attention.py, for such pages.

Codes go from memory straight to the registers of the lanes that need them as operands of matrix instructions, and are
decoded there: no key or value passes through shared memory. For that the products are turned, keys [S, D] times
queries [D, M] and values [D, S] times weights [S, M], and a lane decodes the codes of two keys for one dimension as the
pair that the second product takes. Triton's own compiler brings values to their lanes byte by byte, which takes twice
as long as the memory does.

In a product the dimensions of a head may be in any order: `_in_order_of_lanes` has that of the first one, for keys and
queries alike, `_value_operand` and `_store_sums` that of the second one's rows.

Queries come ready from attention._prepare, which also stores the window's keys and values. This launch starts beside
it: the first keys and values of a program are on their way before it has ended, unless they are the window's own.

Units, tasks, shares and partials are attention.py's; so are the shape letters. W: 32-bit words of a head, four codes
each.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from agentspec import types
from agentspec.kernels.triton.gluon_names import await_previous, release_next
from agentspec.kernels.triton.shares import share_of

NUM_WARPS = 4
PROGRAMS_PER_SM = 2
UNIT = 64
"""Keys of a unit, and of a page."""
HEAD_DIM = 256
MOST_ROWS = 32
"""Most query rows of a task: more would leave no registers for the keys that are on their way."""

_WARPS = gl.constexpr(NUM_WARPS)
_S = gl.constexpr(UNIT)
_D = gl.constexpr(HEAD_DIM)
_W = gl.constexpr(HEAD_DIM // 4)
_SCRATCH_PAGE = tl.constexpr(types.SCRATCH_PAGE)
_share_of = gluon.jit(share_of.fn)


@gluon.constexpr_function
def _mma_layout() -> gl.NVMMADistributedLayout:
    """Of both products: warps divide their rows."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[_WARPS, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def _operand_layout(index: int, columns: int) -> gl.DotOperandLayout:
    """columns: neighbours along the summed axis that a lane has."""
    return gl.DotOperandLayout(index, _mma_layout(), columns)


@gluon.constexpr_function
def _key_words() -> gl.DistributedLinearLayout:
    """[S, W]. A lane has four neighbouring words of a key, and four lanes share it."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [_S, _W],
    )


@gluon.constexpr_function
def _value_words(*, in_pairs: bool) -> gl.DistributedLinearLayout:
    """[S, W]. A lane has two neighbouring words of pairs of keys. in_pairs: its registers are in the order of keys
    first; else in the order of memory."""
    word, key = [0, 1], [1, 0]
    first = [key, word] if in_pairs else [word, key]
    return gl.DistributedLinearLayout(
        [*first, [8, 0], [16, 0], [32, 0]],
        [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        [[0, 16], [0, 32]],
        [],
        [_S, _W],
    )


@gluon.constexpr_function
def _sums_layout(block_m: int) -> gl.DistributedLinearLayout:
    """[D, block_m], as the second product leaves them; registers in the order of memory."""
    registers = [[1, 0], [2, 0], [4, 0], [0, 1]]
    column = 8
    while column < block_m:
        registers.append([0, column])
        column *= 2
    lanes = [[0, 2], [0, 4], [8, 0], [16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[64, 0], [128, 0]], [], [_D, block_m])


def _decode(outputs: list[tuple[str, str, int]]) -> str:
    """PTX that decodes pairs of 8-bit floats, as linear_tiles.decode_e4m3 does. Of each pair: the registers that its
    codes come from, and which bytes of them: prmt's selector, with the sign of each byte after it."""
    lines = ["{ .reg .b32 rebase, zero;", "mov.b32 rebase, 0x7B807B80;", "mov.b32 zero, 0x80008000;"]
    for i, (first, second, selector) in enumerate(outputs):
        lines += [
            f"prmt.b32 ${i}, {first}, {second}, {selector:#x};",
            f"shl.b32 ${i}, ${i}, 4;",
            f"and.b32 ${i}, ${i}, 0x87F087F0;",
            f"fma.rn.bf16x2 ${i}, ${i}, rebase, zero;",
        ]
    return "\n".join(lines) + "}"


_WORD_BY_WORD = gl.constexpr(_decode([(word, "0", half) for word in ("$4", "$5") for half in (0x9180, 0xB3A2)]))
_BYTE_BY_BYTE = gl.constexpr(_decode([("$4", "$5", 0xC480 + 0x1111 * byte) for byte in range(4)]))


@gluon.jit
def attend_fp8(  # type: ignore[no-untyped-def]
    queries_BGMD, words, exponent_P2GS, page_table_BP, num_slots, num_pages, start_B, count_B, scale, sums_CMD,
    scores_2CM, T: gl.constexpr, G: gl.constexpr, SHARES: gl.constexpr, BLOCK_B: gl.constexpr, BLOCK_M: gl.constexpr,
    ROW_BLOCKS: gl.constexpr, FIRST: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """words: the pool's, [P, 2, S, G, W]. queries_BGMD: of all row blocks of a task's head; they and the window's keys
    are the previous kernel's results, all else that is read is of earlier ones."""
    release_next(PDL)
    M: gl.constexpr = gl.SliceLayout(0, _mma_layout())
    b = gl.arange(0, BLOCK_B, layout=gl.BlockedLayout([1], [32], [_WARPS], [0]))
    units_B, ends_B = _units(
        b, page_table_BP, num_slots, num_pages, start_B, count_B, T, G, SHARES, BLOCK_M, ROW_BLOCKS
    )
    total = gl.max(ends_B, axis=0)
    program = gl.program_id(0)
    position, end = _share_of(program, gl.minimum(gl.num_programs(0), total), total)
    dtype: gl.constexpr = queries_BGMD.dtype.element_ty
    shared_q = gl.allocate_shared_memory(dtype, [BLOCK_M, _D], gl.SwizzledSharedLayout(32, 1, 2, [1, 0]))
    shared_p = gl.allocate_shared_memory(dtype, [_S, BLOCK_M], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
    while position < end:
        slot = gl.sum(((ends_B <= position) & (b < num_slots)).to(gl.int32), axis=0)
        num_units = gl.sum(gl.where(b == slot, units_B, 0), axis=0)
        in_slot = position - gl.max(gl.where(b < slot, ends_B, 0), axis=0)
        count, num_blocks = T, ROW_BLOCKS
        if count_B is not None:
            count = gl.load(count_B + slot).to(gl.int32)
            num_blocks = gl.cdiv(count * SHARES, BLOCK_M)
        task, first_unit = in_slot // num_units, in_slot % num_units
        g, row_block = task // num_blocks, task % num_blocks
        run = gl.minimum(num_units - first_unit, end - position)
        start = gl.load(start_B + slot).to(gl.int32)
        first_row = row_block * BLOCK_M
        queries = queries_BGMD + ((slot.to(gl.int64) * G + g) * ROW_BLOCKS + row_block) * (BLOCK_M * _D)
        m = gl.arange(0, BLOCK_M, layout=M)
        column = (first_row + m) // SHARES
        largest, exponentials, acc = _attend_run(
            queries, shared_q, shared_p, start, start + column, words + g * _W, exponent_P2GS + g * _S,
            page_table_BP + slot.to(gl.int64) * num_pages, first_unit, run, start + count, scale, G, BLOCK_M, FIRST,
            PDL,
        )  # fmt: skip
        partial = (program + (slot * G + g) * ROW_BLOCKS + row_block).to(gl.int64) * BLOCK_M
        num_partials = gl.num_programs(0) + num_slots * (G * ROW_BLOCKS)
        gl.store(scores_2CM + partial + m, largest, mask=column < count)
        gl.store(scores_2CM + num_partials * BLOCK_M + partial + m, exponentials, mask=column < count)
        _store_sums(sums_CMD + partial * _D, acc, first_row, count, SHARES, BLOCK_M)
        position += run
    # Programs without a share, too.
    await_previous(PDL)


@gluon.jit
def _sum(a, b):  # type: ignore[no-untyped-def]
    return a + b


@gluon.jit
def _units(  # type: ignore[no-untyped-def]
    b, page_table_BP, num_slots, num_pages, start_B, count_B, T: gl.constexpr, G: gl.constexpr, SHARES: gl.constexpr,
    BLOCK_M: gl.constexpr, ROW_BLOCKS: gl.constexpr
):  # fmt: skip
    """(units of each task of every slot, where those of all its tasks end in the list), int32 [BLOCK_B]: see
    attention._units."""
    first_page = gl.load(page_table_BP + b.to(gl.int64) * num_pages, mask=b < num_slots, other=_SCRATCH_PAGE)
    length = gl.load(start_B + b, mask=b < num_slots, other=0).to(gl.int32)
    count, num_blocks = T, ROW_BLOCKS
    if count_B is not None:
        count = gl.load(count_B + b, mask=b < num_slots, other=0).to(gl.int32)
        num_blocks = (count * SHARES + (BLOCK_M - 1)) // BLOCK_M
    units = gl.where(first_page != _SCRATCH_PAGE, (length + count + (_S - 1)) // _S, 0)
    return units, gl.associative_scan(units * G * num_blocks, 0, _sum)


@gluon.jit
def _attend_run(  # type: ignore[no-untyped-def]
    queries_MD, shared_q, shared_p, start, query_position_M, words, exponents, pages_P, first_unit, num_units, length,
    scale, G: gl.constexpr, BLOCK_M: gl.constexpr, FIRST: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """As attention._attend_run, but the weighted values are [D, BLOCK_M], rows in the order of `_value_operand`. words,
    exponents: those of the head's keys in page 0.

    Codes of places without a key decode to finite numbers, whose weights are 0."""
    MMA: gl.constexpr = _mma_layout()
    PAGE_WORDS: gl.constexpr = 2 * _S * G * _W
    key_at = _places(_key_words(), G)
    value_at = _places(_value_words(in_pairs=False), G) + _S * G * _W
    s = gl.arange(0, _S, layout=gl.SliceLayout(1, MMA))
    end = first_unit + num_units
    page = gl.load(pages_P + first_unit).to(gl.int64)
    keys = gl.load(words + page * PAGE_WORDS + key_at, cache_modifier=".cg")
    values = gl.load(words + page * PAGE_WORDS + value_at, cache_modifier=".cg")
    key_exponent, value_exponent = _load_exponents(exponents, page, s, G)
    next_page = gl.load(pages_P + gl.minimum(first_unit + 1, end - 1)).to(gl.int64)
    await_previous(PDL)
    if (first_unit + 1) * _S > start:
        keys = gl.load(words + page * PAGE_WORDS + key_at, cache_modifier=".cg")
        values = gl.load(words + page * PAGE_WORDS + value_at, cache_modifier=".cg")
        key_exponent, value_exponent = _load_exponents(exponents, page, s, G)
    _share_queries(shared_q, queries_MD, BLOCK_M)
    largest = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(0, MMA))
    exponentials = gl.zeros([_S, BLOCK_M], gl.float32, MMA)
    acc = gl.zeros([_D, BLOCK_M], gl.float32, MMA)
    for unit in range(first_unit, end):
        page = next_page
        has_next = unit + 1 < end
        next_page = gl.load(pages_P + gl.minimum(unit + 2, end - 1)).to(gl.int64)
        position = unit * _S + s
        is_key = (position >= FIRST) & (position < length)
        q = shared_q.permute((1, 0)).load(_operand_layout(1, 8))
        scores = mma_v2(_key_operand(keys), q, gl.zeros([_S, BLOCK_M], gl.float32, MMA))
        keys = gl.load(words + page * PAGE_WORDS + key_at, mask=_all_if(key_at, has_next), cache_modifier=".cg")
        scores *= gl.expand_dims(_power(key_exponent, is_key) * scale, 1)
        value_power = _power(value_exponent, is_key)
        key_exponent, value_exponent = _load_exponents(exponents, page, s, G)
        is_visible = gl.expand_dims(position, 1) <= gl.expand_dims(query_position_M, 0)
        scores = gl.where(is_visible & gl.expand_dims(is_key, 1), scores, float("-inf"))
        new_largest = gl.maximum(largest, gl.max(scores, axis=0))
        base = gl.where(new_largest == float("-inf"), 0.0, new_largest)
        shrink = gl.exp2(largest - base)
        weight = gl.exp2(scores - gl.expand_dims(base, 0))
        exponentials = exponentials * gl.expand_dims(shrink, 0) + weight
        shared_p.store((weight * gl.expand_dims(value_power, 1)).to(shared_p.dtype))
        acc *= gl.expand_dims(shrink, 0)
        acc = mma_v2(_value_operand(values), shared_p.load(_operand_layout(1, 2)), acc)
        values = gl.load(words + page * PAGE_WORDS + value_at, mask=_all_if(value_at, has_next), cache_modifier=".cg")
        largest = new_largest
    return largest, gl.sum(exponentials, axis=0), acc


@gluon.jit
def _places(LAYOUT: gl.constexpr, G: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a unit's words [S, W] of one head, from its first one."""
    s = gl.expand_dims(gl.arange(0, _S, layout=gl.SliceLayout(1, LAYOUT)), 1)
    w = gl.expand_dims(gl.arange(0, _W, layout=gl.SliceLayout(0, LAYOUT)), 0)
    return s * (G * _W) + w


@gluon.jit
def _all_if(place, condition):  # type: ignore[no-untyped-def]
    """A mask of places: all or none of them."""
    return (place >= 0) & condition


@gluon.jit
def _load_exponents(exponents, page, s, G: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of a page's keys and values."""
    at = exponents + page * (2 * G * _S) + s
    return gl.load(at, cache_modifier=".cg"), gl.load(at + G * _S, cache_modifier=".cg")


@gluon.jit
def _power(exponent_S, is_key_S):  # type: ignore[no-untyped-def]
    """fp8_pages.multipliers."""
    exponent = gl.where(is_key_S, exponent_S.to(gl.int32), 0)
    return ((exponent + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _share_queries(shared_q, queries_MD, BLOCK_M: gl.constexpr):  # type: ignore[no-untyped-def]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_WARPS, 1], [1, 0])
    m = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LAYOUT)), 1)
    d = gl.expand_dims(gl.arange(0, _D, layout=gl.SliceLayout(0, LAYOUT)), 0)
    shared_q.store(_in_order_of_lanes(gl.load(queries_MD + (m * _D + d)), BLOCK_M))


@gluon.jit
def _in_order_of_lanes(x, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS, D] with dimensions in the order in which the first product sums them: a lane has 16 neighbours of each 64
    (`_key_words`), of which an operand takes eight at a time."""
    return x.reshape((ROWS, _D // 64, 4, 2, 8)).permute((0, 1, 3, 2, 4)).reshape((ROWS, _D))


@gluon.jit
def _decoded(words, PTX: gl.constexpr):  # type: ignore[no-untyped-def]
    """Four tensors like words [..., 2]: two registers' words give a pair of each."""
    return gl.inline_asm_elementwise(
        PTX,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _key_operand(words):  # type: ignore[no-untyped-def]
    """Words [S, W] as the operand [S, D]. Moves nothing."""
    a, b, c, d = _decoded(words, _WORD_BY_WORD)
    # key, two words, half of a pair, word of the two, pair of the word
    k = gl.join(gl.join(a, c), gl.join(b, d)).reshape((_S, _W // 2, 2, 2, 2))
    k = _in_order_of_lanes(k.permute((0, 1, 3, 4, 2)).reshape((_S, _D)), _S)
    return gl.convert_layout(k, _operand_layout(0, 8), assert_trivial=True)


@gluon.jit
def _value_operand(words):  # type: ignore[no-untyped-def]
    """Words [S, W] as the operand [D, S], with dimension 64 i + 8 j + k in row 64 (k / 2) + 16 i + 8 (k % 2) + j. Moves
    nothing."""
    a, b, c, d = _decoded(gl.convert_layout(words, _value_words(in_pairs=True)), _BYTE_BY_BYTE)
    v = gl.join(gl.join(a, c), gl.join(b, d)).reshape((_S, _D // 64, 8, 4, 2))
    v = v.permute((3, 1, 4, 2, 0)).reshape((_D, _S))
    return gl.convert_layout(v, _operand_layout(0, 2), assert_trivial=True)


@gluon.jit
def _store_sums(sums_MD, acc, first_row, count, SHARES: gl.constexpr, BLOCK_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """acc: rows in the order of `_value_operand`."""
    y = acc.reshape((4, _D // 64, 2, 8, BLOCK_M)).permute((1, 3, 0, 2, 4)).reshape((_D, BLOCK_M))
    LAYOUT: gl.constexpr = _sums_layout(BLOCK_M)
    y = gl.convert_layout(y, LAYOUT)
    d = gl.expand_dims(gl.arange(0, _D, layout=gl.SliceLayout(1, LAYOUT)), 1)
    m = gl.expand_dims(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(sums_MD + (m * _D + d), y, mask=((first_row + m) // SHARES < count) & (d >= 0))
