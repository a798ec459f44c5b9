"""The mixture of experts over many tokens: groups, tiles, every form of weights, odd widths, batch invariance, unused
experts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentspec.kernels.backend import MixtureWeights
from agentspec.kernels.triton import expert_prefill as ours
from agentspec.kernels.triton import grouped_gemm
from agentspec.kernels.triton.expert_groups import group_pairs
from agentspec.kernels.triton.fp8_activations import ScaledTokens, quantize_tokens
from agentspec.kernels.triton.grouped_gemm import GroupedPlan
from agentspec.kernels.weights import BlockScaled, Plain, Weight, quantize_blocks
from tests.fakes.compare import relative_error
from tests.kernels.triton.test_fp8_prefill import SUM_LOSS, from_scaled, randn

EXACT = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2**-7}
W8A8 = 2**-4
"""Largest difference over largest value. Each activation is rounded by at most 2^-4 of itself, with independent
signs."""


class Mixture:
    """Random operands; `formats`: of the routed and the shared experts' weights, 8 or 16 bits."""

    def __init__(
        self,
        num_tokens: int,
        num_experts: int,
        top_k: int,
        hidden: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        routed_fp8: bool = False,
        shared_fp8: bool = False,
        seed: int = 1,
    ) -> None:
        self.text = (
            f"seed {seed}: {num_tokens} tokens, {top_k} of {num_experts} experts, {hidden} x {width}, {dtype}, "
            f"FP8 routed {routed_fp8} shared {shared_fp8}"
        )
        self.residual = randn(num_tokens, hidden, seed=seed, device=device, dtype=dtype)
        self.normed = randn(num_tokens, hidden, seed=seed + 1, device=device, dtype=dtype)
        # Every token chooses the first expert, none the last.
        scores = randn(num_tokens, num_experts, seed=seed + 2, device=device)
        scores[:, 0] += 100
        scores[:, -1] -= 100
        chosen = scores.softmax(-1).topk(top_k, -1)
        self.choice_weights, self.ids = (
            (scores / 50 + 1).gather(1, chosen.indices).contiguous(),
            chosen.indices.int().contiguous(),
        )
        self.gate = randn(num_tokens, seed=seed + 3, device=device)

        def weight(*shape: int, fp8: bool, seed: int) -> Weight:
            values = randn(*shape, seed=seed, device=device) * shape[-1] ** -0.5
            return quantize_blocks(values) if fp8 else Plain(values.to(dtype))

        self.weights = MixtureWeights(
            router_XH=torch.empty(0, device=device),
            top_k=top_k,
            normalize=True,
            gate_up_X2IH=weight(num_experts, 2 * width, hidden, fp8=routed_fp8, seed=seed + 4),
            down_XHI=weight(num_experts, hidden, width, fp8=routed_fp8, seed=seed + 5),
            shared_gate_1H=torch.empty(0, device=device),
            shared_gate_up_2IH=weight(4 * width, hidden, fp8=shared_fp8, seed=seed + 6),
            shared_down_HI=weight(hidden, 2 * width, fp8=shared_fp8, seed=seed + 7),
        )

    def run(self) -> Tensor:
        return ours.add_experts_prefill(
            self.residual.clone(), self.normed, self.choice_weights, self.ids, self.gate, self.weights
        )

    def expected(self) -> Tensor:
        """The result in float64 with dequantized weights and unrounded activations."""
        x = self.normed.double()
        gate_up, down = self.weights.gate_up_X2IH.dequantize().double(), self.weights.down_XHI.dequantize().double()
        y = torch.zeros_like(x)
        for j in range(self.ids.shape[1]):
            for expert in self.ids[:, j].unique().tolist():
                chosen = self.ids[:, j] == expert
                y[chosen] += self.choice_weights[chosen, j, None] * (
                    _swiglu(x[chosen] @ gate_up[expert].t()) @ down[expert].t()
                )
        shared = (
            _swiglu(x @ self.weights.shared_gate_up_2IH.dequantize().double().t())
            @ self.weights.shared_down_HI.dequantize().double().t()
        )
        return self.residual.double() + y + torch.sigmoid(self.gate.double())[:, None] * shared

    def check(self, tolerance: float) -> None:
        got = self.run()
        assert got.dtype == self.residual.dtype
        error = relative_error(got, self.expected())
        assert error < tolerance, f"{self.text}: {error}"


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def check_groups(ids: Tensor, num_experts: int, block_m: int) -> None:
    groups = group_pairs(ids, num_experts, block_m)
    order = ids.flatten().long().sort(stable=True)
    assert torch.equal(groups.pairs_P.long(), order.indices)
    place = 0
    for expert, first, count, _ in (row for row in groups.tiles_T4.tolist() if row[2]):
        assert (first, order.values[first], order.values[first + count - 1]) == (place, expert, expert)
        assert 1 <= count <= block_m
        is_last = first + count == ids.numel() or order.values[first + count] != expert
        assert is_last or count == block_m
        place += count
    assert place == ids.numel()


