"""Every kernel, compiled, at served shapes: the interpreter's checks on published models in bfloat16 and on tiny-agent
in float32.

Linear layers run with each of their recorded plans. tests/gpu/test_window_and_norms.py has the other kernels of a
step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels.reference import fused as reference
from agentspec.kernels.triton import linear_layers
from agentspec.kernels.triton import sampling as triton_sampling
from agentspec.kernels.triton.linear_plans import MEASURED, NO_TORCH_PRODUCT, Key, Kind, plan_for
from agentspec.kernels.weights import Plain
from tests.fakes.compare import relative_error
from tests.kernels.triton import test_attention as attention_checks
from tests.kernels.triton import test_gated_delta as delta_checks
from tests.kernels.triton import test_linear as linear_checks
from tests.kernels.triton import test_sampling as sampling_checks
from tests.kernels.triton.poison import poison_new_memory
from tests.kernels.triton.test_attention import Case
from tests.kernels.triton.test_gated_delta import Shape
from tests.kernels.triton.test_linear import Layer

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 248_320
FLOAT32_TOLERANCE = 1e-5
"""For float32 results of products, relative to the largest."""
ONE_ROUNDING = 2**-7
"""For bfloat16 results, relative to the largest: 2^-8 is half a unit in the last place of the result, and as much
again for intermediate rounding."""


@pytest.fixture(autouse=True)
def _poison_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_memory(monkeypatch)


# Attention

HEADS: dict[str, dict[str, Any]] = {
    "0.8B": {"num_heads": 8, "num_kv_heads": 2},
    "4B": {"num_heads": 16, "num_kv_heads": 4},
    "27B": {"num_heads": 24, "num_kv_heads": 4},
}
PUBLISHED: dict[str, Any] = {"head_dim": 256, "half_rope": 32, "page_tokens": 64, "dtype": torch.bfloat16}
TINY: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "half_rope": 8, "page_tokens": 64}
WINDOWS: dict[str, dict[str, Any]] = {
    "one user": {"starts": (2047,), "num_columns": 4},
    "no drafts": {"starts": (2047, 64), "num_columns": 1},
    "eight columns": {"starts": (700, 3), "num_columns": 8},
    "over ends of pages and units": {"starts": (62, 30, None, 0, 253), "num_columns": 4},
    "the MTP layer": {"starts": (0, 1, 130), "num_columns": 4, "first_position": 1},
    "32 slots": {"starts": (*range(1, 320, 11), None, None, 65), "num_columns": 4},
}
LONG: dict[str, Any] = {"starts": (20_000, 5), "num_columns": 4}


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("model", HEADS)
def test_attention_matches_reference(model: str, window: str, cuda: torch.device) -> None:
    attention_checks.check_step(cuda, Case(**PUBLISHED, **HEADS[model], **WINDOWS[window], seed=len(window)))


@pytest.mark.parametrize("window", WINDOWS)
def test_attention_of_tiny_agent_matches_reference(window: str, cuda: torch.device) -> None:
    attention_checks.check_step(cuda, Case(**TINY, **WINDOWS[window], seed=len(window)))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [PUBLISHED | HEADS["27B"], TINY], ids=["27B", "tiny-agent"])
def test_attention_over_fp8_pages_matches_reference(shape: dict[str, Any], window: str, cuda: torch.device) -> None:
    case = Case(**shape, **WINDOWS[window], fp8=True, seed=len(window))
    attention_checks.check_step(cuda, case)
    attention_checks.check_same_bits(cuda, case)


@pytest.mark.parametrize(
    "shape",
    [PUBLISHED | HEADS["4B"], PUBLISHED | HEADS["4B"] | {"fp8": True}, TINY],
    ids=["4B", "4B, FP8 pages", "tiny-agent"],
)
def test_attention_over_long_context_matches_reference(shape: dict[str, Any], cuda: torch.device) -> None:
    case = Case(**shape, **LONG, seed=1)
    attention_checks.check_step(cuda, case)
    attention_checks.check_same_bits(cuda, case)


# The gated delta rule

RECURRENT = {
    "0.8B": Shape(value_heads=16, key_heads=16, value_dim=128, key_dim=128, dtype=torch.bfloat16),
    "4B": Shape(value_heads=32, key_heads=16, value_dim=128, key_dim=128, dtype=torch.bfloat16),
    "27B": Shape(value_heads=48, key_heads=16, value_dim=128, key_dim=128, dtype=torch.bfloat16),
    "tiny-agent": Shape(value_heads=4, key_heads=2, value_dim=64, key_dim=64),
}


@pytest.mark.parametrize(("num_slots", "num_columns"), [(1, 4), (1, 1), (8, 4), (32, 4), (3, 8)])
@pytest.mark.parametrize("model", RECURRENT)
def test_gated_delta_matches_reference(model: str, num_slots: int, num_columns: int, cuda: torch.device) -> None:
    delta_checks.check_against_reference(RECURRENT[model], num_slots, num_columns, cuda, seed=num_slots + num_columns)


@pytest.mark.parametrize("model", RECURRENT)
def test_gated_delta_is_batch_invariant(model: str, cuda: torch.device) -> None:
    delta_checks.check_against_reference(RECURRENT[model], 3, 4, cuda, seed=1, slow=True)
    delta_checks.check_bits(RECURRENT[model], 8, 4, cuda, seed=2)


# Linear layers

OPERATIONS: dict[Kind, Callable[[Any, Layer], Tensor]] = {
    "linear": lambda ops, layer: ops.linear(layer.x, layer.weight),
    "norm_linear": lambda ops, layer: ops.norm_linear(layer.x, layer.norm, layer.weight),
    "norm_swiglu": lambda ops, layer: ops.norm_swiglu(layer.x, layer.norm, layer.weight),
    "add_linear": lambda ops, layer: ops.add_linear(layer.residual, layer.x, layer.weight),
    "logits": lambda ops, layer: ops.logits(layer.x, layer.weight, len(layer.weight.values) - 7)[:, :-7],
}
TINY_LAYERS: list[Key] = [
    ("norm_linear", 776, 256),
    ("norm_linear", 768, 256),
    ("add_linear", 256, 256),
    ("norm_swiglu", 1280, 256),
    ("add_linear", 256, 640),
    ("linear", 256, 512),
    ("logits", 4096, 256),
    ("draft_argmax", 4096, 256),
]


def in_dtype(layer: Layer, dtype: torch.dtype) -> Layer:
    """The same operands in another dtype."""
    other = object.__new__(Layer)
    other.x, other.weight, other.residual = (
        layer.x.to(dtype),
        Plain(layer.weight.dequantize(dtype)),
        layer.residual.to(dtype),
    )
    other.norm = replace(layer.norm, weight=layer.norm.weight.to(dtype))
    return other


def check_operation(key: Key, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check the backend's result, by its own choice of plan, against the next wider dtype."""
    kind, num_outputs, depth = key
    layer = Layer(num_tokens, num_outputs, depth, device, dtype)
    plan = plan_for(kind, num_outputs, depth, num_tokens, dtype.itemsize)
    text = f"{kind}, {layer.text}, {plan}"
    wider = in_dtype(layer, torch.float64 if dtype == torch.float32 else torch.float32)
    if kind == "draft_argmax":
        assert plan is not None
        scores = reference.linear(wider.x, wider.weight)
        chosen = linear_layers.draft_argmax(layer.x, layer.weight, None)
        short = scores.amax(-1) - scores.gather(1, chosen[:, None])[:, 0]
        assert (short <= FLOAT32_TOLERANCE * scores.abs().amax()).all(), f"{text}: {short.tolist()} below the largest"
        linear_checks.check_nearest(plan, layer)
        return
    got, exact = OPERATIONS[kind](linear_layers, layer), OPERATIONS[kind](reference, wider)
    assert got.dtype == (torch.float32 if kind == "logits" else dtype), text
    error = relative_error(got, exact)
    assert error < (FLOAT32_TOLERANCE if got.dtype == torch.float32 else ONE_ROUNDING), f"{text}: {error}"
    assert torch.equal(OPERATIONS[kind](linear_layers, layer), got), f"a second run: {text}"


