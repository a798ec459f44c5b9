"""Sessions on a real model that take every path of cache and prefill, and their checks:

- Every stream equals the same request run alone: no cache, no drafts, no other requests, its prompt in one chunk.
- Every state that is published, resumed from or fetched from the host equals a from-scratch prefill of its tokens by
  the reference's operations.
- Every path that a scenario is meant for was taken, so that a path can't drop out of the test unnoticed.

    python -m tests.properties.cached_sessions [--device cuda] [--scenario NAME]

runs them on the bundled model and prints how often each path was taken.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentspec.cache.host_tier import HostMemory
from agentspec.engine import bundled
from agentspec.engine.in_process import Engine
from agentspec.models.weights import resolve_checkpoint
from agentspec.runtime.plan import StepPlan
from agentspec.runtime.request import Request
from agentspec.text.tokenizer import Tokenizer
from tests.properties.real_model import (
    EngineSetup,
    Scratch,
    Simulation,
    StateSpy,
    alone,
    explain,
    write_agreeing_checkpoint,
)

LONGEST = 1536
"""Maximum number of tokens of a session."""
WORKLOAD = Path(__file__).parents[2] / "workloads" / "agentic.jsonl"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """An engine's settings, the number of its agents, and how often each path must be taken at least."""

    setup: EngineSetup
    num_agents: int = 8
    num_turns: int = 4
    least: dict[str, int]


ALWAYS = {"first steps": 10, "accepted drafts": 10, "hits": 4, "published TURN": 1}
LONG: dict[str, Any] = {"max_context": LONGEST, "ignoring_share": 0.8}
SCENARIOS = {
    "roomy": Scenario(
        setup=EngineSetup(
            seed=1, random_depth=True, system_tokens=(800, 900), related_systems=1, spare_rows=40, **LONG
        ),
        least=ALWAYS
        | {
            "hit SYSTEM": 1,
            "hit USER": 1,
            "hit TURN": 1,
            "hit GRID": 1,
            "prompts in several chunks": 3,
            "waited for a promised prefix": 1,
        },
    ),
    "agents with other tools": Scenario(
        setup=EngineSetup(seed=30, max_running=2, system_tokens=(500, 700), related_systems=3, **LONG),
        num_agents=9,
        num_turns=2,
        least=ALWAYS | {"published BRANCH": 1, "hit BRANCH": 1},
    ),
    "no overlap, one block a step": Scenario(
        setup=EngineSetup(seed=2, overlap=False, prefill_budget=64, system_tokens=(100, 300), **LONG),
        least=ALWAYS | {"chunks beside decoding": 10, "prompts in several chunks": 5},
    ),
    "many prompts at once, long chunks": Scenario(
        setup=EngineSetup(
            seed=3, prefill_budget=2048, max_running=6, system_tokens=(100, 600), related_systems=1, **LONG
        ),
        num_agents=9,
        least=ALWAYS | {"several chunks in a step": 2, "more than 1,024 tokens in a step": 1},
    ),
    "few pages": Scenario(
        setup=EngineSetup(
            seed=4, random_depth=True, max_running=3, prefill_budget=130, spare_rows=5, num_pages=12, ignoring_share=0.8
        ),
        least=ALWAYS | {"preempted": 1, "hit after preemption": 1, "evicted": 3},
    ),
    "few rows": Scenario(
        setup=EngineSetup(
            seed=5, spare_rows=1, prefill_budget=203, system_tokens=(100, 400), related_systems=1, **LONG
        ),
        least=ALWAYS | {"evicted": 3, "superseded": 1},
    ),
    "few pages, and a host tier": Scenario(
        setup=EngineSetup(
            seed=9,
            random_depth=True,
            max_running=2,
            spare_rows=4,
            num_pages=26,
            host_memory=HostMemory(num_rows=40, num_pages=200),
            system_tokens=(300, 600),
            related_systems=2,
            **LONG,
        ),
        num_agents=10,
        least=ALWAYS | {"evicted": 3, "fetched": 3},
    ),
    "forced outputs": Scenario(
        setup=EngineSetup(seed=6, random_depth=True, forced_share=0.5, system_tokens=(60, 300), ignoring_share=0.8),
        least=ALWAYS | {"forced outputs": 4, "accepted drafts of forced outputs": 4},
    ),
}


