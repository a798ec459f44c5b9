"""`agentspec import FORMAT IN OUT`: convert other tools' traces to replay files. Each format has a reader that returns
a ReplayFile."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from agentspec.errors import ConfigError
from agentspec.replay.importers import agents, bailian, mlperf, mooncake, openai_messages, weka, workloads
from agentspec.replay.schema import ReplayFile, load, save

_READERS: dict[str, Callable[[str], ReplayFile]] = {
    "openai-messages": openai_messages.read,
    "bailian": bailian.read,
    "mlperf-agentic": mlperf.read,
    "weka": weka.read,
    "tau-bench": agents.read_tau_bench,
    "mini-swe-agent": agents.read_mini_swe_agent,
    "swe-agent": agents.read_swe_agent,
    "sglang-agentic": workloads.read_sglang_agentic,
    "evalscope-workload": workloads.read_evalscope_workload,
    "aiperf-multi-turn": workloads.read_aiperf_multi_turn,
}
FORMATS = ("mooncake", *_READERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `agentspec import`."""
    parser.add_argument("format", metavar="FORMAT", choices=FORMATS, help=f"one of {', '.join(FORMATS)}")
    parser.add_argument("input", metavar="IN", help="the trace, plain or gzip")
    parser.add_argument("output", metavar="OUT", help="replay file to write; gzip when the name ends in .gz")
    parser.add_argument(
        "--link",
        action="store_true",
        help="mooncake: join requests that continue an earlier one into a session (inferred)",
    )


def main(args: argparse.Namespace) -> int:
    """Convert a trace and report the result on stderr. Raises ReplayFileError and ConfigError."""
    if args.link and args.format != "mooncake":
        raise ConfigError("link", True, f"has no meaning for {args.format}")
    file = convert(args.format, args.input, link=args.link)
    save(file, args.output)
    load(args.output)  # the output must satisfy the format's own rules
    num_turns = sum(len(session.turns) for session in file.sessions)
    print(f"{args.output}: {len(file.sessions)} sessions, {num_turns} turns", file=sys.stderr)
    return 0


def convert(name: str, path: str, *, link: bool = False) -> ReplayFile:
    """Read a trace of one of FORMATS. Raises ReplayFileError naming its line and field."""
    return mooncake.read(path, link=link) if name == "mooncake" else _READERS[name](path)
