"""The gate's columns of the product before a prompt's recurrence, left for later: the bits of one product, nobody that
reads them before, and where they are left."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels import triton as triton_backend
from agentspec.kernels.backend import Norm, OpenProduct
from agentspec.kernels.group import within
from agentspec.kernels.triton import chunked_delta, chunked_delta_hopper, delta_products, linear_layers
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.variants import Machine
from agentspec.kernels.weights import Plain, Weight
from tests.fakes.sequence_driver import Driver
from tests.kernels.triton.conftest import WriteScaled
from tests.kernels.triton.test_fp8_prefill import block_scaled, randn
from tests.models.test_group import Pretended

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
WIDTH, NUM_TOKENS = 512, 300
GATES = slice(256, 512)


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room beside every recurrence."""
    monkeypatch.setattr(delta_products, "leaves_room", lambda *_: True)


def norm_of(device: torch.device) -> Norm:
    return Norm(weight=randn(WIDTH, seed=3, device=device, dtype=DTYPE), eps=1e-6)


@pytest.mark.usefixtures("roomy")
def test_columns_that_come_later_have_the_bits_of_one_product(device: torch.device) -> None:
    x = randn(NUM_TOKENS, WIDTH, seed=1, device=device, dtype=DTYPE)
    weight, norm = block_scaled(GATES.stop, WIDTH, 2, device), norm_of(device)
    extra = randn(8, WIDTH, seed=4, device=device, dtype=DTYPE)
    expected = linear_layers.norm_linear(x, norm, weight, extra)
    found = delta_products.norm_linear_before_delta(x, norm, weight, extra, GATES)
    assert isinstance(found, OpenProduct)
    columns = torch.arange(expected.shape[1], device=device)
    is_gate = (columns >= GATES.start) & (columns < GATES.stop)
    assert torch.equal(found.values_NP[:, ~is_gate], expected[:, ~is_gate])
    assert found.values_NP[:, is_gate].isnan().all()
    found.close()
    assert torch.equal(found.values_NP, expected)


def test_columns_are_left_only_beside_a_long_recurrence(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where Hopper's kernel doesn't run; not of few tokens; not if its programs take more than half of the device;
    nor in 16 bits."""
    norm, weight = norm_of(device), block_scaled(GATES.stop, WIDTH, 2, device)
    extra = randn(8, WIDTH, seed=4, device=device, dtype=DTYPE)
    x = randn(delta_products.LEAST_TOKENS, WIDTH, seed=1, device=device, dtype=DTYPE)

    def is_open(x: Tensor = x, weight: Weight = weight, gates: slice = GATES, ops: Any = triton_backend) -> bool:
        return isinstance(ops.norm_linear_before_delta(x, norm, weight, extra, gates), OpenProduct)

    monkeypatch.setattr(chunked_delta_hopper, "is_supported", lambda *_: False)
    assert not is_open()
    monkeypatch.setattr(chunked_delta_hopper, "is_supported", lambda *_: True)
    machines = [Machine(capability=(9, 0), num_multiprocessors=7), Machine(capability=(9, 0), num_multiprocessors=132)]
    monkeypatch.setattr(delta_products, "machine_of", lambda _: machines[-1])
    assert is_open()
    assert not is_open(x=x[:-1])
    assert not is_open(gates=slice(200, 456))
    assert not is_open(weight=Plain(weight.dequantize(DTYPE)))
    assert is_open(ops=within(Pretended(2), triton_backend))
    machines.pop()
    assert not is_open()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a mixer does, in order."""
    found: list[str] = []

    def note(module: ModuleType, function: str, name: str) -> None:
        original = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *args: found.append(name) or original(*args))

    note(delta_products, "multiply_scaled", "gates")
    note(chunked_delta, "_fold", "recurrence")
    return found


@torch.inference_mode()
@pytest.mark.usefixtures("roomy")
@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy's, of padding tokens
def test_prompts_have_the_bits_of_whole_products(
    calls: list[str], write_scaled: WriteScaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = write_scaled(
        "dense",
        DTYPE,
        hidden_size=512,
        num_hidden_layers=2,
        full_attention_interval=2,
        head_dim=64,
        linear_key_head_dim=32,
        linear_value_head_dim=128,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
    )
    prompt = [(7 * i) % 160 for i in range(NUM_TOKENS)]

    def run() -> list[Tensor]:
        model = load()
        return [Driver(model, max_tokens=512).prefill(prompt), *model.row_tensors(), *model.page_tensors()]

    got = run()
    assert calls == ["gates", "recurrence"]
    monkeypatch.setattr(delta_products, "leaves_room", lambda *_: False)
    for ours, wanted in zip(got, run(), strict=True):
        assert torch.equal(ours.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert calls == ["gates", "recurrence", "recurrence"]
    assert got[0].isfinite().all()
