"""The flags of the server and of the engine, and the configs that they map to. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from agentspec.config import EngineConfig, Images, KvDtype, LogLevel, ServerConfig, StateForm
from agentspec.errors import ConfigError
from agentspec.types import FAIR_COST, most_drafts

API_KEY_VARIABLE = "AGENTSPEC_API_KEY"

_DEFAULTS = ServerConfig()


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ServerConfig, and the model as a positional argument."""
    parser.add_argument("checkpoint", nargs="?", metavar="MODEL", help="the same as --model")
    group = parser.add_argument_group("server")
    _add_access_arguments(group)
    _add_service_arguments(group)


def _add_access_arguments(group: argparse._ArgumentGroup) -> None:
    """Where the server listens, and which clients it answers."""
    group.add_argument("--host", default=_DEFAULTS.host, help=f"address to listen on (default {_DEFAULTS.host})")
    _add_number(group, "--port", "PORT", "port to listen on; 0: any free one", default=_DEFAULTS.port, kind=int)
    group.add_argument(
        "--root-path",
        default=_DEFAULTS.root_path,
        metavar="PATH",
        help="prefix of every path, for a server behind a proxy, which may strip it or not (default: none)",
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="require this key in every request; may be repeated. Process lists show it: "
        f"{API_KEY_VARIABLE}, --api-key-file and --keys keep it secret",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="file of such keys, one per line")
    group.add_argument(
        "--keys",
        metavar="FILE",
        help="TOML file of keys with their groups and limits; read again on SIGHUP (see docs/api.md)",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let pages of this origin (https://host:port, or * for any) send requests from a browser; may be repeated",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="also answer requests for this host, or * for any; may be repeated "
        "(default: any, but on a loopback address only this machine's names)",
    )


def _add_service_arguments(group: argparse._ArgumentGroup) -> None:
    """Limits on requests, the model's presentation, and the life of the processes."""
    _add_number(
        group, "--max-body-mib", "MIB", "maximum size of a request's body in MiB", default=_DEFAULTS.max_body_mib
    )
    group.add_argument(
        "--strict-fields",
        action="store_true",
        help="refuse requests with unknown fields instead of ignoring the fields: to test clients",
    )
    group.add_argument(
        "--images",
        choices=get_args(Images),
        default=_DEFAULTS.images,
        help=f"treatment of images in requests; drop: replace them by a note (default {_DEFAULTS.images})",
    )
    _add_number(
        group,
        "--max-queue",
        "N",
        "maximum number of waiting requests besides the running ones; more are refused with 429",
        default=_DEFAULTS.max_queue,
        kind=int,
    )
    _add_number(
        group,
        "--text-timeout",
        "S",
        "time limit in seconds for rendering and tokenising one request, without queueing",
        default=_DEFAULTS.text_seconds,
    )
    _add_number(
        group,
        "--queue-timeout",
        "S",
        "seconds that a request may wait for its first token; then it is refused with 429 (default: no limit)",
    )
    _add_number(
        group,
        "--request-timeout",
        "S",
        "seconds that a request may take altogether; then it fails with 504 (default: no limit)",
    )
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="names of the model in requests; answers carry the first one; "
        "* accepts any name, which answers repeat (default: the checkpoint's name)",
    )
    group.add_argument("--chat-template", metavar="FILE", help="Jinja file that replaces the checkpoint's template")
    group.add_argument(
        "--trust-client-text",
        action="store_true",
        help="parse control tokens in messages, tools and results as control tokens: "
        "for chat templates that can't be served otherwise",
    )
    _add_number(
        group,
        "--drain",
        "S",
        "seconds that running answers may continue after the first signal",
        default=_DEFAULTS.drain_seconds,
    )
    _add_number(
        group,
        "--heartbeat",
        "S",
        "seconds without a heartbeat of the engine until /health is 503; "
        "after ten times as long the engine is killed (default 30; on a CPU 300)",
    )
    group.add_argument(
        "--restart", action="store_true", help="restart an engine that ended by itself, instead of exiting with 70"
    )
    group.add_argument(
        "--log-level",
        choices=get_args(LogLevel),
        default=_DEFAULTS.log_level,
        help=f"level of the log on stderr; info: one line per request and per refusal (default {_DEFAULTS.log_level})",
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
    """Add a flag that takes a number. The help shows a numeric default."""
    shown = f" (default {default:g})" if isinstance(default, int | float) else ""
    group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + shown)


