"""Fit the constants of dry runs to samples of steps: `python -m benchmarks.fit_costs SAMPLES...`, files of `python -m
benchmarks.step_costs`.

Writes agentspec/simulate/model_costs.json and replaces the models of SAMPLES. The time of a pair of tokens is the
median of what the context adds to a pass; that of a token of context in a decode step likewise. The tables hold the
remaining time of each sample, so the fit reproduces each measured pass and step. Prints samples that are far from the
fit.

Samples may hold parts only (`python -m benchmarks.step_costs --only steps`): what they lack stays as it is. A batch
that has a time but no sample keeps its relation to the measured batches around it, since both change for one reason.
Without samples at two contexts, the time of a token of context stays too. `benchmarks/samples/ring_steps.json` holds
decode steps with rings as benchmarks/RESULTS.md states them, of one context each, until they are measured this way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from agentspec.runtime.prefill_graphs import chunk_sizes
from agentspec.simulate.model_costs import ModelCosts
from benchmarks.published import CONFIGS

TARGET = Path(__file__).resolve().parent.parent / "agentspec" / "simulate" / "model_costs.json"

Chunks = list[tuple[int, int]]


def num_pairs(chunks: Chunks) -> float:
    return sum(count * (start + (count + 1) / 2) for start, count in chunks)


def fit(measured: dict[str, Any], known: dict[str, Any], turn_seconds: float | None) -> dict[str, Any]:
    """The entry of one model in model_costs.json. known: the present entry; its savings of rides (`python -m
    benchmarks.ride`) are kept, and what was not measured."""
    return {
        "name": measured["model"].lower(),
        "row_bytes": measured["row_bytes"],
        "kv_bytes_per_token": measured["kv_bytes_per_token"],
        **(fit_passes(measured) if measured["passes"] else {name: known[name] for name in ("passes", "pair_seconds")}),
        "chunk_sizes": list(chunk_sizes(CONFIGS[measured["model"]].hidden_size)),
        **(fit_steps(measured, known) if measured["steps"] else {name: known[name] for name in _OF_STEPS}),
        "join_seconds": fit_joins(measured) if measured["joins"] else known.get("join_seconds", 0.0),
        "ride_seconds": known.get("ride_seconds", 0.0),
        "turn_seconds": known.get("turn_seconds", 0.0) if turn_seconds is None else turn_seconds,
    }


def fit_passes(measured: dict[str, Any]) -> dict[str, Any]:
    fresh = {sample["chunks"][0][1]: sample for sample in measured["passes"] if sample["chunks"][0][0] == 0}
    added = []
    for sample in measured["passes"]:
        (start, count), *others = sample["chunks"]
        if start and not others:
            # Large passes have more weight: their difference is well above the measurement error.
            pairs = num_pairs(sample["chunks"]) - num_pairs(fresh[count]["chunks"])
            added.append(((sample["prefill_seconds"] - fresh[count]["prefill_seconds"]) / pairs, pairs))
    pair_seconds = weighted_median(added)
    passes = [
        (count, sample["prefill_seconds"] - num_pairs(sample["chunks"]) * pair_seconds)
        for count, sample in sorted(fresh.items())
    ]
    return {
        "passes": [(count, round(seconds, 7)) for count, seconds in passes],
        "pair_seconds": float(f"{pair_seconds:.4g}"),
    }


def fit_steps(measured: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    by_batch: dict[int, list[dict[str, Any]]] = {}
    for sample in measured["steps"]:
        by_batch.setdefault(len(sample["contexts"]), []).append(sample)
    slopes = []
    for samples in by_batch.values():
        low, high = samples[0], samples[-1]
        tokens = sum(high["contexts"]) - sum(low["contexts"])
        if tokens:
            slopes.append(((high["decode_seconds"] - low["decode_seconds"]) / tokens, tokens))
    context_seconds = weighted_median(slopes) if slopes else known["context_seconds"]
    steps = {
        batch: statistics.median(
            sample["decode_seconds"] - sum(sample["contexts"]) * context_seconds for sample in samples
        )
        for batch, samples in by_batch.items()
    }
    steps |= scaled(dict(known.get("steps", ())), steps)
    return {
        "steps": [(batch, round(seconds, 7)) for batch, seconds in sorted(steps.items())],
        "context_seconds": float(f"{context_seconds:.4g}"),
    }


_OF_STEPS = ("steps", "context_seconds")


def scaled(known: dict[int, float], measured: dict[int, float]) -> dict[int, float]:
    """The known batches that were not measured, each by what the measured ones around it have changed."""
    changes = [(batch, measured[batch] / known[batch]) for batch in sorted(measured.keys() & known.keys())]
    found = {}
    for batch in known.keys() - measured.keys() if changes else ():
        below = max((change for change in changes if change[0] < batch), default=changes[0])
        above = min((change for change in changes if change[0] > batch), default=changes[-1])
        if below[0] >= above[0]:  # outside of what was measured
            found[batch] = known[batch] * (below if batch > below[0] else above)[1]
            continue
        share = (batch - below[0]) / (above[0] - below[0])
        found[batch] = known[batch] * (below[1] + (above[1] - below[1]) * share)
    return found


def fit_joins(measured: dict[str, Any]) -> float:
    joins = [seconds for _, seconds in measured["joins"] if seconds > 0]
    return round(statistics.median(joins), 6) if joins else 0.0


def weighted_median(values: list[tuple[float, float]]) -> float:
    """The weighted median of (value, weight) pairs."""
    half, reached = sum(weight for _, weight in values) / 2, 0.0
    for value, weight in sorted(values):
        reached += weight
        if reached >= half:
            return value
    raise ValueError("nothing was measured behind a context")


def deviations(measured: dict[str, Any], entry: dict[str, Any]) -> list[str]:
    """One line for each sample that differs from the fit by more than 5 %."""
    tables = {name: tuple(map(tuple, entry[name])) for name in ("passes", "steps")}
    costs = ModelCosts(**{**entry, **tables, "chunk_sizes": tuple(entry["chunk_sizes"])})
    lines = []
    for sample in [*measured["passes"], *measured["steps"]]:
        seen = sample["prefill_seconds"] or sample["decode_seconds"]
        fitted = costs.pass_seconds(sample["chunks"]) or costs.step_seconds(sample["contexts"])
        if abs(fitted / seen - 1) > 0.05:
            what = (
                " + ".join(f"{count}@{start}" for start, count in sample["chunks"])
                or f"{len(sample['contexts'])} x {sample['contexts'][0]}"
            )
            lines.append(f"  {what}: {seen * 1e3:.2f} ms, by the fit {fitted * 1e3:.2f} ({fitted / seen - 1:+.1%})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fit_costs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("samples", nargs="+", type=Path)
    parser.add_argument(
        "--turn-ms",
        type=float,
        help="what client, HTTP and text take between two turns of a session (default: as it is)",
    )
    options = parser.parse_args()
    turn_seconds = None if options.turn_ms is None else options.turn_ms / 1e3
    known = (
        {entry["name"]: entry for entry in json.loads(TARGET.read_text(encoding="utf-8"))["models"]}
        if TARGET.exists()
        else {}
    )
    for path in options.samples:
        for measured in json.loads(path.read_text(encoding="utf-8")):
            entry = fit(measured, known.get(measured["model"].lower(), {}), turn_seconds)
            known[entry["name"]] = entry
            print(
                f"{measured['model']} on {measured['machine']}: {len(measured['passes'])} passes, "
                f"{len(measured['steps'])} steps"
            )
            print("\n".join(deviations(measured, entry)) or "  all within 5 %")
    lines = [json.dumps(entry) for entry in known.values()]
    TARGET.write_text('{"models": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
