"""20,000 random turns on the hash-chain model: every published state and every stream is true (engine_proof.py says what is checked).

AGENTSPEC_PROOF_TURNS sets another number of turns, AGENTSPEC_PROOF_SEED another first seed.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.properties.engine_proof import House, Proof

TURNS = int(os.environ.get("AGENTSPEC_PROOF_TURNS", "20000"))
FIRST_SEED = int(os.environ.get("AGENTSPEC_PROOF_SEED", "0"))
SHARDS = 16
TURNS_PER_HOUSE = 125


@pytest.mark.parametrize("shard", range(SHARDS))
def test_every_state_and_every_stream_is_true(shard: int) -> None:
    seed = FIRST_SEED + shard
    print(f"proof seed {seed}")
    rng = random.Random(seed)
    left = TURNS // SHARDS
    while left > 0:
        house = House.random(rng)
        print(house)
        Proof(house).run(min(TURNS_PER_HOUSE, left))
        left -= TURNS_PER_HOUSE
