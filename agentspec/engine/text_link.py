"""Messages between a server's process and its text process: a job, and its one answer. One message per frame (wire.py).

The server sends `Read` first, then `Compile`; after that `Build` and `Encode`, each when the last one is answered, and
any number of `Remember`, which have no answer. Values come from JSON: a number beyond 64 bits, which msgpack can't
hold, is sent as JSON. Knows neither processes nor sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from agentspec.engine.link import ErrorData, ids_of
from agentspec.text.context_edits import AppliedEdit
from agentspec.text.events import AssistantTurn
from agentspec.text.prompt import BuiltPrompt, PromptAsk
from agentspec.text.token_limit import TokenLimit
from agentspec.text.turn_memory import TurnRecord
from agentspec.types import Breakpoint
from agentspec.wire import framed


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Load the tokenizer of a checkpoint directory, if it has one."""

    directory: str


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Load the chat template, and check how it renders messages. `instead`: a file in place of the directory's own."""

    directory: str | None
    """None: there is no checkpoint yet; the template is only checked."""
    instead: str | None
    trusts_client_text: bool = False


class Build(msgspec.Struct, frozen=True, tag="build"):
    asked: PromptAsk


class Encode(msgspec.Struct, frozen=True, tag="encode"):
    texts: list[str]
    limit: TokenLimit


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a BuiltPrompt that `remember` needs."""

    conversation: bytes
    namespace: str
    reasoning: str
    content: str
    ids: bytes
    lead: bytes
    """UTF-8, including sentinels, which are lone surrogates."""


class Remember(msgspec.Struct, frozen=True, tag="remember"):
    begun: Begun
    turn: AssistantTurn
    ids: bytes
    is_cut: bool
    skip_special_tokens: bool


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Answers `Read`."""


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    source: str | None
    """None: the checkpoint has no chat template."""
    reads: frozenset[str] = frozenset()
    """Variables that the template reads."""
    tag_ids: dict[str, int] = {}
    """PromptBuilder.tag_ids."""


class Built(msgspec.Struct, frozen=True, tag="built"):
    ids: bytes
    breakpoints: list[Breakpoint]
    marked_end: int
    reasoning_open: bool
    begun: Begun
    applied: list[AppliedEdit]
    num_spliced: int
    """The builder's total so far."""
    num_mismatched: int


class Encoded(msgspec.Struct, frozen=True, tag="encoded"):
    ids: list[bytes]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    error: ErrorData


BUFFER_BYTES = 1 << 19
"""Socket buffer, each way, where the system allows it: a prompt is written at once, without waiting for its reader."""

ToText = Read | Compile | Build | Encode | Remember
ToServer = Done | Compiled | Built | Encoded | Refused

_Message = TypeVar("_Message")


def frame(message: ToText | ToServer) -> bytes:
    """Encode a message as one frame. Raises UnicodeEncodeError for text that isn't Unicode."""
    return framed(encoded(message))


def encoded(message: ToText | ToServer) -> bytes:
    """A frame's body. Raises UnicodeEncodeError for text that isn't Unicode."""
    try:
        return msgspec.msgpack.encode(message)
    except OverflowError:
        return msgspec.json.encode(message)


class Reader:
    """Decodes frame bodies to messages of one kind."""

    def __init__(self, kind: Any) -> None:
        self._msgpack = msgspec.msgpack.Decoder(kind)
        self._json = msgspec.json.Decoder(kind)

    def __call__(self, body: bytes) -> Any:
        return self._json.decode(body) if body.startswith(b"{") else self._msgpack.decode(body)


def begun_of(prompt: BuiltPrompt) -> Begun:
    record = prompt.begun
    return Begun(
        prompt.conversation,
        prompt.namespace,
        record.turn.reasoning,
        record.turn.content,
        record.token_ids.tobytes(),
        record.lead.encode(errors="surrogatepass"),
    )


def built(prompt: BuiltPrompt, num_spliced: int, num_mismatched: int) -> Built:
    return Built(
        prompt.prompt_ids.tobytes(),
        prompt.breakpoints,
        prompt.marked_end,
        prompt.reasoning_open,
        begun_of(prompt),
        list(prompt.applied),
        num_spliced,
        num_mismatched,
    )


def prompt_of(
    ids: bytes,
    begun: Begun,
    *,
    breakpoints: Sequence[Breakpoint] = (),
    marked_end: int = 0,
    reasoning_open: bool = False,
    applied: Any = (),
) -> BuiltPrompt:
    """Rebuild the prompt. Of its first turn it has only what `remember` needs."""
    turn = AssistantTurn(reasoning=begun.reasoning, content=begun.content)
    return BuiltPrompt(
        prompt_ids=ids_of(ids),
        breakpoints=list(breakpoints),
        marked_end=marked_end,
        reasoning_open=reasoning_open,
        conversation=begun.conversation,
        namespace=begun.namespace,
        begun=TurnRecord(turn, ids_of(begun.ids), "", begun.lead.decode(errors="surrogatepass"), is_cut=True),
        applied=tuple(applied),
    )
