"""The engine's randomised proof (tests/properties/engine_proof.py) on a CUDA device: the hash chain's steps, with
windows opened, chosen, committed and published by the device's kernels; as replayed graphs, and eagerly with checks.

Only configurations with three drafts: each window width needs another set of kernels.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.properties.engine_proof import Proof
from tests.properties.engine_setup import EngineSetup

pytestmark = pytest.mark.gpu
DRAFTS = 3
TURNS = 60
SEEDS = list(
    itertools.islice(
        (seed for seed in itertools.count(5000) if EngineSetup.random(seed).max_draft_tokens == DRAFTS), 16
    )
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "watched"])
def test_every_state_and_stream_matches_model(graphs: bool, seed: int, cuda: torch.device) -> None:
    Proof(EngineSetup.random(seed), cuda, graphs=graphs).run(TURNS)
