"""4-bit weights: their values, packing and rounding, and products in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agentspec.kernels import FP8, GROUPS, FourBit, FourBitForm, Plain, four_bit, pack, quantize_int4, reference, unpack
from agentspec.kernels.reference import fused

FORMS = {
    **{f"int4, {group}": FourBitForm(kind="int4", group=group) for group in GROUPS},
    "int4, float16": FourBitForm(kind="int4", group=32, scale_dtype=torch.float16),
    "int4, zero points": FourBitForm(kind="int4", group=32, has_zeros=True),
    "e2m1": FourBitForm(kind="e2m1", group=16, scale_dtype=FP8),
}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> FourBitForm:
    return FORMS[request.param]


def random_weight(form: FourBitForm, *shape: int, seed: int = 1) -> FourBit:
    """Any codes, zero points and scales."""
    generator = torch.Generator().manual_seed(seed)
    weight = form.empty(shape, torch.device("cpu"))
    weight.values.random_(0, 256, generator=generator)
    weight.scales.copy_(torch.rand(weight.scales.shape, generator=generator) + 2**-6)
    if weight.zeros is not None:
        weight.zeros.random_(0, 16, generator=generator)
    if weight.multipliers is not None:
        weight.multipliers.uniform_(1e-4, 1e-2, generator=generator)
    return weight


def value(code: int) -> float:
    """A float of one sign bit, two exponent bits with bias 1, and one fraction bit."""
    exponent, fraction = code >> 1 & 3, code & 1
    magnitude = fraction / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + fraction / 2)
    return -magnitude if code & 8 else magnitude


def test_dequantize_follows_the_definition(form: FourBitForm) -> None:
    """In exact arithmetic; float32 rounds only the product with the multiplier."""
    weight = random_weight(form, 2, 6, 256)
    plain = weight.dequantize()
    generator = torch.Generator().manual_seed(2)
    for _ in range(300):
        x, row, column = (int(torch.randint(size, (), generator=generator)) for size in weight.shape)
        code = int(weight.values[x, row, column // 2]) >> 4 * (column % 2) & 15
        scale = float(weight.scales[x, row, column // form.group])
        if weight.multipliers is not None:
            want = value(code) * scale * float(weight.multipliers[x, row])
        else:
            want = (code - (8 if weight.zeros is None else int(weight.zeros[x, row, column // form.group]))) * scale
        assert float(plain[x, row, column]) == float(torch.tensor(want, dtype=torch.float64).float()), (x, row, column)
    assert torch.equal(weight.dequantize(torch.bfloat16), plain.bfloat16())


def test_pack_puts_the_even_column_in_the_low_nibble() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    assert pack(codes)[0, :3].tolist() == [0x10, 0x32, 0x54]
    assert torch.equal(unpack(pack(codes)), codes)


def test_quantize_rounds_to_the_nearest_code(form: FourBitForm) -> None:
    values = torch.randn(3, 8, 256, generator=torch.Generator().manual_seed(3))
    values[0, 0] = 0
    weight = form.quantize(values)
    error = (weight.dequantize() - values).abs().unflatten(-1, (-1, form.group))
    largest = values.abs().unflatten(-1, (-1, form.group)).amax(-1, keepdim=True)
    # Half of the widest step: 1 of 7, or 2 of 6, and a scale that is rounded to 8 bits of fraction, or to 4.
    assert (error <= largest * (0.5 / 7 + 2**-8 if form.kind == "int4" else 1 / 6 + 2**-4)).all()
    assert not weight.dequantize()[0, 0].any()
    assert weight.is_finite()


def test_parts_that_are_joined_keep_their_multipliers() -> None:
    """Gate and up of one layer have different ones."""
    form = FORMS["e2m1"]
    gate, up = random_weight(form, 32, 64), random_weight(form, 48, 64, seed=2)
    assert gate.multipliers is not None
    gate.multipliers.mul_(1000)
    assert torch.equal(gate.stack([up]).dequantize(), torch.cat([gate.dequantize(), up.dequantize()]))
    whole = form.empty((2, 80, 64), gate.device)
    for x in range(2):
        whole.fill((x, slice(0, 32)), gate)
        whole.fill((x, slice(32, 80)), up)
    assert torch.equal(whole.dequantize()[1], torch.cat([gate.dequantize(), up.dequantize()]))


def test_forms_that_differ_are_not_joined(form: FourBitForm) -> None:
    for other in FORMS.values():
        if other != form:
            with pytest.raises(AssertionError, match="cannot be joined"):
                random_weight(form, 16, 128).stack([random_weight(other, 16, 128)])


def test_cut_rejects_columns_inside_a_group(form: FourBitForm) -> None:
    weight = random_weight(form, 16, 256)
    for columns in (slice(8, 128), slice(0, form.group + 8)):
        with pytest.raises(AssertionError, match="inside"):
            weight.cut((slice(None), columns))


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, 3e38])
def test_values_that_are_not_finite_are_found(scale: float) -> None:
    weight = random_weight(FORMS["int4, zero points"], 16, 64)
    assert weight.is_finite()
    weight.scales[3, 1] = scale
    assert not weight.is_finite()
    weight = random_weight(FORMS["e2m1"], 16, 64)
    assert weight.multipliers is not None
    weight.multipliers[3] = scale
    assert not weight.is_finite()


def test_nbytes_counts_every_part() -> None:
    assert random_weight(FORMS["int4, zero points"], 16, 64).nbytes == 16 * (32 + 2 * 2 + 2)
    assert random_weight(FORMS["e2m1"], 16, 64).nbytes == 16 * (32 + 4 + 4)


def test_large_products_expand_pieces(form: FourBitForm, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(form, 600, 128)
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(4))
    want = reference.linear(x, Plain(weight.dequantize()))
    assert torch.equal(reference.linear(x, weight), want)
    expanded: list[int] = []
    monkeypatch.setattr(fused, "_EXPANDED", 130 * 128)
    monkeypatch.setattr(fused, "torch_linear", lambda x, w: expanded.append(len(w)) or x @ w.t())
    torch.testing.assert_close(reference.linear(x, weight), want, rtol=1e-5, atol=1e-5)
    assert expanded == [128, 128, 128, 128, 88]


def test_dequantize_works_in_pieces(form: FourBitForm, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(form, 3, 7, 256)
    whole: Tensor = weight.dequantize()
    monkeypatch.setattr("agentspec.kernels.four_bit._PIECE", 4 * 256)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, **options: empty(*given, **options).fill_(torch.nan))
    assert torch.equal(weight.dequantize(), whole)


def squared_error(rounded: Tensor, group: Tensor) -> float:
    return float((rounded.double() - group.double()).square().sum())


def searched(group: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) of one group, by the definition: the first clipping ratio with the least squared error."""
    found: list[tuple[float, Tensor, Tensor]] = []
    for step in range(16):
        scale = (group.abs().max() * ((1 - step / 40) / 7)).bfloat16().float()
        if scale == 0:
            scale = torch.tensor(1.0)
        codes = (group / scale).round().clamp(-8, 7)
        found.append((squared_error(codes * scale, group), codes + 8, scale))
    return min(found, key=lambda one: one[0])[1:]


