"""A new session beside busy sessions that fill the memory, on the bundled model. Its wait is counted in turns of
others, not in seconds."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from agentspec.config import EngineConfig
from agentspec.engine.in_process import AsyncEngine
from agentspec.types import SamplingParams
from agentspec.wire import FinishEvent, Submit, TokensEvent

MEMORY_GIB = 0.03
PROMPT_TOKENS = 400
NUM_BUSY = 6
WARM_TURNS = 18
"""Turns of all busy sessions before the newcomer arrives."""
PAUSE_TURNS = 40
"""Turns of others that may end between the first turns of two newcomers that evict the state of others."""
MOST_TURNS_AHEAD = 10 * NUM_BUSY
"""Turns of others that may begin while a request without a session waits. Unbounded without fair admission."""


class Fleet:
    """Sessions that send a new request as soon as they are answered."""

    def __init__(self, engine: AsyncEngine, seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self.num_begun = 0
        """Number of turns with a first token."""
        self.begun: set[str | None] = set()
        """Sessions with at least one such turn."""
        self.moved = asyncio.Condition()

    def words(self, count: int) -> list[int]:
        return [self._random.randrange(100, 1500) for _ in range(count)]

    async def work(self, name: str) -> None:
        history = self.words(PROMPT_TOKENS)
        for number in itertools.count():
            answer = await self.ask(f"{name}/{number}", name, history)
            history = [*history, *answer, *self.words(8)]

    async def ask(self, request_id: str, session_id: str | None, prompt: list[int]) -> list[int]:
        asked = Submit(
            request_id=request_id,
            prompt_ids=prompt,
            session_id=session_id,
            sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True),
        )
        answer: list[int] = []
        async for event in self._engine.stream(asked):
            if isinstance(event, FinishEvent):
                break
            assert isinstance(event, TokensEvent)
            if not answer:
                async with self.moved:
                    self.num_begun += 1
                    self.begun.add(session_id)
                    self.moved.notify_all()
            answer += event.token_ids
        return answer

    async def turns_ahead(self, session_id: str | None, prompt: list[int]) -> int:
        """Count turns of others that begin before the first token of a newcomer."""
        before = self.num_begun
        asked = Submit(
            request_id="new",
            prompt_ids=prompt,
            session_id=session_id,
            sampling=SamplingParams(temperature=0.0, max_tokens=1),
        )
        async for _ in self._engine.stream(asked):
            return self.num_begun - before
        raise AssertionError("no first token")


@asynccontextmanager
async def busy_engine(seed: int, num_sessions_begun: int) -> AsyncIterator[Fleet]:
    """An engine with at least the given number of busy sessions that have had a turn."""
    async with AsyncEngine(EngineConfig(memory_gib=MEMORY_GIB, max_running=2, seed=seed)) as engine:
        fleet = Fleet(engine, seed)
        tasks = [asyncio.create_task(fleet.work(f"s{number}")) for number in range(NUM_BUSY)]
        try:
            async with fleet.moved:
                await fleet.moved.wait_for(
                    lambda: fleet.num_begun >= WARM_TURNS and len(fleet.begun) >= num_sessions_begun
                )
            yield fleet
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task


def turns_ahead(session_id: str | None, num_tokens: int, *, num_sessions_begun: int = 1) -> tuple[int, int]:
    """Count turns of others that begin before a newcomer's first token, and busy sessions that are still newcomers
    themselves when it arrives."""

    async def main() -> tuple[int, int]:
        async with busy_engine(1, num_sessions_begun) as fleet:
            newcomers = NUM_BUSY - len(fleet.begun)
            return await asyncio.wait_for(fleet.turns_ahead(session_id, fleet.words(num_tokens)), 120), newcomers

    ahead, newcomers = asyncio.run(main())
    print(f"{ahead} turns of others began; {newcomers} newcomers before it")
    return ahead, newcomers


def test_a_request_without_a_session_waits_for_a_bounded_number_of_turns() -> None:
    """Issue 18, finding 5: with admission by order of arrival it gets no first token as long as earlier sessions
    continue."""
    ahead, _ = turns_ahead(None, 20)
    assert ahead <= MOST_TURNS_AHEAD, f"seed 1: {ahead} turns of others began"


def test_a_new_session_waits_for_a_bounded_number_of_turns() -> None:
    """At worst right after another newcomer: it waits for the cost of that one, and for its own place."""
    ahead, newcomers = turns_ahead("new", PROMPT_TOKENS, num_sessions_begun=NUM_BUSY)
    assert newcomers == 0
    assert ahead <= 2 * PAUSE_TURNS, f"seed 1: {ahead} turns of others began"


def test_a_new_session_waits_for_a_bounded_number_of_turns_per_newcomer() -> None:
    ahead, newcomers = turns_ahead("new", PROMPT_TOKENS)
    assert ahead <= (2 + newcomers) * PAUSE_TURNS, (
        f"seed 1: {ahead} turns of others began, {newcomers} newcomers before it"
    )
