"""linear_hopper.py at the shapes of published models with block-scaled weights: against float64, the same bits in every
run, and in a captured graph whose kernels overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from agentspec.kernels.triton import linear_hopper, tensor_maps
from agentspec.kernels.triton.launch import arrival_counters
from benchmarks.linear import Operands, fault, hopper_plans, run
from benchmarks.linear_results import MODELS, Shape
from tests.kernels.triton.poison import poison_new_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="Hopper's instructions"
    ),
]
LAYERS = [
    pytest.param(shape, id=f"{model} {layer}")
    for model in ("27B-FP8", "35B-A3B-FP8")
    for layer, shape in MODELS[model].shapes().items()
    if next(hopper_plans(shape, 32, 132), None)
]
TOKENS = (12, 16, 17, 32, 33, 64)


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


@pytest.mark.parametrize("shape", LAYERS)
def test_products_match_float64(shape: Shape) -> None:
    for num_tokens in TOKENS:
        operands = Operands.random(shape, num_tokens, 1)
        (weight,) = operands.weights
        for plan in hopper_plans(shape, num_tokens, 132):
            first = run(shape.kind, plan, operands, weight)
            wrong = fault(shape.kind, first, operands, weight, torch.float64)
            assert not wrong, f"{num_tokens} tokens, {plan}: {wrong}"
            for _ in range(20):
                assert torch.equal(run(shape.kind, plan, operands, weight), first), f"{num_tokens} tokens, {plan}"
    assert not arrival_counters(torch.device("cuda")).any()


@pytest.mark.parametrize("num_tokens", [32, 64])
def test_a_graph_of_overlapping_products_equals_eager_ones(num_tokens: int) -> None:
    """A chain of a layer's products, each of which reads what the one before has written."""
    shapes = MODELS["27B-FP8"].shapes()
    names = ("ffn in", "ffn out")
    layers = [Operands.random(shapes[name], num_tokens, 1) for name in names]
    plans = [next(iter(hopper_plans(shapes[name], num_tokens, 132))) for name in names]

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            out: Any = x
            for name, plan, layer in zip(names, plans, layers, strict=True):
                operands = Operands(out, layer.norm, layer.weights, x, None)
                out = run(shapes[name].kind, plan, operands, layer.weights[0])
            x = out
        return x

    x = layers[0].x
    eager = chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(x)
    for _ in range(10):
        captured.fill_(torch.nan)
        graph.replay()
        assert torch.equal(captured, eager)


def test_weights_are_read_256_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else; with the same bits as 128 at a time."""
    shape = MODELS["27B-FP8"].shapes()["ffn out"]
    operands, plan = Operands.random(shape, 32, 1), next(iter(hopper_plans(shape, 32, 132)))
    weight = operands.weights[0]
    product = run(shape.kind, plan, operands, weight)
    utils = triton.runtime.driver.active.utils
    name = next(name for name in tensor_maps._FILLS if hasattr(utils, name))
    fill, read = getattr(utils, name), {}

    def seen(address: int, *arguments: Any) -> object:
        tensor_map = fill(address, *arguments)
        read[int(address)] = tensor_maps.promotion_of(tensor_map, address)
        return tensor_map

    monkeypatch.setattr(utils, name, seen)
    assert torch.equal(run(shape.kind, plan, operands, weight), product)
    assert read == {operands.x.data_ptr(): 128, weight.values.data_ptr(): 256}
    monkeypatch.setattr(linear_hopper, "reads_256_bytes", lambda descriptor: descriptor)
    assert torch.equal(run(shape.kind, plan, operands, weight), product)
    assert set(read.values()) == {128}
