"""Names of modules in the configs of quantised checkpoints, and the expressions that stand for them."""

from __future__ import annotations

import random
import re

import pytest

from agentspec.errors import CheckpointError
from agentspec.models.quantised.names import alternatives, canonical_module, expression, matches, spellings

PIECES = (
    *("a", "ab", ".*b", "a|b", "(a)(b)", "[ab]c$", "", r"\d+", "(?:a|c)b", "(?=a).b", "(?!a)b", "(?<=a)b", "(?<!c)b"),
    # What would mean something else among others: flags, and names and numbers of groups.
    *("(?i)A", r"(a|b)\1", "(?P<x>a)(?P=x)", "(?i:A)b", "(?P<x>b)c", r"(a)?(?(1)b|c)", r"\\1"),
)


def test_spellings_lead_to_one_name() -> None:
    for module in ("model.layers.0.mlp.up_proj", "lm_head"):
        assert {canonical_module(name) for name in spellings(module)} == {module}
    assert spellings("mtp.layers.0.mlp.up_proj")[0] == canonical_module("mtp.layers.0.mlp.up_proj")


def test_long_expressions_are_refused() -> None:
    with pytest.raises(CheckpointError, match="has more than 1000 letters"):
        expression("a" * 1001, "config.json")


@pytest.mark.parametrize("seed", range(5))
def test_expressions_together_match_what_each_one_does(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        patterns = rng.sample(PIECES, rng.randrange(6))
        names = ["".join(rng.choices("abcA1\\", k=rng.randrange(5))) for _ in range(3)]
        alone = any(re.compile(pattern).match(name) for pattern in patterns for name in names)
        assert matches(alternatives(patterns, ""), names) == alone, f"seed {seed}: {patterns} {names}"
