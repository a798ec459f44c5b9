"""Compare the prefix cache of an engine with a dry run: `python -m benchmarks.cache_truth FILE` replays recorded
sessions twice.

The first run uses the engine, with every forward pass computed and the recorded answers forced. The second one is a dry
run without a model, with the same rows and pages. Both use a virtual clock (simulate/closed_loop.py), and the dry run
gets the number of tokens that each step of the engine emitted, because order and admission depend on nothing else of
the model. So with any number of lanes, and with too little memory, these must be equal:

- the order in which turns end, and each turn's cached tokens;
- the tokens that prefill computed, and the fate of every checkpoint (created, superseded, evicted, held).

Nothing is computed twice: without a preemption, prefill computes exactly the prompt tokens that were not cached; and
where nothing was evicted, what an infinite cache of single tokens would have held beyond that is less than two blocks a
turn (a hit ends on a block, and so does a breakpoint).

The replay itself renders each turn's prompt, breakpoints and answer, so text and vocabulary don't matter, and weights
may be random. Exit status 1 if anything differs. The first --memory must hold everything and the others must force
eviction; otherwise the test proves nothing, which counts as failure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentspec.commands.dry_run import recorded_sessions
from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.assembly import build
from agentspec.models.protocol import StepModel
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.models.registry import load_model
from agentspec.models.tensors import random_parameters
from agentspec.replay.encoders import find_encoder
from agentspec.replay.ideal import IdealPrefix
from agentspec.replay.options import ReplayOptions
from agentspec.replay.render import TraceRenderer
from agentspec.replay.schema import load
from agentspec.replay.token_runs import TokenRuns
from agentspec.runtime.memory_plan import MemoryPlan, plan_memory
from agentspec.simulate.closed_loop import ClosedLoop, EndedTurn, RecordedTurn, TimedExecutor, VirtualClock
from agentspec.simulate.dry_run import DryMemory, DryRun
from agentspec.simulate.model_costs import ModelCosts, model_costs
from agentspec.types import BLOCK_TOKENS
from benchmarks.published import CONFIGS, spec_of

Sessions = list[tuple[str, list[RecordedTurn]]]

CACHE_EVENTS = (
    "checkpoints_created",
    "checkpoints_superseded",
    "checkpoints_evicted",
    "checkpoints_live",
    "checkpoints_peak",
    "pages_peak",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of both runs."""

    lanes: int
    max_running: int
    num_drafted: int
    prefill_budget: int
    force_acceptance: tuple[float, ...] | None = None
    graphs: bool = True
    hold_seconds: float = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """The result of one run."""

    ended: list[EndedTurn]
    computed_tokens: int
    preemptions: int
    cache: dict[str, int]
    seconds: float

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens for turn in self.ended)

    @property
    def cached_tokens(self) -> int:
        return sum(turn.cached_tokens for turn in self.ended)


@dataclass(kw_only=True, slots=True)
class Verdict:
    """The comparison for one memory size and one number of lanes."""

    settings: Settings
    memory: MemoryPlan
    real: Reached
    dry: Reached
    ideal_tokens: int
    """Prompt tokens that an infinite cache would have held, resuming from any token, for the order in which turns were
    submitted."""
    failures: list[str] = field(default_factory=list)

    @property
    def evicted(self) -> int:
        return self.real.cache["checkpoints_evicted"]


def run_real(
    model: StepModel, device: torch.device, sessions: Sessions, settings: Settings, memory: MemoryPlan
) -> tuple[Reached, int]:
    """Run the sessions through an engine around `model`; also return an ideal cache's hits for their order."""
    clock, ideal, ideal_tokens = VirtualClock(), IdealPrefix(), 0

    def on_submit(_: str, turn: RecordedTurn) -> None:
        nonlocal ideal_tokens
        ideal_tokens += ideal.match_and_insert(turn.prompt, turn.output)

    config = EngineConfig(
        draft_tokens=settings.num_drafted,
        copy_drafts=0,
        max_running=settings.max_running,
        prefill_budget=settings.prefill_budget,
        graphs=settings.graphs,
        allow_forced_output=True,
        force_acceptance=settings.force_acceptance,
        session_hold_seconds=settings.hold_seconds,
    )
    parts = build(model, config=config, memory=memory, device=device, clock=clock)
    costs = costs_of(model)
    parts.loop.executor = TimedExecutor(parts.loop.executor, costs=costs, clock=clock)
    driver = ClosedLoop(
        parts.loop,
        clock=clock,
        turn_seconds=costs.turn_seconds,
        spec=parts.spec,
        max_length=parts.info.max_context,
        on_submit=on_submit,
    )
    started = time.perf_counter()
    try:
        driver.run(_iterators(sessions), settings.lanes)
    finally:
        parts.close()
    metrics = parts.loop.metrics
    reached = Reached(
        ended=driver.ended,
        computed_tokens=metrics.prefill_tokens,
        preemptions=metrics.preemptions,
        cache=parts.cache.stats(),
        seconds=time.perf_counter() - started,
    )
    return reached, ideal_tokens


