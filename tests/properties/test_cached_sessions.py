"""Sessions on a real small model that take every path of cache and prefill: streams and states equal those of a request
run alone. See cached_sessions.py."""

from __future__ import annotations

import pytest
import torch

from tests.properties.cached_sessions import SCENARIOS, ScenarioRunner, small_model

NAMES = ("roomy", "agents with other tools", "few pages, and a host tier", "forced outputs")
"""The other scenarios run on the device; test_real_model_streams.py has similar settings for the CPU."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ScenarioRunner:
    return small_model(tmp_path_factory.mktemp("checkpoint"), torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_all_streams_and_states_match_reference(name: str, runner: ScenarioRunner) -> None:
    runner.run_scenario(name, SCENARIOS[name])
