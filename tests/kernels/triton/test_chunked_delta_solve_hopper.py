"""The state-independent part of the recurrent mixer over a prefill, for Hopper: against float64, and in a whole mixer
against Triton's own kernels. In the interpreter all values but the halves of matrices are float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

from agentspec.kernels.prefill_batch import (
    BLOCK_COUNT,
    BLOCK_OFFSET,
    BLOCK_SPAN,
    COUNT,
    NUM_BLOCK_FIELDS,
    NUM_SPAN_FIELDS,
    OFFSET,
    READ_ROW,
)
from agentspec.kernels.triton import chunked_delta, chunked_delta_solve_hopper
from agentspec.kernels.triton.chunked_delta_blocks import (
    BETA,
    FROM_START,
    HIGH,
    LOW,
    NUM_GATES,
    TO_END,
    convolve_blocks,
    solve_blocks,
)
from agentspec.kernels.triton.chunked_delta_hopper import HEAD_DIM
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.types import BLOCK_TOKENS
from tests.fakes.prompt_run import Run, batch_of
from tests.kernels.triton.gluon_in_interpreter import _code as _code_of
from tests.kernels.triton.gluon_program import SolveProgram
from tests.kernels.triton.gluon_warp_groups import FoldGroups
from tests.kernels.triton.test_chunked_delta import RAGGED, make_case, one_run, relative_norm
from tests.kernels.triton.test_gated_delta import Shape

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU the tests at served shapes run this kernel")
FIRST_TOKEN = 4
"""Tokens before those of the first block."""
TOLERANCE, HARD_TOLERANCE = 1e-5, 1e-4
"""Norm of the difference over norm. Matrices have 17 bits in products. Hard: sums nearly cancel."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Inputs and scratch tensors of the second launch."""

    projected_NP: Tensor
    conv_C4: Tensor
    conv_R3C: Tensor
    spans_UF: Tensor
    blocks_MF: Tensor
    keys_METK: Tensor
    values_MVTD: Tensor
    """For u."""
    gates_MVGT: Tensor
    w_MVTK: Tensor
    reads_MVTT: Tensor

    @property
    def operands(self) -> tuple[Tensor, ...]:
        return self.keys_METK, self.values_MVTD, self.w_MVTK, self.reads_MVTT

    @property
    def sizes(self) -> dict[str, int]:
        num_heads = self.values_MVTD.shape[1]
        return {"V": num_heads, "REPEATS": 2 * num_heads // self.keys_METK.shape[1]}

    @property
    def convolution(self) -> tuple[Any, ...]:
        return self.conv_R3C, self.conv_R3C.stride(0), self.spans_UF, self.blocks_MF

    def solve(self, program: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Return u, w and reads."""
        num_blocks, num_heads = self.values_MVTD.shape[:2]
        program.solve_blocks[(num_heads, num_blocks)](
            self.projected_NP, self.projected_NP.stride(0), self.conv_C4, *self.convolution,
            *program.operands(*self.operands), self.gates_MVGT, **self.sizes, PDL=False,
        )  # fmt: skip
        return self.values_MVTD, self.w_MVTK, self.reads_MVTT

    def convolved(self) -> Tensor:
        """v as the first launch convolves it. Blocks without tokens keep NaN."""
        num_blocks, num_heads = self.values_MVTD.shape[:2]
        keys, values = torch.empty_like(self.keys_METK), torch.full_like(self.values_MVTD, torch.nan)
        convolve_blocks[(self.keys_METK.shape[1] + num_heads, num_blocks)](
            self.projected_NP, self.projected_NP.stride(0), self.conv_C4, None, None, *self.convolution, keys, values,
            None, **self.sizes, D=HEAD_DIM, K=HEAD_DIM, T=BLOCK_TOKENS, PADDED_D=HEAD_DIM, PADDED_K=HEAD_DIM,
            **chunked_delta._CONVOLVE_SIZES, HAS_VALUES=True, PDL=False,
        )  # fmt: skip
        return values


def make_tables(counts: Sequence[int], spans: Sequence[int]) -> tuple[Tensor, Tensor]:
    """spans_UF and blocks_MF of blocks of `counts` tokens, which `spans` have. Span i reads row i + 1, and FIRST_TOKEN
    tokens are of nobody. Blocks without tokens are padding."""
    blocks = torch.zeros(len(counts), NUM_BLOCK_FIELDS, dtype=torch.int64)
    table = torch.zeros(max(spans) + 1, NUM_SPAN_FIELDS, dtype=torch.int64)
    offset = FIRST_TOKEN
    for m, (count, span) in enumerate(zip(counts, spans, strict=True)):
        if count == 0:
            continue
        blocks[m, BLOCK_OFFSET], blocks[m, BLOCK_COUNT], blocks[m, BLOCK_SPAN] = offset, count, span
        if table[span, COUNT] == 0:
            table[span, OFFSET], table[span, READ_ROW] = offset, span + 1
        table[span, COUNT] += count
        offset += count
    return table, blocks


def make_blocks(
    counts: Sequence[int],
    key_heads: int,
    repeats: int,
    seed: int,
    *,
    spans: Sequence[int] | None = None,
    hard: bool = False,
) -> Blocks:
    """Blocks of `counts` tokens. Those without tokens have NaN. spans: of each block; else all are of one. hard: keys
    are nearly equal, write strengths near 1 and decays near 1."""
    rng = torch.Generator().manual_seed(seed)
    num_blocks, num_heads = len(counts), key_heads * repeats

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    keys = random(num_blocks, 2 * key_heads, BLOCK_TOKENS, HEAD_DIM)
    if hard:
        keys = random(num_blocks, 2 * key_heads, 1, HEAD_DIM) + 0.03 * keys
    keys /= keys.norm(dim=-1, keepdim=True)
    is_real = torch.arange(BLOCK_TOKENS) < torch.tensor(counts)[:, None, None]
    beta = (random(num_blocks, num_heads, BLOCK_TOKENS) + (5 if hard else 0)).sigmoid() * is_real
    decay = torch.rand(beta.shape, generator=rng) * (1e-3 if hard else 0.3) * is_real
    total = -decay.double().cumsum(-1)
    gates = torch.full((num_blocks, num_heads, NUM_GATES.value, BLOCK_TOKENS), torch.nan)
    gates[:, :, BETA.value] = beta
    gates[:, :, HIGH.value] = total.float()
    gates[:, :, LOW.value] = (total - total.float()).float()
    gates[:, :, FROM_START.value] = total.exp().float()
    gates[:, :, TO_END.value] = (total[..., -1:] - total).exp().float()
    for m, count in enumerate(counts):
        keys[m, :, count:] = 0
        if count == 0:
            keys[m], gates[m] = torch.nan, torch.nan
    spans_UF, blocks_MF = make_tables(counts, spans or [0] * num_blocks)
    num_channels, num_tokens = (2 * key_heads + num_heads) * HEAD_DIM, sum(counts)
    # Tokens that are of nobody, other columns and other rows of the pool are NaN.
    projected = torch.full((FIRST_TOKEN + num_tokens + 2, num_channels + 16), torch.nan)
    projected[FIRST_TOKEN:-2, :num_channels] = random(num_tokens, num_channels)
    past = torch.full((len(spans_UF) + 2, 3, num_channels), torch.nan)
    past[1:-1] = random(len(spans_UF), 3, num_channels)
    return Blocks(
        projected_NP=projected,
        conv_C4=random(num_channels, 4),
        conv_R3C=past,
        spans_UF=spans_UF,
        blocks_MF=blocks_MF,
        keys_METK=keys.bfloat16().float(),
        values_MVTD=torch.full((num_blocks, num_heads, BLOCK_TOKENS, HEAD_DIM), torch.nan),
        gates_MVGT=gates,
        w_MVTK=torch.full((num_blocks, num_heads, BLOCK_TOKENS, HEAD_DIM), torch.nan),
        reads_MVTT=torch.full((num_blocks, num_heads, BLOCK_TOKENS, BLOCK_TOKENS), torch.nan),
    )


def expected_of(blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """u, w and reads in float64."""
    num_heads, key_heads = blocks.values_MVTD.shape[1], blocks.keys_METK.shape[1] // 2
    of_head = torch.arange(num_heads) // (num_heads // key_heads)
    q, k = blocks.keys_METK.double()[:, of_head], blocks.keys_METK.double()[:, key_heads + of_head]
    gates = blocks.gates_MVGT.double()
    beta, total = gates[:, :, BETA.value, :, None], gates[:, :, HIGH.value] + gates[:, :, LOW.value]
    ratio = (total[..., :, None] - total[..., None, :]).exp().tril()
    coupling = torch.eye(BLOCK_TOKENS).double() + (beta * ratio * (k @ k.mT)).tril(-1)
    wanted = torch.cat((beta * blocks.convolved().double(), beta * total.exp()[..., None] * k), -1)
    u, w = torch.linalg.solve_triangular(coupling, wanted, upper=False).split(HEAD_DIM, -1)
    return u, w, ratio * (q @ k.mT)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize(
    ("counts", "key_heads", "repeats"), [((64, 17, 0, 33), 2, 1), ((64, 1), 1, 2), ((32, 63), 1, 3)]
)
def test_results_match_float64(counts: Sequence[int], key_heads: int, repeats: int, hard: bool) -> None:
    seed = 100 * repeats + hard
    blocks = make_blocks(counts, key_heads, repeats, seed, hard=hard)
    expected = expected_of(blocks)
    for name, got, right in zip(("u", "w", "reads"), blocks.solve(SolveProgram()), expected, strict=True):
        for m, count in enumerate(counts):
            what = f"{name} of block {m}, seed {seed}"
            if count == 0:
                assert got[m].isnan().all(), f"{what}: an empty block"
                continue
            assert relative_norm(got[m], right[m]) < (HARD_TOLERANCE if hard else TOLERANCE), what
            assert not got[m, :, count:].any(), f"{what}: tokens that are not there"


def test_results_match_the_other_kernel() -> None:
    ours, others = (make_blocks((64, 40, 0), 2, 2, 3) for _ in range(2))
    ours.solve(SolveProgram())
    others.values_MVTD.copy_(others.convolved())
    solve_blocks[(4, 3)](
        others.blocks_MF, others.keys_METK, others.values_MVTD, others.gates_MVGT, others.w_MVTK, others.reads_MVTT,
        V=4, REPEATS=2, T=BLOCK_TOKENS, PADDED_D=HEAD_DIM, PADDED_K=HEAD_DIM, PDL=False,
    )  # fmt: skip
    for one, other in zip(ours.operands, others.operands, strict=True):
        assert relative_norm(one[:2], other[:2]) < TOLERANCE
        assert torch.equal(one[2:].isnan(), other[2:].isnan()), "an empty block"


@pytest.mark.parametrize(
    ("counts", "spans"),
    [
        pytest.param((64, 64, 5), (0, 0, 0), id="one span"),
        pytest.param((1, 1, 1, 2, 9), (0, 0, 0, 0, 0), id="blocks after short ones"),
        pytest.param((64, 3, 1, 2, 33, 2), (0, 1, 2, 2, 3, 3), id="many spans"),
        pytest.param((17, 0, 0), (0, 0, 0), id="padding"),
    ],
)
def test_values_have_the_bits_of_the_first_launch(counts: Sequence[int], spans: Sequence[int]) -> None:
    blocks = make_blocks(counts, 1, 2, len(counts), spans=spans)
    program = SolveProgram()
    blocks.solve(program)
    check_values(program, blocks)


def test_bits_do_not_depend_on_other_blocks() -> None:
    together = make_blocks((64, 40, 64), 1, 2, 7)
    of_block = ("blocks_MF", "keys_METK", "values_MVTD", "gates_MVGT", "w_MVTK", "reads_MVTT")
    alone = replace(together, **{name: getattr(together, name)[1:2].clone() for name in of_block})
    for one, other in zip(together.solve(SolveProgram()), alone.solve(SolveProgram()), strict=True):
        assert torch.equal(one[1:2], other)


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([one_run(30, 150, read_row=4, writes=((90, 2), (120, 3)))], id="one span"),
        pytest.param(RAGGED, id="ragged"),
    ],
)
def test_a_whole_mixer_matches_the_other_kernel(
    runs: Sequence[Run], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(runs, device)
    heads = Shape(value_heads=2, key_heads=1, value_dim=HEAD_DIM, key_dim=HEAD_DIM)
    case = make_case(heads, sum(len(run.token_ids) for run in runs), device, 1, [run.read_row for run in runs])
    expected = case.run(batch)
    monkeypatch.setattr(chunked_delta, "chunked_delta_hopper", FoldGroups(0))
    monkeypatch.setattr(chunked_delta, "chunked_delta_solve_hopper", SolveProgram())
    out, ssm, conv = case.run(batch)
    saved = [row for run in runs for _, row in run.state_writes]
    assert relative_norm(out, expected[0]) < TOLERANCE
    assert relative_norm(ssm[saved], expected[1][saved]) < TOLERANCE
    assert torch.equal(conv.nan_to_num(7.0), expected[2].nan_to_num(7.0)), "convolution states"


def check_values(program: SolveProgram, blocks: Blocks) -> None:
    """Check the bits of v that the program has computed of every block with tokens."""
    expected, num_heads = blocks.convolved(), blocks.values_MVTD.shape[1]
    is_real = blocks.blocks_MF[:, BLOCK_COUNT] > 0
    assert program.values.keys() == {(m, head) for m in range(len(is_real)) if is_real[m] for head in range(num_heads)}
    for (m, head), v in program.values.items():
        assert torch.equal(v, expected[m, head]), f"wrong results: v of block {m}, head {head}"


def check_one(program: SolveProgram) -> None:
    blocks = make_blocks((2, 64, 40, 0), 1, 1, 5)
    expected = expected_of(blocks)
    for got, right in zip(blocks.solve(program), expected, strict=True):
        assert relative_norm(got[:-1], right[:-1]) < TOLERANCE, "wrong results"
    check_values(program, blocks)


@pytest.mark.parametrize(
    ("lines", "changed", "fault"),
    [
        ("    mbarrier.wait(keys_here, 0)\n", "", "a read of a buffer before its copy"),
        ("    v_tile.store(v)\n", "", "a read of a buffer before its copy"),
        ("    if count < _T:\n", "    if count < 0:\n", "wrong results"),
        ("gl.minimum(start + i, last)", "gl.minimum(start, last)", "wrong results"),
        ("| (earlier_count < 3)", "", "wrong results"),
        ("before + token < 0", "before + token < -1", "wrong results"),
        ("(before + token + 3)", "(before + token + 2)", "wrong results"),
        ("warpgroup_mma_wait(1, deps=[of_keys])", "warpgroup_mma_wait(2, deps=[of_keys])", "before it was waited for"),
        ("warpgroup_mma_wait(0, deps=[first])", "warpgroup_mma_wait(1, deps=[first])", "before it was waited for"),
        ("wait(0, deps=[first, second])", "wait(1, deps=[first, second])", "before it was waited for"),
        ("    fence_async_shared()\n", "", "not yet visible"),
        ("    warp_barrier()\n", "", "not yet visible|still has readers"),
        ("    warp_barrier()  # every warp must have read v\n", "", "still has readers"),
        ("    warp_barrier()  # every warp must have read k\n", "", "still has readers"),
        ("    tma.store_wait(0)\n", "", "a copy of shared memory that was not waited for"),
        ("(chunk ^ (j // _SWIZZLE % _CHUNKS)) * _AT_ONCE", "chunk * _AT_ONCE", "wrong results"),
        ("gl.where(is_second, inverses, 0.0)", "inverses", "wrong results"),
        ("IS_SECOND * SIZE", "0 * SIZE", "wrong results"),
        ("(2 + IS_SECOND) * SIZE", "IS_SECOND * SIZE", "wrong results"),
    ],
)
def test_a_planted_fault_is_found(lines: str, changed: str, fault: str, tmp_path: Path) -> None:
    source = Path(str(chunked_delta_solve_hopper.__file__)).read_text()
    places = source.count(lines)
    assert places > 0
    module = ModuleType("changed")
    module.__file__ = str(tmp_path / "changed.py")
    module.__dict__.update(NUM_WARPS=4, MAX_REGISTERS=168)
    for place in range(places):
        before, after = lines.join(source.split(lines)[: place + 1]), lines.join(source.split(lines)[place + 1 :])
        Path(module.__file__).write_text(before + changed + after)
        _code_of.cache_clear()
        with pytest.raises((InterpreterError, AssertionError), match=fault):
            check_one(SolveProgram(module))