@pytest.mark.parametrize("key", MEASURED, ids=lambda key: "{} {}x{}".format(*key))
def test_linear_layers_match_reference_with_recorded_plans(key: Key, cuda: torch.device) -> None:
    """1 and 3 tokens, and the most tokens of each plan."""
    for num_tokens in sorted({1, 3, *(most for most, _ in MEASURED[key])}):
        check_operation(key, num_tokens, torch.bfloat16, cuda)


@pytest.mark.parametrize("key", TINY_LAYERS, ids=lambda key: "{} {}x{}".format(*key))
def test_linear_layers_of_tiny_agent_match_reference(key: Key, cuda: torch.device) -> None:
    for num_tokens in (1, 4, 32, 100):
        check_operation(key, num_tokens, torch.float32, cuda)


def test_every_layer_kind_is_covered() -> None:
    assert {kind for kind, _, _ in MEASURED} <= {*OPERATIONS, "draft_argmax"}
    assert set(NO_TORCH_PRODUCT) <= {kind for kind, _, _ in TINY_LAYERS}


# Sampling

REQUESTS: dict[str, list[dict[str, Any]]] = {
    "as the model card says": [{"temperature": 0.6, "top_k": 20, "top_p": 0.95}] * 2,
    "one filter each": [{"top_k": 1000}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.99999}],
    "none": [{"temperature": 1.0}, {"temperature": 0.0}],
    "penalties": [
        {"temperature": 0.7, "top_p": 0.8, "repetition": 1.3, "frequency": 0.4, "presence": -1.5},
        {"temperature": 0.0, "presence": 2.0, "repetition": 0.7},
    ],
}


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("requests", REQUESTS)
def test_sampling_matches_reference(requests: str, constrained: bool, cuda: torch.device) -> None:
    for spread in (0.3, 3.0):
        batch = sampling_checks.Batch.random(len(requests), VOCAB_SIZE, 4, REQUESTS[requests], spread)
        sampling_checks.check_sample(batch, constrained, cuda, f"{requests}, {spread=}, {constrained=}")


