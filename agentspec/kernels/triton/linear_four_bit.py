"""The product of few tokens with 4-bit weights in tiles, in Gluon: one launch, with a SwiGLU or a residual after it.

A lane loads exactly the codes that it needs as operands of its matrix instructions, 16 bytes at a time
(kernels/four_bit_tiles.py has the order), decodes them in its registers and multiplies them at once. So no weight
passes through shared memory, and the loop has some two instructions a weight (three for floats). Triton's own compiler
needs more than four, which take longer than the memory does.

Weights are stationary, as in linear_tiles.py: a program owns BLOCK_O rows and computes acc[o, m] = sum_k W[o, k] x[m,
k]. K is divided between SPLIT programs, and in a program between SHARES groups of warps, whose sums are added at the
end. Each keeps AHEAD groups of 128 columns on the way in registers.

int4: u - zero is exact in bfloat16; the sum of each group is multiplied by its scale in float32. e2m1: code times scale
is exact in bfloat16; the sum of a row is multiplied by its multiplier. Codes come as multiples of 2^-126 and scales of
2^118, so that neither needs an addition to its exponent; the multiplier makes up for the rest.

Shape letters as in linear_layers.py.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from agentspec.kernels.triton.gluon_names import await_previous, release_next, warp_barrier

_WORDS = gl.constexpr(128)
"""32-bit words of a tile."""


def _int4_word(first: int, word: int, offset: int | None, scale: int | None = None) -> str:
    """PTX that decodes a word into four pairs: 128 + u by its bits, then minus 128 + the zero point, which is 8 or in
    the register `offset`; then times the scale, rounded, if there is one."""
    minus = "minus" if offset is None else f"${offset}"
    lines = []
    for pair in range(4):
        source = f"${word}"
        if pair:
            lines.append(f"shr.u32 s, ${word}, {4 * pair};")
            source = "s"
        lines.append(f"lop3.b32 ${first + pair}, {source}, 0x000F000F, 0x43004300, 0xEA;")
        lines.append(f"fma.rn.bf16x2 ${first + pair}, ${first + pair}, one, {minus};")
        if scale is not None:
            lines.append(f"fma.rn.bf16x2 ${first + pair}, ${first + pair}, ${scale}, zero;")
    return "\n".join(lines)


def _e2m1_word(first: int, word: int, scale: int) -> str:
    """PTX that decodes a word into four pairs: the sign to bit 15, the rest to bits 8 to 6, which is the value times
    2^-126, then times the scale times 2^118. The codes' bits are where four_bit_tiles.E2M1_BITS says."""
    a, b, c, d = (f"${first + pair}" for pair in range(4))
    return f"""and.b32 {a}, ${word}, 0x81C081C0;
    shl.b32 s, ${word}, 3; and.b32 {b}, s, 0x81C081C0;
    shl.b32 s, ${word}, 6; and.b32 {c}, s, 0x81C081C0;
    shl.b32 s, ${word}, 1; and.b32 d, s, 0x80008000;
    shr.u32 s, ${word}, 3; lop3.b32 d, s, 0x01800180, d, 0xEA;
    shr.u32 s, ${word}, 7; lop3.b32 {d}, s, 0x00400040, d, 0xEA;
    """ + "\n".join(f"fma.rn.bf16x2 {x}, {x}, ${scale}, zero;" for x in (a, b, c, d))


_HEAD = """{ .reg .b32 s, d, one, minus, zero;
    mov.b32 one, 0x3F803F80;
    mov.b32 minus, 0xC308C308;
    mov.b32 zero, 0x80008000;
    """
_INT4 = gl.constexpr(_HEAD + _int4_word(0, 8, None) + _int4_word(4, 9, None) + "}")
_INT4_ZEROS = gl.constexpr(_HEAD + _int4_word(0, 8, 10) + _int4_word(4, 9, 11) + "}")
INT4_SCALED = gl.constexpr(_HEAD + _int4_word(0, 8, None, 10) + _int4_word(4, 9, None, 11) + "}")
INT4_ZEROS_SCALED = gl.constexpr(_HEAD + _int4_word(0, 8, 12, 10) + _int4_word(4, 9, 13, 11) + "}")
E5M3 = gl.constexpr(
    """{ .reg .b32 even, odd; .reg .b16 a, b, c, d;
    and.b32 even, $4, 0x00FF00FF; shr.u32 odd, $4, 8; and.b32 odd, odd, 0x00FF00FF;
    mad.lo.u32 even, even, 16, 0x76007600; mad.lo.u32 odd, odd, 16, 0x76007600;
    mov.b32 {a, c}, even; mov.b32 {b, d}, odd;
    mov.b32 $0, {a, a}; mov.b32 $1, {b, b}; mov.b32 $2, {c, c}; mov.b32 $3, {d, d}; }"""
)
"""PTX that makes two bfloat16 of each of a word's four scales: the scale times 2^118."""
E2M1 = gl.constexpr(_HEAD + _e2m1_word(0, 8, 10) + _e2m1_word(4, 9, 11) + "}")


