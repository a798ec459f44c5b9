"""The randomised proof with two ranks: the second one runs the same plans and copies on a hash chain of its own, and
has the same outcome in every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from agentspec.engine.ranks import Ranks
from agentspec.types import MAX_WIDE_ROWS
from tests.fakes.ranks import FAULTY, hash_chain_dir
from tests.properties.engine_proof import Proof
from tests.properties.engine_setup import EngineSetup

SEEDS = (1083, 3026)
TURNS = 60
LEAST = {"hit TURN": 1, "copied to the host": 1, "fetched": 1, "preempted in DECODE": 1, "windows ride": 1}


def test_two_ranks_pass_the_proof() -> None:
    paths: Counter[str] = Counter()
    for seed in SEEDS:
        setup = replace(EngineSetup.random(seed), max_wide_rows=MAX_WIDE_ROWS)  # as the other rank's process has it
        print(setup)
        ranks = Ranks(setup.config(num_ranks=2), hash_chain_dir(setup), FAULTY)
        try:
            ranks.join(torch.device("cpu"))
            proof = Proof(setup, ranks=ranks)
            proof.run(TURNS)
            paths.update(proof.paths)
        finally:
            ranks.close()
    rare = [path for path, least in LEAST.items() if paths[path] < least]
    assert not rare, f"paths that this proof doesn't take: {rare}"
