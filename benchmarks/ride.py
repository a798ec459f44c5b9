"""Measure the savings of riding windows: `python -m benchmarks.ride --models 4B 27B-FP8`.

In one engine with running streams, it measures: the pass of an append after a context, a decode step of some streams,
both in sequence in one plan, and the windows riding in the pass. Plans go directly to the engine's executor, ten of a
kind in sequence, and are timed by the host's clock, so a pass that is bound by the host's launches is as slow as in the
engine. Models have published shapes, random weights and random contexts.

Before that, tiny-agent in float32 must generate the same tokens with and without riding.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.assembly import build
from agentspec.models.registry import load_model
from agentspec.models.weights import resolve_checkpoint
from agentspec.runtime.executor import ModelExecutor
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.runtime.pace import FixedPace
from agentspec.runtime.plan import ChunkPlan, StepOutcome, StepPlan
from agentspec.runtime.request import new_request
from agentspec.types import MOST_RIDERS, ZERO_ROW, SamplingParams
from agentspec.wire import Submit, TokensEvent
from benchmarks.decode_checks import CheckFailedError
from benchmarks.prefill_cases import Words
from benchmarks.prefill_engine import NUM_DRAFTS, PromptEngine, Room
from benchmarks.published import CONFIGS, make_model
from benchmarks.running_engine import let_go

APPENDS = (64, 256, 512, 800, 1_600, 2_048, 4_096)
APPEND_CONTEXT = 16_384
WARM_UPS, REPEATS = 2, 10
OUTPUT_TOKENS = 8_000
"""Tokens of each stream: more than all measured steps emit."""
STEPS_BETWEEN = 5
"""Steps of the check between two requests."""
EVERYBODY = 1 << 20
"""A limit that lets every window ride that has a graph or needs none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    batches: tuple[int, ...]
    context: int


STREAMS = {"4B": Streams(batches=(4, 8, 16), context=20_480), "27B-FP8": Streams(batches=(8,), context=16_384)}
OTHER_STREAMS = Streams(batches=(4,), context=1_024)


def check_rides(device: torch.device, num_requests: int = 16) -> str:
    """Compare requests that arrive in sequence in a running engine, with and without riding. Return a description.
    Raises CheckFailedError."""
    config = EngineConfig(
        device=device.type,  # type: ignore[arg-type]
        dtype="float32",
        draft_tokens=NUM_DRAFTS,
        max_running=4,
        max_context=2048,
        max_gap_seconds=10.0,
    )
    (apart, num_apart), (ridden, num_rides) = (
        _staggered(config, device, most_riders, num_requests) for most_riders in (0, EVERYBODY)
    )
    if num_apart or not num_rides:
        raise CheckFailedError(f"{num_apart} steps rode that shouldn't, {num_rides} that should")
    if apart != ridden:
        raise CheckFailedError(f"windows that ride say something else: {ridden} instead of {apart}")
    return (
        f"tiny-agent, float32: {sum(map(len, ridden.values()))} tokens on {device} with {num_rides} steps that "
        f"rode equal those with none"
    )


def _staggered(
    config: EngineConfig, device: torch.device, most_riders: int, num_requests: int
) -> tuple[dict[str, list[int]], int]:
    """Tokens of requests that arrive every few steps, half of them sampled, and the number of steps with riding."""
    model = load_model(resolve_checkpoint(bundled.checkpoint_of(config.model)), device=device, dtype=torch.float32)
    memory = MemoryPlan(num_rows=100, num_pages=200, max_length=2048)
    parts = build(model, config=config, memory=memory, device=device, most_riders=most_riders)
    executor: Any = parts.loop.executor
    collect, rode = executor.collect, []

    def collected(ticket: Any) -> StepOutcome:
        outcome: StepOutcome = collect(ticket)
        rode.append(outcome.rode)
        return outcome

    executor.collect = collected
    rng = random.Random(5)
    found: dict[str, list[int]] = {}
    for number in range(num_requests):
        sampling = SamplingParams(temperature=number % 2 * 0.8, max_tokens=60, ignore_eos=True, seed=number)
        prompt = rng.choices(range(parts.spec.num_real_tokens), k=rng.choice([40, 150, 400, 900, 1300]))
        submit = Submit(request_id=str(number), prompt_ids=prompt, sampling=sampling)
        found[submit.request_id] = []
        parts.loop.submit(
            new_request(
                submit,
                number=number,
                spec=parts.spec,
                max_length=parts.info.max_context,
                engine_seed=0,
                token_bytes=None,
            )
        )
        for step in itertools.count():
            for event in parts.loop.run_once():
                if isinstance(event, TokensEvent):
                    found[event.request_id] += event.token_ids
            if not parts.loop.has_work or (step >= STEPS_BETWEEN and number < num_requests - 1):
                break
    parts.close()
    return found, sum(rode)


