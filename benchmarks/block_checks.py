"""Check of a model with experts or 8-bit weights before it is measured: its blocks, at their published widths, equal
the reference.

Compares one recurrent and one attention layer on the device's kernels with the same weights in float32 on the CPU.
Every block gets independent inputs, so that errors don't propagate. Compared is what a block adds to its input.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import linear

from agentspec import kernels
from agentspec.kernels import reference
from agentspec.models.attention import GatedAttention
from agentspec.models.hf_config import LayerType, TextConfig
from agentspec.models.hybrid import DecoderLayer
from agentspec.models.moe import MixtureOfExperts
from agentspec.models.protocol import VerifyBatch
from agentspec.models.tensors import random_parameters
from agentspec.types import BLOCK_TOKENS
from benchmarks.decode_checks import CheckFailedError
from benchmarks.published import PrefilledModel, spec_of

CPU = torch.device("cpu")
LAYERS: tuple[LayerType, ...] = ("linear_attention", "full_attention")
VOCABULARY = 1_024

STARTS = (70, 5)
"""Start positions of the mixers' windows, one per slot."""
NUM_COLUMNS = 4
FFN_TOKENS = (4, 32, 128, 300)
"""Token counts from a decode window to a prompt: each has its own kernel path."""
EXACT_WEIGHT_TOKENS = 64
"""Up to this many tokens, matmuls with 8-bit weights don't round their inputs; above, they may round them to 8 bits."""

INPUT_SCALE = 1 / 8
"""Scale of random inputs, so that a block's contribution isn't small beside them."""
ROUTER_MARGIN = 0.02
"""Minimum distance between the scores of a token's last chosen expert and the best other one: several times the
rounding error."""

TOLERANCE = 2**-6
"""Relative tolerance of a block's contribution, by norms. bfloat16 rounding gives 2^-8 to 2^-7."""
ROUNDED_INPUTS_TOLERANCE = 2**-4
"""The same where inputs are rounded to 3 mantissa bits: at most 2^-4 of a value, 2^-5.3 on average, in both matmuls of
an FFN."""


@dataclass(frozen=True, slots=True)
class Twin:
    """One of the two models, with the pools of its windows."""

    model: PrefilledModel
    windows: VerifyBatch

    def mix(self, i: int, x_NH: Tensor) -> Tensor:
        """x plus the mixer of layer i."""
        return self.model.layers[i].mix(
            x_NH,
            self.model.pools.layers[i],
            lambda mixer, x_NH, norm, memory: mixer.step(mixer.project(x_NH, norm), memory, self.windows),
        )


def wants_block_checks(config: TextConfig) -> bool:
    """Whether the small model of the other checks lacks such blocks."""
    return config.moe is not None or config.quantization is not None


