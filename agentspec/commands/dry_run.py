"""`agentspec replay FILE --dry-run MODEL`: simulate the file's sessions without a model, and print the cache's hit
share beside the ideal one. Imports no torch."""

from __future__ import annotations

import argparse
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agentspec import files
from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.errors import ConfigError
from agentspec.replay.encoders import find_encoder
from agentspec.replay.ideal import IdealPrefix
from agentspec.replay.measure import Distribution
from agentspec.replay.options import ReplayOptions
from agentspec.replay.render import TraceRenderer
from agentspec.replay.salt import salted
from agentspec.replay.schema import ReplayFile, Session, load
from agentspec.replay.subagents import kept_sessions
from agentspec.replay.token_runs import TokenRuns
from agentspec.runtime.pace import DEFAULT_MAX_GAP
from agentspec.simulate.closed_loop import RecordedTurn, Sessions
from agentspec.simulate.dry_run import DryMemory, DryRun, DryRunResult
from agentspec.simulate.model_costs import ModelCosts, model_costs

DEFAULT_DRAFTS = 3


def run(args: argparse.Namespace, config: EngineConfig) -> int:
    """Run the simulation and print its results. Raises ConfigError for flags that have no effect without a model."""
    options = ReplayOptions.from_args(args, seed=args.seed)
    _refuse_flags(args, options)
    options.check_outputs()
    costs = model_costs(args.dry_run)
    file = salted(load(args.file), options)
    _refuse_worlds(file, options)
    encoder = find_encoder(bundled.checkpoint_of(config.model if options.tokenizer is None else options.tokenizer))
    renderer = TraceRenderer(encoder, options.template, token_runs=TokenRuns(options.seed, *options.token_ids))
    ideal = IdealPrefix()
    ideal_tokens = 0

    def on_submit(turn: RecordedTurn) -> None:
        nonlocal ideal_tokens
        ideal_tokens += ideal.match_and_insert(turn.prompt, turn.output)

    lanes = options.lanes
    assert lanes is not None, "a dry run is a closed loop"
    max_running = lanes if config.max_running == "auto" else config.max_running
    num_drafted = DEFAULT_DRAFTS if config.draft_tokens == "auto" else config.draft_tokens
    dry = DryRun(
        costs=costs,
        memory=DryMemory.bounded(config.memory_gib, costs=costs, max_running=max_running, num_drafted=num_drafted),
        max_running=max_running,
        num_drafted=num_drafted,
        prefill_budget=config.prefill_budget,
        max_gap=DEFAULT_MAX_GAP if config.max_gap_seconds is None else config.max_gap_seconds,
        fair_cost=config.fair_cost,
        hold_seconds=config.session_hold_seconds,
        seed=config.seed,
        on_submit=on_submit,
    )
    result = dry.run(recorded_sessions(file, renderer, options), lanes)
    summary = _summary(
        file, encoder.name, args.template, costs, replace(config, max_running=max_running), lanes, result, ideal_tokens
    )
    print(_table(summary))
    if options.json_path is not None:
        rows = [
            {"request": turn.request_id, "prompt_tokens": turn.prompt_tokens, "cached_tokens": turn.cached_tokens}
            for turn in result.ended
        ]
        files.write(
            options.json_path,
            (json.dumps({"summary": summary, "requests": rows}, indent=1) + "\n").encode(),
            field="json",
        )
    return 0


def _refuse_flags(args: argparse.Namespace, options: ReplayOptions) -> None:
    """Raise ConfigError for flags that a dry run can't honour."""
    if options.arrival != "closed":
        raise ConfigError("arrival", options.arrival, "a dry run is a closed loop")
    if options.history == "live":
        raise ConfigError("history", options.history, "a dry run has recorded answers only")
    if args.no_prefix_cache:
        raise ConfigError("no_prefix_cache", True, "a dry run measures the prefix cache")
    idle = EngineConfig()
    for field, value, default in (
        ("base_url", options.base_url, None),
        ("html", options.html_path, None),
        ("force_acceptance", args.force_acceptance, None),
        ("device", args.device, idle.device),
        ("dtype", args.dtype, idle.dtype),
        ("kv_dtype", args.kv_dtype, idle.kv_dtype),
        ("draft_vocab", args.draft_vocab, None),
        ("draft_precision", args.draft_precision, idle.draft_precision),
        ("token_counts", args.token_counts, None),
        ("no_overlap", args.no_overlap, False),
        ("no_graphs", args.no_graphs, False),
        ("allow_forced_output", args.allow_forced_output, False),
        ("max_context", args.max_context, None),
        ("host_memory", args.host_memory, None),
        ("random_weights", args.random_weights, False),
        ("timeout", options.timeout, ReplayOptions().timeout),
        ("slo", options.slo, None),
        ("gpus", options.gpus, None),
        ("warmup", options.warmup, 0),
    ):
        if value != default:
            raise ConfigError(field, value, "has no effect on a dry run")


