"""Settings of the engine and of the server: frozen, validated once, units in the docstrings.

`serve`, `warm` and `replay` share one set of engine flags, which maps to EngineConfig field by field. The other flags
of `serve` map to ServerConfig. A config is never edited: engine/assembly.py resolves `auto` values into new objects.
"""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from agentspec import files
from agentspec.errors import ConfigError
from agentspec.types import BLOCK_TOKENS, FAIR_COST, most_drafts

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]
DraftPrecision = Literal["auto", "checkpoint", "fp8"]
KvDtype = Literal["auto", "bf16", "fp8"]
LogLevel = Literal["debug", "info", "warning", "error"]
Images = Literal["refuse", "drop"]
StateForm = Literal["auto", "rows", "ring"]

_MAX_TOML_BYTES = 2**20
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", re.ASCII)
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The settings of `serve`, `warm`, `replay` and `Engine(...)`."""

    model: str | None = None
    """A checkpoint directory, or a hub id. None: the bundled model, which is also `tiny-agent`."""
    device: Device = "auto"
    dtype: Dtype = "auto"
    """Weights and activations; recurrent state and gates are always float32."""
    kv_dtype: KvDtype = "auto"
    """Keys and values in the pages. fp8: 8-bit floats with a power of two for each head of each token, in half of the
    memory of bfloat16. bf16: as computed, which needs activations in bfloat16. auto: as computed."""
    tensor_parallel: int = 1
    """Processes (ranks) that hold the model together, each with a part of every layer. On GPUs rank r has the GPU of
    that number."""
    draft_tokens: int | Literal["auto"] = "auto"
    """MTP drafts per step: a fixed number, or auto: the window policy chooses it for each step."""
    copy_drafts: int | Literal["auto"] = "auto"
    """Most drafts per step that are copied from the session's own text, behind the MTP drafts; the window policy
    chooses when. 0: none. auto: as many as a window has room for, up to 12, where the model is dense, requests have
    rings (`state_form`) and memory is not short; otherwise none."""
    state_form: StateForm = "auto"
    """What a running request stores of its latest tokens. rows: a recurrent state after every column of a window. ring:
    what each token added to the state, and a whole state every 16 tokens, which takes less memory and allows windows of
    up to 16 columns. The tokens are the same. auto: ring on a GPU, rows on a CPU, where each is faster."""
    draft_vocab_size: int | None = None
    """Number of tokens that the draft head scores. 0: all. None: all of a vocabulary up to 65,536, else 32,768."""
    draft_precision: DraftPrecision = "auto"
    """Weight precision of the MTP layer and the draft head: the checkpoint's, or quantised to FP8 at load. auto: FP8 on
    a GPU in bfloat16."""
    token_counts: str | None = None
    """A file that counts how often each token was served. It ranks the draft vocabulary; the engine adds its own counts
    when it closes."""
    prefix_cache: bool = True
    overlap: bool = True
    """Read the results of a step while the next one runs."""
    graphs: bool = True
    """On a GPU: record decode steps and short prompt chunks as CUDA graphs at start, where the model allows it."""
    max_running: int | Literal["auto"] = "auto"
    """Requests that decode at the same time (slots). auto: on a GPU up to 64, limited so that their rows take at most a
    third of the memory for rows and pages; 8 on the CPU."""
    prefill_budget: int | Literal["auto"] = "auto"
    """Maximum number of prompt tokens per step. auto: as many as fit under `max_gap_seconds`, by measured times; on the
    CPU 512."""
    max_gap_seconds: float | None = None
    """Upper bound on the time between two decode steps while prompts are computed. Exceeded only where the device is so
    slow that the smallest possible prompt chunk takes longer. None: 0.1 on a GPU; no bound on the CPU or with a fixed
    `prefill_budget`."""
    fair_cost: float = FAIR_COST
    """Maximum share of the time spent on recomputing state that overdue requests evicted. 1: no limit; the bound on
    waiting times has priority (runtime/fairness.py)."""
    max_context: int | None = None
    """Tokens, prompt and output together. None: as many as the model and the memory allow."""
    memory_gib: float | None = None
    """GiB for state rows and KV pages together, on each rank. None: 1 GiB on the CPU; on a GPU 85% of the memory that
    is free beside CUDA graphs."""
    host_memory_gib: float | None = None
    """GiB of page-locked host memory for cached prefixes that the device evicts, on each rank; 0: none. None: on a GPU
    an eighth of the machine's memory, up to 32 GiB, for all ranks together, and up to half of `memory_gib` for each, if
    the machine has 64 GiB or more; else none."""
    seed: int = 0
    """Seed for random weights, and for requests without a seed of their own."""
    random_weights: bool = False
    """Benchmarks only: build the model from its config with random weights."""
    force_acceptance: tuple[float, ...] | None = None
    """Benchmarks only: accept draft i with the i-th probability, given that the drafts before it were accepted,
    regardless of the model's output."""
    allow_forced_output: bool = False
    """Benchmarks only: requests may prescribe their output (`Submit.forced_output`). With `force_acceptance`, its
    tokens are also the drafts."""
    session_hold_seconds: float = 5.0
    """How long a session's cached prefix is protected after a turn, so that the turn with the tool's result can reuse
    it."""

    def __post_init__(self) -> None:
        drafts, running, budget, rates = self.draft_tokens, self.max_running, self.prefill_budget, self.force_acceptance
        max_drafts = most_drafts(has_ring=self.state_form != "rows")
        _check(
            self.model != "",
            "model",
            "",
            "name a checkpoint directory or a hub id, or leave it out for the bundled model",
        )
        for name, value, choices in (
            ("device", self.device, get_args(Device)),
            ("dtype", self.dtype, get_args(Dtype)),
            ("kv_dtype", self.kv_dtype, get_args(KvDtype)),
            ("draft_precision", self.draft_precision, get_args(DraftPrecision)),
            ("state_form", self.state_form, get_args(StateForm)),
        ):
            _check(value in choices, name, value, f"must be one of {', '.join(choices)}")
        _check(1 <= self.tensor_parallel <= 64, "tensor_parallel", self.tensor_parallel, "must be 1 to 64")
        _check(
            drafts == "auto" or (isinstance(drafts, int) and 0 <= drafts <= max_drafts),
            "draft_tokens",
            drafts,
            f"must be auto, or 0 to {max_drafts}",
        )
        _check(
            self.draft_vocab_size is None or self.draft_vocab_size >= 0,
            "draft_vocab",
            self.draft_vocab_size,
            "must be a number of tokens, or 0 for all",
        )
        _check(
            self.copy_drafts == "auto" or (isinstance(self.copy_drafts, int) and 0 <= self.copy_drafts <= max_drafts),
            "copy_drafts",
            self.copy_drafts,
            f"must be auto, or 0 to {max_drafts}",
        )
        _check(self.token_counts != "", "token_counts", "", "name a file, or leave it out")
        _check(
            running == "auto" or (isinstance(running, int) and running >= 1),
            "max_running",
            running,
            "must be auto, or at least 1",
        )
        _check(
            budget == "auto" or (isinstance(budget, int) and budget >= BLOCK_TOKENS),
            "prefill_budget",
            budget,
            f"must be auto, or at least one block ({BLOCK_TOKENS} tokens)",
        )
        self._check_limits()
        _check(0 <= self.seed < 2**63, "seed", self.seed, "must be between 0 and 2**63 - 1")
        _check(
            self.session_hold_seconds >= 0, "session_hold_seconds", self.session_hold_seconds, "must not be negative"
        )
        if rates is not None:
            _check(1 <= len(rates) <= most_drafts(), "force_acceptance", rates, f"needs 1 to {most_drafts()} rates")
            _check(
                all(0.0 <= rate <= 1.0 for rate in rates),
                "force_acceptance",
                rates,
                "every rate must be between 0 and 1",
            )
            _check(
                self.token_counts is None,
                "token_counts",
                self.token_counts,
                "can't be learned from while acceptance is forced",
            )

    def _check_limits(self) -> None:
        _check(
            self.max_gap_seconds is None or 0 < self.max_gap_seconds < math.inf,
            "max_gap",
            self.max_gap_seconds,
            "must be above 0 seconds",
        )
        _check(
            self.max_gap_seconds is None or self.prefill_budget == "auto",
            "max_gap",
            self.max_gap_seconds,
            f"can't be kept with a fixed prefill_budget of {self.prefill_budget}: give one of the two",
        )
        _check(0 < self.fair_cost <= 1, "fair_cost", self.fair_cost, "must be above 0 and at most 1")
        _check(
            self.max_context is None or self.max_context >= BLOCK_TOKENS,
            "max_context",
            self.max_context,
            f"must be at least one block ({BLOCK_TOKENS} tokens)",
        )
        _check(
            self.memory_gib is None or 0 < self.memory_gib < math.inf, "memory", self.memory_gib, "must be above 0 GiB"
        )
        _check(
            self.host_memory_gib is None or 0 <= self.host_memory_gib < math.inf,
            "host_memory",
            self.host_memory_gib,
            "must not be below 0 GiB",
        )
        _check(
            not self.host_memory_gib or self.prefix_cache,
            "host_memory",
            self.host_memory_gib,
            "is for the prefix cache, which is switched off",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The settings of `serve` besides the engine's: the socket, access and limits."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """A request must carry one of these. Empty, and no `keys`: requests need no key."""
    keys: str | None = None
    """A TOML file of keys and their limits (server/keys.py)."""
    max_body_mib: float = 64.0
    """Maximum size of a request's body in MiB."""
    max_queue: int = 256
    """Maximum number of waiting requests, besides the running ones (`max_running`); more are refused with 429."""
    text_seconds: float = 30.0
    """Time limit for rendering and tokenising one request, without queueing; the text process is killed after that."""
    drain_seconds: float = 5.0
    """How long running answers may continue after the first signal; a second signal ends them at once."""
    queue_timeout_seconds: float | None = None
    """How long a request may wait for its first token. None: no limit."""
    request_timeout_seconds: float | None = None
    """How long a request may take, from its body to its last byte. None: no limit."""
    root_path: str = ""
    """Prefix of every path, such as /models; a proxy may strip it or not. "": none."""
    heartbeat_seconds: float | None = None
    """How long the engine may go without a heartbeat before probes and requests get 503; must be longer than its
    longest step. After ten times as long the engine is killed. None: 30, on a CPU 300."""
    restart: bool = False
    """Restart an engine that ended by itself, at most once in some minutes, instead of exiting."""
    strict_fields: bool = False
    """Refuse bodies with unknown fields, instead of ignoring these fields."""
    images: Images = "refuse"
    """How to treat images in bodies. drop: replace each one by a note that an image was there."""
    model_names: tuple[str, ...] = ()
    """Names of the model in requests; answers carry the first. `*`: any name, which answers repeat. Empty: the
    checkpoint's own name."""
    log_level: LogLevel = "warning"
    """Level of the logger `agentspec` in the server's process. info: one line per request and per refusal."""
    chat_template: str | None = None
    """A Jinja file that replaces the checkpoint's chat template."""
    trust_client_text: bool = False
    """Parse control tokens in clients' text as control tokens, not as plain text."""
    cors_origins: tuple[str, ...] = ()
    """Origins (`https://host:port`) whose pages may send requests from a browser; `*`: any. Empty: only the server's
    own."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted names in the Host header, besides the machine's own; `*`: any. Empty: any where the server can be
    reached from other machines, else only the machine's own."""

    def __post_init__(self) -> None:
        _check(0 <= self.port < 2**16, "port", self.port, "must be between 0 and 65535")
        for key in self.api_keys:
            is_printable = all("!" <= letter <= "~" for letter in key)
            # A malformed key is still a secret: the error doesn't show it.
            _check(key != "" and is_printable, "api_key", "", "must be printable ASCII without spaces, and not empty")
        _check(self.keys != "", "keys", "", "name a file, or leave it out")
        _check(0 < self.max_body_mib <= 4096, "max_body_mib", self.max_body_mib, "must be above 0 and at most 4096")
        _check(self.max_queue >= 0, "max_queue", self.max_queue, "must not be negative")
        _check(
            0 < self.text_seconds <= 86_400,
            "text_timeout",
            self.text_seconds,
            "must be above 0 and at most 86400 seconds",
        )
        _check(0 <= self.drain_seconds <= 86_400, "drain", self.drain_seconds, "must be between 0 and 86400 seconds")
        for name, seconds in (
            ("queue_timeout", self.queue_timeout_seconds),
            ("request_timeout", self.request_timeout_seconds),
        ):
            _check(seconds is None or 0 < seconds < math.inf, name, seconds, "must be above 0 seconds")
        _check(
            not self.root_path or _ROOT_PATH.fullmatch(self.root_path) is not None,
            "root_path",
            self.root_path,
            "must be a path such as /models, without a slash at its end",
        )
        _check(
            re.match("/(v1|static)(/|$)", self.root_path) is None,
            "root_path",
            self.root_path,
            "begins like paths of the server's own",
        )
        _check(
            self.heartbeat_seconds is None or 2 <= self.heartbeat_seconds <= 86_400,
            "heartbeat",
            self.heartbeat_seconds,
            "must be between 2 and 86400 seconds",
        )
        for name, value, choices in (
            ("log_level", self.log_level, get_args(LogLevel)),
            ("images", self.images, get_args(Images)),
        ):
            _check(value in choices, name, value, f"must be one of {', '.join(choices)}")
        _check("" not in self.model_names, "served_model_name", "", "must not be empty")
        _check(self.chat_template != "", "chat_template", "", "name a file, or leave it out")
        for origin in self.cors_origins:
            _check(
                origin == "*" or _ORIGIN.fullmatch(origin) is not None,
                "cors_origin",
                origin,
                "must be * or as browsers send it: https://host or https://host:port, without a path",
            )
        for host in self.allowed_hosts:
            _check(
                host == "*" or _HOST.fullmatch(host) is not None,
                "allowed_host",
                host,
                "must be * or a name or an address, without scheme, port and path",
            )

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)


def _check(is_valid: bool, field: str, value: object, reason: str) -> None:
    if not is_valid:
        raise ConfigError(field, value, reason)


def read_toml(field: str, name: str) -> dict[str, Any]:
    """Read the TOML file `name`. Raises ConfigError for the setting `field`."""
    try:
        return tomllib.loads(files.read_bytes(Path(name).expanduser(), most=_MAX_TOML_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(field, name, f"can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # invalid TOML, nested too deep, or not UTF-8
        raise ConfigError(field, name, f"is not valid TOML: {error}") from None