@torch.inference_mode()
def check_blocks(name: str, config: TextConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return a description of the checks. Raises CheckFailedError naming the first block beyond the tolerance."""
    ours, exact = twins(name, config, device, dtype)
    worst: dict[str, float] = {}
    for i in range(len(LAYERS)):
        for block, found, expected in _results(ours, exact, i, dtype):
            num_tokens = len(found)
            rounds_inputs = config.quantization is not None and num_tokens > EXACT_WEIGHT_TOKENS
            error, tolerance = relative_error(found, expected), ROUNDED_INPUTS_TOLERANCE if rounds_inputs else TOLERANCE
            if not error <= tolerance:
                raise CheckFailedError(
                    f"{name}: {block} of {num_tokens} tokens: off by {error:.1e} from float32 on the CPU, "
                    f"{tolerance:.1e} at most"
                )
            kind = f"{block} of {num_tokens}"
            worst[kind] = max(worst.get(kind, 0.0), error)
    errors = ", ".join(f"{block} {error:.1e}" for block, error in worst.items())
    return (
        f"{name}, a recurrent and an attention layer, {str(dtype).removeprefix('torch.')}: blocks are as in "
        f"float32 on the CPU (errors: {errors})"
    )


def twins(name: str, config: TextConfig, device: torch.device, dtype: torch.dtype) -> tuple[Twin, Twin]:
    """(on the device, in float32 on the CPU) with the same weights, states and keys."""
    cut = replace(config, layer_types=LAYERS, vocab_size=min(VOCABULARY, config.vocab_size), num_mtp_layers=0)
    parameters = random_parameters(cut, device=device, dtype=dtype, seed=0)
    exact_parameters: dict[str, kernels.Weight] = {
        key: kernels.Plain(parameter.dequantize().cpu()) for key, parameter in parameters.items()
    }
    spec = spec_of(name, cut, dtype)
    models = PrefilledModel(cut, spec, parameters), PrefilledModel(cut, spec, exact_parameters)
    num_slots, num_pages = len(STARTS), (max(STARTS) + NUM_COLUMNS) // BLOCK_TOKENS + 1
    rows_BR = torch.arange(num_slots * (NUM_COLUMNS + 1)).view(num_slots, -1) + 2
    pages_BP = (torch.arange(num_slots * num_pages, dtype=torch.int32) + 1).view(num_slots, -1)
    found = []
    for model in models:
        model.allocate(num_rows=2 + rows_BR.numel(), num_pages=1 + pages_BP.numel())
        windows = VerifyBatch(
            tokens_BT=torch.zeros(num_slots, NUM_COLUMNS, dtype=torch.int64, device=model.device),  # unused by mixers
            length_B=torch.tensor(STARTS, device=model.device),
            read_row_B=rows_BR[:, 0].to(model.device).contiguous(),
            write_rows_BT=rows_BR[:, 1:].to(model.device).contiguous(),
            page_table_BP=pages_BP.to(model.device),
        )
        found.append(Twin(model, windows))
    for tensor, exact in zip(models[0].pools.tensors(), models[1].pools.tensors(), strict=True):
        exact.copy_(tensor)
    return found[0], found[1]


def _results(ours: Twin, exact: Twin, i: int, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(block of layer i, what it adds on the device, what it adds in float32)."""
    layer, exact_layer = ours.model.layers[i], exact.model.layers[i]
    generator = torch.Generator().manual_seed(i)
    x_NH = made_up_inputs(len(STARTS) * NUM_COLUMNS, exact_layer, dtype, generator)
    kind = "attention" if isinstance(layer.mixer, GatedAttention) else "delta rule"
    device = ours.model.device
    yield kind, _added(ours.mix(i, x_NH.to(device, copy=True)), x_NH), _added(exact.mix(i, x_NH.float()), x_NH)
    for num_tokens in FFN_TOKENS:
        x_NH = made_up_inputs(num_tokens, exact_layer, dtype, generator)
        found_NH = layer.ffn.add_to(x_NH.to(device, copy=True), layer.post_norm)
        yield "FFN", _added(found_NH, x_NH), _added(exact_layer.ffn.add_to(x_NH.float(), exact_layer.post_norm), x_NH)


def _added(result_NH: Tensor, x_NH: Tensor) -> Tensor:
    return result_NH.cpu().double() - x_NH.double()


def made_up_inputs(
    num_tokens: int, exact_layer: DecoderLayer, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """[num_tokens, H] on the CPU: inputs whose experts don't change by rounding."""
    hidden = exact_layer.post_norm.weight.shape[0]
    x_NH = (torch.randn(4 * num_tokens, hidden, generator=generator) * INPUT_SCALE).to(dtype)
    if isinstance(exact_layer.ffn, MixtureOfExperts):
        weights = exact_layer.ffn.weights
        scores_NX = linear(reference.rms_norm(x_NH.float(), exact_layer.post_norm), weights.router_XH.float())
        best_NJ = scores_NX.topk(min(weights.top_k + 1, scores_NX.shape[1]), -1).values
        x_NH = x_NH[best_NJ[:, -2] - best_NJ[:, -1] > ROUTER_MARGIN]
        assert len(x_NH) >= num_tokens, f"{len(x_NH)} of {4 * num_tokens} tokens choose clearly"
    return x_NH[:num_tokens]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Relative difference by norms. NaN if any value is NaN."""
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return float(difference / torch.linalg.vector_norm(expected.double()))
