"""The honest clients' requests in all four APIs, and a common form of their answers, whole or streamed.

Knows the APIs' shapes; nothing of attacks.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from tests.chaos.connection import Answer, request_bytes

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
WORDS = (
    "Order",
    "invoice",
    "parcel",
    "refund",
    "shelf",
    "window",
    "harbour",
    "copper",
    "winter",
    "letter",
    "engine",
    "garden",
    "silver",
    "lantern",
)
TERMINALS = ("message_stop", "response.completed", "response.incomplete", "response.failed", "error")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. It is greedy, so its answer never changes."""

    path: str
    body: dict[str, Any]
    session: str | None = None
    key: str | None = None

    def content(self) -> bytes:
        return json.dumps(self.body).encode()

    def headers(self) -> dict[str, str]:
        session = {} if self.session is None else {"x-session-id": self.session}
        return session if self.key is None else session | {"authorization": f"Bearer {self.key}"}

    def wire(self) -> bytes:
        return request_bytes(self.path, self.content(), self.headers())


@dataclass(frozen=True, slots=True)
class Said:
    """The content of an answer."""

    text: str
    """Reasoning and content, joined."""
    reason: str | None
    """Why it ended; None: it did not."""


def make_ask(
    rng: random.Random, model: str, *, num_words: int = 40, max_tokens: int = 24, stream: bool | None = None
) -> Ask:
    """A request of a random API."""
    path = rng.choice((CHAT, COMPLETIONS, MESSAGES, RESPONSES))
    text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, num_words)))
    streamed = rng.random() < 0.5 if stream is None else stream
    common = {"model": model, "temperature": 0, "stream": streamed}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    given = (
        {"prompt": text}
        if path == COMPLETIONS
        else {"input": text}
        if path == RESPONSES
        else {"messages": [{"role": "user", "content": text}]}
    )
    kept = {"store": False} if path == RESPONSES else {}  # otherwise stored responses would make memory grow
    return Ask(path, common | given | kept | {limit: rng.randint(1, max_tokens)})


def turned(ask: Ask) -> Ask:
    """The same request as a stream if it was whole, and vice versa."""
    return Ask(ask.path, ask.body | {"stream": not ask.body["stream"]}, ask.session, ask.key)


def endless(model: str, text: str = "Go on.", *, max_tokens: int = 8000) -> Ask:
    """A chat stream that ends only by its token limit."""
    messages = [{"role": "user", "content": text}]
    return Ask(
        CHAT,
        {
            "model": model,
            "messages": messages,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "max_tokens": max_tokens,
        },
    )


def events(body: bytes) -> list[Any]:
    """The complete events of a stream: objects, and "[DONE]"."""
    frames = body.decode().split("\n\n")[:-1]
    lines = [line[6:] for frame in frames for line in frame.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def num_terminals(ask: Ask, body: bytes) -> int:
    """Terminal events of a stream; -1 if anything follows one."""
    found = [_is_terminal(ask, event) for event in events(body)]
    return -1 if any(found[:-1]) else sum(found)


def is_error(ask: Ask, answer: Answer) -> bool:
    """Whether it reports a failure: by its status, or within the stream."""
    if answer.status != 200:
        return answer.status is not None
    if not ask.body["stream"]:
        return False
    return any(
        isinstance(event, dict) and (event.get("error") or event.get("type") in ("error", "response.failed"))
        for event in events(answer.body)
    )


def said(ask: Ask, answer: Answer) -> Said:
    """The content of an answer with status 200."""
    return _said_in_stream(events(answer.body)) if ask.body["stream"] else _said_whole(ask.path, answer.json())


def _is_terminal(ask: Ask, event: Any) -> bool:
    if ask.path in (MESSAGES, RESPONSES):
        return event["type"] in TERMINALS
    return event == "[DONE]" or "error" in event


def _said_in_stream(found: list[Any]) -> Said:
    text, reason = "", None
    for event in found:
        if event == "[DONE]":
            continue
        for choice in event.get("choices", ()):
            delta = choice.get("delta", {"content": choice.get("text")})
            text += (delta.get("reasoning_content") or "") + (delta.get("content") or "")
            reason = choice["finish_reason"] or reason
        kind = event.get("type", "")
        if kind in ("content_block_delta", "message_delta"):
            delta = event["delta"]
            text += delta.get("thinking", "") + delta.get("text", "")
            reason = delta.get("stop_reason", reason)
        elif kind in ("response.reasoning_text.delta", "response.output_text.delta"):
            text += event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            reason = event["response"]["status"]
    return Said(text, reason)


def _said_whole(path: str, body: Any) -> Said:
    if path == RESPONSES:
        return Said(
            "".join(part["text"] for item in body["output"] for part in item.get("content", ())), body["status"]
        )
    if path == MESSAGES:
        return Said(
            "".join(block.get("thinking", "") + block.get("text", "") for block in body["content"]), body["stop_reason"]
        )
    (choice,) = body["choices"]
    message = choice.get("message", {"content": choice.get("text")})
    return Said((message.get("reasoning_content") or "") + (message.get("content") or ""), choice["finish_reason"])
