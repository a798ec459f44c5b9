"""Engines whose model is shared by several processes: they give the tokens of one process, and a process that dies,
stops or differs ends every request with one error, in bounded time."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec import kernels
from agentspec.cache.host_tier import HostMemory
from agentspec.config import EngineConfig
from agentspec.engine import assembly
from agentspec.engine.assembly import Assembly, assemble
from agentspec.engine.in_process import AsyncEngine, Engine
from agentspec.engine.ranks import RankOptions, Ranks, least
from agentspec.engine.remote import RemoteEngine
from agentspec.engine.settings import Settings, device_of
from agentspec.errors import ConfigError, EngineClosedError, RankError
from agentspec.kernels import GatheredGroup
from agentspec.runtime.kernels_ahead import KernelsAhead
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.types import FinishReason, SamplingParams
from agentspec.wire import Event, FinishEvent, Grammar, Submit, TokensEvent
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.ranks import FAULTY, PLANTED, PLANTED_PLAN, RECORDED, STRICT
from tests.fakes.replayer import Replayer
from tests.fakes.text import write_text_assets

TINY = EngineConfig(device="cpu", draft_tokens=2, max_running=3, max_context=1024, session_hold_seconds=0.0)
MEMORY = MemoryPlan(num_rows=40, num_pages=40, max_length=1024)
TIGHT = MemoryPlan(
    num_rows=19,
    num_pages=7,
    max_length=370,
    host=HostMemory(num_rows=8, num_pages=40, ready_share=1.0, min_fetch_blocks=1),
)
"""Room for two of three requests when they have grown, so that one is preempted."""
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)

Answer = tuple[list[int], FinishReason]


@contextmanager
def engine(config: EngineConfig, memory: MemoryPlan, ranks: int, options: RankOptions = STRICT) -> Iterator[Engine]:
    with Engine(assemble(replace(config, tensor_parallel=ranks), memory=memory, rank_options=options)) as made:
        yield made


def parts_of(made: Engine | AsyncEngine) -> Assembly:
    return made._assembly


def pids(made: Engine | AsyncEngine) -> list[int]:
    ranks = parts_of(made).ranks
    assert ranks is not None
    return ranks.pids


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def read(events: Iterator[Event]) -> Answer:
    *parts, last = events
    assert isinstance(last, FinishEvent)
    ids = [token for part in parts if isinstance(part, TokensEvent) for token in part.token_ids]
    return ids, last.reason


def sampling(rng: random.Random, number: int, vocab: int) -> SamplingParams:
    """Greedy and sampled ones take turns."""
    common: dict[str, Any] = {"max_tokens": rng.choice([8, 24, 40]), "ignore_eos": True}
    if number % 3 == 2:
        common |= {"repetition_penalty": 1.2, "presence_penalty": 0.4, "logit_bias": {rng.randrange(vocab): 2.0}}
    if number % 2:
        return SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=rng.randrange(2**40), **common)
    return SamplingParams(temperature=0.0, **common)


SEED = 3


def conversations(made: Engine, *, seed: int, turns: int = 2, sessions: int = 4) -> list[Answer]:
    """Sessions whose turns extend each other, all of a turn at the same time."""
    rng, vocab = random.Random(seed), 150
    system = [rng.randrange(3, vocab) for _ in range(70)]
    histories = [system + [rng.randrange(3, vocab) for _ in range(rng.choice([3, 70]))] for _ in range(sessions)]
    answers = []
    for turn in range(turns):
        asked = [
            Submit(
                request_id=f"{turn}.{session}",
                prompt_ids=list(history),
                sampling=sampling(rng, turn + session, vocab),
                session_id=str(session),
                logprobs=2 if session == 1 else None,
            )
            for session, history in enumerate(histories)
        ]
        for one in asked:
            made.submit(one)
        heard = [read(made.events(one.request_id)) for one in asked]
        answers += heard
        for history, (ids, _) in zip(histories, heard, strict=True):
            history.extend([*ids, *(rng.randrange(3, vocab) for _ in range(5))])
            if len(history) > 230:
                del history[140:]
    return answers


def crowd(made: Engine) -> list[Answer]:
    """Requests that all begin with one page and end with three."""
    asked = [
        Submit(
            request_id=f"c{number}",
            prompt_ids=[number, *range(3, 33)],
            sampling=SamplingParams(temperature=0.5 * number, seed=number, max_tokens=110, ignore_eos=True),
        )
        for number in range(3)
    ]
    for one in asked:
        made.submit(one)
    return [read(made.events(one.request_id)) for one in asked]


SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "vision": False,
    "vocab_size": 320,
}


def test_two_ranks_give_the_tokens_of_one_whatever_the_engine_does(tmp_path: Path) -> None:
    """Drafts, cache hits, preemption, fetches from the host, penalties, a grammar, and log-probabilities. The head has
    weights of its own, which the ranks share too."""
    model = write_checkpoint(tmp_path / "model", "dense", **SMALL)
    write_text_assets(model)
    sampled = SamplingParams(temperature=0.7, seed=3, max_tokens=12)
    grammar = Grammar(kind="regex", source="[a-c]{3,9}")
    answers, scores = {}, {}
    for ranks in (1, 2):
        with engine(replace(TINY, model=str(model)), TIGHT, ranks) as made:
            answers[ranks] = crowd(made) + conversations(made, seed=SEED)
            constrained = Submit(request_id="g", prompt_ids=[5, 6, 7], sampling=sampled, grammar=grammar)
            answers[ranks].append(read(made.stream(constrained)))
            *_, end = made.stream(Submit(request_id="s", prompt_ids=[5, 6, 7, 8], sampling=sampled, prompt_logprobs=1))
            assert isinstance(end, FinishEvent)
            assert end.prompt_scores is not None
            scores[ranks] = [score.logprob for score in end.prompt_scores]
            metrics, stats = parts_of(made).loop.metrics, parts_of(made).cache.stats()
            assert metrics.preemptions > 0
            assert metrics.drafted_tokens > 0
            assert metrics.cached_tokens > 0
            assert stats["host_copies_fetched"] > 0
    assert answers[2] == answers[1]
    assert scores[2] == pytest.approx(scores[1], abs=1e-4)


MODELS: dict[str, tuple[Family, int, dict[str, Any], dict[str, Any]]] = {
    "mixture, rings and copies": ("moe", 2, {}, {"state_form": "ring", "copy_drafts": 2}),
    "mixture, packed projections": ("next", 2, {}, {}),
    "key/value heads on two ranks each": ("dense", 4, {"linear_num_key_heads": 4, "linear_num_value_heads": 8}, {}),
}
"""By name: the family, how many ranks, and settings of the model and of the engine."""


@pytest.mark.parametrize("name", MODELS)
def test_ranks_give_the_tokens_of_one_process(name: str, tmp_path: Path) -> None:
    family, count, overrides, settings = MODELS[name]
    model = write_checkpoint(tmp_path / "model", family, **SMALL, **overrides)
    answers = {}
    for ranks in (1, count):
        with engine(replace(TINY, model=str(model), **settings), MEMORY, ranks) as made:
            answers[ranks] = conversations(made, seed=2, turns=4 // count, sessions=2)
    assert answers[count] == answers[1]


class Calls(GatheredGroup):
    """Counts the exchanges of this rank."""

    num_calls = 0

    def _gather(self, mine: Tensor) -> list[Tensor]:
        Calls.num_calls += 1
        return super()._gather(mine)


def test_ranks_capture_the_same_graphs_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every first run and every capture exchanges, also those that an idle engine does: one that only one rank did, or
    did at another time, would hang, or add up sums of different steps."""
    with engine(TINY, MEMORY, 1) as made:
        expected = conversations(made, seed=4, turns=1, sessions=2)
    monkeypatch.setenv(RECORDED, "1")
    monkeypatch.setattr(assembly, "CudaRecorder", lambda device: Replayer())
    monkeypatch.setattr(Settings, "why_eager", None)
    monkeypatch.setattr(Settings, "graphs_bytes", lambda settings: 0)
    monkeypatch.setattr(kernels, "GatheredGroup", Calls)
    config = replace(TINY, max_running=2, draft_tokens=1, tensor_parallel=2)
    with Engine(assembly.assemble(config, serves=True, memory=MEMORY, rank_options=FAULTY)) as made:
        loop = parts_of(made).loop
        at_start = Calls.num_calls
        for _ in range(12):
            assert loop.prepare()
        assert conversations(made, seed=4, turns=1, sessions=2) == expected
        assert 0 < at_start < Calls.num_calls