def _refuse_worlds(file: ReplayFile, options: ReplayOptions) -> None:
    for session in file.sessions[: options.sessions]:
        if session.world is not None:
            raise ConfigError(
                "file",
                file.path,
                f"session {session.session_id!r} has a world: its turns depend on a model's calls, "
                "and a dry run has no model",
            )


def recorded_sessions(file: ReplayFile, renderer: TraceRenderer, options: ReplayOptions) -> Sessions:
    """Yield the sessions that the options select; turns are rendered on demand. Raises ConfigError for subagents."""
    sessions = kept_sessions(file.sessions, options.sessions, options.max_turns)
    for session in sessions:
        if session.parent is not None:
            raise ConfigError("file", file.path, f"session {session.session_id!r}: parent: a dry run has no subagents")
    for session in sessions:
        yield session.session_id, _turns(file, session, renderer, options)


def _turns(
    file: ReplayFile, session: Session, renderer: TraceRenderer, options: ReplayOptions
) -> Iterator[RecordedTurn]:
    # Not strict: the renderer stops at the first turn without a recorded answer.
    turns = zip(session.turns, renderer.turns(file, session), strict=False)
    for turn, rendered in itertools.islice(turns, options.max_turns):
        yield RecordedTurn(
            prompt=rendered.prompt_ids,
            output=rendered.output_ids or array("i", [0]),
            breakpoints=rendered.breakpoints,
            delay_seconds=options.wait(turn.delay_ms or 0),
        )


def _summary(
    file: ReplayFile,
    encoder: str,
    template: str,
    costs: ModelCosts,
    config: EngineConfig,
    lanes: int,
    result: DryRunResult,
    ideal_tokens: int,
) -> dict[str, Any]:
    requests = max(result.num_requests, 1)
    return {
        "file": Path(file.path).name,
        "tokens_by": encoder,
        "template": template,
        "costs": asdict(costs),
        "memory_gib": config.memory_gib,
        "lanes": lanes,
        "max_running": config.max_running,
        "sessions": result.num_sessions,
        "requests": result.num_requests,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "ideal_hit_share": ideal_tokens / max(result.prompt_tokens, 1),
        "hit_share": result.hit_share,
        "computed_tokens_per_request": result.prefill_tokens / requests,
        "preemptions": result.preemptions,
        "virtual_seconds": result.virtual_seconds,
        "turn_ms": _milliseconds(turn.seconds for turn in result.ended),
        "ttft_ms": _milliseconds(turn.first_token_seconds for turn in result.ended),
        "longest_gap_ms": 1000 * max((turn.longest_gap for turn in result.ended), default=0.0),
        "cache": result.cache,
    }


def _milliseconds(seconds: Iterable[float]) -> dict[str, float | None]:
    found = Distribution.of(seconds)
    return {
        name: None if value is None else 1000 * value
        for name, value in (("mean", found.mean), ("p50", found.p50), ("p99", found.p99))
    }


def _times(milliseconds: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {'-' if value is None else f'{value:,.0f}'}" for name, value in milliseconds.items())


def _table(summary: dict[str, Any]) -> str:
    cache, costs = summary["cache"], summary["costs"]
    memory = "no bound" if summary["memory_gib"] is None else f"{summary['memory_gib']:g} GiB for checkpoints and pages"
    state_gib = cache["checkpoints_peak"] * costs["row_bytes"] / 2**30
    lines = [
        ("file", f"{summary['file']}, {summary['sessions']} sessions, {summary['requests']} requests"),
        (
            "tokens",
            f"{summary['prompt_tokens']:,} prompt, {summary['output_tokens']:,} output, by {summary['tokens_by']}",
        ),
        ("template", summary["template"]),
        (
            "costs of",
            f"{costs['name']}: {costs['row_bytes'] / 1e6:.1f} MB a checkpoint, "
            f"{costs['kv_bytes_per_token']:,} B of KV a token",
        ),
        ("memory", memory),
        ("lanes", f"{summary['lanes']} sessions at the same time, {summary['max_running']} slots"),
        ("ideal hit share", f"{summary['ideal_hit_share']:.2%}  (infinite cache, every token restorable)"),
        ("hit share", f"{summary['hit_share']:.2%}"),
        ("computed a request", f"{summary['computed_tokens_per_request']:,.0f} prompt tokens"),
        (
            "checkpoints",
            f"{cache['checkpoints_created']:,} created, {cache['checkpoints_superseded']:,} superseded, "
            f"{cache['checkpoints_evicted']:,} evicted",
        ),
        (
            "live checkpoints",
            f"{cache['checkpoints_live']:,} at the end, {cache['checkpoints_peak']:,} at most ({state_gib:,.1f} GiB)",
        ),
        ("preemptions", f"{summary['preemptions']}"),
        ("turns, ms", _times(summary["turn_ms"])),
        ("first tokens, ms", _times(summary["ttft_ms"])),
        ("longest gap, ms", f"{summary['longest_gap_ms']:,.0f}"),
        ("wall", f"{summary['virtual_seconds']:,.2f} s on the virtual clock"),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(
        [
            "dry run: no forward pass, recorded outputs, virtual clock",
            *(f"  {name:<{width}}  {value}" for name, value in lines),
        ]
    )
