"""Tenants: the isolation between API keys, and the limits of each.

Owns the names that separate keys (namespaces and sessions), the limits of a key and the counters behind them. Knows no
key itself, and no endpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from agentspec.errors import OverloadedError
from agentspec.server.recorder import WatchedEngine
from agentspec.wire import EngineClient, Event, Submit, TokensEvent

TENANT = "agentspec.tenant"
"""The scope key of a request's Tenant."""

_RETRY_SECONDS = 1
"""Retry-After when all places are taken; one may become free at any time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one key. None: only the server's own."""

    max_running: int | None = None
    """Prompts (each choice is one) in the engine at the same time; others wait."""
    max_queue: int | None = None
    """How many may wait; more are refused."""
    tokens_per_minute: int | None = None
    """Prompt and output together. After an excess, requests are refused until it has been made up for."""


class Tenant:
    """The state of one key, by name, while the key exists. Belongs to one event loop."""

    def __init__(self, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """name: without a slash; "" for all requests if no key is required."""
        self.name = name
        self.num_inside = 0
        """HTTP requests that the Door has admitted and that still run or wait."""
        self.num_requests = 0
        """Submits so far."""
        self.num_refused = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self._group: str | None = None
        self._limits = Limits()
        self._slots: asyncio.Semaphore | None = None
        self._num_waiting = 0
        self._clock = clock
        self._tokens_left = 0.0
        self._counted_at = 0.0

    def set_limits(self, group: str | None, limits: Limits) -> None:
        """Set group and limits. Running requests don't count against a new `max_running`."""
        if limits.max_running != self._limits.max_running:
            self._slots = None if limits.max_running is None else asyncio.Semaphore(limits.max_running)
        if limits.tokens_per_minute is not None and limits.tokens_per_minute != self._limits.tokens_per_minute:
            self._tokens_left, self._counted_at = float(limits.tokens_per_minute), self._clock()
        self._group, self._limits = group, limits

    def namespace(self, salt: str) -> str:
        """The namespace of this key's requests with a given salt, for prefixes and turns: within its group, or its own.

        Names and groups contain no slash and the salt comes after the second one, so no salt can reach another
        group."""
        if not self.name:
            return salt
        return f"key/{self.name}/{salt}" if self._group is None else f"group/{self._group}/{salt}"

    def check_limits(self) -> None:
        """Raise OverloadedError, naming the limit, if a request can't be admitted now."""
        self._check_places()
        limit = self._limits.tokens_per_minute
        if limit is None:
            return
        now = self._clock()
        self._tokens_left = min(self._tokens_left + (now - self._counted_at) * limit / 60, limit)
        self._counted_at = now
        if self._tokens_left <= 0:
            seconds = int(-self._tokens_left * 60 / limit) + 1
            raise self._refused(
                f"tokens-per-minute={limit}: the key {self.name!r} has used them, and may ask again in {seconds} s",
                seconds,
            )

    def _check_places(self) -> None:
        limits = self._limits
        if (
            self._slots is not None
            and self._slots.locked()
            and limits.max_queue is not None
            and self._num_waiting >= limits.max_queue
        ):
            reason = f"as many requests of the key {self.name!r} run and wait already"
            raise self._refused(
                f"max-running={limits.max_running}, max-queue={limits.max_queue}: {reason}", _RETRY_SECONDS
            )

    def _refused(self, reason: str, retry_after: int) -> OverloadedError:
        self.num_refused += 1
        return OverloadedError(reason, retry_after)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold one of the places in the engine, in FIFO order. Raises OverloadedError if too many wait."""
        slots = self._slots
        if slots is None:
            yield
            return
        self._check_places()
        self._num_waiting += 1
        try:
            await slots.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            slots.release()

    def count_tokens(self, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self._tokens_left -= prompt_tokens + output_tokens


NOBODY = Tenant()
"""The tenant of all requests if no key is required. Without limits or counters."""


class TenantEngine(WatchedEngine):
    """An engine client for one request of a key: applies the key's namespace, session prefix and limits.

    Implements wire.EngineClient."""

    def __init__(self, engine: EngineClient, tenant: Tenant) -> None:
        super().__init__(engine)
        self._tenant = tenant
        self._prompts: dict[int, Sequence[int]] = {}
        """Prompts already counted, by identity: choices share theirs."""

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """The engine's events, unchanged. Also raises OverloadedError."""
        tenant = self._tenant
        owned = msgspec.structs.replace(
            submit,
            owner=tenant.name,
            namespace=tenant.namespace(submit.namespace),
            session_id=None if submit.session_id is None else f"{tenant.name}/{submit.session_id}",
        )
        async with tenant.running():
            tenant.num_requests += 1
            if id(submit.prompt_ids) not in self._prompts:
                self._prompts[id(submit.prompt_ids)] = submit.prompt_ids
                tenant.count_tokens(prompt_tokens=len(submit.prompt_ids))
            async with self._opened(owned) as events:
                async for event in events:
                    if isinstance(event, TokensEvent):
                        tenant.count_tokens(output_tokens=len(event.token_ids))
                    yield event
