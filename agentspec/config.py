"""Settings of the engine and of the server: frozen, validated once, units in the docstrings.

The one set of engine flags of `serve` and `replay` maps to EngineConfig field by field, the other flags of `serve` to
ServerConfig. `auto` values are resolved where the facts are known (engine/assembly.py), into new objects: a config is
never edited.
"""

from __future__ import annotations

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
LogLevel = Literal["debug", "info", "warning", "error"]
Images = Literal["refuse", "drop"]

_MAX_TOML_BYTES = 2**20
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+", re.ASCII)
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+", re.ASCII)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that `serve`, `replay` and `Engine(...)` can choose."""

    model: str | None = None
    """A checkpoint directory, or a hub id. None: the bundled model, which is also `tiny-agent`."""
    device: Device = "auto"
    dtype: Dtype = "auto"
    """Weights and activations; recurrent state and gates are always float32."""
    draft_tokens: int | Literal["auto"] = "auto"
    """Drafts a step: a fixed k, or chosen per step by the depth policy."""
    draft_vocab_size: int | None = None
    """Tokens that drafts are chosen from. 0: all. None: all of a vocabulary up to 65,536, else 32,768."""
    draft_precision: DraftPrecision = "auto"
    """Of the MTP layer and the draft head: as the checkpoint has them, or quantised to FP8 at load. auto: FP8 on a GPU
    in bfloat16."""
    token_counts: str | None = None
    """A file of how often each token was served: ranks the draft vocabulary, and gets what this engine served added
    when it closes."""
    prefix_cache: bool = True
    overlap: bool = True
    """Read the results of a step while the next one runs."""
    graphs: bool = True
    """On a GPU: record decode steps and short prompt chunks as CUDA graphs at start, where the model allows it."""
    max_running: int | Literal["auto"] = "auto"
    """Requests that decode at the same time: slots. auto: on a GPU up to 64, as many as write into at most a third of
    the memory for rows and pages; 8 on the CPU."""
    prefill_budget: int | Literal["auto"] = "auto"
    """Prompt tokens computed in one step at most. auto: as many as fit under `max_gap_seconds`, by measured times; on
    the CPU 512."""
    max_gap_seconds: float | None = None
    """The longest time between two steps of a running stream that prompts may make: a ceiling, which only the smallest
    possible piece of a prompt exceeds where the device is that slow. None: 0.1 on a GPU; on the CPU, and with a fixed
    `prefill_budget`, there is none."""
    fair_cost: float = FAIR_COST
    """Share of the time that may go into computing again what requests that had waited for longer than a fair share
    pushed out of the memory. 1: the bound on waits comes first, whatever that costs (runtime/fairness.py)."""
    max_context: int | None = None
    """Tokens, prompt and output together. None: what the model and the memory allow."""
    memory_gib: float | None = None
    """GiB for state rows and KV pages together. None: 1 GiB on the CPU, 85% of what is free on a GPU beside CUDA
    graphs."""
    host_memory_gib: float | None = None
    """GiB of locked host memory for cached prefixes that the device lets go; 0: none. None: on a GPU an eighth of the
    machine's memory, up to 32 GiB and half of `memory_gib`, if the machine has 64 GiB or more; else none."""
    seed: int = 0
    """Seeds requests that bring no seed of their own, and random weights."""
    random_weights: bool = False
    """Build the model from its config alone, without weights: for benchmarks."""
    force_acceptance: tuple[float, ...] | None = None
    """Benchmarks only: accept draft i with this probability (given that the ones before it were accepted), whatever the
    model says."""
    allow_forced_output: bool = False
    """Benchmarks only: requests may bring their own output (`Submit.forced_output`). With `force_acceptance`, its
    tokens are the drafts too."""
    session_hold_seconds: float = 5.0
    """How long the path of a session is held after a turn, so that a tool's result finds it."""

    def __post_init__(self) -> None:
        if self.model == "":
            raise ConfigError(
                "model", "", "name a checkpoint directory or a hub id, or leave it out for the bundled model"
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError("device", self.device, "must be auto, cpu or cuda")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError("dtype", self.dtype, "must be auto, float32 or bfloat16")
        if self.draft_tokens != "auto" and not (
            isinstance(self.draft_tokens, int) and 0 <= self.draft_tokens <= most_drafts()
        ):
            raise ConfigError("draft_tokens", self.draft_tokens, f"must be auto, or 0 to {most_drafts()}")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 0:
            raise ConfigError("draft_vocab", self.draft_vocab_size, "must be a number of tokens, or 0 for all")
        if self.draft_precision not in ("auto", "checkpoint", "fp8"):
            raise ConfigError("draft_precision", self.draft_precision, "must be auto, checkpoint or fp8")
        if self.token_counts == "":
            raise ConfigError("token_counts", "", "name a file, or leave it out")
        if self.max_running != "auto" and not (isinstance(self.max_running, int) and self.max_running >= 1):
            raise ConfigError("max_running", self.max_running, "must be auto, or at least 1")
        if self.prefill_budget != "auto" and not (
            isinstance(self.prefill_budget, int) and self.prefill_budget >= BLOCK_TOKENS
        ):
            raise ConfigError(
                "prefill_budget", self.prefill_budget, f"must be auto, or at least one block ({BLOCK_TOKENS} tokens)"
            )
        if self.max_gap_seconds is not None and not 0 < self.max_gap_seconds < float("inf"):
            raise ConfigError("max_gap", self.max_gap_seconds, "must be above 0 seconds")
        if self.max_gap_seconds is not None and self.prefill_budget != "auto":
            raise ConfigError(
                "max_gap",
                self.max_gap_seconds,
                f"can't be kept with a fixed prefill_budget of {self.prefill_budget}: give one of the two",
            )
        if not 0 < self.fair_cost <= 1:
            raise ConfigError("fair_cost", self.fair_cost, "must be above 0 and at most 1")
        if self.max_context is not None and self.max_context < BLOCK_TOKENS:
            raise ConfigError("max_context", self.max_context, f"must be at least one block ({BLOCK_TOKENS} tokens)")
        if self.memory_gib is not None and not 0 < self.memory_gib < float("inf"):
            raise ConfigError("memory", self.memory_gib, "must be above 0 GiB")
        if self.host_memory_gib is not None and not 0 <= self.host_memory_gib < float("inf"):
            raise ConfigError("host_memory", self.host_memory_gib, "must not be below 0 GiB")
        if self.host_memory_gib and not self.prefix_cache:
            raise ConfigError("host_memory", self.host_memory_gib, "is for the prefix cache, which is switched off")
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", self.seed, "must be between 0 and 2**63 - 1")
        if not self.session_hold_seconds >= 0:
            raise ConfigError("session_hold_seconds", self.session_hold_seconds, "must not be negative")
        if self.force_acceptance is not None:
            if not 1 <= len(self.force_acceptance) <= most_drafts():
                raise ConfigError("force_acceptance", self.force_acceptance, f"needs 1 to {most_drafts()} rates")
            if any(not 0.0 <= rate <= 1.0 for rate in self.force_acceptance):
                raise ConfigError("force_acceptance", self.force_acceptance, "every rate must be between 0 and 1")
            if self.token_counts is not None:
                raise ConfigError("token_counts", self.token_counts, "can't be learned from while acceptance is forced")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """What `serve` can choose beside the engine: the socket, and who may ask for how much."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """A request must bring one of these; none, and no `keys`: nobody is asked for a key."""
    keys: str | None = None
    """A TOML file of keys, with what each may ask for (server/keys.py)."""
    max_body_mib: float = 64.0
    """MiB of a request's body at most."""
    max_queue: int = 256
    """Requests that may wait beside those that the engine runs (`max_running`); more are refused with 429."""
    text_seconds: float = 30.0
    """How long one request's texts may take to render and tokenise, once it is their turn; then the process that does
    it is killed."""
    drain_seconds: float = 5.0
    """How long running answers may go on after the first signal; a second signal ends them at once."""
    queue_timeout_seconds: float | None = None
    """How long a request may wait for its first token. None: without end."""
    request_timeout_seconds: float | None = None
    """How long a request may take from its body to its end. None: without end."""
    root_path: str = ""
    """What clients write before every path, such as /models; a proxy may strip it or not. "": nothing."""
    heartbeat_seconds: float | None = None
    """How long the engine may send no heartbeat before probes and requests are answered with 503: longer than its
    longest step. After ten times as long it is killed. None: 30, on a CPU 300."""
    restart: bool = False
    """Start an engine that ended by itself again, once in some minutes, instead of ending with it."""
    strict_fields: bool = False
    """Refuse bodies with fields that nobody knows, instead of leaving these out."""
    images: Images = "refuse"
    """Bodies with images. drop: the model reads that one was there."""
    model_names: tuple[str, ...] = ()
    """What clients call the model; answers carry the first. `*`: whatever they ask for, and answers carry that. None:
    the checkpoint's own name."""
    log_level: LogLevel = "warning"
    """Of the logger `agentspec` in the server's process. info: a line for each request, and one for each that is
    refused."""
    chat_template: str | None = None
    """A jinja file in place of the checkpoint's chat template."""
    trust_client_text: bool = False
    """Control tokens that clients' text spells are control tokens."""
    cors_origins: tuple[str, ...] = ()
    """Origins (`https://host:port`) whose pages may ask from a browser; `*`: any. None: only the server's own."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, beside those of the machine itself, that requests may ask for in their Host header; `*`: any. None: any
    where the server can be reached from other machines, else the machine's own."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError("port", self.port, "must be between 0 and 65535")
        for key in self.api_keys:
            if not key or not all(
                "!" <= letter <= "~" for letter in key
            ):  # a wrong key is still a secret: it isn't shown
                raise ConfigError("api_key", "", "must be printable ASCII without spaces, and not empty")
        if self.keys == "":
            raise ConfigError("keys", "", "name a file, or leave it out")
        if not 0 < self.max_body_mib <= 4096:
            raise ConfigError("max_body_mib", self.max_body_mib, "must be above 0 and at most 4096")
        if self.max_queue < 0:
            raise ConfigError("max_queue", self.max_queue, "must not be negative")
        if not 0 < self.text_seconds <= 86_400:
            raise ConfigError("text_timeout", self.text_seconds, "must be above 0 and at most 86400 seconds")
        if not 0 <= self.drain_seconds <= 86_400:
            raise ConfigError("drain", self.drain_seconds, "must be between 0 and 86400 seconds")
        for name, seconds in (
            ("queue_timeout", self.queue_timeout_seconds),
            ("request_timeout", self.request_timeout_seconds),
        ):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise ConfigError(name, seconds, "must be above 0 seconds")
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError("root_path", self.root_path, "must be a path such as /models, without a slash at its end")
        if re.match("/(v1|static)(/|$)", self.root_path):
            raise ConfigError("root_path", self.root_path, "begins like paths of the server's own")
        if self.heartbeat_seconds is not None and not 2 <= self.heartbeat_seconds <= 86_400:
            raise ConfigError("heartbeat", self.heartbeat_seconds, "must be between 2 and 86400 seconds")
        if self.log_level not in get_args(LogLevel):
            raise ConfigError("log_level", self.log_level, f"must be one of {', '.join(get_args(LogLevel))}")
        if self.images not in get_args(Images):
            raise ConfigError("images", self.images, f"must be one of {', '.join(get_args(Images))}")
        if "" in self.model_names:
            raise ConfigError("served_model_name", "", "must not be empty")
        if self.chat_template == "":
            raise ConfigError("chat_template", "", "name a file, or leave it out")
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "cors_origin",
                    origin,
                    "must be * or as browsers send it: https://host or https://host:port, without a path",
                )
        for name in self.allowed_hosts:
            if name != "*" and not _HOST.fullmatch(name):
                raise ConfigError(
                    "allowed_host", name, "must be * or a name or an address, without scheme, port and path"
                )

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * 2**20)


def read_toml(field: str, name: str) -> dict[str, Any]:
    """What stands in a TOML file that the setting `field` names. Raises ConfigError."""
    try:
        return tomllib.loads(files.read_bytes(Path(name).expanduser(), most=_MAX_TOML_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(field, name, f"can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:  # no TOML, too deep a one, or no UTF-8
        raise ConfigError(field, name, f"is not valid TOML: {error}") from None
