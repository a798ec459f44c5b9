"""Engines of two ranks on CUDA devices: the tokens of one process on the CPU in float32, and one error for every
request when a rank dies or stops.

Each rank has a GPU of its own; with one GPU the ranks share it, which is slow: they take turns.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.config import EngineConfig
from agentspec.engine.assembly import assemble
from agentspec.engine.in_process import Engine
from agentspec.engine.ranks import RankOptions
from agentspec.engine.settings import device_of
from agentspec.errors import ConfigError
from agentspec.kernels.triton.exchange import ExchangeGroup
from agentspec.types import SamplingParams
from agentspec.wire import Grammar, Submit
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.text import write_text_assets
from tests.test_ranks import (
    MEMORY,
    SEED,
    SMALL,
    TIGHT,
    TINY,
    Answer,
    conversations,
    crowd,
    ends_after,
    engine,
    parts_of,
    read,
)

pytestmark = pytest.mark.gpu
PATIENCE = 240
"""Seconds until a test that hangs says where, and ends the run."""
ON_CUDA: dict[str, Any] = {"device": "cuda", "dtype": "float32"}


@pytest.fixture
def options() -> RankOptions:
    """Every step's outcomes are compared."""
    return RankOptions(check_every=1, late_seconds=60.0, shares_device=torch.cuda.device_count() < 2)


@pytest.fixture(autouse=True)
def _says_where_it_hangs() -> Iterator[None]:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def answers_of(made: Engine) -> list[Answer]:
    """Drafts, cache hits, preemption, fetches from the host, penalties, and a grammar."""
    found = crowd(made) + conversations(made, seed=SEED)
    sampled, grammar = (
        SamplingParams(temperature=0.7, seed=3, max_tokens=12),
        Grammar(kind="regex", source="[a-c]{3,9}"),
    )
    found.append(read(made.stream(Submit(request_id="g", prompt_ids=[5, 6, 7], sampling=sampled, grammar=grammar))))
    metrics, stats = parts_of(made).loop.metrics, parts_of(made).cache.stats()
    assert metrics.preemptions > 0
    assert metrics.drafted_tokens > 0
    assert metrics.cached_tokens > 0
    assert stats["host_copies_fetched"] > 0
    return found


def test_two_ranks_give_the_tokens_of_the_cpu(options: RankOptions, cuda: torch.device) -> None:
    """tiny-agent. All of a start's graphs are captured first."""
    with engine(TINY, TIGHT, 1) as made:
        expected = answers_of(made)
    with engine(replace(TINY, **ON_CUDA), TIGHT, 2, options) as made:
        parts = parts_of(made)
        assert parts.ranks is not None
        assert isinstance(parts.ranks._group, ExchangeGroup)
        assert not parts.graphs.startswith("none")
        assert answers_of(made) == expected
        assert int(parts.ranks._group.aborted) == 0


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_ranks_of_a_mixture_give_the_tokens_of_the_cpu(
    graphs: bool, options: RankOptions, cuda: torch.device, tmp_path: Path
) -> None:
    """Rings and copies; the head has weights of its own. With graphs, the engine starts early: most are captured while
    it serves, on both ranks in the same order."""
    model = write_checkpoint(tmp_path / "model", "moe", **SMALL)
    write_text_assets(model)
    config = replace(TINY, model=str(model), dtype="float32", copy_drafts=2, state_form="ring")
    with engine(config, MEMORY, 1) as made:
        expected = conversations(made, seed=2, sessions=2)
    config = replace(config, device="cuda", graphs=graphs, tensor_parallel=2)
    with Engine(assemble(config, serves=True, memory=MEMORY, rank_options=options)) as made:
        assert conversations(made, seed=2, sessions=2) == expected
        while parts_of(made).loop.prepare():
            pass
        assert conversations(made, seed=2, sessions=2) == expected


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGKILL, "rank 1 was killed by SIGKILL"),
        (signal.SIGSTOP, "rank 1 is stuck: it has not responded"),
    ],
)
def test_a_harmed_rank_ends_every_request_with_one_error(
    number: signal.Signals, expected: str, options: RankOptions, cuda: torch.device
) -> None:
    """The leader's GPU is freed: it still computes afterwards."""
    harmed = replace(options, silent_seconds=3.0)
    config = replace(TINY, **ON_CUDA)
    ends_after(harmed, lambda ids: os.kill(ids[0], number), expected=expected, config=config)
    torch.cuda.synchronize()
    assert torch.ones(1000, device=cuda).sum().item() == 1000


def test_more_ranks_than_gpus_are_refused_by_name(cuda: torch.device) -> None:
    count = torch.cuda.device_count() + 1
    with pytest.raises(ConfigError, match=f"tensor_parallel={count}: every rank needs a GPU of its own"):
        device_of(EngineConfig(device="cuda", tensor_parallel=count))
