"""The recurrent mixer over a prefill against the reference: outputs, saved rows, untouched rows, and bitwise
repeatability.

The checks take the device, so that GPU tests can run them at served shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels import (
    BlockScaled,
    DeltaWeights,
    Plain,
    PrefillBatch,
    ProductInput,
    Weight,
    quantize_blocks,
    reference,
    within,
)
from agentspec.kernels import triton as triton_backend
from agentspec.kernels.triton.chunked_delta import gated_delta_prefill
from agentspec.kernels.triton.fp8_activations import quantize_tokens
from agentspec.kernels.triton.fp8_prefill import RoundedTokens
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.triton.linear_plans import SMALL_TOKENS
from agentspec.runtime.prefill_tables import PrefillSizes
from agentspec.types import SCRATCH_ROW, ZERO_ROW
from tests.fakes.prompt_run import Run, batch_of
from tests.kernels.triton.test_gated_delta import Shape
from tests.models.test_group import Pretended

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2 if INTERPRETED else 7e-3}
"""Norm of the difference over norm. bfloat16: operands of the matrix units are rounded; the interpreter truncates
instead."""
NUM_ROWS = 20
SMALL = Shape(value_heads=2, key_heads=1, value_dim=16, key_dim=16)
ODD = Shape(value_heads=3, key_heads=1, value_dim=24, key_dim=12, gate="sigmoid")
TINY = Shape(value_heads=2, key_heads=2, value_dim=64, key_dim=64)


@dataclass(frozen=True, kw_only=True)
class Case:
    projected_NP: Tensor
    weights: DeltaWeights
    ssm_RVDK: Tensor
    conv_R3C: Tensor

    def in_float32(self) -> Case:
        """The same values in float32: the reference would round intermediate results, which the kernels do not."""
        weights = replace(self.weights, conv_C4=self.weights.conv_C4.float())
        return replace(self, projected_NP=self.projected_NP.float(), weights=weights, conv_R3C=self.conv_R3C.float())

    def run(
        self, batch: PrefillBatch, prefill: Callable[..., Any] = gated_delta_prefill
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run a prefill of the first tokens of `projected_NP`, padded with NaN. Return the real tokens' outputs and
        both pools."""
        real, padding = int(batch.spans_UF[:, 1].sum()), len(batch.position_N)
        projected = torch.nn.functional.pad(self.projected_NP[:real], (0, 0, 0, padding - real), value=torch.nan)
        ssm, conv = self.ssm_RVDK.clone(), self.conv_R3C.clone()
        return prefill(projected, self.weights, ssm, conv, batch)[:real], ssm, conv


def make_case(
    shape: Shape, num_tokens: int, device: torch.device, seed: int, read_rows: Sequence[int], *, slow: bool = False
) -> Case:
    """Pools of NaN except for the rows that are read. slow: decays near 1, as of heads with long memory."""
    rng = torch.Generator().manual_seed(seed)
    heads = shape.value_heads
    ssm = torch.full((NUM_ROWS, heads, shape.value_dim, shape.key_dim), torch.nan)
    conv = torch.full((NUM_ROWS, 3, shape.channels), torch.nan)
    for row in read_rows:
        ssm[row], conv[row] = torch.randn(ssm.shape[1:], generator=rng), torch.randn(conv.shape[1:], generator=rng)
    ssm[ZERO_ROW], conv[ZERO_ROW] = 0, 0
    weights = DeltaWeights(
        conv_C4=torch.randn(shape.channels, 4, generator=rng).to(device, shape.dtype),
        a_log_V=(torch.empty(heads).uniform_(0.05, 16.0, generator=rng).log() - (8 if slow else 0)).to(device),
        dt_bias_V=torch.randn(heads, generator=rng).to(device),
        norm_D=torch.randn(shape.value_dim, generator=rng).to(device),
        eps=1e-6,
        gate=shape.gate,
    )
    projected = 2 * torch.randn(num_tokens, shape.width, generator=rng)
    return Case(
        projected_NP=projected.to(device, shape.dtype),
        weights=weights,
        ssm_RVDK=ssm.to(device),
        conv_R3C=conv.to(device, shape.dtype),
    )