# --- ends ---


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


async def collect(made: AsyncEngine, name: str, started: Callable[[], object]) -> FinishEvent:
    ends = []
    async for event in made.stream(Submit(request_id=name, prompt_ids=[5, 6, 7, len(name)], sampling=ENDLESS)):
        started()
        if isinstance(event, FinishEvent):
            ends.append(event)
    (end,) = ends
    return end


def ends_after(
    options: RankOptions, harm: Callable[[list[int]], object] | None, *, expected: str, config: EngineConfig = TINY
) -> None:
    """Run two requests, harm the ranks while they run, and check how everything ends."""

    async def main() -> None:
        config_of_two = replace(config, tensor_parallel=2)
        made = AsyncEngine(assemble(config_of_two, memory=MEMORY, rank_options=options))
        ids = pids(made)
        running: dict[str, bool] = {}
        async with made:
            begun = asyncio.Event()

            def note(name: str) -> None:
                running[name] = True
                if len(running) == 2:
                    begun.set()

            tasks = [asyncio.create_task(collect(made, name, partial(note, name))) for name in ("a", "bc")]
            if harm is not None:
                await begun.wait()
                harm(ids)
            for end in await asyncio.gather(*tasks):
                assert (end.reason, end.is_lost) == (FinishReason.ERROR, True)
                assert end.error is not None
                assert expected in end.error
            death = await made.ended()
            assert death is not None
            assert expected in death
            assert not made.alive
            with pytest.raises(EngineClosedError, match=expected):
                made.check_alive()
        assert all(is_gone(pid) for pid in ids)

    run(main())


