"""Cached and uncached runs on a CUDA device: sessions on tiny-agent in float32, with graphs, over every path of the
cache and of prefill.

tests/properties/cached_sessions.py says what must hold, and which paths each scene has to take.
"""

from __future__ import annotations

import pytest
import torch

from tests.properties.cached_sessions import SCENES, Stage, tiny_agent

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def stage(cuda: torch.device) -> Stage:
    return tiny_agent(cuda)


@pytest.mark.parametrize("name", SCENES)
def test_every_stream_and_every_state_is_true(name: str, stage: Stage) -> None:
    found = stage.play(name, SCENES[name])
    print(dict(found))
    num_replayed = found["replayed prefills"] + found["replayed prefills with windows"]
    assert num_replayed > 5
    assert found["prefills"] > num_replayed or not found["more than 1,024 tokens in a step"], "larger ones are eager"
