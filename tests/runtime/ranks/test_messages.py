"""Messages to followers: whatever a plan holds arrives as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from agentspec.cache.host_tier import CopyOrder, CopyOrders
from agentspec.runtime.plan import ChunkPlan, OwnRows, SlotJoin, StepPlan
from agentspec.runtime.ranks.messages import Prepare, decode, encode
from agentspec.types import SamplingParams, tokens


def random_plan(rng: random.Random) -> StepPlan:
    def ids(most: int = 30) -> list[int]:
        return [rng.randrange(2**20) for _ in range(rng.randrange(most))]

    def chunk() -> ChunkPlan:
        return ChunkPlan(
            request_id=f"r{rng.random()}",
            token_ids=tokens(ids(9000)),
            start=rng.randrange(10**6),
            read_row=rng.randrange(99),
            state_writes=tuple((rng.randrange(99), rng.randrange(99)) for _ in range(rng.randrange(3))),
            page_ids=ids(),
            next_token=rng.choice([None, 0, 5]),
            score_top=rng.choice([None, 0, 20]),
        )

    def join() -> SlotJoin:
        return SlotJoin(
            request_id="ü",
            slot=rng.randrange(9),
            length=rng.randrange(99),
            last_token=7,
            rows=OwnRows.of(list(range(rng.randrange(3, 9)))),
            checkpoint_length=rng.randrange(99),
            page_ids=ids(),
            length_limit=10**6,
            stop_ids=tuple(ids(4)),
            seed=rng.randrange(2**63),
            sampling=SamplingParams(
                temperature=rng.random(),
                logit_bias={3: 1.5, 70000: -100.0},
                stop=("\n",),
                max_tokens=rng.choice([None, 4]),
            ),
            prompt_ids=tokens(ids()),
            output_ids=tokens(),
            forced_output=rng.choice([None, tokens([1, 2])]),
            constrained=rng.random() < 0.5,
            logprobs=rng.choice([None, 0, 5]),
        )

    return StepPlan(
        leaves=ids(4),
        page_updates=[(1, 2, 3)],
        chunks=[chunk() for _ in range(rng.randrange(3))],
        joins=[join() for _ in range(rng.randrange(3))],
        first_slots=ids(3),
        decode_slots=ids(5),
        num_drafted=rng.randrange(8),
        masks={
            slot: np.array(
                [[rng.randrange(-(2**31), 2**31) for _ in range(7)] for _ in range(rng.randrange(1, 5))], np.int32
            )
            for slot in range(rng.randrange(4))
        },
    )


def plain(plan: StepPlan) -> Any:
    """Comparable: arrays of numpy are not."""
    masks = {slot: (rows.dtype, rows.tolist()) for slot, rows in plan.masks.items()}
    return [getattr(plan, name) for name in plan.__slots__ if name != "masks"], masks


def test_plans_arrive_as_they_were() -> None:
    for seed in range(40):
        print(f"seed {seed}")
        plan = random_plan(random.Random(seed))
        heard = decode(encode(plan))
        assert isinstance(heard, StepPlan)
        assert plain(heard) == plain(plan)
        assert all(rows.flags.writeable for rows in heard.masks.values()), "torch wants memory that it may write"


def test_copy_orders_arrive_as_they_were() -> None:
    orders = CopyOrders([CopyOrder(1, [(1, 2)], [(3, 4), (5, 6)])], [CopyOrder(2, [], [(7, 8)])])
    heard = decode(encode(orders))
    assert isinstance(heard, CopyOrders)
    assert (heard.to_host, heard.to_device) == (orders.to_host, orders.to_device)
    assert isinstance(decode(encode(Prepare())), Prepare)
