"""Weights with scales of blocks and of rows: their values, rounding, slicing and joining."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from agentspec.kernels.weights import (
    FP8,
    FP8_MAX,
    BlockScaled,
    Plain,
    RowScaled,
    Weight,
    quantize_blocks,
    quantize_rows,
)

SHAPES = [(1, 1), (128, 128), (127, 129), (300, 260), (96, 640), (3, 130, 257)]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_blocks(num_rows: int, depth: int, seed: int = 0) -> BlockScaled:
    return quantize_blocks(randn(num_rows, depth, seed=seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_multiplies_each_value_by_its_block_scale(shape: tuple[int, ...]) -> None:
    weight = quantize_blocks(randn(*shape))
    plain, values = weight.dequantize(), weight.values.float()
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        *stack, row, column = (int(torch.randint(size, (), generator=generator)) for size in shape)
        want = values[(*stack, row, column)] * weight.scales[(*stack, row // 128, column // 128)]
        assert plain[(*stack, row, column)] == want, (stack, row, column)


@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_rounds_to_nearest_and_uses_full_range(shape: tuple[int, ...]) -> None:
    weight = randn(*shape)
    quantized = quantize_blocks(weight)
    assert quantized.values.dtype == FP8
    assert torch.equal(quantized.scales.bfloat16().float(), quantized.scales)
    scales = quantized.scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    # Half a unit of the third fraction bit, and half of the smallest subnormal.
    bound = torch.maximum(weight.abs() * 2**-4, scales * 2**-10)
    assert ((quantized.dequantize() - weight).abs() <= bound * (1 + 1e-6)).all()
    largest = torch.nn.functional.pad(weight.abs(), (0, -shape[-1] % 128, 0, -shape[-2] % 128))
    *stack, rows, columns = largest.shape
    largest = largest.view(*stack, rows // 128, 128, columns // 128, 128).amax((-3, -1))
    ratio = largest / quantized.scales
    assert (ratio <= FP8_MAX).all()
    assert (ratio >= FP8_MAX * (1 - 2**-7)).all()


def test_quantize_is_idempotent() -> None:
    once = quantize_blocks(randn(200, 200)).dequantize()
    assert torch.equal(quantize_blocks(once).dequantize(), once)


def test_quantize_keeps_zeros() -> None:
    weight = randn(256, 256)
    weight[:128, 128:] = 0
    quantized = quantize_blocks(weight)
    assert quantized.scales[0, 1] == 1
    assert not quantized.dequantize()[:128, 128:].any()
    assert quantized.dequantize().isfinite().all()


def test_each_matrix_of_stack_has_own_blocks() -> None:
    weights = randn(3, 130, 70)
    weights[1] *= 1000
    stack = quantize_blocks(weights)
    for index in range(3):
        alone = quantize_blocks(weights[index])
        assert torch.equal(stack.matrix(index).dequantize(), alone.dequantize())


@pytest.mark.parametrize("heights", [(128, 256), (32, 32), (128, 64), (48, 48), (96, 32, 32), (130, 5), (7, 1)])
def test_stacked_rows_keep_values(heights: tuple[int, ...]) -> None:
    """Also if a part ends inside a block: then scales cover fewer rows."""
    parts = [quantize_blocks(randn(rows, 200, seed=rows) * 10**i) for i, rows in enumerate(heights)]
    stacked = parts[0].stack(parts[1:])
    assert torch.equal(stacked.dequantize(), torch.cat([part.dequantize() for part in parts]))
    again = stacked.stack([parts[0]])
    assert torch.equal(again.dequantize(), torch.cat([stacked.dequantize(), parts[0].dequantize()]))


def test_stacking_whole_blocks_keeps_block_size() -> None:
    stacked = random_blocks(256, 130).stack([random_blocks(128, 130), random_blocks(70, 130)])
    assert stacked.block_rows == 128


def test_plain_rows_stack_to_plain_matrix() -> None:
    parts = [randn(3, 5), randn(2, 5, seed=1)]
    assert torch.equal(Plain(parts[0]).stack([Plain(parts[1])]).values, torch.cat(parts))


def test_cuts_share_memory_and_reject_block_interiors() -> None:
    weight = random_blocks(64, 130).stack([random_blocks(64, 130, seed=1)])
    tail = weight.cut((slice(64, None),))
    assert torch.equal(tail.dequantize(), weight.dequantize()[64:])
    assert tail.values.untyped_storage().data_ptr() == weight.values.untyped_storage().data_ptr()
    assert tail.scales.untyped_storage().data_ptr() == weight.scales.untyped_storage().data_ptr()
    with pytest.raises(AssertionError, match="inside a block"):
        weight.cut((slice(32, None),))


def test_smaller_blocks_keep_values() -> None:
    weight = random_blocks(300, 130)
    lower = weight.with_block_rows(32)
    assert lower.scales.shape == (10, 2)
    assert torch.equal(lower.dequantize(), weight.dequantize())


def test_nbytes_counts_values_and_scales() -> None:
    assert random_blocks(256, 300).nbytes == 256 * 300 + 2 * 3 * 4


def test_rows_have_scales_of_their_own() -> None:
    """Each as a block of one row would: its largest magnitude / 448, in bfloat16, rounded up."""
    values = randn(30, 300) * torch.logspace(-20, 10, 30)[:, None]
    values[4] = 0
    weight = quantize_rows(values)
    assert weight.scales.shape == (30,)
    assert weight.nbytes == 30 * 300 + 30 * 4
    assert torch.equal(weight.scales, weight.scales.bfloat16().float())
    for row in range(30):
        scale, largest = float(weight.scales[row]), float(values[row].abs().max())
        if row == 4:
            assert scale == 1
        else:
            assert 1 <= scale * FP8_MAX / largest <= 1 + 2**-7, row
        assert torch.equal(weight.values[row].float(), (values[row] / scale).to(FP8).float()), row


def test_rows_stand_for_values_times_their_scales() -> None:
    weight = quantize_rows(randn(30, 300))
    exact = weight.values.double() * weight.scales.double()[:, None]
    assert torch.equal(weight.dequantize().double(), exact)
    assert weight.is_finite()
    for broken in (
        replace(weight, scales=weight.scales.clone().index_fill_(0, torch.tensor([7]), torch.inf)),
        *(replace(weight, values=with_code(weight.values, code)) for code in (0x7F, 0xFF)),
    ):
        assert not broken.is_finite()
    with pytest.raises(AssertionError, match="scales"):
        RowScaled(values=weight.values, scales=weight.scales[:, None])


def with_code(values: Tensor, code: int) -> Tensor:
    codes = values.view(torch.uint8).clone()
    codes[3, 5] = code
    return codes.view(FP8)


@pytest.mark.parametrize("weight", [quantize_rows(randn(30, 300)), Plain(randn(30, 300).bfloat16())], ids=["8", "16"])
def test_numbers_of_rows_make_the_same_rows(weight: Weight) -> None:
    """As ranks show each other rows of a head."""
    assert weight.can_draft
    numbers = weight.to_numbers()
    assert numbers.dtype == torch.float32
    again = weight.select_rows(torch.tensor([2])).from_numbers(numbers)
    assert (type(again), again.values.dtype) == (type(weight), weight.values.dtype)
    assert torch.equal(again.values.float(), weight.values.float())
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_forms_that_cannot_draft_have_no_numbers() -> None:
    weight = random_blocks(64, 130)
    assert not weight.can_draft
    with pytest.raises(AssertionError, match="BlockScaled has rows that are no numbers"):
        weight.to_numbers()
    with pytest.raises(AssertionError, match="BlockScaled has rows that are no numbers"):
        weight.from_numbers(torch.zeros(1, 130))