def check_gate_up(plan: GroupedPlan, mixture: Mixture, block_m: int) -> None:
    """8-bit operands: against float64 of the same 8-bit values; the result is then in 8 bits, too."""
    gate_up = mixture.weights.gate_up_X2IH
    x = quantize_tokens(mixture.normed) if isinstance(gate_up, BlockScaled) else mixture.normed
    groups = group_pairs(mixture.ids, gate_up.shape[0], block_m)
    got = grouped_gemm.gate_up(plan, x, gate_up, groups, mixture.ids.shape[1])
    values = (from_scaled(x) if isinstance(x, ScaledTokens) else x).double()[
        groups.pairs_P.long() // mixture.ids.shape[1]
    ]
    expert = mixture.ids.flatten()[groups.pairs_P.long()].long()
    expected = _swiglu(torch.einsum("pk,pok->po", values, gate_up.dequantize().double()[expert]))
    if isinstance(got, ScaledTokens):
        scales = got.scales_GR.t().repeat_interleave(128, 1)
        largest = expected.unflatten(1, (-1, 128)).abs().amax(-1)
        torch.testing.assert_close(got.scales_GR.t().double() * 448, largest, rtol=SUM_LOSS, atol=0.0, msg=mixture.text)
        bound = torch.maximum(expected.abs() / 16, scales / 1024) + SUM_LOSS * expected.abs().amax()
        assert ((from_scaled(got) - expected).abs() <= bound).all(), mixture.text
    else:
        assert relative_error(got, expected) < EXACT[got.dtype], mixture.text


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "block_m"), [(1, 1, 3, 16), (70, 3, 6, 16), (300, 2, 16, 32)]
)
def test_pairs_are_sorted_by_expert(
    num_tokens: int, top_k: int, num_experts: int, block_m: int, device: torch.device
) -> None:
    scores = randn(num_tokens, num_experts, seed=num_tokens, device=device)
    check_groups(scores.topk(top_k, -1).indices.int().contiguous(), num_experts, block_m)


def test_one_expert_may_have_all_pairs(device: torch.device) -> None:
    check_groups(torch.full((300, 1), 2, dtype=torch.int32, device=device), 5, 16)


@pytest.mark.parametrize("fp8", [False, True], ids=["16 bits", "8 bits"])
def test_gate_up_matches_float64(fp8: bool, device: torch.device) -> None:
    mixture = Mixture(20, 4, 2, 256, 128, device, torch.float16, routed_fp8=fp8)
    check_gate_up(GroupedPlan(block_o=128, block_k=128 if fp8 else 64, warps=4, stages=2), mixture, 16)


@pytest.mark.parametrize("size", [(1, 4, 2, 64, 32), (37, 5, 3, 48, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_plain_weights_match_float64(
    size: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    Mixture(*size, device, dtype).check(EXACT[dtype])


@pytest.mark.parametrize(("routed_fp8", "shared_fp8"), [(True, True), (True, False), (False, True)])
def test_w8a8_matches_float64(routed_fp8: bool, shared_fp8: bool, device: torch.device) -> None:
    Mixture(20, 4, 2, 128, 128, device, torch.float16, routed_fp8=routed_fp8, shared_fp8=shared_fp8).check(W8A8)


@pytest.mark.parametrize(("dtype", "hidden", "width"), [(torch.float32, 128, 128), (torch.float16, 64, 32)], ids=str)
def test_unsupported_shapes_dequantize_weights(
    dtype: torch.dtype, hidden: int, width: int, device: torch.device
) -> None:
    Mixture(9, 4, 2, hidden, width, device, dtype, routed_fp8=True, shared_fp8=True).check(EXACT[dtype])


def test_routed_part_is_batch_invariant(device: torch.device) -> None:
    mixture = Mixture(40, 4, 2, 64, 32, device, torch.float32)
    mixture.weights.shared_down_HI.tensor.zero_()
    together = mixture.run()
    for name in ("residual", "normed", "choice_weights", "ids", "gate"):
        setattr(mixture, name, getattr(mixture, name)[17:20].contiguous())
    assert torch.equal(mixture.run(), together[17:20])


def test_second_run_is_bitwise_equal(device: torch.device) -> None:
    mixture = Mixture(30, 4, 2, 128, 128, device, torch.float16, routed_fp8=True, shared_fp8=True)
    assert torch.equal(mixture.run(), mixture.run())