def test_a_killed_rank_ends_every_request_with_one_error() -> None:
    ends_after(STRICT, lambda ids: os.kill(ids[0], signal.SIGKILL), expected="rank 1 was killed by SIGKILL")


def test_a_stopped_rank_ends_every_request_with_one_error() -> None:
    options = replace(STRICT, silent_seconds=2.0)
    ends_after(options, lambda ids: os.kill(ids[0], signal.SIGSTOP), expected="rank 1 is stuck: it has not responded")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("token", f"rank 1 and rank 0 differ in plan {PLANTED_PLAN}: slot 1 had another outcome"),
        ("error", "rank 1 failed: ValueError: planted"),
        ("exit", "rank 1 ended with exit status 5"),
        ("hang", f"rank 1 is stuck: it has not finished step {PLANTED_PLAN} in"),
    ],
)
def test_a_faulty_rank_is_named(fault: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLANTED, fault)
    ends_after(replace(FAULTY, late_seconds=3.0) if fault == "hang" else FAULTY, None, expected=expected)


def test_an_idle_engine_notices_the_end_of_a_rank() -> None:
    async def main() -> None:
        async with AsyncEngine(assemble(replace(TINY, tensor_parallel=2), memory=MEMORY)) as made:
            await made.beat()
            os.kill(pids(made)[0], signal.SIGKILL)
            assert await made.ended() == "RankError: rank 1 was killed by SIGKILL"
            assert not made.alive

    run(main())


def test_an_engine_that_its_caller_drives_ends_its_requests_and_closes_without_a_trace() -> None:
    with engine(TINY, MEMORY, 2) as made:
        ids = pids(made)
        assert not any(is_gone(pid) for pid in ids)
        made.submit(Submit(request_id="a", prompt_ids=[5, 6], sampling=ENDLESS))
        made.submit(Submit(request_id="b", prompt_ids=[7, 8], sampling=ENDLESS))
        first, second = made.events("a"), made.events("b")
        assert isinstance(next(first), TokensEvent)
        os.kill(ids[0], signal.SIGKILL)
        for events in (first, second):
            *_, end = events
            assert isinstance(end, FinishEvent)
            assert (end.reason, end.error) == (FinishReason.ERROR, "rank 1 was killed by SIGKILL")
        with pytest.raises(EngineClosedError, match="SIGKILL"):
            made.submit(Submit(request_id="c", prompt_ids=[5]))
    assert all(is_gone(pid) for pid in ids)
    assert "agentspec-plans" not in Path("/proc/self/maps").read_text(), "the shared memory is still mapped"