def run_dry(
    costs: ModelCosts, sessions: Sessions, settings: Settings, memory: MemoryPlan, emissions: dict[str, list[int]]
) -> Reached:
    """Run the same sessions without a model. `emissions`: tokens that each step of the real run emitted, by request."""
    dry = DryRun(
        costs=costs,
        memory=DryMemory.of_engine(memory),
        prefill_budget=settings.prefill_budget,
        hold_seconds=settings.hold_seconds,
        seed=0,
        on_submit=lambda turn: None,
        emissions=emissions,
        max_running=settings.max_running,
        num_drafted=settings.num_drafted,
    )
    started = time.perf_counter()
    result = dry.run(_iterators(sessions), settings.lanes)
    return Reached(
        ended=result.ended,
        computed_tokens=result.prefill_tokens,
        preemptions=result.preemptions,
        cache=result.cache,
        seconds=time.perf_counter() - started,
    )


def compare(
    model: StepModel, device: torch.device, sessions: Sessions, settings: Settings, memory: MemoryPlan
) -> Verdict:
    """Run both and compare them."""
    real, ideal_tokens = run_real(model, device, sessions, settings, memory)
    dry = run_dry(costs_of(model), sessions, settings, memory, {turn.request_id: turn.emissions for turn in real.ended})
    verdict = Verdict(settings=settings, memory=memory, real=real, dry=dry, ideal_tokens=ideal_tokens)
    verdict.failures += differences(real, dry)
    if not real.preemptions and real.computed_tokens != real.prompt_tokens - real.cached_tokens:
        verdict.failures.append(
            f"prefill computed {real.computed_tokens:,} tokens, {real.prompt_tokens - real.cached_tokens:,} were "
            f"not cached"
        )
    missed = ideal_tokens - real.cached_tokens
    if not verdict.evicted and missed >= 2 * BLOCK_TOKENS * len(real.ended):
        verdict.failures.append(
            f"{missed:,} tokens were computed that had been computed before, in {len(real.ended)} turns"
        )
    return verdict


def differences(real: Reached, dry: Reached) -> list[str]:
    """One line for each figure that differs; of the turns only the first."""
    found = []
    for index, (ours, theirs) in enumerate(zip(real.ended, dry.ended, strict=False)):
        if (ours.request_id, ours.cached_tokens) != (theirs.request_id, theirs.cached_tokens):
            told = [
                f"{turn.request_id} with {turn.cached_tokens} of {turn.prompt_tokens} cached" for turn in (ours, theirs)
            ]
            found.append(f"turn {index} to end: {told[0]}; the cache alone: {told[1]}")
            break
    figures = [
        ("turns", len(real.ended), len(dry.ended)),
        ("computed tokens", real.computed_tokens, dry.computed_tokens),
    ]
    figures.append(("preemptions", real.preemptions, dry.preemptions))
    figures += [(name, real.cache[name], dry.cache[name]) for name in CACHE_EVENTS]
    return found + [
        f"{name}: {ours:,}; the cache alone: {theirs:,}" for name, ours, theirs in figures if ours != theirs
    ]


def costs_of(model: StepModel) -> ModelCosts:
    """Costs with the bytes of this model and the times of the 4B; both runs use the same times."""
    spec = model.spec
    return dataclasses.replace(
        model_costs("4b"),
        name=spec.name,
        row_bytes=spec.row_bytes,
        kv_bytes_per_token=spec.page_bytes // spec.block_tokens,
    )


def _iterators(sessions: Sessions) -> Any:
    return iter([(name, iter(turns)) for name, turns in sessions])