RAGGED = [
    Run(token_ids=range(131), state_writes=((64, 5), (131, 2)), page_ids=(1, 2, 3)),
    Run(token_ids=range(1), start=9, read_row=7, state_writes=((1, 7), (1, 8)), page_ids=(4,)),
    Run(token_ids=range(40), start=50, read_row=3, state_writes=((40, 3),), page_ids=(5, 6)),
    # A state is saved over the row that was read, while later tokens still read its convolution rows.
    Run(token_ids=range(5), start=62, read_row=10, state_writes=((1, 10), (2, 11), (5, 12)), page_ids=(7, 8)),
]
ROOMY = PrefillSizes(num_tokens=190, num_spans=6, num_blocks=12, num_pages=4)


def relative_norm(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def check_against_reference(
    shape: Shape,
    runs: Sequence[Run],
    device: torch.device,
    seed: int,
    *,
    sizes: PrefillSizes | None = None,
    slow: bool = False,
) -> None:
    batch = batch_of(runs, device, sizes=sizes)
    case = make_case(
        shape, sum(len(run.token_ids) for run in runs), device, seed, [run.read_row for run in runs], slow=slow
    )
    what = f"{shape} seed={seed}"
    expected, expected_ssm, expected_conv = case.in_float32().run(batch, reference.gated_delta_prefill)
    out, ssm, conv = case.run(batch)
    assert out.dtype == shape.dtype, what
    assert relative_norm(out, expected) < TOLERANCES[shape.dtype], what
    saved = [row for run in runs for _, row in run.state_writes]
    for row in saved:
        assert relative_norm(ssm[row], expected_ssm[row]) < TOLERANCES[shape.dtype], f"row {row}: {what}"
    assert torch.equal(conv.float().nan_to_num(7.0), expected_conv.nan_to_num(7.0)), (
        f"convolution states must be copied exactly: {what}"
    )
    kept = [row for row in range(NUM_ROWS) if row not in saved]
    assert torch.equal(ssm[kept].nan_to_num(7.0), case.ssm_RVDK[kept].nan_to_num(7.0)), (
        f"a row that is not a save row changed: {what}"
    )


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALL, id="small"),
        pytest.param(ODD, id="odd sizes"),
        pytest.param(replace(TINY, dtype=torch.bfloat16), id="a value head a key head, bfloat16"),
    ],
)
def test_ragged_spans_match_reference(shape: Shape, device: torch.device) -> None:
    check_against_reference(shape, RAGGED, device, seed=1, sizes=ROOMY)


def test_tables_without_padding_match_reference(device: torch.device) -> None:
    check_against_reference(SMALL, RAGGED[:1], device, seed=2)


def test_slow_decays_keep_precision(device: torch.device) -> None:
    check_against_reference(SMALL, RAGGED, device, seed=3, slow=True)


def one_run(start: int, end: int, *, read_row: int, writes: tuple[tuple[int, int], ...]) -> Run:
    return Run(token_ids=range(end - start), start=start, read_row=read_row, state_writes=writes, page_ids=range(1, 9))


def check_bits(shape: Shape, device: torch.device, seed: int) -> None:
    """Check that a prefill in two parts, each with other spans beside it, is bitwise equal to an unsplit one."""
    start, cut, end = 30, 192, 281
    company = Run(token_ids=range(75), read_row=ZERO_ROW, state_writes=((75, 6),), page_ids=(9, 10))
    case = make_case(shape, end - start + 75, device, seed, [4])
    what = f"{shape} seed={seed}"
    out, ssm, conv = case.run(
        batch_of([one_run(start, end, read_row=4, writes=((cut - start, 2), (end - start, 3)))], device)
    )
    tokens = case.projected_NP[: end - start]
    others = case.projected_NP[end - start :]

    first = replace(case, projected_NP=torch.cat([others, tokens[: cut - start]]))
    first_run = one_run(start, cut, read_row=4, writes=((cut - start, 2),))
    first_out, middle_ssm, middle_conv = first.run(
        batch_of([company, first_run], device, sizes=replace(ROOMY, num_tokens=260))
    )
    second = replace(
        case, projected_NP=torch.cat([tokens[cut - start :], others]), ssm_RVDK=middle_ssm, conv_R3C=middle_conv
    )
    second_run = one_run(cut, end, read_row=2, writes=((end - cut, 3),))
    second_out, last_ssm, last_conv = second.run(batch_of([second_run, company], device))
    assert torch.equal(torch.cat([first_out[75:], second_out[: end - cut]]), out), what
    for row in (2, 3):
        assert torch.equal(last_ssm[row], ssm[row]), f"row {row}: {what}"
        assert torch.equal(last_conv[row], conv[row]), f"row {row}: {what}"


