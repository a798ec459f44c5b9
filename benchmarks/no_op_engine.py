"""An engine that computes nothing, to measure the server around it. Has no HTTP and no processes, and imports no
torch."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from agentspec.text.tokenizer import Tokenizer
from agentspec.types import FinishReason
from agentspec.wire import Event, FinishEvent, ModelInfo, Submit, TokensEvent, Usage

STEPS = 32
TOKENS_A_STEP = 4
STEP_TEXT = " four words a step"
PACE_SECONDS = 0.02
MODEL = "no-op"


class Ticker:
    """The pace of an engine: a thread, like AsyncEngine's, sends tokens to all streams of a batch at the same time."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[int]] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Must be called on the streams' event loop."""
        self._thread = threading.Thread(
            target=self._run, args=(asyncio.get_running_loop(),), name="no-op-engine", daemon=True
        )
        self._thread.start()

    async def step(self) -> int:
        """Wait for the next step; return the time of its tokens in nanoseconds of the monotonic clock."""
        self._waiting.append(asyncio.get_running_loop().create_future())
        return await self._waiting[-1]

    def stop(self) -> None:
        self._stopping.set()

    async def ended(self) -> None:
        assert self._thread is not None
        await asyncio.to_thread(self._thread.join)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopping.wait(PACE_SECONDS):
            batch, self._waiting = self._waiting, []
            if batch:
                loop.call_soon_threadsafe(_hand_out, batch, time.monotonic_ns())


def _hand_out(batch: list[asyncio.Future[int]], now: int) -> None:
    for stream in batch:
        if not stream.done():
            stream.set_result(now)


class NoOpEngine:
    """An engine client with prepared answers. Seed 1: steps come at the pace of an engine, and each text is the time of
    its step. Forced output comes in one step."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ticker = Ticker()
        self._tokenizer = tokenizer
        self._ids = tokenizer.encode(STEP_TEXT)[:TOKENS_A_STEP]
        self.info = ModelInfo(model_id=MODEL, vocab_size=tokenizer.vocab_size, max_context=1 << 20, stop_token_ids=(2,))
        self.alive = True

    async def __aenter__(self) -> Self:
        self.ticker.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ticker.stop()
        await self.ticker.ended()

    def check_alive(self) -> None:
        """It runs."""

    async def beat(self) -> None:
        """Always true: there is no loop that could hang."""

    async def ended(self) -> str | None:
        await self.ticker.ended()
        return None

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        paced = submit.sampling.seed == 1
        forced = submit.forced_output
        if forced is not None:
            yield TokensEvent(request_id=submit.request_id, token_ids=forced, text=self._tokenizer.decode(forced))
        for _ in range(STEPS if forced is None else 0):
            text = STEP_TEXT
            if paced:
                text = f"@{await self.ticker.step()}@"
            else:
                await asyncio.sleep(0)
            yield TokensEvent(request_id=submit.request_id, token_ids=self._ids, text=text)
        usage = Usage(
            prompt_tokens=len(submit.prompt_ids),
            completion_tokens=STEPS * TOKENS_A_STEP + 1 if forced is None else len(forced),
        )
        yield FinishEvent(request_id=submit.request_id, reason=FinishReason.STOP, usage=usage, stop_match=2)

    async def stats(self) -> dict[str, Any]:
        return {}
