"""The `agentspec` command: its flags, the one set of engine flags, and exit codes. Imports no torch.

A command's own module is loaded only when the command runs, and the engine only when the command needs one, both by
`_load`: so `--help`, `import` and a replay against another server work without torch. Exit codes: 0, 2 for an error
that the user can mend (one line on stderr), 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from agentspec import version
from agentspec.commands import config_file
from agentspec.config import EngineConfig, Images, LogLevel, ServerConfig
from agentspec.errors import AgentspecError, ConfigError, EngineClosedError, printable
from agentspec.replay import importers
from agentspec.replay import options as replay_options
from agentspec.types import FAIR_COST, most_drafts

INTERRUPTED = 130
USER_ERROR = 2
ENGINE_ENDED = 70
"""The engine of `serve` ended without being told to: whoever started it may start it again."""

MAX_ERROR_LENGTH = 4000
"""Characters of what is said on stderr."""

API_KEY_VARIABLE = "AGENTSPEC_API_KEY"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes no abbreviated flags."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(USER_ERROR, f"agentspec: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="agentspec", description="An inference engine for tool-calling agents on the Qwen3.5 family.")
    parser.add_argument("--version", action="version", version=f"agentspec {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve the OpenAI API over HTTP")
    _add_server_arguments(serve)
    add_engine_arguments(serve)
    warm = commands.add_parser(
        "warm", help="compile what `serve` with the same flags would compile at its start: for container images"
    )
    warm.add_argument("checkpoint", nargs="?", metavar="MODEL", help="the same as --model")
    warm.add_argument(
        "--target",
        metavar="CC",
        help="compute capability to compile for, as 9.0 for an H100 (default: this machine's GPU)",
    )
    add_engine_arguments(warm)
    replay = commands.add_parser("replay", help="replay recorded agent sessions and report what they cost")
    replay_options.add_arguments(replay)
    dry = replay.add_argument_group("dry run")
    dry.add_argument(
        "--dry-run",
        metavar="COSTS",
        help="run scheduler and cache alone, with the costs of a named model (27b, 27b-bf16-state, ...)",
    )
    add_engine_arguments(replay)
    for command in (serve, warm, replay):
        command.add_argument(
            "--config",
            metavar="FILE",
            help="TOML file with flags by their names, as in max-running = 8; the command line wins",
        )
    importers.add_arguments(commands.add_parser("import", help="turn another tool's trace into a replay file"))
    quantize = commands.add_parser("quantize", help="write a checkpoint's linears and experts as 8-bit floats")
    quantize.add_argument("source", metavar="SRC", help="checkpoint directory or hub id, in full precision")
    quantize.add_argument("destination", metavar="DST", help="directory to make; it must not exist")
    keys = commands.add_parser("keys", help="make a key, and its entry for the file of `serve --keys`")
    keys.add_argument("action", choices=("new",))
    keys.add_argument("name", metavar="NAME", help="whose key it is: letters, digits, - and _")
    return parser


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ServerConfig, and the model by its place."""
    idle = ServerConfig()
    parser.add_argument("checkpoint", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=idle.host, help=f"address to listen on (default {idle.host})")
    group.add_argument(
        "--port", type=int, default=idle.port, help=f"port to listen on (default {idle.port}; 0: any free one)"
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"ask every request for this key; may be repeated. Process lists show it: {API_KEY_VARIABLE}, --api-key-file and --keys keep it secret",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="the same for each line of a file")
    group.add_argument(
        "--keys",
        metavar="FILE",
        help="TOML file of keys with their groups and limits; read again on SIGHUP (see docs/api.md)",
    )
    _add_number(group, "--max-body-mib", "MIB", "MiB of a request's body at most", default=idle.max_body_mib)
    group.add_argument(
        "--strict-fields",
        action="store_true",
        help="refuse unknown fields of a request instead of leaving them out: to test clients",
    )
    group.add_argument(
        "--images",
        choices=get_args(Images),
        default=idle.images,
        help=f"what becomes of images in requests; drop: the model reads that one was there (default {idle.images})",
    )
    waiting = "requests that may wait beside those that run; more are refused with 429"
    _add_number(group, "--max-queue", "N", waiting, default=idle.max_queue, kind=int)
    texts = "seconds that a request's texts may take to render and tokenise, at its turn"
    _add_number(group, "--text-timeout", "S", texts, default=idle.text_seconds)
    _add_number(
        group,
        "--drain",
        "S",
        "seconds that running answers may go on after the first signal",
        default=idle.drain_seconds,
    )
    silence = "seconds without a heartbeat of the engine until /health is 503; after ten times as long it is killed (default 30; on a CPU 300)"
    _add_number(group, "--heartbeat", "S", silence)
    group.add_argument(
        "--restart", action="store_true", help="start an engine that ended by itself again, instead of exiting with 70"
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients may call the model: answers carry the first name; * takes any, and answers carry that (default: the checkpoint's)",
    )
    group.add_argument(
        "--log-level",
        choices=get_args(LogLevel),
        default=idle.log_level,
        help=f"what is logged on stderr; info: a line for each request and refusal (default {idle.log_level})",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="a jinja file in place of the checkpoint's own chat template"
    )
    group.add_argument(
        "--trust-client-text",
        action="store_true",
        help="let control tokens that messages, tools and results spell be control tokens: for chat templates that can't be served otherwise",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let pages of this origin (https://host:port, or * for any) ask from a browser; may be repeated",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="answer requests for this host, too, or * for any; may be repeated (default: any, but on a loopback address only this machine's names)",
    )
    first_token = (
        "seconds that a request may wait for its first token, before it is refused with 429 (default: without end)"
    )
    _add_number(group, "--queue-timeout", "S", first_token)
    _add_number(
        group,
        "--request-timeout",
        "S",
        "seconds that a request may take altogether, before it fails with 504 (default: without end)",
    )
    group.add_argument(
        "--root-path",
        default=idle.root_path,
        metavar="PATH",
        help="what clients write before every path, behind a proxy: it may strip that or not (default: nothing)",
    )


def _add_number(
    group: argparse._ArgumentGroup,
    flag: str,
    metavar: str,
    text: str,
    *,
    default: Any = None,
    kind: Callable[[str], Any] = float,
) -> None:
    """A flag that takes a number. A default that is one is said behind the text."""
    shown = f" (default {default:g})" if isinstance(default, int | float) else ""
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + shown)


def server_config(args: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    """The server's settings that the flags and the environment ask for. Raises ConfigError naming the setting and its
    value."""
    keys = list(args.api_key or ())
    if args.api_key_file is not None:
        keys += _lines("api_key_file", args.api_key_file)
    if API_KEY_VARIABLE in environment:
        keys.append(environment[API_KEY_VARIABLE])
    return ServerConfig(
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        keys=args.keys,
        max_body_mib=args.max_body_mib,
        max_queue=args.max_queue,
        text_seconds=args.text_timeout,
        drain_seconds=args.drain,
        queue_timeout_seconds=args.queue_timeout,
        request_timeout_seconds=args.request_timeout,
        root_path=args.root_path,
        heartbeat_seconds=args.heartbeat,
        restart=args.restart,
        strict_fields=args.strict_fields,
        images=args.images,
        model_names=tuple(args.served_model_name or ()),
        chat_template=args.chat_template,
        trust_client_text=args.trust_client_text,
        log_level=args.log_level,
        cors_origins=tuple(args.cors_origin or ()),
        allowed_hosts=tuple(args.allowed_host or ()),
    )


def _lines(field: str, name: str) -> list[str]:
    """The lines of a file that hold something: at least one."""
    try:
        lines = [
            line.strip() for line in Path(name).expanduser().read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    except OSError as error:
        raise ConfigError(field, name, f"can't be read: {error.strerror or error}") from None
    except ValueError:
        raise ConfigError(field, name, "is not text in UTF-8") from None
    if not lines:
        raise ConfigError(field, name, "holds no line")
    return lines


def served_model(args: argparse.Namespace) -> str | None:
    """What `serve` or `warm` is about, named by place or by flag."""
    if args.checkpoint is not None and args.model is not None and args.checkpoint != args.model:
        raise ConfigError("model", args.model, f"and {args.checkpoint!r} are two models: serve one")
    return args.model if args.checkpoint is None else str(args.checkpoint)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of EngineConfig. `serve`, `warm` and `replay` have the same ones."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", metavar="PATH|ID", help="checkpoint directory or hub id (default: the bundled model, tiny-agent)"
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="weights and activations"
    )
    _add_number(
        group, "--draft-tokens", "K|auto", f"drafts a step, 0 to {most_drafts()}", default="auto", kind=_number_or_auto
    )
    _add_number(
        group,
        "--draft-vocab",
        "N",
        "tokens that drafts are chosen from; 0: all (default: 32768 of a vocabulary above 65536)",
        kind=int,
    )
    group.add_argument(
        "--draft-precision",
        choices=("auto", "checkpoint", "fp8"),
        default="auto",
        help="of the weights that drafts are made by: the checkpoint's, or FP8 (auto: on a GPU in bfloat16)",
    )
    group.add_argument(
        "--token-counts",
        metavar="FILE",
        help="rank the draft vocabulary by this file, and add what is served to it at the end",
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    group.add_argument("--no-overlap", action="store_true", help="wait for each step's results before the next step")
    group.add_argument(
        "--no-graphs",
        action="store_true",
        help="launch the kernels of each step one by one, instead of as a CUDA graph",
    )
    running = "requests that decode at the same time (default auto: up to 64 on a GPU, by its memory; 8 on the CPU)"
    _add_number(group, "--max-running", "N|auto", running, default="auto", kind=_number_or_auto)
    budget = "prompt tokens computed in one step at most (default auto: as many as fit under --max-gap; 512 on the CPU)"
    _add_number(group, "--prefill-budget", "N|auto", budget, default="auto", kind=_number_or_auto)
    _add_number(
        group,
        "--max-gap",
        "S",
        "seconds between two steps of a running stream at most, while prompts come in (default 0.1 on a GPU)",
    )
    cost = "of the time, for computing again what late requests pushed out (1: their bound comes first)"
    _add_number(group, "--fair-cost", "SHARE", cost, default=FAIR_COST)
    _add_number(
        group,
        "--max-context",
        "N",
        "tokens of prompt and output together (default: what model and memory allow)",
        kind=int,
    )
    _add_number(
        group,
        "--memory",
        "GIB",
        "GiB for state rows and KV pages together (default: 1 on the CPU, 85%% of a GPU's free)",
    )
    kept = "GiB of host memory for cached prefixes that the device lets go; 0: none (default: with a GPU, an eighth of 64 GiB or more, 32 at most)"
    _add_number(group, "--host-memory", "GIB", kept)
    _add_number(group, "--seed", "N", "for requests without a seed, and random weights", default=0, kind=int)
    group.add_argument(
        "--random-weights", action="store_true", help="benchmarks only: build the model from its config alone"
    )
    group.add_argument(
        "--force-acceptance",
        metavar="RATES",
        help="benchmarks only: accept draft i with the i-th of these comma-separated rates, given that the ones before it were accepted; "
        "one number above 1 means emitted tokens a step (3.39) and needs a fixed --draft-tokens",
    )
    group.add_argument(
        "--allow-forced-output",
        action="store_true",
        help="benchmarks only: requests may bring their own output (forced_output)",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings that the flags ask for. Raises ConfigError naming the setting and its value."""
    return EngineConfig(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        draft_tokens=args.draft_tokens,
        draft_vocab_size=args.draft_vocab,
        draft_precision=args.draft_precision,
        token_counts=args.token_counts,
        prefix_cache=not args.no_prefix_cache,
        overlap=not args.no_overlap,
        graphs=not args.no_graphs,
        max_running=args.max_running,
        prefill_budget=args.prefill_budget,
        max_gap_seconds=args.max_gap,
        fair_cost=args.fair_cost,
        max_context=args.max_context,
        memory_gib=args.memory,
        host_memory_gib=args.host_memory,
        seed=args.seed,
        random_weights=args.random_weights,
        allow_forced_output=args.allow_forced_output,
        force_acceptance=None
        if args.force_acceptance is None
        else acceptance_rates(args.force_acceptance, args.draft_tokens),
    )


def acceptance_rates(text: str, draft_tokens: int | Literal["auto"]) -> tuple[float, ...]:
    """Rates by draft position: as listed, or one rate for all k positions that emits the given tokens a step.

    With the same rate p at each of k positions a step emits 1 + p + ... + p^k tokens, which grows with p: bisection
    finds p."""
    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(
            "force_acceptance", text, "must be rates from 0 to 1 separated by commas, or emitted tokens a step"
        ) from None
    emitted = numbers[0]
    if len(numbers) > 1 or not emitted > 1:
        return numbers
    if draft_tokens == "auto":
        raise ConfigError("force_acceptance", text, "emitted tokens a step need a fixed --draft-tokens")
    if emitted > draft_tokens + 1:
        raise ConfigError(
            "force_acceptance", text, f"a step with {draft_tokens} drafts emits at most {draft_tokens + 1} tokens"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if sum(rate**position for position in range(draft_tokens + 1)) < emitted:
            low = rate
        else:
            high = rate
    return (high,) * draft_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        if getattr(args, "config", None) is not None:
            _add_file(args, argv)
        code = _run(args)
        sys.stdout.flush()
        return code
    except (
        AgentspecError,
        OSError,
    ) as error:  # a disk that is full, a file that isn't ours: the machine's own words name it
        print(f"agentspec: error: {_one_line(error)}", file=sys.stderr)
        _let_go_of_stdout()
        return ENGINE_ENDED if isinstance(error, EngineClosedError) else USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def _let_go_of_stdout() -> None:
    """What can't be written must not fail again, with a traceback, when Python ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: Exception) -> str:
    shown = printable(str(error))
    return shown if len(shown) <= MAX_ERROR_LENGTH else shown[:MAX_ERROR_LENGTH] + "..."


def _add_file(args: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """What --config's file sets, where the command line `argv`, parsed as `args`, says nothing. Raises ConfigError
    naming file, key and value."""
    parser = build_parser()
    (commands,) = (action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    # One file for an image's `warm` and its `serve`: what concerns the server alone is nothing to the kernels.
    beside = commands["serve"] if args.command == "warm" else None
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
        return int(_load("agentspec.commands.quantize").run(args.source, args.destination))
    if args.command == "keys":
        print(_load("agentspec.server.keys").new_key(args.name))
        return 0
    config = engine_config(args)
    if args.command == "serve":
        config = dataclasses.replace(config, model=served_model(args))
        server = server_config(args, os.environ)
        # The engine's process takes longest to load what it needs: it begins before this one loads a web server.
        with (
            _caught_signals() as early,
            _load("agentspec.engine.remote").EngineProcess() as process,
            _load("agentspec.engine.remote_text").text_process(server.text_seconds) as text,
        ):
            caught = _load("agentspec.commands.serve").run(config, server, process, text, early)
        return INTERRUPTED if caught is signal.SIGINT else 0
    if args.command == "warm":
        return int(
            _load("agentspec.commands.warm").run(dataclasses.replace(config, model=served_model(args)), args.target)
        )
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
    """Signals that come before the server has handlers of its own: it is told of them when it has."""
    early: list[signal.Signals] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda caught, _: early.append(signal.Signals(caught))) for number in numbers]
    try:
        yield early
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    """With --base-url there is no engine here; --seed alone still has a meaning, for the replay itself."""
    parser = _Parser()
    add_engine_arguments(parser)
    for name, default in vars(parser.parse_args([])).items():
        if name != "seed" and getattr(args, name) != default:
            raise ConfigError(
                name, getattr(args, name), "is for an engine in this process; leave it out with --base-url"
            )


def _number_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number") from None


def _load(module: str) -> Any:
    """The one place where a module is imported late: what it needs (torch, a web server) is needed by its command
    alone."""
    return importlib.import_module(module)
