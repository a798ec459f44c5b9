"""Who asks: what belongs to one key alone, and how much of the engine it may have.

Owns the names that keep keys apart (namespaces and sessions), the limits of a key and what counts against them. Knows
no key itself, and no endpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import cast

import msgspec

from agentspec.errors import OverloadedError
from agentspec.server.recorder import WatchedEngine
from agentspec.wire import EngineClient, Event, Submit, TokensEvent

TENANT = "agentspec.tenant"
"""Where the scope of a request that brought a key holds its Tenant."""

_RETRY_SECONDS = 1
"""When a client is asked to come again for a place. It may be free at any time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one key. None: only the server's own."""

    max_running: int | None = None
    """Prompts (each choice is one) that are in the engine at the same time; others wait."""
    max_queue: int | None = None
    """How many may wait so; more are refused."""
    tokens_per_minute: int | None = None
    """Prompt and output together. What is over it is made up for: until then requests are refused."""


class Tenant:
    """A key by its name, for as long as it is known. Belongs to one event loop."""

    def __init__(self, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """name: without a slash; "" stands for everybody where no key is asked for."""
        self.name = name
        self.num_inside = 0
        """HTTP requests that run or wait behind the door."""
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

    def apply(self, group: str | None, limits: Limits) -> None:
        """What counts from now on. What runs already goes on beside a new `max_running`."""
        if limits.max_running != self._limits.max_running:
            self._slots = None if limits.max_running is None else asyncio.Semaphore(limits.max_running)
        if limits.tokens_per_minute is not None and limits.tokens_per_minute != self._limits.tokens_per_minute:
            self._tokens_left, self._counted_at = float(limits.tokens_per_minute), self._clock()
        self._group, self._limits = group, limits

    def namespace(self, salt: str) -> str:
        """Where this key's requests with a salt of their own find and leave prefixes and turns: inside its group, or by
        itself.

        Names and groups have no slash, so whatever the salt is, it is behind the second one: no salt leads into another
        group."""
        if not self.name:
            return salt
        return f"key/{self.name}/{salt}" if self._group is None else f"group/{self._group}/{salt}"

    def check(self) -> None:
        """Raises OverloadedError, naming the limit, for a request that can't come in now."""
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
        """One of the places in the engine, in the order of asking. Raises OverloadedError where too many wait for
        one."""
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

    def count(self, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        self.prompt_tokens += prompt_tokens
        self.output_tokens += output_tokens
        self._tokens_left -= prompt_tokens + output_tokens


NOBODY = Tenant()
"""Who asks where no key is asked for. Without limits or figures."""


class TenantEngine(WatchedEngine):
    """An engine client for one request of a key: what it submits carries the key's names, and counts against its
    limits.

    Implements wire.EngineClient."""

    def __init__(self, engine: EngineClient, tenant: Tenant) -> None:
        super().__init__(engine)
        self._tenant = tenant
        self._prompts: dict[int, Sequence[int]] = {}
        """Those that were counted, by identity: choices share theirs."""

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        """The engine's events, untouched. Raises OverloadedError, too."""
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
                tenant.count(prompt_tokens=len(submit.prompt_ids))
            # The protocol promises that closing the iterator aborts; AsyncIterator has no name for that.
            async with aclosing(cast(AsyncGenerator[Event, None], self._engine.stream(owned))) as events:
                async for event in events:
                    if isinstance(event, TokensEvent):
                        tenant.count(output_tokens=len(event.token_ids))
                    yield event
