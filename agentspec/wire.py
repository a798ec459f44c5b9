"""Messages between an engine and its clients: plain structs, so that they cross a process boundary as they are.

A client sends `Submit` and `Abort`. The engine answers each accepted `Submit` with any number of
`TokensEvent`, then exactly one `FinishEvent`. A refused `Submit` raises `errors.RequestError` at the door and has
no events at all. What only its own output brings to light ends it with a `FinishEvent` that names the field: `refusal`.
The frames in which processes exchange messages are at the end.
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
    """What the output of a request must be. It ends only where this is complete, by a stop id; a token limit may still
    cut it."""

    kind: Literal["json_schema", "regex", "ebnf", "structural_tag"]
    source: str
    """A JSON schema or a structural tag as JSON text, a regular expression, or an EBNF grammar in xgrammar's notation
    with the rule `root`."""
    after: int | None = None
    """A token id: the output is free up to its first occurrence (the end of reasoning), except that it can't end before
    it."""
    lead: str = ""
    """Text that may stand before the constrained part: the newlines that templates write behind reasoning."""
    field: str = "grammar"
    """What the sender's own clients know it by. The engine's errors name fields of `Submit`; the server's name this one
    instead."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """One turn: a prompt, where it may diverge later, and how to continue it."""

    request_id: str
    prompt_ids: Sequence[int]
    """At least one id. A list, or an array of types.tokens, which is what comes out of an engine's link."""
    sampling: SamplingParams = SamplingParams()
    breakpoints: list[Breakpoint] = []
    """From the text layer; ascending offsets, each between 0 and the prompt's length."""
    session_id: str | None = None
    """Requests of one session share it: admission and the hold while a tool runs go by session."""
    owner: str = ""
    """Who asked, for fair admission: the name of a key. "" where no key is asked for."""
    namespace: str = ""
    """Prefixes are shared only inside one namespace (adapter, the caller's cache salt)."""
    prompt_logprobs: int | None = None
    """None: no scores. n: the log-probability of every prompt token after the first, and the n most likely there."""
    logprobs: int | None = None
    """The same for every generated token: `TokensEvent.scores`."""
    grammar: Grammar | None = None
    skip_special_tokens: bool = True
    """False: control tokens stand in the text, and stop strings are sought in it. A stop id that ends the output never
    does."""
    forced_output: list[int] | None = None
    """The output, known beforehand: these tokens are the target's choice, whatever it says, and drafts are accepted
    against them. What ends a request ends this one too; behind the last of them the output is free. Only where the
    engine was made for it (`EngineConfig.allow_forced_output`)."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str


class SpecStats(msgspec.Struct, kw_only=True):
    """What speculation did for one request. Lists are indexed by draft position, first draft first."""

    num_steps: int = 0
    """Decode steps that the request took part in; the first token comes before them, with the prompt."""
    num_drafted: int = 0
    num_accepted: int = 0
    """Accepted drafts; the bonus token of each step is not counted."""
    drafted_by_position: list[int] = []
    accepted_by_position: list[int] = []
    histogram: list[int] = []
    """histogram[n]: steps that accepted exactly n drafts."""


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed because a checkpoint stood behind them (at first admission)."""
    spec: SpecStats = msgspec.field(default_factory=SpecStats)


class TokensEvent(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """What one step added to a stream."""

    request_id: str
    token_ids: list[int]
    text: str
    """Text that is safe to show: held back while it may be the start of a stop string or half a character.
    Always "" for a checkpoint without a tokenizer."""
    scores: list[TokenScore] | None = None
    """One per token id, when the submit asked for them."""


class FinishEvent(msgspec.Struct, frozen=True, kw_only=True, tag="finish"):
    """The one terminal event of a request."""

    request_id: str
    reason: FinishReason
    usage: Usage
    text: str = ""
    """Held-back text that turned out to be no stop string."""
    stop_match: int | str | None = None
    """The stop id or the stop string that ended the request. A stop string itself is never part of any text."""
    error: str | None = None
    refused: str | None = None
    """Where `error` is the request's own fault: the field of its Submit that is to blame, with dots."""
    is_lost: bool = False
    """Where `error` is the engine's end, which ended this request with all others."""
    prompt_scores: list[TokenScore] | None = None
    """One per prompt token after the first, when the submit asked for them."""

    def refusal(self, submit: Submit) -> RequestError | None:
        """What to raise at whoever sent `submit`, when it turned out that it can't be served as asked."""
        if self.refused is None:
            return None
        return RequestError(self.refused.removeprefix("sampling."), attrgetter(self.refused)(submit), self.error or "")


Event = TokensEvent | FinishEvent


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client may know of the served model."""

    model_id: str
    vocab_size: int
    max_context: int
    stop_token_ids: tuple[int, ...]
    draft_sources: tuple[DraftSource, ...] = ()
    """Where the draft at each position of a step comes from. Empty: no speculation."""
    max_running: int = 1
    """Requests that the engine decodes at the same time; what is more waits."""
    forced_acceptance: tuple[float, ...] | None = None
    """Set in benchmarks only: acceptance is synthetic, so the text is not the model's."""

    @property
    def max_draft_tokens(self) -> int:
        """Drafts a step at most."""
        return len(self.draft_sources)


class EngineClient(Protocol):
    """What the server needs of an engine: in process, or behind a process boundary."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def alive(self) -> bool:
        """False once the engine was closed or its loop died, and while it sends no heartbeat: every submit is refused
        then."""
        ...

    def check_alive(self) -> None:
        """Raises EngineClosedError, which says why, unless `alive`."""
        ...

    def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """Submit and yield this request's events. Closing the iterator early aborts the request.

        Raises RequestError (from the first `anext`) when the request is refused."""
        ...

    async def stats(self) -> dict[str, Any]:
        """JSON-ready counters of the whole engine (runtime/metrics.py names them), taken between two steps."""
        ...


_LENGTH = struct.Struct(">I")


def framed(body: bytes) -> bytes:
    """A frame, as every two processes exchange them: four bytes of length, big endian, and the body."""
    return _LENGTH.pack(len(body)) + body


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The body of the next frame of a stream that blocks; None at its end, or when it ends inside a frame."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return None if len(body) < length else body


class FrameReader:
    """Cuts a byte stream into the bodies of its frames, whatever the chunks it comes in."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that are whole now."""
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
