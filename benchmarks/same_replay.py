"""Compare a device's tokens with the CPU's: `python -m benchmarks.same_replay` replays a file on both.

Uses the whole server with float32 and a fixed number of drafts, and the bundled model by default. Sessions run
concurrently, so the two runs batch requests differently, but tokens must not differ. Prints both runs' counts and the
device's acceptance; exit status 1 if a token differs or a session failed. --copies and --tensor-parallel apply to the
device's run only: with `--device cpu --copies 12` copies in slots with rings must not change the CPU's own tokens.

--save writes the streams of one device to a file; --expected compares with such a file instead of a run on the CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from agentspec.config import Device, EngineConfig
from agentspec.engine.in_process import AsyncEngine
from agentspec.engine.local_server import LocalServer
from agentspec.replay.options import ReplayOptions
from agentspec.replay.report import Report, count_rows, speculation_rows
from agentspec.replay.run import run_replay
from agentspec.replay.schema import ReplayFile, load
from agentspec.wire import Event, Submit, TokensEvent

SAMPLED = {"temperature": 1.2, "seed": 11}
"""Request fields of --sampled."""

Exchanges = dict[str, list[tuple[list[int], list[int]]]]
"""By session: (prompt, generated ids) of each request, in order."""


class HeardEngine(AsyncEngine):
    """An engine client that records the prompt and tokens of every request."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.exchanges: Exchanges = {}

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        assert submit.session_id is not None
        generated: list[int] = []
        self.exchanges.setdefault(submit.session_id, []).append((list(submit.prompt_ids), generated))
        async for event in super().stream(submit):
            if isinstance(event, TokensEvent):
                generated.extend(event.token_ids)
            yield event


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """The streams of one replay."""

    exchanges: Exchanges
    report: Report | None
    """None: from a file."""


def replay(file: ReplayFile, device: Device, options: argparse.Namespace, *, is_tried: bool) -> Heard:
    """is_tried: False for the run that the other one is compared with."""
    config = EngineConfig(model=options.model, device=device, dtype="float32", draft_tokens=options.k)
    if is_tried:
        config = replace(config, tensor_parallel=options.tensor_parallel)
    if is_tried and options.copies:
        config = replace(config, state_form="ring", copy_drafts=options.copies)
    engine = HeardEngine(config)

    async def run() -> Report:
        async with LocalServer(engine=engine, app=engine.app).client() as client:
            return await run_replay(
                file,
                ReplayOptions(delay_scale=0.0, sessions=options.sessions, concurrency=options.concurrency),
                client,
                None,
            )

    return Heard(report=asyncio.run(run()), exchanges=engine.exchanges)


def differences(found: Exchanges, expected: Exchanges) -> list[str]:
    """One line for each session that differs, with its first request that differs."""
    lines = [f"{name}: only one of both has it" for name in sorted(found.keys() ^ expected.keys())]
    for name in sorted(found.keys() & expected.keys()):
        for turn, (ours, theirs) in enumerate(zip(found[name], expected[name], strict=False)):
            for what, a, b in zip(("prompt", "answer"), ours, theirs, strict=True):
                if a != b:
                    place = next(
                        (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
                    )
                    lines.append(
                        f"{name}, request {turn}: {what} differs from token {place} on, {a[place : place + 5]} for "
                        f"{b[place : place + 5]}"
                    )
                    break
            else:
                continue
            break
        else:
            if len(found[name]) != len(expected[name]):
                lines.append(f"{name}: {len(found[name])} requests for {len(expected[name])}")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.same_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", default="workloads/agentic.jsonl")
    parser.add_argument("--model", help="checkpoint directory or hub id (default: the bundled model)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--k", type=int, default=3, help="drafts a step")
    parser.add_argument("--copies", type=int, default=0, metavar="N", help="copies behind the drafts, on the device")
    parser.add_argument(
        "--concurrency", type=int, default=ReplayOptions().concurrency, metavar="N", help="sessions at the same time"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="ranks of the engine on the device")
    parser.add_argument(
        "--sampled", action="store_true", help=f"sample with {SAMPLED} instead of what the file asks for"
    )
    parser.add_argument("--sessions", type=int, help="the first N sessions")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the device's streams, compare nothing")
    parser.add_argument(
        "--expected", type=Path, metavar="FILE", help="streams to compare with, instead of a run on the CPU"
    )
    return parser.parse_args()


def main() -> int:
    options = arguments()
    file = load(options.file)
    if options.sampled:
        file = msgspec.structs.replace(
            file, meta=msgspec.structs.replace(file.meta, defaults={**file.meta.defaults, **SAMPLED})
        )
    found = replay(file, options.device, options, is_tried=True)
    assert found.report is not None
    print(f"{options.device}, float32, {options.k} drafts{f' and {options.copies} copies' * bool(options.copies)}")
    print("\n".join(f"{name:<26}{value}" for name, value in count_rows(found.report)))
    if options.save is not None:
        options.save.write_text(json.dumps(found.exchanges), encoding="utf-8")
        return int(found.report.has_failures)
    if options.expected is not None:
        expected = Heard(exchanges=json.loads(options.expected.read_text(encoding="utf-8")), report=None)
    else:
        expected = replay(file, "cpu", options, is_tried=False)
    if expected.report is not None:
        rows = speculation_rows(expected.report.summary)
        print("\n".join(["", "the CPU", *(f"{name:<26}{value}" for name, value in rows)]))
    lines = differences(as_lists(found.exchanges), as_lists(expected.exchanges))
    answers = [generated for exchanges in found.exchanges.values() for _, generated in exchanges]
    print(
        f"\n{len(answers)} requests, {sum(map(len, answers))} generated tokens on {options.device}: {len(lines)} "
        f"sessions diverge from the CPU's"
    )
    print("\n".join(lines))
    return int(bool(lines) or found.report.has_failures)


def as_lists(exchanges: Exchanges) -> Exchanges:
    return {name: [(list(prompt), list(generated)) for prompt, generated in turns] for name, turns in exchanges.items()}


if __name__ == "__main__":
    raise SystemExit(main())