@gluon.constexpr_function
def mma_layout(num_shares: int, num_warps: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[num_shares, num_warps // num_shares, 1], instr_shape=[1, 16, 8]
    )


@gluon.constexpr_function
def pairs_layout(block_m: int, num_shares: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Pairs of activations [share of K, 64, token]: what each lane needs of the other operand."""
    registers, token = [[0, 1, 0], [0, 2, 0], [0, 16, 0], [0, 32, 0]], 8
    while token < block_m:
        registers.append([0, 0, token])
        token *= 2
    of_rows = (num_warps // num_shares).bit_length() - 1  # bits of a warp that say which rows of the weight it has
    warps, share = [[0, 0, 0]] * of_rows, 1
    while share < num_shares:
        warps.append([share, 0, 0])
        share *= 2
    lanes = [[0, 4, 0], [0, 8, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [num_shares, 64, block_m])


@gluon.constexpr_function
def takes_pairs(format: str, block_m: int, split: int) -> bool:
    """Whether activations are loaded as words of two, for then each stays in one register from its load to its product.
    Where the compiler moves nothing anyway, single ones take fewer registers."""
    return sums_of(format) == 1 and (block_m > 8 or (format != "e2m1" and split == 1))


@gluon.constexpr_function
def inputs_layout(in_pairs: bool, block_m: int, num_shares: int, num_warps: int) -> gl.DistributedLayout:
    """Of activations as they are loaded."""
    if in_pairs:
        return pairs_layout(block_m, num_shares, num_warps)
    return gl.DotOperandLayout(1, mma_layout(num_shares, num_warps), 8)


@gluon.constexpr_function
def tokens_layout(format: str, block_m: int, split: int, num_shares: int, num_warps: int) -> gl.SliceLayout:
    """Of a value for each token, as `inputs_layout` has them."""
    return axis_layout(inputs_layout(takes_pairs(format, block_m, split), block_m, num_shares, num_warps), 2, 3)


@gluon.constexpr_function
def words_layout(num_shares: int, num_blocks: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Words [share of K, block of 8 rows, row 8, lane of four 4, word 4]: what each lane needs of an operand."""
    registers = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 2], [0, 1, 0, 0, 0]]
    warps, block = [], 2
    while block < 2 * num_warps // num_shares:
        warps.append([0, block, 0, 0, 0])
        block *= 2
    while block < num_blocks:
        registers.append([0, block, 0, 0, 0])
        block *= 2
    share = 1
    while share < num_shares:
        warps.append([share, 0, 0, 0, 0])
        share *= 2
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 0, 1, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [num_shares, num_blocks, 8, 4, 4])


