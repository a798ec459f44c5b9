"""Time prefill passes and decode steps: `python -m benchmarks.step_costs --models 4B 27B-FP8 --json FILE`.

Prefill passes have many sizes and contexts, with one or several sequences; decode steps have many batch sizes and
contexts. Each is a step of the engine's own loop, timed by the device's events as reported to the engine's pace, on
models of published shapes with random weights and contexts. `--only steps` measures the decode steps alone, with more
slots where the memory that prompts need is free then.

`python -m benchmarks.fit_costs FILE` fits the constants of dry runs (agentspec/simulate/model_costs.json) to the
samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from agentspec.runtime.pace import FixedPace, StepTimes
from agentspec.types import rows_of_request
from benchmarks.prefill_cases import Words
from benchmarks.prefill_checks import check_cached_turns
from benchmarks.prefill_engine import NUM_DRAFTS, ROWS_A_SLOT, PromptEngine, Room
from benchmarks.published import CONFIGS, make_model
from benchmarks.running_engine import let_go

LARGEST_PASS = 8_192

PASSES: tuple[tuple[int, int, int], ...] = (
    *(
        (count, 0, 1)
        for count in (64, 128, 192, 256, 384, 512, 800, 1_024, 1_280, 1_536, 2_048, 3_072, 4_096, 6_144, 8_192)
    ),
    *((count, 16_384, 1) for count in (64, 256, 800, 2_048, 8_192)),
    *((count, 49_152, 1) for count in (64, 256, 800, 2_048, 8_192)),
    *((800, 16_384, spans) for spans in (2, 4, 8)),
    *((256, 16_384, spans) for spans in (2, 4, 8)),
)
"""(tokens of each sequence, cached context of each, sequences)."""

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (1_024, 8_192, 24_576)
JOINS = (1, 2, 4, 8)
PARTS = ("passes", "steps", "joins")

WARM_UPS, REPEATS = 2, 3
_STEPS_AROUND = 2
STEPS = 24
"""Number of decode steps for each batch and context; the first quarter isn't counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Measurements of one kind of step. Seconds are medians."""

    chunks: list[tuple[int, int]]
    """(start, tokens) of each."""
    contexts: list[int]
    prefill_seconds: float
    decode_seconds: float
    whole_seconds: float
    """Time from the end of the previous step to the end of this one, by the host's clock, if both were launched
    ahead."""


class RecordingPace(FixedPace):
    """A pace with a fixed budget that records the reported times."""

    def __init__(self, budget: int, *, block_tokens: int) -> None:
        super().__init__(budget, block_tokens=block_tokens)
        self.heard: list[tuple[float, StepTimes]] = []
        """(when, what)."""

    def observe(self, times: StepTimes) -> None:
        self.heard.append((time.perf_counter(), times))


@dataclass(kw_only=True)
class Measured:
    """A model's samples."""

    model: str
    machine: str
    row_bytes: int
    kv_bytes_per_token: int
    num_drafts: int = NUM_DRAFTS
    passes: list[Sample] = field(default_factory=list)
    steps: list[Sample] = field(default_factory=list)
    joins: list[tuple[int, float]] = field(default_factory=list)
    """(requests, seconds): additional time of a step in which that many requests take their first step."""


def measure(
    name: str,
    device: torch.device,
    *,
    slots: int,
    longest: int,
    others: int,
    rows_a_slot: int = ROWS_A_SLOT,
    only: Collection[str] = PARTS,
) -> Measured:
    model = make_model(name, CONFIGS[name], device=device, dtype=torch.bfloat16)
    pace = RecordingPace(LARGEST_PASS, block_tokens=model.spec.block_tokens)
    room = Room(longest=longest, others=others, max_running=slots, rows_a_slot=rows_a_slot)
    engine = PromptEngine(model, device, room, pace=pace)
    print(f"{name}: {engine.graphs}; started in {engine.start_seconds:.1f} s", flush=True)
    spec = model.spec
    measured = Measured(
        model=name,
        machine=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        row_bytes=spec.row_bytes,
        kv_bytes_per_token=spec.page_bytes // spec.block_tokens,
    )
    for count, context, spans in PASSES if "passes" in only else ():
        if spans <= slots and count * spans <= LARGEST_PASS and context + count < longest:
            measured.passes.append(_pass(engine, pace, count, context, spans))
            print(f"  pass {spans} x {count}@{context}: {measured.passes[-1].prefill_seconds * 1e3:.2f} ms", flush=True)
    for batch, context in _steps(slots, others) if "steps" in only else ():
        step = _decode(engine, pace, batch, context)
        measured.steps.append(step)
        print(
            f"  step {batch} x {context}: {step.decode_seconds * 1e3:.2f} ms, whole {step.whole_seconds * 1e3:.2f}",
            flush=True,
        )
    for count in JOINS if "joins" in only else ():
        if count + 2 <= slots:
            measured.joins.append((count, _join(engine, pace, count)))
            print(f"  join {count}: {measured.joins[-1][1] * 1e3:.2f} ms", flush=True)
    del engine
    let_go(model)
    return measured


def _steps(slots: int, others: int) -> Iterator[tuple[int, int]]:
    for batch in BATCHES:
        for context in CONTEXTS:
            if batch <= slots and batch * (context + STEPS * 8 + 64) <= others:
                yield batch, context


