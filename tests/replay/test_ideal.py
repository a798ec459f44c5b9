"""The ideal hit count against a brute-force comparison with all earlier sequences."""

from __future__ import annotations

import random
from array import array

from agentspec.replay.ideal import IdealPrefix


def longest(prompt: list[int], seen: list[list[int]]) -> int:
    best = 0
    for other in seen:
        common = 0
        for a, b in zip(prompt, other, strict=False):
            if a != b:
                break
            common += 1
        best = max(best, common)
    return min(best, len(prompt) - 1)


def test_ideal_hits_equal_brute_force() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        ideal, seen = IdealPrefix(), list[list[int]]()
        for _ in range(40):
            prompt = list(rng.choice(seen))[: rng.randrange(1, 400)] if seen and rng.random() < 0.8 else []
            prompt += [rng.choice((0, 1, 255, 256, 65536)) for _ in range(rng.randrange(0 if prompt else 1, 150))]
            output = [rng.randrange(2) for _ in range(rng.randrange(90))]
            expected = longest(prompt, seen)
            assert ideal.match_and_insert(array("i", prompt), array("i", output)) == expected, f"seed {seed}"
            seen.append(prompt + output)


def test_repeated_prompt_computes_one_token() -> None:
    ideal = IdealPrefix()
    prompt = array("i", range(200))
    assert ideal.match_and_insert(prompt, array("i")) == 0
    assert ideal.match_and_insert(prompt, array("i", [7])) == 199
    assert ideal.match_and_insert(array("i", [*range(200), 7, 8]), array("i")) == 201