@gluon.constexpr_function
def axis_layout(layout: gl.DistributedLayout, axis: int, rank: int) -> gl.SliceLayout:
    """The layout of one axis."""
    for other in range(rank - 1, -1, -1):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def index_along(SIZE: gl.constexpr, AXIS: gl.constexpr, RANK: gl.constexpr, LAYOUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """0 to SIZE - 1 along an axis of LAYOUT, 1 along the others."""
    index = gl.arange(0, SIZE, layout=axis_layout(LAYOUT, AXIS, RANK))
    for axis in gl.static_range(RANK):
        if axis != AXIS:
            index = gl.expand_dims(index, axis)
    return index


@gluon.jit
def _operand(parts, SHARES: gl.constexpr, NUM_BLOCKS: gl.constexpr, MMA: gl.constexpr):  # type: ignore[no-untyped-def]
    """Eight tensors [shares, blocks, 8, 4, 4], four pairs of each of two words, as the operand [shares, rows, 128],
    whose columns are in an order in which both halves of a register come from the same word: `_paired` has it. Moves
    nothing."""
    w = gl.join(
        gl.join(gl.join(parts[0], parts[4]), gl.join(parts[2], parts[6])),
        gl.join(gl.join(parts[1], parts[5]), gl.join(parts[3], parts[7])),
    )
    # share, rows, lane of four, two words, half of a register, word of two, pair's bits 1 and 0
    w = w.reshape((SHARES, NUM_BLOCKS * 8, 4, 2, 2, 2, 2, 2))
    w = w.permute((0, 1, 3, 7, 2, 5, 6, 4))
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    return gl.convert_layout(w.reshape((SHARES, NUM_BLOCKS * 8, 128)), LAYOUT, assert_trivial=True)


@gluon.jit
def _operands_of_words(parts, SHARES: gl.constexpr, NUM_BLOCKS: gl.constexpr, MMA: gl.constexpr):  # type: ignore[no-untyped-def]
    """`_operand` as one operand [shares, rows, 32] for each word of a lane, which has a group's columns."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    operands = ()
    for odd in gl.static_range(2):
        w = gl.join(gl.join(parts[4 * odd], parts[4 * odd + 2]), gl.join(parts[4 * odd + 1], parts[4 * odd + 3]))
        # share, rows, lane of four, two words, half of a register, pair's bits 1 and 0
        w = w.reshape((SHARES, NUM_BLOCKS * 8, 4, 2, 2, 2, 2)).permute((0, 1, 2, 5, 6, 4, 3))
        first, second = gl.split(w)
        operands += (
            gl.convert_layout(first.reshape((SHARES, NUM_BLOCKS * 8, 32)), LAYOUT, assert_trivial=True),
            gl.convert_layout(second.reshape((SHARES, NUM_BLOCKS * 8, 32)), LAYOUT, assert_trivial=True),
        )
    return operands[0], operands[2], operands[1], operands[3]  # type: ignore[misc]


@gluon.jit
def _decoded(words, scales, zeros, FORMAT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Decode words [..., 4]: eight tensors [..., 2 x 2]. The first four have the pairs of words 0 and 2, the others
    those of words 1 and 3; an element of the last axis is a word of the two and a half of its pair."""
    if FORMAT == "e2m1":
        a, b, c, d = gl.inline_asm_elementwise(
            E5M3, "=r,=r,=r,=r,r", [scales], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
        )
        pair = gl.join(gl.join(a, b), gl.join(c, d)).permute((0, 1, 2, 3, 4, 6, 5)).reshape(words.shape)
        pair = gl.convert_layout(pair, layout_of(words), assert_trivial=True)
    elif has_zeros(FORMAT):
        # Two bfloat16: -(128 + zero). The constant is 0xC300C300 as a signed number.
        pair = zeros.to(gl.int32) * 0x00010001 - 0x3CFF3D00
    else:
        pair = words  # not used
    return gl.inline_asm_elementwise(
        E2M1 if FORMAT == "e2m1" else _INT4_ZEROS if has_zeros(FORMAT) else _INT4,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
        [words, pair],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.constexpr_function
def _bulk_prefetch(num_bytes: int) -> str:
    return (
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; "
        f"@p cp.async.bulk.prefetch.L2.global [$1], {num_bytes}; mov.u32 $0, 0; }}"
    )


@gluon.jit
def _prefetch(addresses, wanted, BYTES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for BYTES at each of the wanted addresses to be in L2."""
    gl.inline_asm_elementwise(
        _bulk_prefetch(BYTES), "=r,l,r", [addresses, wanted], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def four_bit_kernel(  # type: ignore[no-untyped-def]
    out, out_stride, x, x_stride, words, scales, zeros, multipliers, residual, partial, arrivals, num_tokens,
    num_outputs, GROUPS: gl.constexpr, SPLIT: gl.constexpr, FORMAT: gl.constexpr, SWIGLU: gl.constexpr,
    BLOCK_O: gl.constexpr, BLOCK_M: gl.constexpr, AHEAD: gl.constexpr, SHARES: gl.constexpr, FAR: gl.constexpr,
    WARPS: gl.constexpr, PDL: gl.constexpr
):  # fmt: skip
    """x_stride: in pairs of activations. num_outputs: of SwiGLU, those of gate alone. GROUPS: of 128 columns, of a row.
    FORMAT: FourBitForm.format. A program of SwiGLU has BLOCK_O / 2 rows of gate and the same of up, eight in turn: then
    a lane has both. FAR: groups that each share asks for to be in L2 before it awaits the previous kernel, beside those
    that it loads."""
    release_next(PDL)
    NUM_BLOCKS: gl.constexpr = BLOCK_O // 8
    tile, part = gl.program_id(0) // SPLIT, gl.program_id(0) % SPLIT
    if FAR > 0:
        prefetch_shares(words, tile, part, num_outputs, GROUPS, SPLIT, SWIGLU, NUM_BLOCKS, AHEAD, SHARES, FAR, WARPS)
    m = gl.program_id(1) * BLOCK_M + gl.arange(0, BLOCK_M, layout=tokens_layout(FORMAT, BLOCK_M, SPLIT, SHARES, WARPS))
    acc_OM = walk(
        x, m * x_stride, m < num_tokens, words, scales, zeros, multipliers, tile, part, num_outputs, GROUPS, SPLIT,
        FORMAT, SWIGLU, NUM_BLOCKS, BLOCK_M, AHEAD, SHARES, WARPS, False, True, PDL,
    )  # fmt: skip
    FLAT: gl.constexpr = gl.SliceLayout(0, mma_layout(SHARES, WARPS))
    if SPLIT > 1:
        unit = gl.program_id(1) * (gl.num_programs(0) // SPLIT) + tile
        place = index_along(BLOCK_O, 0, 2, FLAT) * BLOCK_M + index_along(BLOCK_M, 1, 2, FLAT)
        place = partial + unit * (SPLIT * BLOCK_O * BLOCK_M) + place
        gl.store(place + part * (BLOCK_O * BLOCK_M), acc_OM)
        # The barrier orders every thread's store before the one thread's release.
        warp_barrier()
        is_last = gl.atomic_add(arrivals + unit, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if is_last:
            # In order, whichever program adds them. L1 is not coherent with other multiprocessors' stores.
            acc_OM = gl.zeros([BLOCK_O, BLOCK_M], gl.float32, FLAT)
            for other in gl.static_range(SPLIT):
                acc_OM += gl.load(place + other * (BLOCK_O * BLOCK_M), cache_modifier=".cg")
            gl.store(arrivals + unit, 0)
            _finish(acc_OM, out, out_stride, residual, tile, num_tokens, num_outputs, SWIGLU, BLOCK_O, BLOCK_M)
    else:
        _finish(acc_OM, out, out_stride, residual, tile, num_tokens, num_outputs, SWIGLU, BLOCK_O, BLOCK_M)


@gluon.jit
def prefetch_shares(  # type: ignore[no-untyped-def]
    words, tile, part, num_outputs, GROUPS: gl.constexpr, SPLIT: gl.constexpr, SWIGLU: gl.constexpr,
    NUM_BLOCKS: gl.constexpr, AHEAD: gl.constexpr, SHARES: gl.constexpr, FAR: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Ask for FAR groups of each share and block of rows, behind those that are loaded first."""
    i = gl.arange(0, 32 * WARPS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    block = block_of_tile(tile, i % NUM_BLOCKS, num_outputs, NUM_BLOCKS, SWIGLU)
    group = _share_begin(part * SHARES + i // NUM_BLOCKS, GROUPS, SPLIT * SHARES) + AHEAD
    address = words + block.to(gl.int64) * (GROUPS * _WORDS) + group * _WORDS
    wanted = (i < NUM_BLOCKS * SHARES) & (group + FAR <= GROUPS)
    _prefetch(address.to(gl.int64, bitcast=True), wanted.to(gl.int32), FAR * 512)


@gluon.jit
def walk(  # type: ignore[no-untyped-def]
    x, m_offset, m_is_real, words, scales, zeros, multipliers, tile, part, num_outputs, GROUPS: gl.constexpr,
    SPLIT: gl.constexpr, FORMAT: gl.constexpr, SWIGLU: gl.constexpr, NUM_BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr,
    AHEAD: gl.constexpr, SHARES: gl.constexpr, WARPS: gl.constexpr, UNROLL: gl.constexpr, CLEARED: gl.constexpr,
    PDL: gl.constexpr
):  # fmt: skip
    """Return a tile's sums over a part of the columns, float32 [rows, BLOCK_M]. Awaits the previous kernel once the
    first weights are asked for. m_offset, m_is_real: of each token, the pair of x where its inputs begin, and whether
    it has any, else its sums are undefined; in `tokens_layout`. UNROLL: of few groups, so that each step is code of its
    own. CLEARED: see `_load_tokens`."""
    MMA: gl.constexpr = mma_layout(SHARES, WARPS)
    PAIRS: gl.constexpr = takes_pairs(FORMAT, BLOCK_M, SPLIT)
    X: gl.constexpr = inputs_layout(PAIRS, BLOCK_M, SHARES, WARPS)
    WIDTH: gl.constexpr = 64 if PAIRS else 128
    W: gl.constexpr = words_layout(SHARES, NUM_BLOCKS, WARPS)
    PARTS: gl.constexpr = SPLIT * SHARES
    APART: gl.constexpr = UNROLL or is_last_apart(FORMAT, BLOCK_M)
    # Whether every share has MOST groups, and no step multiplies others.
    EVEN: gl.constexpr = GROUPS % (PARTS * (1 if APART else AHEAD)) == 0
    MOST: gl.constexpr = (GROUPS + PARTS - 1) // PARTS
    STEPS: gl.constexpr = (MOST + AHEAD - 1) // AHEAD
    LAST: gl.constexpr = MOST - (STEPS - 1) * AHEAD if EVEN else AHEAD
    SCALES: gl.constexpr = scales_of(FORMAT)

    block = block_of_tile(tile, index_along(NUM_BLOCKS, 1, 5, W), num_outputs, NUM_BLOCKS, SWIGLU)
    g, t, i = index_along(8, 2, 5, W), index_along(4, 3, 5, W), index_along(4, 4, 5, W)
    share = part * SHARES + index_along(SHARES, 0, 5, W)
    w_begin, w_end = _share_begin(share, GROUPS, PARTS), _share_begin(share + 1, GROUPS, PARTS)
    word_at = words + (block * (GROUPS * _WORDS) + g * 16 + t * 4 + i)
    row, share = index_along(NUM_BLOCKS * 8, 1, 3, MMA), part * SHARES + index_along(SHARES, 0, 3, MMA)
    if FORMAT == "e2m1":
        scale_at, s_begin, s_end = scales + (block * (GROUPS * SCALES) + g * 8 + t // 2 * 4), w_begin, w_end
    else:
        row_block = block_of_tile(tile, row // 8, num_outputs, NUM_BLOCKS, SWIGLU)
        s_begin, s_end = _share_begin(share, GROUPS, PARTS), _share_begin(share + 1, GROUPS, PARTS)
        scale_at = scales + row_block * (GROUPS * SCALES) + row % 8 * sums_of(FORMAT)
    zero_at = None
    if has_zeros(FORMAT):
        zero_at = zeros + (block * (GROUPS * SCALES) + g * sums_of(FORMAT) + t * 0 + i * (sums_of(FORMAT) // 4))
    w_next, s_next, z_next = (), (), ()
    for n in gl.static_range(AHEAD):
        w_next += (gl.load(word_at + _group(w_begin, n, w_end, EVEN and n < MOST) * _WORDS, cache_modifier=".cg"),)
        s_next += _load_scales(scale_at + _group(s_begin, n, s_end, EVEN and n < MOST) * SCALES, FORMAT)
        if has_zeros(FORMAT):
            z_next += (gl.load(zero_at + _group(w_begin, n, w_end, EVEN and n < MOST) * SCALES),)
    await_previous(PDL)

    share, k = part * SHARES + index_along(SHARES, 0, 3, X), index_along(WIDTH // sums_of(FORMAT), 1, 3, X)
    x_begin, x_end = _share_begin(share, GROUPS, PARTS), _share_begin(share + 1, GROUPS, PARTS)
    CLEAR: gl.constexpr = CLEARED or not (EVEN and PAIRS)
    x_at = _inputs_at(x, gl.expand_dims(gl.expand_dims(m_offset, 0), 1), k, PAIRS, CLEAR)
    is_token = gl.expand_dims(gl.expand_dims(m_is_real, 0), 1) & (k < 128) & (share >= 0)
    x_next = _load_tokens(x_at + x_begin * WIDTH, is_token, FORMAT, PAIRS, CLEAR)
    acc = gl.zeros([SHARES, NUM_BLOCKS * 8, BLOCK_M], gl.float32, MMA)
    MORE: gl.constexpr = (STEPS - APART) * AHEAD
    if UNROLL:
        for step in gl.static_range(0, MORE, AHEAD):
            acc, x_next, w_next, s_next, z_next = _step(
                acc, x_next, w_next, s_next, z_next, step, x_at, is_token, x_begin, x_end, word_at, w_begin, w_end,
                scale_at, s_begin, s_end, zero_at, FORMAT, SHARES, NUM_BLOCKS, BLOCK_M, AHEAD, EVEN, LAST, MMA, PAIRS,
                CLEAR, False,
            )  # fmt: skip
    else:
        for step in range(0, MORE, AHEAD):
            acc, x_next, w_next, s_next, z_next = _step(
                acc, x_next, w_next, s_next, z_next, step, x_at, is_token, x_begin, x_end, word_at, w_begin, w_end,
                scale_at, s_begin, s_end, zero_at, FORMAT, SHARES, NUM_BLOCKS, BLOCK_M, AHEAD, EVEN, LAST, MMA, PAIRS,
                CLEAR, False,
            )  # fmt: skip
    if APART:
        acc, x_next, w_next, s_next, z_next = _step(
            acc, x_next, w_next, s_next, z_next, MORE, x_at, is_token, x_begin, x_end, word_at, w_begin, w_end,
            scale_at, s_begin, s_end, zero_at, FORMAT, SHARES, NUM_BLOCKS, BLOCK_M, AHEAD, EVEN, LAST, MMA, PAIRS,
            CLEAR, True,
        )  # fmt: skip
    acc_OM = gl.sum(acc, axis=0)
    if FORMAT == "e2m1":
        acc_OM *= _multipliers(multipliers, tile, num_outputs, SWIGLU, NUM_BLOCKS, layout_of(acc_OM))
    return acc_OM


@gluon.jit
def _multipliers(  # type: ignore[no-untyped-def]
    multipliers, tile, num_outputs, SWIGLU: gl.constexpr, NUM_BLOCKS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Those of a tile's rows, [rows, 1], with what scales and codes lack."""
    o = index_along(NUM_BLOCKS * 8, 0, 2, LAYOUT)
    return gl.load(multipliers + block_of_tile(tile, o // 8, num_outputs, NUM_BLOCKS, SWIGLU) * 8 + o % 8) * 256.0


@gluon.jit
def _step(  # type: ignore[no-untyped-def]
    acc, x_next, w_now, s_now, z_now, step, x_at, is_token, x_begin, x_end, word_at, w_begin, w_end, scale_at, s_begin,
    s_end, zero_at, FORMAT: gl.constexpr, SHARES: gl.constexpr, NUM_BLOCKS: gl.constexpr, BLOCK_M: gl.constexpr,
    AHEAD: gl.constexpr, EVEN: gl.constexpr, LAST: gl.constexpr, MMA: gl.constexpr, PAIRS: gl.constexpr,
    CLEARED: gl.constexpr, IS_LAST: gl.constexpr
):  # fmt: skip
    """Multiply AHEAD groups and ask for the next ones, or multiply the LAST ones. EVEN: all shares have as many groups,
    so none past a share's end is needed. Return (acc, x, words, scales, zero points), those of the next step."""
    IN: gl.constexpr = EVEN and is_last_apart(FORMAT, BLOCK_M)
    w_next, s_next, z_next = (), (), ()
    for n in gl.static_range(LAST if IS_LAST else AHEAD):
        x_now, later = x_next, step + AHEAD + n
        if not IS_LAST or n + 1 < LAST:
            is_in = is_token & ((x_begin + step + n + 1 < x_end) | EVEN)
            x_group = _group(x_begin, step + n + 1, x_end, IN)
            x_next = _load_tokens(x_at + x_group * (64 if PAIRS else 128), is_in, FORMAT, PAIRS, CLEARED)
        if has_zeros(FORMAT):
            parts = _decoded(w_now[n], s_now[n], z_now[n], FORMAT)
        else:
            parts = _decoded(w_now[n], s_now[n], None, FORMAT)
        if not IS_LAST:
            w_next += (
                gl.load(word_at + _group(w_begin, later, w_end, IN and n < LAST) * _WORDS, cache_modifier=".cg"),
            )
        if FORMAT == "e2m1":
            acc = mma_v2(_operand(parts, SHARES, NUM_BLOCKS, MMA), _tokens(x_now[0], PAIRS, MMA), acc)
        else:
            operands = (_operand(parts, SHARES, NUM_BLOCKS, MMA),)
            if sums_of(FORMAT) == 4:
                operands = _operands_of_words(parts, SHARES, NUM_BLOCKS, MMA)
            for i in gl.static_range(sums_of(FORMAT)):
                zero = gl.zeros([SHARES, NUM_BLOCKS * 8, BLOCK_M], gl.float32, MMA)
                group_sum = mma_v2(operands[i], _tokens(x_now[i], PAIRS, MMA), zero)
                acc = gl.fma(group_sum, s_now[n * sums_of(FORMAT) + i].to(gl.float32), acc)
        if not IS_LAST:
            s_next += _load_scales(
                scale_at + _group(s_begin, later, s_end, IN and n < LAST) * scales_of(FORMAT), FORMAT
            )
            if has_zeros(FORMAT):
                z_next += (gl.load(zero_at + _group(w_begin, later, w_end, IN and n < LAST) * scales_of(FORMAT)),)
    return acc, x_next, w_next, s_next, z_next


@gluon.jit
def _inputs_at(x, offset, k, PAIRS: gl.constexpr, CLEARED: gl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to pairs k, or single elements, as `_load_tokens` takes them. offset: in pairs."""
    if not PAIRS:
        at = x + offset * 2 + k
    elif CLEARED:
        at = x.to(gl.pointer_type(gl.int32), bitcast=True) + offset + k
    else:
        at = x.to(gl.pointer_type(gl.int32), bitcast=True) + offset + k // 4 * 4
    return at


@gluon.jit
def _load_tokens(at, is_in, FORMAT: gl.constexpr, PAIRS: gl.constexpr, CLEARED: gl.constexpr):  # type: ignore[no-untyped-def]
    """The columns of a tile, for each of its sums.

    Lanes where `is_in` is false, whose sums nobody reads, get zeros if CLEARED: this takes two instructions for each
    load. Otherwise they keep what they have, for which the compiler keeps their registers between a use and the next
    load."""
    x = ()
    for i in gl.static_range(sums_of(FORMAT)):
        if not CLEARED:
            x += (_load_where(at, is_in),)
        elif PAIRS:
            x += (gl.load(at, mask=is_in, other=0),)
        else:
            part = gl.load(at + i * (128 // sums_of(FORMAT)), mask=is_in, other=0.0)
            x += (_in_order(part) if sums_of(FORMAT) == 1 else part,)
    return x


@gluon.jit
def _in_order(x):  # type: ignore[no-untyped-def]
    """A tile's columns of the tokens in the order in which `_operand` has them. Lanes keep what they have loaded."""
    LAYOUT: gl.constexpr = layout_of(x)
    SHARES: gl.constexpr = x.shape[0]
    BLOCK_M: gl.constexpr = x.shape[2]
    # share, half of the columns, word of two, lane of four, pair's bits 1 and 0, half of a register, token
    y = x.reshape((SHARES, 2, 2, 4, 2, 2, 2, BLOCK_M)).permute((0, 1, 5, 3, 2, 4, 6, 7))
    return gl.convert_layout(y.reshape((SHARES, 128, BLOCK_M)), LAYOUT)


@gluon.jit
def _load_where(at, is_in):  # type: ignore[no-untyped-def]
    """Load words, four adjacent ones by a lane, of which all have the first one's pointer."""
    address, is_in = gl.broadcast(at.to(gl.int64, bitcast=True), is_in.to(gl.int32))
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $8, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=r,=r,=r,=r,l,l,l,l,r,r,r,r",
        [address, is_in],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def _tokens(x, PAIRS: gl.constexpr, MMA: gl.constexpr):  # type: ignore[no-untyped-def]
    """What was loaded as the operand [shares, columns, tokens], in the order of `_in_order`. Moves nothing."""
    if PAIRS:
        SHARES: gl.constexpr = x.shape[0]
        BLOCK_M: gl.constexpr = x.shape[2]
        even, odd = _halves(x)
        # share, two pairs, half of a pair, token, pair of the two
        y = gl.join(even, odd).reshape((SHARES, 32, 2, BLOCK_M, 2)).permute((0, 1, 4, 2, 3))
        x = gl.convert_layout(_in_order(y.reshape((SHARES, 128, BLOCK_M))), gl.DotOperandLayout(1, MMA, 8))
    return x


@gluon.jit
def _halves(pairs):  # type: ignore[no-untyped-def]
    """Of pairs in words, 2 n and 2 n + 1 for each n: both elements of the first one; and of the second one."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $3;", "=r,=r,r,r", [pairs], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )


@gluon.jit
def _load_scales(at, FORMAT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Those of a tile's sums; of floats all in one, four to a word."""
    scales = ()
    for i in gl.static_range(sums_of(FORMAT)):
        if FORMAT == "e2m1":
            scales += (gl.load(at.to(gl.pointer_type(gl.int32), bitcast=True)),)
        else:
            scales += (gl.load(at + i),)
    return scales


@gluon.constexpr_function
def has_zeros(format: str) -> bool:
    return "zeros" in format


@gluon.constexpr_function
def is_last_apart(format: str, block_m: int) -> bool:
    """Whether the loop's last step is code of its own, which asks for nothing again: not where the compiler then lacks
    registers."""
    return "by 32" not in format and not ("zeros" in format and block_m == 32)


@gluon.constexpr_function
def sums_of(format: str) -> int:
    """Sums of a tile's columns that are multiplied by a scale each; of floats, whose products have theirs, one."""
    return 4 if "by 32" in format else 1


@gluon.constexpr_function
def scales_of(format: str) -> int:
    """Scales of a tile, and zero points."""
    return 64 if format == "e2m1" else 32 if "by 32" in format else 8


@gluon.jit
def _share_begin(share, GROUPS: gl.constexpr, PARTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """The first group of a share of K."""
    return share * GROUPS // PARTS


@gluon.jit
def block_of_tile(tile, i, num_outputs, NUM_BLOCKS: gl.constexpr, SWIGLU: gl.constexpr):  # type: ignore[no-untyped-def]
    """The weight's block of eight rows that is the i-th of a tile."""
    if SWIGLU:
        return tile * (NUM_BLOCKS // 2) + i // 2 + i % 2 * (num_outputs // 8)
    return tile * NUM_BLOCKS + i


@gluon.jit
def _group(begin, step, end, IS_IN: gl.constexpr):  # type: ignore[no-untyped-def]
    """The group of a step; the last one in place of those past the end."""
    if IS_IN:
        return begin + step
    return gl.minimum(begin + step, end - 1)


@gluon.constexpr_function
def layout_of(x):  # type: ignore[no-untyped-def]
    return x.type.layout


@gluon.jit
def gated(acc_OM, BLOCK_O: gl.constexpr, BLOCK_M: gl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) * up of a tile of SwiGLU: [BLOCK_O / 2, BLOCK_M]. Moves nothing."""
    gate, up = gl.split(acc_OM.reshape((BLOCK_O // 16, 2, 8, BLOCK_M)).permute((0, 2, 3, 1)))
    return (gate / (1.0 + gl.exp(-gate)) * up).reshape((BLOCK_O // 2, BLOCK_M))


@gluon.jit
def _finish(  # type: ignore[no-untyped-def]
    acc_OM, out, out_stride, residual, tile, num_tokens, num_outputs, SWIGLU: gl.constexpr, BLOCK_O: gl.constexpr,
    BLOCK_M: gl.constexpr
):  # fmt: skip
    """Store the outputs of a tile: with the residual added, or of gate and up."""
    ROWS: gl.constexpr = BLOCK_O // 2 if SWIGLU else BLOCK_O
    y = acc_OM
    if SWIGLU:
        y = gated(acc_OM, BLOCK_O, BLOCK_M)
    LAYOUT: gl.constexpr = layout_of(y)
    n = gl.program_id(1) * BLOCK_M + index_along(BLOCK_M, 1, 2, LAYOUT)
    o = tile * ROWS + index_along(ROWS, 0, 2, LAYOUT)
    is_token = (n < num_tokens) & (o >= 0)
    if residual is not None:
        y += gl.load(residual + n * num_outputs + o, mask=is_token, other=0.0).to(gl.float32)
    gl.store(out + n * out_stride + o, y.to(out.dtype.element_ty), mask=is_token)
