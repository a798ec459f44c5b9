"""The recurrent mixer's kernel against the reference: outputs, every state row, untouched rows, and bitwise
repeatability.

The checks take the device, so that GPU tests can run them at served shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from agentspec.kernels import DeltaWeights, reference
from agentspec.kernels.traffic import state_traffic
from agentspec.kernels.triton import gated_delta
from agentspec.kernels.triton.launch import arrival_counters
from agentspec.types import SCRATCH_ROW, ZERO_ROW
from tests.fakes.compare import relative_error

STATE_TOLERANCE = 1e-5
"""For states: float32 arithmetic on the same inputs, whatever their dtype."""
OUTPUT_TOLERANCES = {torch.float32: STATE_TOLERANCE, torch.bfloat16: 2**-7}
"""bfloat16: one rounding, half of this on a device; the interpreter truncates instead."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    value_heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    dtype: torch.dtype = torch.float32
    gate: Literal["silu", "sigmoid"] = "silu"

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def width(self) -> int:
        return self.channels + self.value_heads * (self.value_dim + 2)


@dataclass(frozen=True, kw_only=True)
class Case:
    projected_NP: Tensor
    weights: DeltaWeights
    ssm_RVDK: Tensor
    conv_R3C: Tensor
    read_row_B: Tensor
    write_rows_BT: Tensor

    def in_float32(self) -> Case:
        """The same values in float32: the reference would round intermediate results, which the kernel does not."""
        weights = replace(self.weights, conv_C4=self.weights.conv_C4.float())
        return replace(self, projected_NP=self.projected_NP.float(), weights=weights, conv_R3C=self.conv_R3C.float())

    def run(self, step: Callable[..., Tensor] = gated_delta.gated_delta_step) -> tuple[Tensor, Tensor, Tensor]:
        """Run one step. Return outputs and both pools."""
        ssm, conv = self.ssm_RVDK.clone(), self.conv_R3C.clone()
        return step(self.projected_NP, self.weights, ssm, conv, self.read_row_B, self.write_rows_BT), ssm, conv


def make_case(
    shape: Shape, num_slots: int, num_columns: int, device: torch.device, seed: int, *, slow: bool = False
) -> Case:
    """Scattered rows in pools of NaN. Slot 0 starts from zero, slot 1 is inert, odd slots from 3 on overwrite the row
    they read. slow: decays near 1, as of heads with long memory."""
    rng = torch.Generator().manual_seed(seed)
    num_rows = 2 + num_slots * (num_columns + 1) + 3
    rows = torch.randperm(num_rows - 2, generator=rng) + 2
    read_row = rows[:num_slots].clone()
    write_rows = rows[num_slots : num_slots * (num_columns + 1)].view(num_slots, num_columns).clone()
    for slot in range(3, num_slots, 2):
        write_rows[slot, slot % num_columns] = read_row[slot]
    read_row[:2] = ZERO_ROW
    write_rows[1:2] = SCRATCH_ROW
    heads = shape.value_heads
    ssm = torch.full((num_rows, heads, shape.value_dim, shape.key_dim), torch.nan)
    conv = torch.full((num_rows, 3, shape.channels), torch.nan)
    ssm[ZERO_ROW], conv[ZERO_ROW] = 0, 0
    ssm[read_row[2:]] = torch.randn(num_slots - len(read_row[:2]), *ssm.shape[1:], generator=rng)
    conv[read_row[2:]] = torch.randn(num_slots - len(read_row[:2]), *conv.shape[1:], generator=rng)
    weights = DeltaWeights(
        conv_C4=torch.randn(shape.channels, 4, generator=rng).to(device, shape.dtype),
        a_log_V=(torch.empty(heads).uniform_(0.05, 16.0, generator=rng).log() - (8 if slow else 0)).to(device),
        dt_bias_V=torch.randn(heads, generator=rng).to(device),
        norm_D=torch.randn(shape.value_dim, generator=rng).to(device),
        eps=1e-6,
        gate=shape.gate,
    )
    return Case(
        projected_NP=(2 * torch.randn(num_slots * num_columns, shape.width, generator=rng)).to(device, shape.dtype),
        weights=weights,
        ssm_RVDK=ssm.to(device),
        conv_R3C=conv.to(device, shape.dtype),
        read_row_B=read_row.to(device),
        write_rows_BT=write_rows.to(device),
    )


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Make torch.empty return NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_against_reference(
    shape: Shape, num_slots: int, num_columns: int, device: torch.device, seed: int, *, slow: bool = False
) -> None:
    case = make_case(shape, num_slots, num_columns, device, seed, slow=slow)
    what = f"{shape} B={num_slots} T={num_columns} seed={seed}"
    expected, expected_ssm, expected_conv = case.in_float32().run(reference.gated_delta_step)
    state_traffic.reset()
    with poisoned_allocations():
        out, ssm, conv = case.run()
    assert (state_traffic.rows_read, state_traffic.rows_written) == (num_slots, num_slots * num_columns), what
    assert out.dtype == shape.dtype, what
    assert relative_error(out, expected) < OUTPUT_TOLERANCES[shape.dtype], what
    written = case.write_rows_BT[case.write_rows_BT != SCRATCH_ROW]
    assert relative_error(ssm[written], expected_ssm[written]) < STATE_TOLERANCE, what
    kept = torch.arange(len(conv), device=device) != SCRATCH_ROW
    assert torch.equal(conv[kept].float().nan_to_num(7.0), expected_conv[kept].nan_to_num(7.0)), (
        f"convolution states must be copied exactly: {what}"
    )
    kept[written] = False
    assert torch.equal(ssm[kept].nan_to_num(7.0), case.ssm_RVDK[kept].nan_to_num(7.0)), (
        f"a row that is not a write row changed: {what}"
    )
    assert not arrival_counters(out.device).any(), what