@pytest.mark.parametrize("group", [32, 128])
def test_int4_takes_the_scale_of_least_squared_error(group: int) -> None:
    print(f"seed {group}")
    generator = torch.Generator().manual_seed(group)
    values = torch.randn(40, 256, generator=generator) ** 3 / 100
    values[3], values[5, :group], values[7] = 0, 1e-42, values[7] * 1e30
    weight = quantize_int4(values, group)
    assert weight.form == FourBitForm(kind="int4", group=group)
    codes = unpack(weight.values).view(40, -1, group)
    for row in range(40):
        for index, of_group in enumerate(values[row].view(-1, group)):
            want_codes, want_scale = searched(of_group)
            got = (codes[row, index].float() - 8) * weight.scales[row, index].float()
            want_error = squared_error((want_codes - 8) * want_scale, of_group)
            # The sums may be added in another order: of nearly equal errors either may win.
            assert squared_error(got, of_group) == pytest.approx(want_error, rel=1e-5, abs=0), (row, index)
    assert not weight.dequantize()[3].any()
    nearest = weight.form.quantize(values)
    for rows in (slice(0, 3), slice(7, 8), slice(8, 40)):
        error, plain_error = (squared_error(w.dequantize()[rows], values[rows]) for w in (weight, nearest))
        assert error < 0.95 * plain_error, "the search must be worth it"


def test_int4_is_rounded_the_same_however_rows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(96, 256, generator=torch.Generator().manual_seed(3))
    whole = quantize_int4(values, 128)
    parts = [quantize_int4(rows, 128) for rows in values.split(32)]
    monkeypatch.setattr(four_bit, "_SEARCH_PIECE", 3 * 128)
    for other in (parts[0].stack(parts[1:]), quantize_int4(values, 128)):
        assert torch.equal(other.values, whole.values)
        assert torch.equal(other.scales, whole.scales)
