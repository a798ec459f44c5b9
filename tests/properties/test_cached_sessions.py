"""On a real small model, every path of the cache and of prefill: what is heard and kept is what a request alone would.
See cached_sessions.py."""

from __future__ import annotations

import pytest
import torch

from tests.properties.cached_sessions import SCENES, Stage, small_model

NAMES = ("roomy", "agents with other tools", "few pages, and a host tier", "forced outputs")
"""The other scenes are for the device: here test_real_model_streams.py has houses like theirs."""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return small_model(tmp_path_factory.mktemp("checkpoint"), torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_every_stream_and_every_state_is_true(name: str, stage: Stage) -> None:
    stage.play(name, SCENES[name])
