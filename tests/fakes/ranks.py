"""Entries of rank processes for tests: `python -m tests.fakes.ranks` instead of engine/rank_process.py.

A model directory `hash-chain-SEED` stands for the model of the randomised proof's setup, which every rank has as a
whole. PLANTED names a fault of rank 1 in its plan PLANTED_PLAN. With RECORDED in the environment, a rank on a CPU
captures graphs as on a GPU: `record_on_cpu`.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from unittest.mock import patch

import torch

from agentspec.engine import assembly
from agentspec.engine.rank_link import RankStart
from agentspec.engine.rank_process import load_part, main
from agentspec.engine.ranks import RankOptions, meet
from agentspec.engine.settings import Settings
from agentspec.models.protocol import StepModel
from agentspec.models.shards import Rank
from agentspec.runtime.plan import StepOutcome
from agentspec.types import ModelSpec
from tests.fakes.replayer import Replayer
from tests.properties.engine_setup import EngineSetup

ENTRY = ("-m", "tests.fakes.ranks")
STRICT = RankOptions(check_every=1)
FAULTY = RankOptions(check_every=1, entry=ENTRY)
PLANTED, PLANTED_PLAN = "AGENTSPEC_TEST_PLANTED", 6
RECORDED = "AGENTSPEC_TEST_RECORDED"
_HASH_CHAIN = "hash-chain-"


def hash_chain_dir(setup: EngineSetup) -> Path:
    return Path(f"{_HASH_CHAIN}{setup.seed}")


def load(start: RankStart) -> StepModel:
    assert start.model_dir is not None
    if not start.model_dir.startswith(_HASH_CHAIN):
        return load_part(start)
    meet(start.meeting, Rank(start.index, start.count))
    setup = EngineSetup.random(int(start.model_dir.removeprefix(_HASH_CHAIN)))
    # A setting of the proof alone, which reaches no engine through its config.
    patch.object(ModelSpec, "min_copy_match", setup.min_match).start()
    return setup.new_model(torch.device("cpu"))


def record_on_cpu() -> None:
    """Have this process capture its steps where it would on a GPU, and replay them by running them again."""
    patch.object(assembly, "CudaRecorder", lambda device: Replayer()).start()
    patch.object(Settings, "why_eager", None).start()
    patch.object(Settings, "graphs_bytes", lambda settings: 0).start()


def alter(number: int, outcome: StepOutcome) -> None:
    if number != PLANTED_PLAN:
        return
    if os.environ.get(PLANTED) == "token":
        outcome.slots[-1].emitted[-1] += 1
    elif os.environ.get(PLANTED) == "error":
        raise ValueError("planted")
    elif os.environ.get(PLANTED) == "hang":
        threading.Event().wait()
    elif os.environ.get(PLANTED) == "exit":
        os._exit(5)


if __name__ == "__main__":
    if RECORDED in os.environ:
        record_on_cpu()
    main(load, alter)