@pytest.mark.parametrize("shape", [SMALL, replace(ODD, dtype=torch.bfloat16)], ids=["small", "odd sizes, bfloat16"])
def test_split_prefill_is_bitwise_equal(shape: Shape, device: torch.device) -> None:
    check_bits(shape, device, seed=4)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # numpy's warning, in the interpreter: sigmoid of minus infinity is 0
def test_extreme_gates_stay_finite(device: torch.device) -> None:
    """Decays that underflow, decays of 1, and saturated gates."""
    batch = batch_of(RAGGED, device)
    case = make_case(SMALL, len(batch.position_N), device, 5, [run.read_row for run in RAGGED])
    gates = case.projected_NP[:, SMALL.channels :]
    gates[0::3], gates[1::3] = 120.0, -120.0
    expected, expected_ssm, _ = case.run(batch, reference.gated_delta_prefill)
    out, ssm, _ = case.run(batch)
    assert relative_norm(out, expected) < TOLERANCES[torch.float32]
    for row in (5, 2, 7, 8, 3, 10, 11, 12):
        assert relative_norm(ssm[row], expected_ssm[row]) < TOLERANCES[torch.float32], f"row {row}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_key_stays_accurate(dtype: torch.dtype, device: torch.device) -> None:
    """Repeated tokens, strong writes, no decay: powers of the coupling would grow to 10^17, and rounding errors add up
    over a block."""
    shape = replace(SMALL, dtype=dtype)
    run = one_run(0, 128, read_row=4, writes=((128, 2),))
    batch = batch_of([run], device)
    case = make_case(shape, 128, device, 6, [4], slow=True)
    case.projected_NP[:] = case.projected_NP[:1].clone()
    case.projected_NP[:, shape.channels + shape.value_heads * shape.value_dim :][:, : shape.value_heads] = 8.0
    expected, expected_ssm, _ = case.in_float32().run(batch, reference.gated_delta_prefill)
    out, ssm, _ = case.run(batch)
    # Rounding errors of equal keys add up instead of averaging out.
    assert relative_norm(out, expected) < 2 * TOLERANCES[dtype]
    assert relative_norm(ssm[2], expected_ssm[2]) < 2 * TOLERANCES[dtype]


def test_padding_writes_no_row(device: torch.device) -> None:
    run = one_run(0, 10, read_row=ZERO_ROW, writes=((10, 2),))
    batch = batch_of([run], device, sizes=ROOMY)
    case = make_case(SMALL, 10, device, 7, [])
    _, ssm, conv = case.run(batch)
    rows = [row for row in range(NUM_ROWS) if row not in (ZERO_ROW, 2)]
    assert ssm[rows].isnan().all()
    assert conv[rows].isnan().all()
    assert SCRATCH_ROW in rows


WIDE = Shape(value_heads=4, key_heads=2, value_dim=128, key_dim=16, dtype=torch.bfloat16)
"""A value head is a group of 8-bit floats, and the heads together are as deep as a W8A8 product must be."""


def out_projection(shape: Shape, device: torch.device) -> BlockScaled:
    depth = shape.value_heads * shape.value_dim
    return quantize_blocks(torch.randn(256, depth, generator=torch.Generator().manual_seed(9)).to(device))