class Bench:
    """An engine with all slots running, and plans for its executor."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.streams = STREAMS.get(name, OTHER_STREAMS)
        most, context = max(self.streams.batches), self.streams.context
        self.model = make_model(name, CONFIGS[name], device=device, dtype=torch.bfloat16)
        room = Room(
            longest=context + OUTPUT_TOKENS + 64,
            others=most * (context + OUTPUT_TOKENS) + 2 * APPEND_CONTEXT,
            max_running=most,
        )
        pace = FixedPace(8_192, block_tokens=self.model.spec.block_tokens)
        self.engine = PromptEngine(self.model, device, room, pace=pace, most_riders=EVERYBODY)
        print(f"{name}: {self.engine.graphs}; started in {self.engine.start_seconds:.1f} s", flush=True)
        executor = self.engine.executor
        assert isinstance(executor, ModelExecutor)
        self.executor = executor
        self._words = words = Words(1, self.model.spec.num_real_tokens)
        contexts = [words(context) for _ in range(most)]
        for known in contexts:
            self.engine.cache_context(known, compute=False)
        for known in contexts:
            self.engine.submit(known + words(16), max_tokens=OUTPUT_TOKENS)
        for _ in range(12):
            self.engine.step()

    def plan(self, append: int | None, batch: int | None) -> StepPlan:
        plan = StepPlan(num_drafted=NUM_DRAFTS)
        if append is not None:
            plan.chunks = [self._chunk(append)]
        if batch is not None:
            plan.decode_slots = list(range(batch))
        return plan

    def milliseconds(self, plan: StepPlan, most_riders: int) -> tuple[float, bool]:
        """Times of the plans, launched in sequence, and whether their windows rode."""
        executor = self.executor
        executor.most_riders = most_riders
        for _ in range(WARM_UPS):
            executor.collect(executor.launch(plan))
        torch.cuda.synchronize()
        began = time.perf_counter()
        tickets = [executor.launch(plan) for _ in range(REPEATS)]
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        (rode,) = {executor.collect(ticket).rode for ticket in tickets}
        return seconds / REPEATS * 1e3, rode

    def _chunk(self, count: int) -> ChunkPlan:
        """An append that uses the last row and pages of the pools, which are unused."""
        pools = self.model.pools
        num_rows, num_pages = pools.hidden_RH.shape[0], pools["kv_AP2SGD"].shape[1]
        needed = -(-(APPEND_CONTEXT + count) // self.model.spec.block_tokens)
        return ChunkPlan(
            request_id="append",
            token_ids=array("i", self._words(count)),
            start=APPEND_CONTEXT,
            read_row=ZERO_ROW,
            state_writes=((count, num_rows - 1),),
            page_ids=list(range(num_pages - needed, num_pages)),
            next_token=None,
        )


def measure(name: str, device: torch.device, appends: Sequence[int]) -> None:
    bench = Bench(name, device)
    print("| model | streams | append | pass | step | one after the other | ridden | saved | rides |", flush=True)
    for batch in bench.streams.batches:
        step, _ = bench.milliseconds(bench.plan(None, batch), 0)
        for append in appends:
            alone, _ = bench.milliseconds(bench.plan(append, None), 0)
            both = bench.plan(append, batch)
            (apart, _), (ridden, could) = bench.milliseconds(both, 0), bench.milliseconds(both, EVERYBODY)
            _, does = bench.milliseconds(both, MOST_RIDERS)
            figures = (alone, step, apart, *((ridden, apart - ridden) if could else ()))
            row = (
                name,
                str(batch),
                str(append),
                *(f"{figure:.2f}" for figure in figures),
                *(() if could else ("", "")),
                "yes" if does else "no",
            )
            print(f"| {' | '.join(row)} |", flush=True)
    let_go(bench.model)


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ride", description=__doc__, formatter_class=formatter)
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=["4B", "27B-FP8"])
    parser.add_argument("--appends", nargs="+", type=int, default=list(APPENDS))
    options = parser.parse_args()
    device = torch.device("cuda")
    print(f"checked: {check_rides(device)}", flush=True)
    for name in options.models:
        measure(name, device, options.appends)
    return 0


if __name__ == "__main__":
    sys.exit(main())
