"""The engine's event streams as the server reads them: closed on every way out, and always ended or failed.

Knows wire alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

from agentspec.errors import AgentspecError, EngineClosedError
from agentspec.types import FinishReason
from agentspec.wire import EngineClient, Event, FinishEvent, Submit, TokensEvent


async def generate(engine: EngineClient, submit: Submit) -> AsyncGenerator[Event, None]:
    """Events of one request, the last one its FinishEvent. Closing this generator aborts the request.

    Raises RequestError before the first event when the engine refuses; AgentspecError when the request fails."""
    # The protocol promises that closing the iterator aborts; AsyncIterator has no name for that.
    stream = cast(AsyncGenerator[Event, None], engine.stream(submit))
    async with aclosing(stream):
        async for event in stream:
            if not isinstance(event, FinishEvent):
                yield event
            elif event.reason is FinishReason.ERROR:
                raise AgentspecError(event.error or "the request failed")
            else:
                yield event
                return
    raise EngineClosedError("the engine ended a stream without a terminal event")


async def collect(engine: EngineClient, submit: Submit) -> tuple[list[TokensEvent], FinishEvent]:
    """Run a request to its end. Raises like `generate`."""
    parts: list[TokensEvent] = []
    async with aclosing(generate(engine, submit)) as events:
        async for event in events:
            if isinstance(event, FinishEvent):
                return parts, event
            parts.append(event)
    raise AssertionError("generate ends with a FinishEvent or raises")