def make_model(name: str, device: torch.device) -> StepModel:
    """A model of published size with random bfloat16 weights, or the bundled model."""
    if name == bundled.NAME:
        return load_model(
            bundled.DIRECTORY, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    config, dtype = CONFIGS[name], torch.bfloat16
    return Qwen3_5Model(
        config, spec_of(name, config, dtype), random_parameters(config, device=device, dtype=dtype, seed=0)
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache_truth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="replay file with recorded answers")
    parser.add_argument("--model", choices=(*CONFIGS, bundled.NAME), default="4B")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--sessions", type=int, default=4, help="the first N sessions")
    parser.add_argument("--max-turns", type=int, help="the first N turns of each")
    parser.add_argument("--lanes", type=int, nargs="+", default=[4], help="sessions at the same time, one run each")
    parser.add_argument(
        "--memory",
        type=float,
        nargs="+",
        default=[32.0, 2.5],
        metavar="GIB",
        help="the first holds everything, the others don't",
    )
    parser.add_argument("--k", type=int, default=3, help="drafts a step")
    parser.add_argument(
        "--force-acceptance",
        type=float,
        metavar="RATE",
        help="draft what is forced and accept it at this rate: fewer, fuller steps",
    )
    parser.add_argument("--prefill-budget", type=int, default=1024)
    parser.add_argument("--template", choices=("qwen35", "stable"), default="stable")
    parser.add_argument("--tool-delay", type=float, default=1.0, help="factor on recorded waits")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    encoder = find_encoder(bundled.DIRECTORY)
    replayed = ReplayOptions(sessions=options.sessions, max_turns=options.max_turns, delay_scale=options.tool_delay)
    renderer = TraceRenderer(encoder, options.template, token_runs=TokenRuns(replayed.seed, *replayed.token_ids))
    sessions = [(name, list(turns)) for name, turns in recorded_sessions(load(options.file), renderer, replayed)]
    device = torch.device(options.device)
    model = make_model(options.model, device)
    turns = [turn for _, turns in sessions for turn in turns]
    print(
        f"{Path(options.file).name}: {len(sessions)} sessions, {len(turns)} turns, tokens by {encoder.name}; "
        f"{options.model} on {device}"
    )
    longest = max(len(turn.prompt) + len(turn.output) for turn in turns)
    verdicts = []
    for lanes in options.lanes:
        settings = Settings(
            lanes=lanes,
            max_running=max(options.lanes),
            num_drafted=options.k,
            prefill_budget=options.prefill_budget,
            force_acceptance=None if options.force_acceptance is None else (options.force_acceptance,) * options.k,
            graphs=not options.no_graphs,
        )
        for index, gib in enumerate(options.memory):
            memory = plan_memory(
                model.spec,
                memory_bytes=int(gib * 2**30),
                max_running=settings.max_running,
                max_draft_tokens=settings.num_drafted,
            )
            if memory.max_length < longest:
                sys.exit(f"--memory {gib:g}: a turn has {longest:,} tokens, and it holds {memory.max_length:,}")
            verdict = compare(model, device, sessions, settings, memory)
            if bool(verdict.evicted) != bool(index):
                verdict.failures.append(
                    f"{verdict.evicted} checkpoints evicted at {gib:g} GiB: give {'less' if index else 'more'} --memory"
                )
            verdicts.append(verdict)
            print(told(verdict, gib), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([_json(verdict) for verdict in verdicts], indent=1) + "\n")
    return int(any(verdict.failures for verdict in verdicts))


def told(verdict: Verdict, gib: float) -> str:
    real, memory, settings = verdict.real, verdict.memory, verdict.settings
    lines = [
        f"{settings.lanes} lanes, {gib:g} GiB ({memory.num_rows:,} rows, {memory.num_pages:,} pages): "
        f"{'EQUAL' if not verdict.failures else 'NOT AS IT SHOULD BE'}",
        f"  cached {real.cached_tokens:,} of {real.prompt_tokens:,} prompt tokens, "
        f"{real.cached_tokens / real.prompt_tokens:.2%} "
        f"(ideal {verdict.ideal_tokens / real.prompt_tokens:.2%}); computed {real.computed_tokens:,}; "
        f"{len(real.ended)} turns compared one by one",
        "  "
        + ", ".join(f"{name.replace('_', ' ')} {real.cache[name]:,}" for name in CACHE_EVENTS)
        + f", preemptions {real.preemptions}",
        f"  {sum(len(turn.emissions) for turn in real.ended):,} steps of requests, {real.seconds:.1f} s; the cache "
        f"alone {verdict.dry.seconds:.1f} s",
    ]
    return "\n".join(lines + [f"  ! {failure}" for failure in verdict.failures])


def _json(verdict: Verdict) -> dict[str, Any]:
    return {
        "settings": dataclasses.asdict(verdict.settings),
        "memory": dataclasses.asdict(verdict.memory),
        "failures": verdict.failures,
        "ideal_tokens": verdict.ideal_tokens,
        "prompt_tokens": verdict.real.prompt_tokens,
        "cached_tokens": verdict.real.cached_tokens,
        "computed_tokens": verdict.real.computed_tokens,
        "preemptions": verdict.real.preemptions,
        "cache": verdict.real.cache,
        "seconds": verdict.real.seconds,
        "turns": [
            {
                "request": ours.request_id,
                "prompt": ours.prompt_tokens,
                "cached": ours.cached_tokens,
                "cache_alone": theirs.cached_tokens,
            }
            for ours, theirs in zip(verdict.real.ended, verdict.dry.ended, strict=False)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
