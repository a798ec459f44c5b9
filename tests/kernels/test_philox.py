"""Philox4x32-10: published test vectors, an independent pure-python version, and the properties that sampling needs."""

from __future__ import annotations

import random

import pytest
import torch

from agentspec.kernels.reference.philox import PURPOSE_FORCED_ACCEPT, PURPOSE_TOKEN, philox4x32, uniform
from agentspec.kernels.reference.sampling import gumbel_noise

KNOWN_ANSWERS = [  # Random123's kat_vectors: counter, key, output
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def slow_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's definition in python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low = 0xD2511F53 * c0
        high = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & 0xFFFFFFFF, (low >> 32) ^ c3 ^ k1, low & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def torch_philox(counters: list[tuple[int, ...]], keys: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    counter, key = torch.tensor(counters).T, torch.tensor(keys).T
    even, odd = philox4x32(counter[[0, 2]], counter[[1, 3]], key)
    words = torch.stack((even[0], odd[0], even[1], odd[1]), dim=1) & 0xFFFFFFFF
    return [tuple(row) for row in words.tolist()]


def test_philox_matches_published_vectors() -> None:
    for counter, key, expected in KNOWN_ANSWERS:
        assert slow_philox(counter, key) == expected
    assert torch_philox([c for c, _, _ in KNOWN_ANSWERS], [k for _, k, _ in KNOWN_ANSWERS]) == [
        out for _, _, out in KNOWN_ANSWERS
    ]


def test_philox_matches_pure_python() -> None:
    generator = random.Random(7)
    counters = [tuple(generator.getrandbits(32) for _ in range(4)) for _ in range(500)]
    keys = [tuple(generator.getrandbits(32) for _ in range(2)) for _ in range(500)]
    assert torch_philox(counters, keys) == [slow_philox(c, k) for c, k in zip(counters, keys, strict=True)]


def test_uniform_has_the_documented_counter_layout() -> None:
    generator = random.Random(8)
    for _ in range(20):
        seed, position, purpose = generator.getrandbits(63), generator.getrandbits(32), generator.randrange(2)
        got = uniform(torch.tensor([seed]), torch.tensor([position]), 11, purpose)[0].tolist()
        for token, value in enumerate(got):
            word = slow_philox((token // 4, position, purpose, 0), (seed & 0xFFFFFFFF, seed >> 32))[token % 4]
            assert value == ((word >> 8) + 0.5) / 2**24


def test_uniform_depends_only_on_its_counter_and_key() -> None:
    seed, position = torch.tensor([[3, 4], [5, 2**63 - 1]]), torch.tensor([[10, 11], [12, 13]])
    whole = uniform(seed, position, 50, PURPOSE_TOKEN)
    assert torch.equal(whole[1, 0], uniform(seed[1, :1], position[1, :1], 50, PURPOSE_TOKEN)[0])
    assert torch.equal(whole[..., :7], uniform(seed, position, 7, PURPOSE_TOKEN))
    for other in (
        uniform(seed + 1 - 2 * (seed == 2**63 - 1), position, 50, PURPOSE_TOKEN),
        uniform(seed ^ (1 << 40), position, 50, PURPOSE_TOKEN),
        uniform(seed, position + 1, 50, PURPOSE_TOKEN),
        uniform(seed, position, 50, PURPOSE_FORCED_ACCEPT),
    ):
        assert (other == whole).float().mean() < 0.01


def test_uniform_passes_chi_squared_test() -> None:
    values = uniform(torch.arange(64), torch.arange(64), 4096, PURPOSE_TOKEN).flatten()
    counts = torch.histc(values.float(), bins=256, min=0.0, max=1.0)
    expected = values.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 255 degrees of freedom: mean 255, deviation 22.6; six deviations.
    assert 255 - 136 < chi_square < 255 + 136


def test_extreme_uniforms_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 the largest uniform would round to 1 and its Gumbel noise to infinity: that token would always win."""
    extremes = torch.tensor([[[0.5 * 2.0**-24, 1.0 - 0.5 * 2.0**-24]]], dtype=torch.float64)
    monkeypatch.setattr("agentspec.kernels.reference.sampling.uniform", lambda *_: extremes.clone())
    noise = gumbel_noise(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), 2)
    assert noise.dtype == torch.float32
    assert torch.isfinite(noise).all()
    assert -3.0 < noise[0, 0, 0] < -2.5
    assert 17.0 < noise[0, 0, 1] < 17.5