class Paths:
    """Counts how often a run takes each path."""

    def __init__(self, simulation: Simulation) -> None:
        self.counts: Counter[str] = Counter()
        self._simulation = simulation
        self._watch_cache(simulation.assembly.cache)
        self._watch_scheduler(simulation.assembly.loop.scheduler)
        self._watch_executor(simulation.assembly.loop)

    def total(self) -> Counter[str]:
        """All counts, after the run."""
        metrics, stats, setup = (
            self._simulation.metrics,
            self._simulation.assembly.cache.stats(),
            self._simulation.setup,
        )
        forced = [turn for turn in self._simulation.turns if turn.submit.forced_output is not None]
        accepted = sum(turn.ended.usage.spec.num_accepted for turn in forced)
        rest = {
            "first steps": metrics.first_slots,
            "accepted drafts": metrics.accepted_tokens,
            "preempted": metrics.preemptions,
            "evicted": stats["checkpoints_evicted"],
            "superseded": stats["checkpoints_superseded"],
            "fetched": stats.get("host_copies_fetched", 0),
            "forced outputs": len(forced),
            "accepted drafts of forced outputs": accepted,
            "steps with overlap": metrics.steps * setup.overlap,
        }
        return self.counts + Counter(rest)

    def _watch_cache(self, cache: Any) -> None:
        acquire, publish = cache.acquire, cache.publish

        def watched_acquire(found: Any, **keywords: Any) -> Any:
            lease = acquire(found, **keywords)
            if lease.num_cached:
                self.counts["hits"] += 1
                self.counts[f"hit {found.kind.name}"] += 1
            return lease

        def watched_publish(*arguments: Any) -> bool:
            taken: bool = publish(*arguments)
            self.counts[f"published {arguments[-1].name}"] += taken
            return taken

        cache.acquire, cache.publish = watched_acquire, watched_publish

    def _watch_scheduler(self, scheduler: Any) -> None:
        enter, soon_cached = scheduler._enter, scheduler._soon_cached

        def watched_enter(request: Request) -> None:
            enter(request)
            assert request.lease is not None
            self.counts["hit after preemption"] += request.preemptions > 0 and request.lease.num_cached > 0

        def watched_soon_cached(*arguments: Any) -> bool:
            waits: bool = soon_cached(*arguments)
            self.counts["waited for a promised prefix"] += waits
            return waits

        scheduler._enter, scheduler._soon_cached = watched_enter, watched_soon_cached

    def _watch_executor(self, loop: Any) -> None:
        executor = loop.executor
        launch = executor.launch

        def watched_launch(plan: StepPlan) -> Any:
            num_tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
            self.counts["prefills"] += bool(plan.chunks)
            self.counts["chunks"] += len(plan.chunks)
            self.counts["several chunks in a step"] += len(plan.chunks) > 1
            self.counts["more than 1,024 tokens in a step"] += num_tokens > 1024
            self.counts["chunks beside decoding"] += bool(plan.chunks and plan.decode_slots)
            self.counts["prompts in several chunks"] += len(plan.chunks) - len(plan.joins)
            return launch(plan)

        executor.launch = watched_launch
        if executor._graphs is not None:
            self._watch_replays(executor._graphs.prompts, "replayed prefills")
            self._watch_replays(executor._graphs.rides, "replayed prefills with windows")

    def _watch_replays(self, graphs: Any, path: str) -> None:
        run = graphs.run

        def watched_run(*arguments: Any) -> None:
            self.counts[path] += 1
            run(*arguments)

        graphs.run = watched_run


class ScenarioRunner:
    """A checkpoint with the reference results that its scenarios share: many of their prefixes are the same."""

    def __init__(self, checkpoint: Path, device: torch.device, *, words: Sequence[int] | None = None) -> None:
        """words: see Simulation."""
        self._checkpoint, self._device, self._words = checkpoint, device, words
        self._scratch = Scratch(checkpoint, device)
        self._alone: Engine = alone(
            checkpoint, device, num_pages=-(-LONGEST // 64) + 1, prefill_budget=LONGEST, takes_forced_output=True
        )

    def run_scenario(self, name: str, scenario: Scenario) -> Counter[str]:
        """Run a scenario. Raises AssertionError if a state or stream is wrong, or a path was taken too rarely. Returns
        how often each path was taken."""
        simulation = Simulation(
            scenario.setup,
            self._checkpoint,
            num_agents=scenario.num_agents,
            num_turns=scenario.num_turns,
            device=self._device,
            words=self._words,
        )
        paths = Paths(simulation)
        StateSpy(simulation, self._scratch)
        simulation.run()
        for turn in simulation.turns:
            expected, finish = self._alone.generate(turn.submit)
            where = f"{name}: {scenario.setup}: {turn.submit}"
            assert turn.emitted == expected, f"{explain(self._checkpoint, turn, expected)}: {where}"
            assert (turn.ended.reason, turn.ended.stop_match) == (finish.reason, finish.stop_match), where
            forced = turn.submit.forced_output or []
            assert turn.emitted[: len(forced)] == forced[: len(turn.emitted)], where
        found = paths.total()
        rare = {path: f"{found[path]} of {least}" for path, least in scenario.least.items() if found[path] < least}
        assert not rare, f"{name}: paths that are hardly taken any more: {rare}; all: {dict(found)}"
        return found


def tiny_agent(device: torch.device) -> ScenarioRunner:
    """The bundled model, with prompts from its own workload."""
    checkpoint = resolve_checkpoint(bundled.checkpoint_of(None))
    tokenizer = Tokenizer.from_directory(checkpoint)
    assert tokenizer is not None
    words = tokenizer.encode(WORKLOAD.read_text(encoding="utf-8"))
    return ScenarioRunner(checkpoint, device, words=words)


def small_model(directory: Path, device: torch.device) -> ScenarioRunner:
    """Random weights in two layers."""
    return ScenarioRunner(write_agreeing_checkpoint(directory, num_hidden_layers=2, full_attention_interval=2), device)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.properties.cached_sessions")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scenario", choices=SCENARIOS)
    parser.add_argument(
        "--small", action="store_true", help="random weights in few layers instead of the bundled model"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        device = torch.device(arguments.device)
        runner = small_model(Path(folder), device) if arguments.small else tiny_agent(device)
        for name in SCENARIOS if arguments.scenario is None else [arguments.scenario]:
            found = runner.run_scenario(name, SCENARIOS[name])
            print(f"{name}: " + ", ".join(f"{path} {count}" for path, count in sorted(found.items())))


if __name__ == "__main__":
    main()
