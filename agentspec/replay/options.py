"""Replay flags, and the validated options object that they become. Knows nothing of engine flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal, get_args

from agentspec.errors import ConfigError
from agentspec.replay.slo import Slo

DEFAULT_LANES = 4

ArrivalKind = Literal["closed", "trace", "poisson"]
History = Literal["auto", "recorded", "live"]
Output = Literal["free", "length", "forced"]
Salt = Literal["none", "system", "first-user"]
TemplateMode = Literal["qwen35", "stable"]
"""How the replay itself renders history. qwen35: think blocks, even empty ones, are kept only after the last user
message. stable: history is kept as generated."""

DEFAULT_TEMPLATE: TemplateMode = "qwen35"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """How a file is replayed and where the results go."""

    concurrency: int | None = None
    """Greatest number of concurrent sessions. None: 4 in closed loop, unlimited in open loop."""
    arrival: ArrivalKind = "closed"
    """closed: a session starts when a lane is free. trace: at its `start_ms`. poisson: a Poisson process with
    `arrival_rate`."""
    arrival_rate: float | None = None
    """Sessions per second, for Poisson arrivals."""
    speed: float = 1.0
    """Speed-up factor of arrivals (trace and poisson)."""
    delay_scale: float = 1.0
    """Factor on the recorded waits between turns (tool runs and user thinking)."""
    max_idle: float | None = None
    """Upper bound on a wait between turns, in seconds. None: as recorded."""
    warmup: int = 0
    """Requests per lane before the measurement begins (closed loop)."""
    history: History = "auto"
    """Which answers later prompts contain. auto: the recorded ones when the session has them all, else the live
    ones."""
    output: Output = "free"
    """length: `ignore_eos` and exactly the recorded number of tokens. forced: the recorded tokens themselves, with
    prompts of token ids."""
    template: TemplateMode = DEFAULT_TEMPLATE
    """Forced outputs and dry runs: how history is rendered."""
    tokenizer: str | None = None
    """Forced outputs and dry runs: the checkpoint directory of the tokenizer. None: that of the engine's model."""
    salt: Salt = "none"
    """Where salts are inserted to prevent prefix cache hits across runs or sessions (replay/salt.py)."""
    sessions: int | None = None
    """Replay the first n sessions only."""
    max_turns: int | None = None
    """Replay the first n turns of each session only."""
    timeout: float = 600.0
    """Time limit of a turn in seconds, from sending to the last token."""
    token_ids: tuple[int, int] = (100, 2000)
    """Half-open range of token ids for prompts of token-run turns."""
    seed: int = 0
    """Seeds poisson arrivals and the tokens of token-run turns."""
    base_url: str | None = None
    """URL of the server to measure, with or without `/v1`. None: an engine in this process."""
    api_key: str | None = None
    served_model: str | None = None
    """Model name of the requests. None: the first that the server lists."""
    slo: Slo | None = None
    """Service level objectives that every turn is checked against."""
    gpus: int | None = None
    """Number of GPUs of the server, for tokens per second per GPU."""
    json_path: str | None = None
    html_path: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        for field in ("concurrency", "sessions", "max_turns", "gpus"):
            count = getattr(self, field)
            if count is not None and count < 1:
                raise ConfigError(field, count, "must be at least 1")
        for field, choices in (("history", History), ("output", Output), ("template", TemplateMode), ("salt", Salt)):
            *others, last = get_args(choices)
            if getattr(self, field) not in (*others, last):
                raise ConfigError(field, getattr(self, field), f"must be {', '.join(others)} or {last}")
        if self.arrival not in ("closed", "trace", "poisson"):
            raise ConfigError("arrival", self.arrival, "must be closed, trace or poisson:RATE")
        if (self.arrival == "poisson") != (self.arrival_rate is not None):
            raise ConfigError(
                "arrival", self.arrival, "poisson, and only poisson, needs a rate: poisson:RATE, in sessions a second"
            )
        if self.arrival_rate is not None and not 0 < self.arrival_rate < float("inf"):
            raise ConfigError("arrival", f"poisson:{self.arrival_rate:g}", "the rate must be above 0 sessions a second")
        is_closed, scale, idle, url = self.arrival == "closed", self.delay_scale, self.max_idle, self.base_url
        low, high = self.token_ids
        rules: tuple[tuple[str, object, bool, str], ...] = (
            ("speed", self.speed, 0 < self.speed < inf, "must be above 0"),
            (
                "speed",
                self.speed,
                self.speed == 1.0 or not is_closed,
                "has no effect in closed loop; use it with --arrival trace or poisson:RATE",
            ),
            ("tool_delay", f"scale:{scale:g}", 0 <= scale < inf, "the factor must not be negative"),
            ("max_idle", idle, idle is None or 0 <= idle < inf, "must be a number of seconds, 0 or more"),
            ("warmup", self.warmup, self.warmup >= 0, "must not be negative"),
            (
                "warmup",
                self.warmup,
                not self.warmup or is_closed,
                "counts the requests of a lane, and only a closed loop has lanes",
            ),
            (
                "history",
                self.history,
                self.output != "forced" or self.history != "live",
                "can't be live when the recorded answers are forced",
            ),
            ("timeout", self.timeout, 0 < self.timeout < inf, "must be above 0 seconds"),
            ("token_ids", self.token_ids, 0 <= low < high < 2**31, "must be LOW:HIGH with 0 <= LOW < HIGH"),
            (
                "base_url",
                url,
                url is None or url.startswith(("http://", "https://")),
                "must begin with http:// or https://",
            ),
        )
        for field, shown, is_met, reason in rules:
            if not is_met:
                raise ConfigError(field, shown, reason)
        for field, value in (("api_key", self.api_key), ("served_model", self.served_model)):
            if value is not None and self.base_url is None:
                reason = "is for a server; give its --base-url too"
                raise ConfigError(field, "(hidden)" if field == "api_key" else value, reason)

    @classmethod
    def from_args(cls, args: argparse.Namespace, *, seed: int = 0) -> ReplayOptions:
        """Create the options from parsed flags; `seed` comes from the engine's own flag. Raises ConfigError naming flag
        and value."""
        arrival, rate = _arrival(args.arrival)
        return cls(
            concurrency=args.concurrency,
            arrival=arrival,
            arrival_rate=rate,
            speed=args.speed,
            delay_scale=_delay_scale(args.tool_delay),
            max_idle=args.max_idle,
            warmup=args.warmup,
            history=args.history,
            output=args.output,
            template=args.template,
            tokenizer=args.tokenizer,
            salt=args.salt,
            sessions=args.sessions,
            max_turns=args.max_turns,
            timeout=args.timeout,
            token_ids=_token_ids(args.token_ids),
            seed=seed,
            base_url=args.base_url,
            api_key=args.api_key,
            served_model=args.served_model,
            slo=None if args.slo is None else Slo.parse(args.slo),
            gpus=args.gpus,
            json_path=args.json,
            html_path=args.html,
            quiet=args.quiet,
        )

    def check_outputs(self) -> None:
        """Raise ConfigError before the run for a result file that can't be written."""
        for field, path in (("json", self.json_path), ("html", self.html_path)):
            if path is not None and not Path(path).resolve().parent.is_dir():
                raise ConfigError(field, path, "there is no such directory")
            if path is not None and Path(path).is_dir():
                raise ConfigError(field, path, "is a directory")

    def settings(self) -> dict[str, str]:
        """Return the settings that affect the measurement, for the report; without file names and the API key."""
        arrival = self.arrival if self.arrival_rate is None else f"poisson:{self.arrival_rate:g}"
        limit = "no limit" if self.lanes is None else str(self.lanes)
        shown = {
            "concurrency": limit,
            "arrival": arrival if self.speed == 1.0 else f"{arrival}, {self.speed:g} times as fast",
            "tool delay": {1.0: "recorded", 0.0: "zero"}.get(self.delay_scale, f"scale:{self.delay_scale:g}"),
            "history": self.history,
            "output": self.output,
            "timeout": f"{self.timeout:g} s",
            "seed": str(self.seed),
        }
        if self.max_idle is not None:
            shown["longest wait"] = f"{self.max_idle:g} s"
        if self.warmup:
            shown["warm-up"] = f"{self.warmup} requests a lane"
        if self.output == "forced":
            shown["template"] = self.template
        if self.salt != "none":
            shown["salt"] = self.salt
        if self.sessions is not None:
            shown["sessions"] = f"first {self.sessions}"
        if self.max_turns is not None:
            shown["turns"] = f"first {self.max_turns} of a session"
        return shown

    def wait(self, delay_ms: float) -> float:
        """Return the replayed duration of a recorded wait, in seconds."""
        seconds = delay_ms / 1000 * self.delay_scale
        return seconds if self.max_idle is None else min(seconds, self.max_idle)

    @property
    def lanes(self) -> int | None:
        """Greatest number of concurrent sessions; None: unlimited."""
        if self.concurrency is None and self.arrival == "closed":
            return DEFAULT_LANES
        return self.concurrency


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `replay` itself; the command line adds the engine's flags."""
    parser.add_argument("file", metavar="FILE", help="replay file (agentspec.replay/1, plain or gzip)")
    _add_content_flags(parser)
    _add_schedule_flags(parser)
    server = parser.add_argument_group("another server")
    server.add_argument("--base-url", metavar="URL", help="measure this server instead of an engine in this process")
    server.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    server.add_argument(
        "--served-model", metavar="NAME", help="model to ask for (default: the first that the server lists)"
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--slo",
        action="append",
        metavar="NAME=TIME,...",
        help="mark turns over these bounds: turn, ttft, tpot, gap, as in turn=10s,ttft=150ms",
    )
    results.add_argument("--gpus", type=int, metavar="N", help="GPUs that serve: adds tokens a second a GPU")
    results.add_argument("--json", metavar="FILE", help="write every request and the summary as JSON")
    results.add_argument("--html", metavar="FILE", help="write one self-contained page with plots")
    results.add_argument("--quiet", action="store_true", help="no progress on stderr")


