"""Messages between an engine and its clients: plain structs, which can cross a process boundary.

A client sends `Submit` and `Abort`. The engine answers each accepted `Submit` with any number of `TokensEvent`, then
exactly one `FinishEvent`. An invalid `Submit` raises `errors.RequestError` at once and has no events. A fault that
shows only during generation ends the request with a `FinishEvent` that names the field (`refusal`). The framing of
messages between processes is at the end of this file.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Sequence
from operator import attrgetter
from typing import IO, Any, Literal, Protocol

import msgspec

from agentspec.errors import RequestError
from agentspec.types import Breakpoint, DraftSource, FinishReason, SamplingParams, TokenScore


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on a request's output. A stop id may end the output only where the grammar is complete; a token
    limit may still cut it."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    source: str
    """A JSON schema or a structural tag as JSON text, a regular expression, or an EBNF grammar in xgrammar's notation
    with the rule `root`."""
    after: int | None = None
    """A token id, such as the end of reasoning: the constraint starts after its first occurrence. The output can't end
    before it."""
    lead: str = ""
    """Text that may precede the constrained part: the newlines that templates write after reasoning."""
    field: str = "grammar"
    """The name of the constraint in the HTTP request. The engine's errors name fields of `Submit`; the server's errors
    name this field instead."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A request for one turn: a prompt, its breakpoints, and how to continue it."""

    request_id: str
    prompt_ids: Sequence[int]
    """At least one id. A list, or an array of `types.tokens`, which an engine's link delivers."""
    sampling: SamplingParams = SamplingParams()
    breakpoints: list[Breakpoint] = []
    """From the text layer; ascending offsets, each between 0 and the prompt's length."""
    session_id: str | None = None
    """Shared by the requests of a session. Fair admission and the hold while a tool runs use it."""
    owner: str = ""
    """The name of the API key, for fair admission. "": no key is asked for."""
    namespace: str = ""
    """Cached prefixes are shared only within a namespace (adapter, the caller's cache salt)."""
    prompt_logprobs: int | None = None
    """None: no scores. n: the log-probability of every prompt token after the first, with the n most likely tokens."""
    logprobs: int | None = None
    """The same for every generated token (`TokensEvent.scores`)."""
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    """False: the text contains control tokens, and stop strings may match them. It never contains the stop id that ends
    the output."""
    forced_output: list[int] | None = None
    """Prescribed output: these tokens replace the target's choice, and drafts are verified against them. The usual stop
    conditions apply; after the last of these tokens the output is free. Needs `EngineConfig.allow_forced_output`."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class SpecStats(msgspec.Struct, kw_only=True):
    """Speculation statistics of one request. Lists are indexed by draft position, the first draft first."""

    num_steps: int = 0
    """Decode steps of the request. The first token comes from the prefill, before them."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Accepted drafts; the bonus token of each step is not counted."""
    drafted_by_position: list[int] = []
    accepted_by_position: list[int] = []
    histogram: list[int] = []
    """histogram[n]: number of steps that accepted exactly n drafts."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens restored from a cached checkpoint instead of computed (at first admission)."""
    spec: SpecStats = msgspec.field(default_factory=SpecStats)


class TokensEvent(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Output of one step."""

    request_id: str
    token_ids: list[int]
    text: str
    """Final text. Text that may be the start of a stop string or half a character is held back. Always "" for a
    checkpoint without a tokenizer."""
    scores: list[TokenScore] | None = None
    """One per token id, if the request asked for them."""


class FinishEvent(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """The terminal event of a request."""

    request_id: str
    reason: FinishReason
    usage: Usage
    text: str = ""
    """Held-back text that wasn't part of a stop string."""
    stop_match: int | str | None = None
    """The stop id or the stop string that ended the request. A stop string itself is never part of any text."""
    error: str | None = None
    refused: str | None = None
    """The dotted path of the invalid field of `Submit`, if the request itself caused `error`."""
    is_lost: bool = False
    """Whether the engine ended, and this request with it."""
    prompt_scores: list[TokenScore] | None = None
    """One per prompt token after the first, if the request asked for them."""

    def refusal(self, submit: Submit) -> RequestError | None:
        """The error for the sender of `submit`, if generation showed that the request is invalid; else None."""
        if self.refused is None:
            return None
        return RequestError(self.refused.removeprefix("sampling."), attrgetter(self.refused)(submit), self.error or "")


Event = TokensEvent | FinishEvent


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the served model for clients."""

    model_id: str
    vocab_size: int
    max_context: int
    stop_token_ids: tuple[int, ...]
    draft_sources: tuple[DraftSource, ...] = ()
    """The source of the draft at each position of a step. Empty: no speculation."""
    max_running: int = 1
    """Requests that the engine decodes at the same time; others wait."""
    forced_acceptance: tuple[float, ...] | None = None
    """Benchmarks only: acceptance is synthetic, so the text is not the model's."""

    @property
    def max_draft_tokens(self) -> int:
        """The maximum number of drafts per step."""
        return len(self.draft_sources)


class EngineClient(Protocol):
    """The engine's interface for the server, in the same process or in another one."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def alive(self) -> bool:
        """False after the engine was closed or its loop ended, and while it sends no heartbeat. Every submit is refused
        then."""

    def check_alive(self) -> None:
        """Raise EngineClosedError with the reason unless `alive`."""

    def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """Submit and yield this request's events. Closing the iterator early aborts the request.

        Raises RequestError (from the first `anext`) when the request is refused."""

    async def stats(self) -> dict[str, Any]:
        """JSON-ready counters of the whole engine, read between two steps (runtime/metrics.py lists them)."""


_LENGTH = struct.Struct(">I")


def framed(body: bytes) -> bytes:
    """A frame, the unit of all messages between processes: four bytes of length, big endian, and the body."""
    return frame_head(body) + body


def frame_head(body: bytes) -> bytes:
    """What precedes the body in its frame."""
    return _LENGTH.pack(len(body))


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Read the body of the next frame from a blocking stream; None at its end, also inside a frame."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return None if len(body) < length else body


class FrameReader:
    """Splits a byte stream into the bodies of its frames, for chunks of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The bodies of the frames that `data` completes."""
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return bodies
