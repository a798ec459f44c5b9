"""The gate's product beside the recurrence of a long prompt, on two streams: the bits of one product before it, at once
and in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from agentspec.kernels import ProductInput
from agentspec.kernels.backend import Norm, OpenProduct
from agentspec.kernels.triton import delta_products, gated_delta_prefill, norm_linear, norm_linear_before_delta
from agentspec.kernels.triton.fp8_prefill import RoundedTokens
from agentspec.kernels.weights import quantize_blocks
from agentspec.types import ZERO_ROW
from tests.fakes.prompt_run import Run, batch_of
from tests.gpu.test_kernels_at_served_shapes import RECURRENT
from tests.kernels.triton.poison import poison
from tests.kernels.triton.test_chunked_delta import make_case

pytestmark = pytest.mark.gpu

WIDTH = 2048
PROMPTS: dict[str, Sequence[int]] = {"one": (5000,), "as many tokens as it takes": (2048,), "several": (1100, 64, 1500)}


def run_of(count: int, number: int) -> Run:
    return Run(
        token_ids=range(count), read_row=ZERO_ROW, state_writes=((count, 2 + number),), page_ids=range(count // 64 + 1)
    )


def tensors(mixed: Tensor | ProductInput) -> list[Tensor]:
    if isinstance(mixed, Tensor):
        return [mixed]
    assert isinstance(mixed, RoundedTokens)
    return [mixed.scaled.values_RK.view(torch.uint8), mixed.scaled.scales_GR]


@pytest.mark.parametrize("prompts", PROMPTS)
@pytest.mark.parametrize("model", ["4B", "27B"])
def test_results_are_those_of_one_product(
    model: str, prompts: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, counts = RECURRENT[model], PROMPTS[prompts]
    num_tokens = sum(counts)
    batch = batch_of([run_of(count, number) for number, count in enumerate(counts)], cuda)
    case = make_case(shape, 1, cuda, 1, [])
    rng = torch.Generator(device=cuda).manual_seed(2)

    def randn(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device=cuda).to(shape.dtype)

    rows, num_values = randn(shape.width, WIDTH) / 30, shape.value_heads * shape.value_dim
    weight, extra = quantize_blocks(rows[: -2 * shape.value_heads].float()), rows[-2 * shape.value_heads :]
    out_weight = quantize_blocks(randn(WIDTH, num_values).float())
    x, norm = randn(num_tokens, WIDTH), Norm(weight=randn(WIDTH), eps=1e-6)
    gates = slice(shape.channels, shape.channels + num_values)
    assert delta_products.leaves_room(x, gates) == (model == "4B")
    monkeypatch.setattr(delta_products, "leaves_room", lambda *_: True)

    def mixed(*, opens: bool) -> list[Tensor]:
        ssm, conv = case.ssm_RVDK.clone(), case.conv_R3C.clone()
        projected: Tensor | OpenProduct = norm_linear(x, norm, weight, extra)
        if opens:
            projected = norm_linear_before_delta(x, norm, weight, extra, gates)
            assert isinstance(projected, OpenProduct)
            poison(projected.values_NP[:, gates])
        return [
            *tensors(gated_delta_prefill(projected, case.weights, ssm, conv, batch, out_weight=out_weight)),
            ssm,
            conv,
        ]

    expected = mixed(opens=False)

    def check(got: list[Tensor], where: str) -> None:
        for ours, wanted in zip(got, expected, strict=True):
            assert torch.equal(ours.nan_to_num(7.0), wanted.nan_to_num(7.0)), where

    for _ in range(5):
        check(mixed(opens=True), "at once")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mixed(opens=True)
    for _ in range(5):
        graph.replay()
        check(captured, "in a graph")
