"""Wrappers around the engine's event streams: always closed, always ended by a FinishEvent or an exception, with
grammar errors under the client's field name.

Knows wire alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import cast

from agentspec.errors import AgentspecError, EngineClosedError, RequestError
from agentspec.types import FinishReason
from agentspec.wire import EngineClient, Event, FinishEvent, Submit


def opened(engine: EngineClient, submit: Submit) -> aclosing[AsyncGenerator[Event, None]]:
    """The engine's stream, closed on every exit."""
    # The protocol guarantees that closing the iterator aborts; the type AsyncIterator can't express it.
    return aclosing(cast(AsyncGenerator[Event, None], engine.stream(submit)))


async def generate(engine: EngineClient, submit: Submit) -> AsyncGenerator[Event, None]:
    """Events of one request; the last one is its FinishEvent. Closing this generator aborts the request.

    Raises RequestError when the engine refuses, before the first event or later; EngineClosedError when the engine
    ends; AgentspecError when the request fails."""
    try:
        async with opened(engine, submit) as stream:
            async for event in stream:
                if isinstance(event, FinishEvent) and event.reason is FinishReason.ERROR:
                    failure = EngineClosedError if event.is_lost else AgentspecError
                    raise event.refusal(submit) or failure(event.error or "the request failed")
                yield event
                if isinstance(event, FinishEvent):
                    return
    except RequestError as error:
        if submit.grammar is None or not error.field.startswith("grammar"):
            raise
        raise type(error)(submit.grammar.field, error.value, error.reason) from None
    raise EngineClosedError("the engine ended a stream without a terminal event")


async def merge(engine: EngineClient, submits: Sequence[Submit]) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of several requests as they arrive, each with its request's index in `submits`; ends with the last
    FinishEvent.

    Closing this generator aborts all requests. The first error does the same, and is raised as in `generate`."""
    if len(submits) == 1:
        async with aclosing(generate(engine, submits[0])) as events:
            async for event in events:
                yield 0, event
        return
    ready: asyncio.Queue[tuple[int, Event | Exception]] = asyncio.Queue()
    tasks = [asyncio.create_task(_forward(engine, submit, index, ready)) for index, submit in enumerate(submits)]
    num_open = len(tasks)
    try:
        while num_open:
            index, item = await ready.get()
            if isinstance(item, Exception):
                raise item
            num_open -= isinstance(item, FinishEvent)
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _forward(
    engine: EngineClient, submit: Submit, index: int, ready: asyncio.Queue[tuple[int, Event | Exception]]
) -> None:
    try:
        async with aclosing(generate(engine, submit)) as events:
            async for event in events:
                ready.put_nowait((index, event))
    except Exception as error:  # raised where the queue is read
        ready.put_nowait((index, error))