def outputs(case: Case, batch: PrefillBatch, out_weight: Weight | None = None) -> Tensor | ProductInput:
    """Of all tokens, padding included."""
    tokens = case.projected_NP
    projected = torch.nn.functional.pad(tokens, (0, 0, 0, len(batch.position_N) - len(tokens)))
    ssm, conv = case.ssm_RVDK.clone(), case.conv_R3C.clone()
    return gated_delta_prefill(projected, case.weights, ssm, conv, batch, out_weight=out_weight)


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy's warning, in the interpreter: of padding tokens
@pytest.mark.parametrize(
    ("shape", "runs", "sizes"),
    [
        pytest.param(WIDE, RAGGED, ROOMY, id="padding tokens and rows"),
        pytest.param(replace(WIDE, gate="sigmoid"), RAGGED, None, id="padding rows"),
        pytest.param(replace(WIDE, value_heads=12, key_heads=3), RAGGED[:1], replace(ROOMY, num_tokens=144), id="even"),
    ],
)
def test_outputs_for_a_w8a8_product_are_the_rounded_outputs(
    shape: Shape, runs: Sequence[Run], sizes: PrefillSizes | None, device: torch.device
) -> None:
    batch = batch_of(runs, device, sizes=sizes)
    num_tokens, real = len(batch.position_N), sum(len(run.token_ids) for run in runs)
    case = make_case(shape, real, device, 10, [run.read_row for run in runs])
    # A head of zeros, and one of which all values are below the least scale.
    gates = case.projected_NP[:, shape.channels : shape.channels + shape.value_heads * shape.value_dim]
    gates[3, :128], gates[5, 128:256] = (0, 2.0**-120) if shape.gate == "silu" else (-torch.inf, -80)
    weight = out_projection(shape, device)
    plain, rounded = outputs(case, batch), outputs(case, batch, weight)
    assert isinstance(plain, Tensor)
    assert isinstance(rounded, RoundedTokens)
    got, expected = rounded.scaled, quantize_tokens(plain)
    rows = [*range(real), *range(num_tokens, len(expected.values_RK))]
    assert torch.equal(got.values_RK.view(torch.uint8)[rows], expected.values_RK.view(torch.uint8)[rows])
    assert torch.equal(got.scales_GR[:, rows], expected.scales_GR[:, rows])
    assert (expected.scales_GR[[0, 1], [3, 5]] == 1).all()

    residual = torch.randn(num_tokens, 256, generator=torch.Generator().manual_seed(11)).to(device, shape.dtype)
    one, two = within(None, triton_backend), within(Pretended(2), triton_backend)
    for ops, start in ((one, residual), (one, None), (two, residual)):
        of_rounded, of_plain = (
            ops.add_linear(None if start is None else start.clone(), x, weight)[:real] for x in (rounded, plain)
        )
        assert torch.equal(of_rounded, of_plain)


@pytest.mark.parametrize(
    ("shape", "num_tokens", "form"),
    [
        pytest.param(WIDE, SMALL_TOKENS, "blocks", id="few tokens"),
        pytest.param(replace(WIDE, dtype=torch.float32), SMALL_TOKENS + 1, "blocks", id="float32"),
        pytest.param(replace(WIDE, value_heads=8, value_dim=64), SMALL_TOKENS + 1, "blocks", id="heads of 64"),
        pytest.param(replace(WIDE, value_heads=2), SMALL_TOKENS + 1, "blocks", id="no W8A8 product so shallow"),
        pytest.param(WIDE, SMALL_TOKENS + 1, "plain", id="weights in 16 bits"),
    ],
)
def test_outputs_for_other_products_are_not_rounded(
    shape: Shape, num_tokens: int, form: str, device: torch.device
) -> None:
    run = one_run(0, num_tokens, read_row=ZERO_ROW, writes=((num_tokens, 2),))
    batch = batch_of([run], device)
    case = make_case(shape, num_tokens, device, 12, [])
    weight: Weight = out_projection(shape, device)
    if form == "plain":
        weight = Plain(weight.dequantize(shape.dtype))
    plain, out = outputs(case, batch), outputs(case, batch, weight)
    assert isinstance(plain, Tensor)
    assert isinstance(out, Tensor)
    assert torch.equal(out, plain)
