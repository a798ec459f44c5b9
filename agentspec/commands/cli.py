"""The `agentspec` command: subcommands, dispatch and exit codes. Imports no torch.

`_load` imports a command's module when the command runs, and the engine when the command needs one. So `--help`,
`import` and a replay against another server work without torch. Exit codes: 0; 1 for a replay with failed sessions; 2
for an error that the user can fix (one line on stderr); 70 for an engine that ended by itself; 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from agentspec import version
from agentspec.commands import config_file
from agentspec.commands.flags import (
    add_engine_arguments,
    add_server_arguments,
    engine_config,
    served_model,
    server_config,
)
from agentspec.errors import AgentspecError, ConfigError, EngineClosedError, printable
from agentspec.replay import importers
from agentspec.replay import options as replay_options

INTERRUPTED = 130
USER_ERROR = 2
ENGINE_ENDED = 70
"""The engine of `serve` ended by itself: a supervisor may restart the server."""

QUANTIZE_TARGETS = ("fp8", "int4", "mixed4")
"""Keys of models/quantised/recipes.py, which imports torch."""

MAX_ERROR_LENGTH = 4000
"""Maximum number of characters of an error on stderr."""


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, and accepts no abbreviated flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"agentspec: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="agentspec", description="An inference engine for tool-calling agents on the Qwen3.5 family.")
    parser.add_argument("--version", action="version", version=f"agentspec {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve the OpenAI API over HTTP")
    add_server_arguments(serve)
    add_engine_arguments(serve)
    warm = commands.add_parser(
        "warm", help="compile the kernels that `serve` with the same flags would compile: for container images"
    )
    warm.add_argument("checkpoint", nargs="?", metavar="MODEL", help="the same as --model")
    warm.add_argument(
        "--target",
        metavar="CC",
        help="compute capability to compile for, such as 9.0 for an H100 (default: this machine's GPU)",
    )
    add_engine_arguments(warm)
    replay = commands.add_parser("replay", help="replay recorded agent sessions and report latency and throughput")
    replay_options.add_arguments(replay)
    dry = replay.add_argument_group("dry run")
    dry.add_argument(
        "--dry-run",
        metavar="COSTS",
        help="simulate scheduler and cache only, with the costs of a named model (27b, 27b-bf16-state, ...)",
    )
    add_engine_arguments(replay)
    importers.add_arguments(commands.add_parser("import", help="turn another tool's trace into a replay file"))
    memory = commands.add_parser("memory", help="say what a GPU of some size would hold of a model; needs no GPU")
    memory.add_argument("checkpoint", nargs="?", metavar="MODEL", help="the same as --model; its weights aren't read")
    memory.add_argument(
        "--card-gib",
        action="append",
        type=float,
        metavar="N",
        help="memory of the GPU in GiB; may be repeated (default: 24)",
    )
    memory.add_argument(
        "--tokens",
        type=int,
        metavar="C",
        help="prompt and output of the requests that are counted (default: 16384, or the model's context if shorter)",
    )
    add_engine_arguments(memory)
    for command in (serve, warm, replay, memory):
        command.add_argument(
            "--config",
            metavar="FILE",
            help="TOML file of flags, such as max-running = 8; the command line takes precedence",
        )
    quantize = commands.add_parser("quantize", help="quantize a checkpoint's linear layers and experts to 8 or 4 bits")
    quantize.add_argument(
        "source", metavar="SRC", help="checkpoint directory or hub id, in full precision (int4, mixed4: or in FP8)"
    )
    quantize.add_argument("destination", metavar="DST", help="directory to make; it must not exist")
    quantize.add_argument(
        "--to",
        choices=QUANTIZE_TARGETS,
        default=QUANTIZE_TARGETS[0],
        help="fp8: the official format; int4: all in 4 bits; mixed4: FFNs and experts in 4 bits, mixers and head in 8 "
        "(default: %(default)s)",
    )
    keys = commands.add_parser("keys", help="make an API key and its entry for the file of `serve --keys`")
    keys.add_argument("action", choices=("new",))
    keys.add_argument("name", metavar="NAME", help="whose key it is: letters, digits, - and _")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        if getattr(args, "config", None) is not None:
            _apply_config_file(args, argv)
        code = _run(args)
        sys.stdout.flush()
        return code
    except (AgentspecError, OSError) as error:  # OSError: such as a full disk; its text names the fault
        message = printable(str(error))
        shown = message if len(message) <= MAX_ERROR_LENGTH else message[:MAX_ERROR_LENGTH] + "..."
        print(f"agentspec: error: {shown}", file=sys.stderr)
        _discard_unwritable_stdout()
        return ENGINE_ENDED if isinstance(error, EngineClosedError) else USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _discard_unwritable_stdout() -> None:
    """Redirect stdout to /dev/null if it can't be flushed: Python's own flush at exit would print a traceback."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _apply_config_file(args: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """Set in `args` the flags of --config's file that the command line `argv` doesn't give. Raises ConfigError naming
    file, key and value."""
    parser = build_parser()
    (commands,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    # `warm` and `memory` accept and ignore the server's flags, so that they and `serve` can share one file.
    beside = commands["serve"] if args.command in ("warm", "memory") else None
    found = config_file.read_flags(args.config, commands[args.command], command=args.command, beside=beside)
    config_file.without_defaults(commands[args.command])
    given = config_file.given_flags(args, parser.parse_args(argv))
    for name, value in found.items():
        if name not in given:
            setattr(args, name, value)


def _run(args: argparse.Namespace) -> int:
    if args.command == "import":
        return int(importers.main(args))
    if args.command == "quantize":
        return int(_load("agentspec.commands.quantize").run(args.source, args.destination, args.to))
    if args.command == "keys":
        print(_load("agentspec.server.keys").new_key(args.name))
        return 0
    config = engine_config(args)
    if args.command == "serve":
        config = dataclasses.replace(config, model=served_model(args))
        server = server_config(args, os.environ)
        # Start the engine's process first: its imports take longest, and the web server's imports run beside them.
        remote = _load("agentspec.engine.remote")
        with (
            _caught_signals() as early,
            remote.EngineProcess(options=remote.engine_options(config)) as process,
            _load("agentspec.engine.remote_text").text_process(server.text_seconds) as text,
        ):
            caught = _load("agentspec.commands.serve").run(config, server, process, text, early)
        return INTERRUPTED if caught is signal.SIGINT else 0
    if args.command == "warm":
        return int(
            _load("agentspec.commands.warm").run(dataclasses.replace(config, model=served_model(args)), args.target)
        )
    if args.command == "memory":
        config = dataclasses.replace(config, model=served_model(args))
        return int(_load("agentspec.commands.memory").run(config, args.card_gib, args.tokens))
    if args.dry_run is not None:
        return int(_load("agentspec.commands.dry_run").run(args, config))
    if args.output == "forced":
        config = dataclasses.replace(config, allow_forced_output=True)
    elif args.template != replay_options.DEFAULT_TEMPLATE:
        raise ConfigError(
            "template",
            args.template,
            "is for --dry-run and --output forced; an engine takes its chat template from the checkpoint",
        )
    elif args.tokenizer is not None:
        raise ConfigError(
            "tokenizer",
            args.tokenizer,
            "is for --dry-run and --output forced; an engine takes its tokenizer from the checkpoint",
        )
    if args.base_url is not None:
        _refuse_engine_flags(args)
    return int(
        _load("agentspec.commands.replay").run(
            args, lambda: _load("agentspec.engine.local_server").load(config).client()
        )
    )


@contextmanager
def _caught_signals() -> Iterator[list[signal.Signals]]:
    """Collect signals that arrive before the server installs its own handlers, so that it can handle them then."""
    early: list[signal.Signals] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda caught, _: early.append(signal.Signals(caught))) for number in numbers]
    try:
        yield early
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for engine flags given with --base-url, except --seed, which the replay itself uses."""
    parser = _Parser()
    add_engine_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name != "seed" and getattr(args, name) != default:
            raise ConfigError(
                name, getattr(args, name), "is for an engine in this process; leave it out with --base-url"
            )


def _load(module: str) -> Any:
    """Import a module late, because only its command needs its dependencies (torch, a web server)."""
    return importlib.import_module(module)
