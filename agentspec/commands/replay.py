"""`agentspec replay FILE`: measure a server, by default an engine in this process. Imports no torch: the caller opens
the engine."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx

from agentspec.engine import bundled
from agentspec.replay.encoders import find_encoder
from agentspec.replay.options import ReplayOptions
from agentspec.replay.page import write_page
from agentspec.replay.render import TraceRenderer
from agentspec.replay.report import Report
from agentspec.replay.run import http_client, make_plans, run_replay
from agentspec.replay.salt import salted
from agentspec.replay.schema import ReplayFile, load
from agentspec.replay.token_runs import TokenRuns

FAILED_SESSIONS = 1


def run(args: argparse.Namespace, open_engine: Callable[[], AbstractAsyncContextManager[httpx.AsyncClient]]) -> int:
    """Replay the file and print a report; return 1 when a session failed. `open_engine` loads an engine and is called
    only without --base-url.

    The file and the options are checked before a model is loaded."""
    options = ReplayOptions.from_args(args, seed=args.seed)
    options.check_outputs()
    file = salted(load(args.file), options)
    make_plans(file, options)
    renderer = make_renderer(options, args.model) if options.output == "forced" else None
    report = asyncio.run(
        _measure(file, options, renderer, http_client(options) if options.base_url is not None else open_engine())
    )
    print(report.table())
    if options.json_path is not None:
        report.write_json(options.json_path)
    if options.html_path is not None:
        write_page(report, options.html_path)
    return FAILED_SESSIONS if report.has_failures else 0


def make_renderer(options: ReplayOptions, model: str | None) -> TraceRenderer:
    """A renderer of sessions as tokens, with the tokenizer that the options name, else with that of the engine's
    model."""
    encoder = find_encoder(bundled.checkpoint_of(model if options.tokenizer is None else options.tokenizer))
    return TraceRenderer(encoder, options.template, token_runs=TokenRuns(options.seed, *options.token_ids))


async def _measure(
    file: ReplayFile,
    options: ReplayOptions,
    renderer: TraceRenderer | None,
    opened: AbstractAsyncContextManager[httpx.AsyncClient],
) -> Report:
    async with opened as client:
        progress = None if options.quiet else sys.stderr
        return await run_replay(file, options, client, options.served_model, renderer=renderer, progress=progress)
