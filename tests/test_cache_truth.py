"""`python -m benchmarks.cache_truth`: the engine and a simulated cache agree on every turn, in any order and with too
little memory, and differences are reported."""

from __future__ import annotations

import dataclasses
import json
import random
from array import array
from pathlib import Path

import pytest
import torch

from agentspec.replay.schema import Session, save
from agentspec.runtime.memory_plan import MemoryPlan, longest_sequence
from agentspec.simulate.closed_loop import EndedTurn, RecordedTurn
from agentspec.types import BLOCK_TOKENS, Breakpoint, CheckpointKind
from benchmarks import cache_truth
from benchmarks.cache_truth import Reached, Sessions, Settings, compare, differences
from tests.fakes.hash_chain import HashChainModel
from tests.replay.builders import replay_file, result, said, system, turn, user

CPU = torch.device("cpu")
ROOMY = MemoryPlan(num_rows=400, num_pages=900, max_length=4000)


def recorded(rng: random.Random, num_sessions: int) -> Sessions:
    """Agents with a common opening; the template sometimes changes the last tool loop."""

    def words(count: int) -> list[int]:
        return [rng.randrange(1, 46) for _ in range(count)]

    openings, sessions = [words(150), words(40)], []
    for number in range(num_sessions):
        opening = openings[number % 2]
        history, query_end, turns = list(opening), len(opening), []
        for index in range(rng.randrange(2, 7)):
            if index and rng.random() < 0.3:
                del history[query_end:]
            history += words(rng.randrange(1, 160))
            if index == 0 or rng.random() < 0.4:
                query_end = len(history)
            output = words(rng.randrange(1, 90))
            points = [Breakpoint(len(opening), CheckpointKind.SYSTEM), Breakpoint(query_end, CheckpointKind.USER)]
            turns.append(
                RecordedTurn(
                    prompt=array("i", [*history, 1, 2, 3]),
                    output=array("i", output),
                    breakpoints=points,
                    delay_seconds=rng.choice([0.0, 0.01, 1.0, 7.0]),
                )
            )
            history += [1, 2, 3, *output]
        sessions.append((f"s{number}", turns))
    return sessions


def model(seed: int) -> HashChainModel:
    return HashChainModel(seed=seed, max_context=4096, block_tokens=BLOCK_TOKENS)


@pytest.mark.parametrize("seed", range(5))
def test_engine_hits_equal_the_simulated_cache(seed: int) -> None:
    rng = random.Random(seed)
    sessions = recorded(rng, 6)
    longest = max(len(one.prompt) + len(one.output) for _, turns in sessions for one in turns)
    rates = rng.choice([None, (0.9, 0.7, 0.5)])
    settings = Settings(lanes=1 + seed % 4, max_running=3, num_drafted=3, prefill_budget=256, force_acceptance=rates)
    roomy = compare(model(seed), CPU, sessions, settings, ROOMY)
    assert not roomy.failures, f"seed {seed}: {roomy.failures}"
    assert not roomy.evicted
    assert roomy.real.cached_tokens > 0
    assert len(roomy.real.ended) == sum(len(turns) for _, turns in sessions)
    num_pages = longest // BLOCK_TOKENS + 5
    tight = MemoryPlan(
        num_rows=2 + 3 * 6 + 5, num_pages=num_pages, max_length=longest_sequence(num_pages, 3, BLOCK_TOKENS)
    )
    evicting = compare(model(seed), CPU, sessions, settings, tight)
    assert not evicting.failures, f"seed {seed}: {evicting.failures}"
    assert evicting.evicted > 0
    assert evicting.real.cached_tokens <= roomy.real.cached_tokens


def test_every_difference_is_reported() -> None:
    ended = [
        EndedTurn(
            request_id=f"a/{index}",
            prompt_tokens=200,
            cached_tokens=64 * index,
            emissions=[1, 2],
            submitted=0.0,
            times=[1.0, 2.0],
        )
        for index in range(3)
    ]
    cache = dict.fromkeys(cache_truth.CACHE_EVENTS, 4)
    right = Reached(ended=ended, computed_tokens=100, preemptions=0, cache=cache, seconds=1.0)
    assert differences(right, dataclasses.replace(right, seconds=2.0)) == []
    wrong = dataclasses.replace(
        right,
        ended=[ended[0], dataclasses.replace(ended[1], cached_tokens=0), ended[2]],
        computed_tokens=164,
        cache=cache | {"checkpoints_evicted": 5},
    )
    assert differences(right, wrong) == [
        "turn 1 to end: a/1 with 64 of 200 cached; the cache alone: a/1 with 0 of 200 cached",
        "computed tokens: 100; the cache alone: 164",
        "checkpoints_evicted: 4; the cache alone: 5",
    ]
    assert len(differences(right, dataclasses.replace(right, ended=ended[:2]))) == 1


def test_the_command_compares_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = [
        turn(system("Look for parcels. " * 60), user("where is it?"), expect=said("In depot 4, on the left.")),
        turn(result("42 "), expect=said("There.")),
        turn(user("and now?"), expect=said("Gone.")),
    ]
    path, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    save(replay_file(*(Session(session_id=name, turns=loop) for name in "ab")), path)
    flags = ["--model", "tiny-agent", "--device", "cpu", "--lanes", "2", "--memory", "1", "--json", str(out)]
    assert cache_truth.main([str(path), *flags]) == 0
    assert "2 lanes, 1 GiB" in capsys.readouterr().out
    (verdict,) = json.loads(out.read_text())
    assert [one["cached"] for one in verdict["turns"]] == [one["cache_alone"] for one in verdict["turns"]]
    assert verdict["cached_tokens"] > 0
    with pytest.raises(SystemExit, match=r"--memory 0\.0115: a turn has"):
        cache_truth.main([str(path), *flags, "--memory", "0.0115"])
