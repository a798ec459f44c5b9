"""swiglu_hopper.py at the shapes of published models: against float64, the same bits in every run, and in a captured
graph whose kernels overlap; the layer that uses it beside one that doesn't."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from agentspec.kernels.backend import Norm
from agentspec.kernels.triton import linear_layers, swiglu_hopper
from agentspec.kernels.triton.norms import rms_norm
from agentspec.kernels.weights import Plain, Weight
from benchmarks.four_bit import FORMS, random_tiles
from tests.kernels.triton.poison import poison_new_memory
from tests.kernels.triton.test_swiglu_hopper import TOLERANCE, operands

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's instructions"
    ),
]
SHAPES = {"4B": (9216, 2560), "27B": (17408, 5120), "27B, 2 ranks": (8704, 5120)}


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize("model", SHAPES)
def test_products_match_float64(model: str) -> None:
    for seed, num_tokens in enumerate((1, 129, 1000, 2600)):
        x, weight, expected = operands(num_tokens, *SHAPES[model], seed, CUDA)
        first = swiglu_hopper.product(x, weight)
        assert ((first.double() - expected).norm() / expected.norm()).item() < TOLERANCE, num_tokens
        for _ in range(20):
            assert torch.equal(swiglu_hopper.product(x, weight), first), num_tokens


def test_a_graph_of_overlapping_layers_equals_eager_ones() -> None:
    """A chain in which each launch reads what the one before has written."""
    x, weight, _ = operands(1500, *SHAPES["4B"], 1, CUDA)
    down = torch.randn(2560, 9216, device=CUDA).bfloat16() * 0.01
    norm = Norm(weight=torch.zeros(2560, device=CUDA, dtype=torch.bfloat16), eps=1e-6)

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + linear(swiglu_hopper.product(rms_norm(x, norm), weight), down)
        return x

    expected = chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x)
    for _ in range(20):
        got.fill_(torch.nan)
        graph.replay()
        assert torch.equal(got, expected)


@pytest.mark.parametrize("form", ["plain", "int4", "nvfp4"])
def test_layers_of_long_prompts_take_it(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width, depth = SHAPES["4B"]
    generator = torch.Generator(CUDA).manual_seed(3)
    x = torch.randn(4096, depth, device=CUDA, generator=generator).bfloat16()
    norm = Norm(weight=torch.zeros(depth, device=CUDA, dtype=torch.bfloat16), eps=1e-6)
    if form == "plain":
        values = torch.randn(2 * width, depth, device=CUDA, generator=generator) * depth**-0.5
        weight: Weight = Plain(values.bfloat16())
    else:
        weight = random_tiles(FORMS[form], (2 * width, depth), 3)
    assert swiglu_hopper.is_faster(4096, width, depth, torch.bfloat16, CUDA)
    got = linear_layers.norm_swiglu(x, norm, weight)
    monkeypatch.setattr(swiglu_hopper, "is_faster", lambda *_: False)
    other = linear_layers.norm_swiglu(x, norm, weight)
    error = ((got.double() - other.double()).norm() / other.double().norm()).item()
    assert 0 < error < 2 * TOLERANCE, error