def _add_content_flags(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is replayed")
    what.add_argument("--sessions", type=int, metavar="N", help="the first N sessions only, with their subagents")
    what.add_argument("--max-turns", type=int, metavar="N", help="the first N turns of each session only")
    what.add_argument(
        "--history",
        default="auto",
        metavar="auto|recorded|live",
        help="whose answers the next prompt contains (auto: the recorded ones if there)",
    )
    what.add_argument(
        "--output",
        default="free",
        metavar="free|length|forced",
        help="length: as many tokens as recorded, ignoring the end of text. "
        "forced: the recorded tokens themselves, whatever the model says",
    )
    what.add_argument(
        "--template",
        default=DEFAULT_TEMPLATE,
        metavar="qwen35|stable",
        help="forced, dry run: how history is rendered (stable: as it was generated)",
    )
    what.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="forced, dry run: checkpoint directory whose tokenizer makes the tokens (default: --model's)",
    )
    what.add_argument(
        "--salt",
        default="none",
        metavar="system|first-user",
        help="markers by --seed that bust prefix caches: around the system prompt, or behind it",
    )
    what.add_argument(
        "--token-ids",
        default="100:2000",
        metavar="LOW:HIGH",
        help="ids that prompts without text are made of (default 100:2000)",
    )


def _add_schedule_flags(parser: argparse.ArgumentParser) -> None:
    when = parser.add_argument_group("when")
    when.add_argument(
        "--concurrency", type=int, metavar="N", help=f"sessions at the same time (closed loop: {DEFAULT_LANES})"
    )
    when.add_argument(
        "--arrival",
        default="closed",
        metavar="closed|trace|poisson:R",
        help="how sessions start; R in sessions a second",
    )
    when.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="arrivals this many times as fast as recorded"
    )
    when.add_argument(
        "--tool-delay",
        default="recorded",
        metavar="recorded|zero|scale:X",
        help="waits between turns: tool runs and user thinking",
    )
    when.add_argument(
        "--max-idle", type=float, metavar="S", help="no wait between turns is longer than this many seconds"
    )
    when.add_argument(
        "--warmup",
        type=int,
        default=0,
        metavar="N",
        help="the first N requests of each lane are sent before the measurement, and not measured",
    )
    when.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for one turn (default 600)")


def _arrival(text: str) -> tuple[ArrivalKind, float | None]:
    if text == "closed":
        return "closed", None
    if text == "trace":
        return "trace", None
    kind, _, rate = text.partition(":")
    if kind == "poisson":
        return "poisson", _number("arrival", text, rate)
    raise ConfigError("arrival", text, "must be closed, trace or poisson:RATE")


def _delay_scale(text: str) -> float:
    fixed = {"recorded": 1.0, "zero": 0.0}
    if text in fixed:
        return fixed[text]
    kind, _, factor = text.partition(":")
    if kind == "scale":
        return _number("tool_delay", text, factor)
    raise ConfigError("tool_delay", text, "must be recorded, zero or scale:FACTOR")


def _token_ids(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    try:
        return int(low), int(high)
    except ValueError:
        raise ConfigError("token_ids", text, "must be LOW:HIGH, two integers") from None


def _number(field: str, text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise ConfigError(field, text, f"{number!r} is not a number") from None