def _pass(engine: PromptEngine, pace: RecordingPace, count: int, context: int, spans: int) -> Sample:
    """Measure one pass over `spans` prompts of `count` new tokens, each after its own context."""
    words = Words(count + context + spans, engine.model.spec.num_real_tokens)
    contexts = [words(context) for _ in range(spans)]
    for known in contexts if context else ():
        engine.cache_context(known, compute=False)
    seconds, chunks = [], []
    for repeat in range(WARM_UPS + REPEATS):
        pace.heard.clear()
        for known in contexts:
            engine.submit(known + words(count), max_tokens=1)
        engine.settle()
        (times,) = [times for _, times in pace.heard if times.chunks]
        if repeat >= WARM_UPS:
            seconds.append(times.prefill_seconds)
            chunks = [*times.chunks]
    return Sample(
        chunks=chunks, contexts=[], prefill_seconds=statistics.median(seconds), decode_seconds=0.0, whole_seconds=0.0
    )


def _decode(engine: PromptEngine, pace: RecordingPace, batch: int, context: int) -> Sample:
    """Measure decode steps of `batch` streams, each after its own context."""
    words = Words(batch * 7 + context, engine.model.spec.num_real_tokens)
    contexts = [words(context) for _ in range(batch)]
    for known in contexts:
        engine.cache_context(known, compute=False)
    pace.heard.clear()
    for known in contexts:
        engine.submit(known + words(16), max_tokens=STEPS * (NUM_DRAFTS + 1))
    engine.settle()
    heard = pace.heard
    full = [place for place, (_, times) in enumerate(heard) if len(times.contexts) == batch and not times.chunks]
    full = full[len(full) // 4 :]
    whole = [heard[place][0] - heard[place - 1][0] for place in full if place - 1 in full]
    return Sample(
        chunks=[],
        contexts=[*heard[full[len(full) // 2]][1].contexts],
        prefill_seconds=0.0,
        decode_seconds=statistics.median(heard[place][1].decode_seconds for place in full),
        whole_seconds=statistics.median(whole),
    )


def _join(engine: PromptEngine, pace: RecordingPace, count: int) -> float:
    """Measure the additional time of a step with `count` first steps. Two streams run, so that it is launched ahead."""
    words = Words(count, engine.model.spec.num_real_tokens)
    streams = [engine.submit(words(64), max_tokens=800) for _ in range(2)]
    while len(streams[0].arrivals) < 8 or len(streams[1].arrivals) < 8:
        engine.step()
    seconds = []
    for _ in range(WARM_UPS + REPEATS):
        pace.heard.clear()
        for _ in range(_STEPS_AROUND):
            engine.step()
        newcomers = [engine.submit(words(64), max_tokens=1) for _ in range(count)]
        while not all(answer.is_over for answer in newcomers) or len(pace.heard) < 4 * _STEPS_AROUND:
            engine.step()
        place = next(place for place, (_, times) in enumerate(pace.heard) if times.chunks)
        # The host launches first steps kernel by kernel and may read the previous step late; the steps around it are
        # read when they are done.
        around = pace.heard[place - _STEPS_AROUND : place + _STEPS_AROUND + 1]
        parts = sum(times.prefill_seconds + times.decode_seconds for _, times in around[1:])
        seconds.append(around[-1][0] - around[0][0] - parts)
    while not all(stream.is_over for stream in streams):
        engine.step()
    engine.settle()
    return statistics.median(seconds[WARM_UPS:])


def sizes_of(name: str, device: torch.device) -> dict[str, int]:
    """Slots and tokens that fit beside the weights on a device of 80 GB."""
    if device.type == "cpu":
        return {"slots": 2, "longest": 60_000, "others": 8_000}
    return {
        "4B": {"slots": 64, "longest": 60_000, "others": 900_000},
        "9B": {"slots": 32, "longest": 60_000, "others": 500_000},
        "27B": {"slots": 8, "longest": 60_000, "others": 100_000},
        "27B-FP8": {"slots": 16, "longest": 60_000, "others": 260_000},
        "35B-A3B": {"slots": 2, "longest": 60_000, "others": 100_000},
        "35B-A3B-FP8": {"slots": 32, "longest": 60_000, "others": 600_000},
    }[name]


def step_sizes_of(name: str, device: torch.device) -> dict[str, int]:
    """The same for decode steps alone: shorter prompts, and the rows that slots with rings take beside a context's."""
    rows_a_slot = rows_of_request(NUM_DRAFTS, has_ring=True) + 2
    others = {"27B-FP8": {"slots": 32, "others": 140_000}}.get(name, {}) if device.type == "cuda" else {}
    return sizes_of(name, device) | {"longest": max(CONTEXTS) + 1_024, "rows_a_slot": rows_a_slot} | others


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_costs", description=__doc__, formatter_class=formatter
    )
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=["4B", "27B-FP8"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="the parts to measure (default: all)")
    parser.add_argument("--json", type=Path, required=True, help="write the samples here")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(f"checked: {check_cached_turns(options.device)}", flush=True)
    results: list[dict[str, Any]] = []
    for name in options.models:
        sizes = step_sizes_of(name, device) if options.only == ["steps"] else sizes_of(name, device)
        results.append(asdict(measure(name, device, **sizes, only=options.only)))
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