@pytest.mark.parametrize("vocab_size", [4096, VOCAB_SIZE])
def test_sampling_of_random_requests_matches_reference(vocab_size: int, cuda: torch.device) -> None:
    for seed in range(6):
        generator = random.Random(seed)
        slots = [sampling_checks.random_slot(generator, vocab_size) for _ in range(3)]
        batch = sampling_checks.Batch.random(seed, vocab_size, 2, slots)
        sampling_checks.check_sample(batch, seed % 2 == 1, cuda, f"{seed=} {slots}")


@pytest.mark.parametrize("kind", sampling_checks.FILTERS)
def test_filters_keep_same_tokens_as_reference(kind: str, cuda: torch.device) -> None:
    batch = sampling_checks.Batch.random(len(kind), VOCAB_SIZE, 2, [sampling_checks.FILTERS[kind]])
    sampling_checks.check_kept_tokens(batch, cuda, kind)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, VOCAB_SIZE), (4, VOCAB_SIZE), (128, VOCAB_SIZE), (4, 4096)])
def test_argmax_matches_reference(num_rows: int, vocab_size: int, cuda: torch.device) -> None:
    sampling_checks.check_argmax(num_rows, vocab_size, num_rows, cuda)


def test_seeded_draws_are_batch_invariant(cuda: torch.device) -> None:
    batch = sampling_checks.Batch.random(
        5, VOCAB_SIZE, 4, [{"temperature": 0.8, "top_p": math.inf}, {"top_k": 50}, {"min_p": 0.1}]
    ).to(cuda)
    together_BT = triton_sampling.sample(*batch.arguments(), constrained=False)
    for b in range(3):
        alone = batch.row(b)
        assert torch.equal(triton_sampling.sample(*alone.arguments(), constrained=False)[0], together_BT[b]), b
