"""`agentspec import FORMAT IN OUT`: other tools' traces as replay files. One module a format; each yields a ReplayFile."""

from __future__ import annotations

import argparse
import sys

from agentspec.errors import ConfigError
from agentspec.replay.importers import mooncake, openai_messages
from agentspec.replay.schema import ReplayFile, load, save

FORMATS = ("mooncake", "openai-messages")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `agentspec import`."""
    parser.add_argument("format", metavar="FORMAT", choices=FORMATS, help=" or ".join(FORMATS))
    parser.add_argument("input", metavar="IN", help="the trace, plain or gzip")
    parser.add_argument("output", metavar="OUT", help="replay file to write; gzip when the name ends in .gz")
    parser.add_argument("--link", action="store_true", help="mooncake: join requests that continue an earlier one into a session (inferred)")


def main(args: argparse.Namespace) -> int:
    """Convert as asked; says on stderr what was made. Raises ReplayFileError and ConfigError."""
    if args.link and args.format != "mooncake":
        raise ConfigError("link", True, f"has no meaning for {args.format}")
    file = convert(args.format, args.input, link=args.link)
    save(file, args.output)
    load(args.output)  # what we write must satisfy the format's own rules
    num_turns = sum(len(session.turns) for session in file.sessions)
    print(f"{args.output}: {len(file.sessions)} sessions, {num_turns} turns", file=sys.stderr)
    return 0


def convert(name: str, path: str, *, link: bool = False) -> ReplayFile:
    """Read a trace of one of FORMATS. Raises ReplayFileError naming its line and field."""
    return mooncake.read(path, link=link) if name == "mooncake" else openai_messages.read(path)