def test_a_rank_that_ends_while_it_starts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankError, match="rank 1 ended with exit status 1"):
        assemble(replace(TINY, tensor_parallel=2), rank_options=RankOptions(entry=("-c", "import sys; sys.exit(1)")))


def test_a_rank_that_ends_while_kernels_compile_is_reported() -> None:
    """As on a GPU, where that may take a minute."""

    class Compiling(KernelsAhead):
        def __init__(self) -> None:
            """Compile nothing, without an end."""

        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            return False

    ranks = Ranks(replace(TINY, tensor_parallel=2), None, RankOptions(entry=("-c", "import sys; sys.exit(1)")))
    try:
        with pytest.raises(RankError, match="rank 1 ended with exit status 1"):
            assembly._await(Compiling(), ranks)
    finally:
        ranks.close()


def test_a_server_loses_an_engine_whose_rank_dies() -> None:
    """The engine's process reports the cause and ends with a status; nothing is left of it."""

    async def main() -> None:
        async with await RemoteEngine.start(replace(TINY, tensor_parallel=2, memory_gib=0.1)) as remote:
            assert remote.setup.num_ranks == 2
            pid = remote._process.pid
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            (rank,) = (child for child in children if "rank_process" in Path(f"/proc/{child}/cmdline").read_text())
            events = remote.stream(Submit(request_id="a", prompt_ids=[5, 6], sampling=ENDLESS))
            assert isinstance(await anext(events), TokensEvent)
            os.kill(int(rank), signal.SIGKILL)
            end = [event async for event in events][-1]
            assert isinstance(end, FinishEvent)
            assert (end.reason, end.is_lost, end.error) == (
                FinishReason.ERROR,
                True,
                "RankError: rank 1 was killed by SIGKILL",
            )
            await remote.lost()
            with pytest.raises(EngineClosedError, match="rank 1 was killed by SIGKILL"):
                remote.check_alive()
        assert remote._process.returncode == 1
        with pytest.raises(ProcessLookupError):
            os.killpg(pid, 0)

    run(main())


def test_ranks_end_with_a_killed_engine() -> None:
    """Also a rank whose leader had no time to end it."""
    code = (
        "import sys; from tests.test_ranks import *; "
        "made = Engine(assemble(replace(TINY, tensor_parallel=2), memory=MEMORY)); "
        "print(*pids(made), flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as leader:
        assert leader.stdout is not None
        (rank,) = map(int, leader.stdout.readline().split())
        descriptor = os.pidfd_open(rank)
        leader.kill()
        assert select.select([descriptor], [], [], 30)[0], "the rank outlives its leader"
        os.close(descriptor)


# --- settings ---


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [(3, "num_attention_heads=4"), (4, "linear_num_key_heads=2")],
)
def test_a_model_that_the_ranks_cannot_share_is_refused(ranks: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        assemble(replace(TINY, tensor_parallel=ranks))
    assert refused.value.field == "tensor_parallel"


@pytest.mark.parametrize("ranks", [0, -1, 65])
def test_the_number_of_ranks_is_checked(ranks: int) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel"):
        EngineConfig(tensor_parallel=ranks)


def test_rank_has_the_gpu_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    two, three = (EngineConfig(tensor_parallel=count) for count in (2, 3))
    assert [str(device_of(two, rank)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert str(device_of(EngineConfig())) == "cuda"
    assert str(device_of(replace(three, device="cpu"), 2)) == "cpu"
    with pytest.raises(ConfigError, match="tensor_parallel=3: every rank needs a GPU of its own, and torch sees 2"):
        device_of(three)
    assert [str(device_of(three, rank, shares_device=True)) for rank in range(3)] == ["cuda:0"] * 3


def test_memory_is_what_fits_on_every_rank() -> None:
    host = HostMemory(num_rows=3, num_pages=30)
    one = MemoryPlan(num_rows=10, num_pages=90, max_length=500, host=host)
    other = MemoryPlan(num_rows=12, num_pages=80, max_length=370, host=HostMemory(num_rows=9, num_pages=20))
    expected = MemoryPlan(num_rows=10, num_pages=80, max_length=370, host=replace(host, num_pages=20))
    assert least(one, other) == least(other, one) == expected
    assert least(one, replace(other, host=None)).host is None
