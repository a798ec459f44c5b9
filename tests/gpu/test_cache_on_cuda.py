"""Cached and uncached runs on a CUDA device: sessions on tiny-agent in float32, with graphs, over every path of cache
and prefill.

tests/properties/cached_sessions.py defines the invariants, and the paths that each scene must take.
"""

from __future__ import annotations

import pytest
import torch

from tests.properties.cached_sessions import SCENARIOS, ScenarioRunner, tiny_agent

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def runner(cuda: torch.device) -> ScenarioRunner:
    return tiny_agent(cuda)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_stream_and_state_matches_uncached_run(name: str, runner: ScenarioRunner) -> None:
    found = runner.run_scenario(name, SCENARIOS[name])
    print(dict(found))
    num_replayed = found["replayed prefills"] + found["replayed prefills with windows"]
    assert num_replayed > 5
    assert found["prefills"] > num_replayed or not found["more than 1,024 tokens in a step"], (
        "chunks larger than the largest graph run eagerly"
    )