def check_bits(shape: Shape, num_slots: int, num_columns: int, device: torch.device, seed: int) -> None:
    """Check that a slot's bits depend neither on the run nor on the other slots or its place in the batch."""
    case = make_case(shape, num_slots, num_columns, device, seed)
    what = f"{shape} B={num_slots} T={num_columns} seed={seed}"
    out, ssm, conv = (x.nan_to_num(7.0) for x in case.run())
    chosen = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[: max(1, num_slots - 1)].to(
        device
    )
    projected_BTP = case.projected_NP.unflatten(0, (num_slots, num_columns))
    some = replace(
        case,
        projected_NP=projected_BTP[chosen].flatten(0, 1),
        read_row_B=case.read_row_B[chosen],
        write_rows_BT=case.write_rows_BT[chosen],
    )
    again, again_ssm, again_conv = (x.nan_to_num(7.0) for x in some.run())
    assert torch.equal(again.unflatten(0, (-1, num_columns)), out.unflatten(0, (num_slots, num_columns))[chosen]), what
    rows = some.write_rows_BT[some.write_rows_BT != SCRATCH_ROW]
    assert torch.equal(again_ssm[rows], ssm[rows]), what
    assert torch.equal(again_conv[rows], conv[rows]), what


SMALL = Shape(value_heads=4, key_heads=2, value_dim=16, key_dim=16)
ODD = Shape(value_heads=6, key_heads=2, value_dim=24, key_dim=12, gate="sigmoid")
ONE_TO_ONE = Shape(value_heads=2, key_heads=2, value_dim=32, key_dim=64)


@pytest.mark.parametrize(
    ("shape", "num_slots", "num_columns"),
    [
        pytest.param(SMALL, 4, 4, id="small"),
        pytest.param(SMALL, 1, 1, id="one slot, one column"),
        pytest.param(SMALL, 4, 3, id="padded columns"),
        pytest.param(SMALL, 2, 8, id="eight columns"),
        pytest.param(replace(SMALL, dtype=torch.bfloat16), 4, 4, id="bfloat16"),
        pytest.param(ODD, 4, 4, id="odd sizes"),
        pytest.param(ODD, 4, 5, id="odd sizes, padded columns"),
        pytest.param(ONE_TO_ONE, 4, 2, id="a value head a key head"),
        pytest.param(replace(ONE_TO_ONE, value_heads=4, value_dim=64), 1, 4, id="tiny-agent"),
    ],
)
def test_gated_delta_step_matches_reference(
    shape: Shape, num_slots: int, num_columns: int, device: torch.device
) -> None:
    check_against_reference(shape, num_slots, num_columns, device, seed=num_slots * 10 + num_columns)


def test_slow_decays_keep_precision(device: torch.device) -> None:
    check_against_reference(SMALL, 3, 4, device, seed=1, slow=True)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # numpy's warning, in the interpreter: sigmoid of minus infinity is 0
def test_extreme_gates_stay_finite(device: torch.device) -> None:
    """Decays that underflow, decays of 1, and saturated gates."""
    case = make_case(SMALL, 3, 4, device, seed=2)
    gates = case.projected_NP[:, SMALL.channels :]
    gates[0::3], gates[1::3] = 120.0, -120.0
    expected, expected_ssm, _ = case.run(reference.gated_delta_step)
    out, ssm, _ = case.run()
    assert relative_error(out, expected) < STATE_TOLERANCE
    rows = case.write_rows_BT[case.write_rows_BT != SCRATCH_ROW]
    assert relative_error(ssm[rows], expected_ssm[rows]) < STATE_TOLERANCE


@pytest.mark.parametrize("shape", [SMALL, ODD], ids=["small", "odd sizes"])
def test_bits_depend_only_on_the_slot(shape: Shape, device: torch.device) -> None:
    check_bits(shape, 4, 3, device, seed=6)
