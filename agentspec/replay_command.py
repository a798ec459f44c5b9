"""`agentspec replay FILE`: measures a server, by default an engine in this process. Imports no torch: the caller opens the engine."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx

from agentspec.replay.options import ReplayOptions
from agentspec.replay.page import write_page
from agentspec.replay.report import Report
from agentspec.replay.run import http_client, make_plans, run_replay
from agentspec.replay.schema import ReplayFile, load

FAILED_SESSIONS = 1


def run(args: argparse.Namespace, open_engine: Callable[[], AbstractAsyncContextManager[httpx.AsyncClient]]) -> int:
    """Replay as asked and report; 1 when a session failed. `open_engine` loads an engine and is called only without --base-url.

    What can be wrong with the file and the options is found before a model is loaded."""
    options = ReplayOptions.from_args(args, seed=args.seed)
    options.check_outputs()
    file = load(args.file)
    make_plans(file, options)
    report = asyncio.run(_measure(file, options, http_client(options) if options.base_url is not None else open_engine()))
    print(report.table())
    if options.json_path is not None:
        report.write_json(options.json_path)
    if options.html_path is not None:
        write_page(report, options.html_path)
    return FAILED_SESSIONS if report.has_failures else 0


async def _measure(file: ReplayFile, options: ReplayOptions, opened: AbstractAsyncContextManager[httpx.AsyncClient]) -> Report:
    async with opened as client:
        return await run_replay(file, options, client, options.served_model, progress=None if options.quiet else sys.stderr)
