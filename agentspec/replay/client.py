"""Send one turn to an OpenAI server and timestamp the stream. Knows nothing of sessions, schedules or reports.

Uses the event loop's clock, as asyncio.sleep in the schedule does: a test that replaces the loop controls all time.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from agentspec.errors import AgentspecError
from agentspec.replay.bodies import counting, portable
from agentspec.replay.measure import TurnRecord
from agentspec.replay.reply import Reply, ServerError, error_text, read_events

CHAT_PATH = "v1/chat/completions"
COMPLETION_PATH = "v1/completions"


class TargetError(AgentspecError):
    """The server to measure can't be reached, refuses the key, or lists no model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The server under test."""

    model: str
    url: str
    is_agentspec: bool
    """Only agentspec's own server supports running usage in every chunk, and any call arguments in the history."""


async def find_target(client: httpx.AsyncClient, model: str | None) -> Target:
    """Identify the server by /v1/models. A server without this endpoint is accepted when `model` is given.

    Raises TargetError when the server can't be reached or refuses the key, or when no model name is known."""
    url = str(client.base_url).rstrip("/")
    try:
        response = await client.get("v1/models")
    except httpx.HTTPError as error:
        raise TargetError(f"{url} can't be reached: {describe(error)}") from None
    if response.status_code in (401, 403):
        raise TargetError(f"{url} refuses the key: {response.status_code} {response.reason_phrase}")
    try:
        models = response.json()["data"] if response.is_success else []
        names = {entry["id"]: entry.get("owned_by") for entry in models}
    except (ValueError, KeyError, TypeError, AttributeError):
        names = {}
    if model is None and not names:
        raise TargetError(f"{url}/v1/models lists no model ({response.status_code}); name one with --served-model")
    name = model if model is not None else next(iter(names))
    return Target(model=name, url=url, is_agentspec="agentspec" in names.values())


class TurnClient:
    """Sends turns over an HTTP client whose base URL is the server's root (without /v1)."""

    def __init__(self, client: httpx.AsyncClient, target: Target, *, timeout: float, start: float) -> None:
        self._client = client
        self._target = target
        self._timeout = timeout
        self._start = start
        """Start of the run on the loop's clock."""

    @property
    def model(self) -> str:
        return self._target.model

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return asyncio.get_running_loop().time() - self._start

    async def send(self, path: str, body: dict[str, Any], record: TurnRecord) -> Reply | None:
        """Send a turn and fill its record. Returns the answer, or None when the turn failed (`record.error` has the
        reason)."""
        body = counting(body) if self._target.is_agentspec else portable(body)
        reply = Reply(counts_so_far=self._target.is_agentspec)
        # Faster than httpx's `json`, which takes milliseconds for a long prompt of ids and blocks all other streams.
        content = msgspec.json.encode(body)
        record.sent = self.now()
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(path, content, record, reply)
        except TimeoutError:
            record.error = f"no complete answer within {self._timeout:g} s"
        except httpx.HTTPError as error:
            record.error = f"connection failed: {describe(error)}"
        except ServerError as error:
            record.error = str(error)
        record.end = record.tokens[-1][0] if record.tokens and record.error is None else self.now()
        record.finish_reason = reply.finish_reason
        record.prompt_tokens = reply.prompt_tokens
        record.completion_tokens = reply.completion_tokens
        record.cached_tokens = reply.cached_tokens
        record.speculation = reply.speculation
        record.forced_acceptance = reply.forced_acceptance
        return reply if record.error is None else None

    async def _stream(self, path: str, content: bytes, record: TurnRecord, reply: Reply) -> None:
        headers = {
            "content-type": "application/json",
            "x-session-id": quote(record.session_id, safe="/:@!$&'()*+,;=?#[] "),
        }
        async with self._client.stream("POST", path, content=content, headers=headers, timeout=None) as response:
            if not response.is_success:
                raise ServerError(f"{response.status_code}: {_refusal(await response.aread())}")
            async for event in read_events(response.aiter_bytes()):
                try:
                    num_tokens = reply.add_event(event)
                except (KeyError, TypeError, AttributeError, IndexError) as error:
                    raise ServerError(
                        f"the stream holds an event of an unknown shape ({error!r}): {json.dumps(event)[:200]}"
                    ) from None
                if num_tokens:
                    record.tokens.append((self.now(), num_tokens))
        if reply.finish_reason is None:
            raise ServerError("the stream ended without a finish_reason")


def describe(error: httpx.HTTPError) -> str:
    """Describe an httpx error with its type, since many have no message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _refusal(body: bytes) -> str:
    try:
        return error_text(json.loads(body))
    except ValueError:
        return body.decode(errors="replace")[:200] or "no explanation"
