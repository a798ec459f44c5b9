"""4-bit weights in tiles stand for the same values as row by row, whatever is filled, cut or stacked."""

from __future__ import annotations

import random

import pytest
import torch

from agentspec.kernels.four_bit import FourBit, FourBitForm
from agentspec.kernels.four_bit_tiles import FourBitTiles, has_tiles
from agentspec.kernels.weights import FP8

FORMS = (
    FourBitForm(kind="int4", group=128),
    FourBitForm(kind="int4", group=128, scale_dtype=torch.float16, has_zeros=True),
    FourBitForm(kind="e2m1", group=16, scale_dtype=FP8),
    FourBitForm(kind="int4", group=32),
    FourBitForm(kind="int4", group=32, scale_dtype=torch.float16, has_zeros=True),
)


def random_weight(form: FourBitForm, shape: tuple[int, ...], seed: int) -> FourBit:
    """All codes, zero points and scales are equally frequent; those of floats have subnormals and zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = form.empty(shape, torch.device("cpu"))
    weight.values.copy_(torch.randint(0, 256, weight.values.shape, generator=generator, dtype=torch.uint8))
    if form.kind == "e2m1":
        scales = torch.randint(0, 0x7F, weight.scales.shape, generator=generator, dtype=torch.uint8)
        weight.scales.copy_(scales.view(FP8))
        assert weight.multipliers is not None
        weight.multipliers.copy_(torch.rand(shape[:-1], generator=generator) * 1e-3)
    else:
        weight.scales.copy_(torch.rand(weight.scales.shape, generator=generator) * 0.1 + 0.01)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(0, 16, weight.zeros.shape, generator=generator, dtype=torch.uint8))
    return weight


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tiles_stand_for_the_same_values(form: FourBitForm) -> None:
    for seed, shape in enumerate([(16, 128), (48, 384), (32, 1024)]):
        print(f"seed {seed}")
        weight = random_weight(form, shape, seed)
        tiles = FourBitTiles.of(weight)
        assert tiles.shape == weight.shape
        assert torch.equal(tiles.dequantize(), weight.dequantize())
        assert torch.equal(tiles.dequantize(torch.bfloat16), weight.dequantize(torch.bfloat16))
        assert str(form) == tiles.form_name
        ids_O = torch.randint(shape[0], (13,), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(tiles.select_rows(ids_O).dequantize(), weight.dequantize()[ids_O])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_filled_cut_and_stacked_tiles_are_those_rows_and_columns(form: FourBitForm) -> None:
    for seed in range(10):
        rng = random.Random(seed)
        shape = (16 * rng.randint(1, 4), 128 * rng.randint(1, 4))
        print(f"seed {seed} {shape}")
        weight = random_weight(form, shape, seed)
        filled = FourBitTiles.empty(form, shape, torch.device("cpu"))
        middle = 16 * rng.randint(0, shape[0] // 16)
        for rows in (slice(0, middle), slice(middle, shape[0])):
            source = weight if rng.random() < 0.5 else FourBitTiles.of(weight)
            filled.fill((rows,), source, (rows,))
        assert torch.equal(filled.dequantize(), weight.dequantize())
        rows, columns = slice(0, 16), slice(128 * (shape[1] // 128 - 1), shape[1])
        assert torch.equal(filled.cut((rows, columns)).dequantize(), weight.dequantize()[rows, columns])
        other = FourBitTiles.of(random_weight(form, (32, shape[1]), seed + 100))
        stacked = filled.stack([other, filled])
        expected = torch.cat([filled.dequantize(), other.dequantize(), filled.dequantize()])
        assert torch.equal(stacked.dequantize(), expected)
        assert stacked.nbytes == 2 * filled.nbytes + other.nbytes


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_stack_of_tiles_is_its_matrices(form: FourBitForm) -> None:
    """Filled as loaders do, expert by expert and gate apart from up, cut to some experts and columns, as ranks do."""
    for seed in range(4):
        rng = random.Random(seed)
        shape = (rng.randint(1, 4), 16 * rng.randint(1, 3), 128 * rng.randint(1, 3))
        print(f"seed {seed} {shape}")
        weight = random_weight(form, shape, seed)
        assert torch.equal(FourBitTiles.of(weight).dequantize(), weight.dequantize())
        filled, half = FourBitTiles.empty(form, shape, torch.device("cpu")), shape[1] // 2
        for expert in range(shape[0]):
            for rows in (slice(0, half), slice(half, shape[1])):
                filled.fill((expert, rows), weight.cut((expert, rows)))
        assert filled.shape == weight.shape
        assert filled.nbytes == weight.nbytes
        assert torch.equal(filled.dequantize(), weight.dequantize())
        assert torch.equal(filled.rows().dequantize(), weight.dequantize())
        assert torch.equal(filled.matrix(shape[0] - 1).dequantize(), weight.dequantize()[-1])
        some, columns = slice(shape[0] - 1, shape[0]), slice(shape[2] - 128, shape[2])
        part = filled.cut((some, slice(8, 16), columns))
        assert torch.equal(part.dequantize(), weight.dequantize()[some, 8:16, columns])
        again = FourBitTiles.empty(form, shape, torch.device("cpu"))
        again.fill((), filled)
        assert torch.equal(again.dequantize(), weight.dequantize())


def test_only_whole_tiles_of_published_groups_have_tiles() -> None:
    int4, nvfp4 = FORMS[0], FORMS[2]
    assert has_tiles(int4, (16, 256))
    assert has_tiles(nvfp4, (16, 256))
    assert not has_tiles(int4, (24, 256))
    assert not has_tiles(int4, (16, 192))
    assert has_tiles(int4, (4, 16, 256))
    assert not has_tiles(int4, (16, 4, 256))
    assert not has_tiles(FourBitForm(kind="int4", group=16), (16, 256))


def test_tiles_of_another_form_are_refused() -> None:
    first, second = (FourBitTiles.of(random_weight(form, (16, 128), 0)) for form in FORMS[:2])
    with pytest.raises(AssertionError, match="cannot be joined with"):
        first.stack([second])
    with pytest.raises(AssertionError, match="inside a tile"):
        first.cut((slice(0, 4),))