def server_config(args: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    """The server's settings from the flags and the environment. Raises ConfigError naming the setting and its value."""
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
    """Read the lines of a file that aren't blank. Raises ConfigError if there are none."""
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
    """The model of `serve` or `warm`, from the positional argument or the flag. Raises ConfigError if they differ."""
    if args.checkpoint is not None and args.model is not None and args.checkpoint != args.model:
        raise ConfigError("model", args.model, f"and {args.checkpoint!r} are two models: serve one")
    return args.model if args.checkpoint is None else str(args.checkpoint)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of EngineConfig, which are the same for `serve`, `warm` and `replay`."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", metavar="PATH|ID", help="checkpoint directory or hub id (default: the bundled model, tiny-agent)"
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="weights and activations"
    )
    group.add_argument(
        "--kv-dtype",
        choices=get_args(KvDtype),
        default="auto",
        help="keys and values: as computed (auto; bf16 says so), or in 8 bits, which takes half of the memory (fp8)",
    )
    _add_number(
        group,
        "--tensor-parallel",
        "N",
        "processes that hold the model together, each with a part of every layer and on a GPU of its own",
        default=1,
        kind=int,
    )
    _add_draft_arguments(group)
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    group.add_argument("--no-overlap", action="store_true", help="wait for each step's results before the next step")
    group.add_argument(
        "--no-graphs",
        action="store_true",
        help="launch the kernels of each step one by one instead of as a CUDA graph",
    )
    _add_limit_arguments(group)
    _add_number(group, "--seed", "N", "for requests without a seed, and random weights", default=0, kind=int)
    group.add_argument(
        "--random-weights", action="store_true", help="benchmarks only: build the model from its config alone"
    )
    group.add_argument(
        "--force-acceptance",
        metavar="RATES",
        help="benchmarks only: accept draft i with the i-th of these comma-separated rates, given that the drafts "
        "before it were accepted; one number above 1 means emitted tokens per step (3.39) "
        "and needs a fixed --draft-tokens",
    )
    group.add_argument(
        "--allow-forced-output",
        action="store_true",
        help="benchmarks only: requests may prescribe their output (forced_output)",
    )


def _add_draft_arguments(group: argparse._ArgumentGroup) -> None:
    _add_number(
        group,
        "--draft-tokens",
        "K|auto",
        f"drafts per step, 0 to {most_drafts()} (with rings to {most_drafts(has_ring=True)}, see --state-form)",
        default="auto",
        kind=_number_or_auto,
    )
    _add_number(
        group,
        "--copy-drafts",
        "N|auto|off",
        "most drafts per step that are copied from the session's own text, behind the MTP head's "
        "(default: 12 for dense models with rings, see --state-form, if memory allows; otherwise none)",
        default="auto",
        kind=_number_auto_or_off,
    )
    group.add_argument(
        "--state-form",
        choices=get_args(StateForm),
        default="auto",
        help="what running requests store of their latest tokens: a state after each (rows), or what each added to the "
        "state (ring): less memory, wider windows, same tokens (default: ring on a GPU, rows on a CPU)",
    )
    _add_number(
        group,
        "--draft-vocab",
        "N",
        "number of tokens that drafts are chosen from; 0: all (default: 32768 of a vocabulary above 65536)",
        kind=int,
    )
    group.add_argument(
        "--draft-precision",
        choices=("auto", "checkpoint", "fp8"),
        default="auto",
        help="weights of the MTP layer and the draft head: the checkpoint's precision, or FP8 "
        "(auto: FP8 on a GPU in bfloat16)",
    )
    group.add_argument(
        "--token-counts",
        metavar="FILE",
        help="rank the draft vocabulary by this file, and add the served tokens to it at the end",
    )


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    """Limits on requests, time and memory."""
    _add_number(
        group,
        "--max-running",
        "N|auto",
        "requests that decode at the same time (default auto: up to 64 on a GPU, by its memory; 8 on the CPU)",
        default="auto",
        kind=_number_or_auto,
    )
    _add_number(
        group,
        "--prefill-budget",
        "N|auto",
        "maximum number of prompt tokens per step (default auto: as many as fit under --max-gap; 512 on the CPU)",
        default="auto",
        kind=_number_or_auto,
    )
    _add_number(
        group,
        "--max-gap",
        "S",
        "maximum seconds between two decode steps while prompts are computed (default 0.1 on a GPU)",
    )
    _add_number(
        group,
        "--fair-cost",
        "SHARE",
        "maximum share of the time for recomputing state that overdue requests evicted; 1: no limit",
        default=FAIR_COST,
    )
    _add_number(
        group,
        "--max-context",
        "N",
        "tokens of prompt and output together (default: as many as model and memory allow)",
        kind=int,
    )
    _add_number(
        group,
        "--memory",
        "GIB",
        "GiB for state rows and KV pages together (default: 1 on the CPU, 85%% of a GPU's free memory)",
    )
    _add_number(
        group,
        "--host-memory",
        "GIB",
        "GiB of host memory for cached prefixes that the device evicts; 0: none "
        "(default: with a GPU and 64 GiB or more, an eighth of it, 32 at most)",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings from the flags. Raises ConfigError naming the setting and its value."""
    return EngineConfig(
        model=args.model,
        device=args.device,
        dtype=args.dtype,
        tensor_parallel=args.tensor_parallel,
        draft_tokens=args.draft_tokens,
        copy_drafts=args.copy_drafts,
        state_form=args.state_form,
        draft_vocab_size=args.draft_vocab,
        draft_precision=args.draft_precision,
        kv_dtype=args.kv_dtype,
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
    """Acceptance rates by draft position: as listed, or the one rate that emits the given number of tokens per step.

    With the same rate p at each of k positions a step emits 1 + p + ... + p^k tokens. This grows with p, so bisection
    finds p. Raises ConfigError for text that is neither."""
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


def _number_auto_or_off(text: str) -> int | str:
    return 0 if text == "off" else _number_or_auto(text)


def _number_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number") from None
