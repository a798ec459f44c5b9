"""The sum before a mixture, left open for the router's scores: where it is, the bits of a sum apart, and nothing that
reads a residual without its product. The scores are torch's; test_routing_hopper.py has the kernel that adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec.kernels import triton as triton_backend
from agentspec.kernels.backend import MixtureWeights, Norm, OpenSum
from agentspec.kernels.group import within
from agentspec.kernels.triton import linear_layers, mixture, routing
from agentspec.kernels.triton.fp8_activations import quantize_tokens
from agentspec.kernels.triton.fp8_prefill import RoundedTokens
from agentspec.kernels.triton.launch import INTERPRETED
from agentspec.kernels.variants import Machine
from agentspec.kernels.weights import BlockScaled, Plain
from tests.fakes.ridden_pass import RiddenPass
from tests.fakes.sequence_driver import Driver
from tests.kernels.triton.conftest import WriteScaled
from tests.kernels.triton.test_experts import inputs, mixture_of
from tests.kernels.triton.test_fp8_prefill import block_scaled, randn
from tests.models.test_group import Pretended

DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
WIDTH, DEPTH, NUM_TOKENS = 256, 512, 259


class Scores:
    """routing_hopper.py's functions, for any device. What has been added up holds NaN afterwards: nothing reads it."""

    def __init__(self) -> None:
        self.num_sums = self.num_calls = 0

    def is_supported(self, *_: Tensor) -> bool:
        return True

    def split_of(self, *_: int) -> int:
        return 1

    def score(
        self,
        x: Tensor,
        router: Tensor,
        norm: Tensor,
        parts: Tensor,
        squares: Tensor,
        product: Tensor | None = None,
        summed: Tensor | None = None,
    ) -> None:
        self.num_calls += 1
        if product is not None:
            assert summed is not None
            summed.copy_(x + product)
            x.fill_(torch.nan)
            product.fill_(torch.nan)
            x = summed
            self.num_sums += 1
        parts[0] = (x.float() * (1 + norm.float())) @ router.float().t()
        squares[0] = x.float().square().sum(1)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Scores:
    found = Scores()
    monkeypatch.setattr(routing, "routing_hopper", found)
    monkeypatch.setattr(routing, "machine_of", lambda _: Machine(capability=(9, 0), num_multiprocessors=132))
    return found


def mixture_and_norm(device: torch.device) -> tuple[MixtureWeights, Norm]:
    weights = mixture_of(WIDTH, 8, 128, 2, 3, device, DTYPE, scaled=True)
    return weights, inputs(1, WIDTH, 4, device, DTYPE)[1]


@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_mixture_adds_the_sum_before_it(is_rounded: bool, scores: Scores, device: torch.device) -> None:
    (weights, norm), out = mixture_and_norm(device), block_scaled(WIDTH, DEPTH, 8, device)
    residual = randn(NUM_TOKENS, WIDTH, seed=1, device=device, dtype=DTYPE)
    tokens = randn(NUM_TOKENS, DEPTH, seed=2, device=device, dtype=DTYPE)
    x = RoundedTokens(scaled=quantize_tokens(tokens), num_tokens=NUM_TOKENS, dtype=DTYPE) if is_rounded else tokens
    expected = mixture.add_experts(linear_layers.add_linear(residual.clone(), x, out), norm, weights)
    found = mixture.add_linear_before_experts(residual.clone(), x, out, norm, weights)
    assert isinstance(found, OpenSum)
    assert torch.equal(found.residual_NH, residual)
    assert scores.num_sums == 0
    got = mixture.add_experts(found, norm, weights)
    assert (scores.num_sums, scores.num_calls) == (1, 2)
    assert got.isfinite().all()
    assert torch.equal(got, expected)


def test_a_closed_sum_is_a_linear_layers(scores: Scores, device: torch.device) -> None:
    (weights, norm), out = mixture_and_norm(device), block_scaled(WIDTH, DEPTH, 8, device)
    residual = randn(NUM_TOKENS, WIDTH, seed=1, device=device, dtype=DTYPE)
    x = randn(NUM_TOKENS, DEPTH, seed=2, device=device, dtype=DTYPE)
    found = mixture.add_linear_before_experts(residual.clone(), x, out, norm, weights)
    assert isinstance(found, OpenSum)
    assert torch.equal(found.closed(), linear_layers.add_linear(residual.clone(), x, out))


def test_sums_are_left_open_only_where_the_scores_add_them(
    scores: Scores, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of few tokens; not if the product adds the residual itself; not of rows apart; nor between ranks."""
    (weights, norm), out = mixture_and_norm(device), block_scaled(WIDTH, DEPTH, 8, device)
    residual = randn(NUM_TOKENS, 2 * WIDTH, seed=1, device=device, dtype=DTYPE)
    whole, rows = residual[:, :WIDTH].contiguous(), residual[:, :WIDTH]
    x = randn(NUM_TOKENS, DEPTH, seed=2, device=device, dtype=DTYPE)

    def is_open(residual: Tensor, x: Tensor, out: BlockScaled | Plain, ops: Any = mixture) -> bool:
        found = ops.add_linear_before_experts(residual.clone(), x, out, norm, weights)
        return isinstance(found, OpenSum)

    assert is_open(whole, x, out)
    assert not is_open(whole[: mixture.MOST_TOKENS], x[: mixture.MOST_TOKENS], out)
    assert not is_open(whole, x, Plain(out.dequantize(DTYPE)))
    assert not isinstance(mixture.add_linear_before_experts(rows, x, out, norm, weights), OpenSum)
    assert not is_open(whole, x, out, within(Pretended(2), triton_backend))
    monkeypatch.setattr(scores, "is_supported", lambda *_: False)
    assert not is_open(whole, x, out)


@torch.inference_mode()
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, of the interpreter
def test_prompts_have_the_bits_of_sums_apart(
    scores: Scores, write_scaled: WriteScaled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One alone, and short ones with windows that ride, for which the limits are lowered."""
    load = write_scaled(
        "moe",
        DTYPE,
        hidden_size=256,
        num_hidden_layers=3,
        full_attention_interval=2,
        head_dim=64,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
    )
    prompt = [(7 * i) % 160 for i in range(NUM_TOKENS)]

    def run() -> list[Tensor]:
        model = load()
        hidden = Driver(model, max_tokens=512).prefill(prompt)
        alone = [hidden, *model.row_tensors(), *model.page_tensors()]
        assert scores.num_calls % 3 == 0
        with monkeypatch.context() as patch:
            patch.setattr(mixture, "MOST_TOKENS", 64)
            patch.setattr(routing, "_FEW_TILES", 64)
            model = load()
            return [*alone, *RiddenPass(model, prompt[:130]).ridden()]

    got = run()
    assert scores.num_sums == scores.num_calls == 3 * 3, "of 259 tokens, of 70, and of 89 with windows"
    monkeypatch.setattr(mixture, "takes_open_sum", lambda *_: False)
    expected = run()
    assert (scores.num_sums, scores.num_calls) == (9, 18)
    for ours, wanted in zip(got, expected, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert got[0].isfinite().all()
