"""An engine client that plays back scripts: no model, no scheduler, and every step controlled by the test."""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_right
from collections.abc import AsyncGenerator, Iterable
from functools import lru_cache
from typing import Any

from agentspec.errors import EngineClosedError
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import DraftSource, FinishReason, TokenScore
from agentspec.wire import Event, FinishEvent, ModelInfo, SpecStats, Submit, TokensEvent, Usage
from tests.fakes.text import END_OF_TEXT, byte_backend

INFO = ModelInfo(
    model_id="scripted", vocab_size=1000, max_context=4096, stop_token_ids=(2,), draft_sources=(DraftSource.MTP,) * 3
)
SPEC = SpecStats(
    num_steps=4,
    num_drafted=9,
    num_accepted=5,
    drafted_by_position=[4, 3, 2],
    accepted_by_position=[3, 2, 0],
    histogram=[1, 1, 2],
)


Step = Event | Exception | asyncio.Event | float
"""What a script is made of: an event to hand out, an exception to raise, a signal to wait for, seconds to wait."""


@lru_cache(maxsize=1)
def _tokenizer() -> Tokenizer:
    return Tokenizer(byte_backend())


def said(*texts: str) -> list[TokensEvent]:
    """One event per text, with the byte tokenizer's ids (tests/fakes/text.py) of the characters that begin in it; an
    event may show no text."""
    tokenizer = _tokenizer()
    ends = list(itertools.accumulate(map(len, texts)))
    ids: list[list[int]] = [[] for _ in texts]
    place = b""
    for token_id in tokenizer.encode("".join(texts)):
        ids[bisect_right(ends, len(place.decode(errors="ignore")))].append(token_id)
        place += tokenizer.spelled_bytes[token_id]
    hidden = tokenizer.special_ids[END_OF_TEXT]
    return [
        TokensEvent(request_id="", token_ids=own or [hidden], text=text) for own, text in zip(ids, texts, strict=True)
    ]


def ended(
    reason: FinishReason = FinishReason.STOP,
    *,
    stop_match: int | str | None = 2,
    text: str = "",
    error: str | None = None,
    refused: str | None = None,
    scores: list[TokenScore] | None = None,
) -> Event:
    """A FinishEvent, typed as an Event so that it can be in one list with the events of `said`."""
    usage = Usage(prompt_tokens=10, completion_tokens=6, cached_tokens=4, spec=SPEC)
    return FinishEvent(
        request_id="",
        reason=reason,
        usage=usage,
        text=text,
        stop_match=stop_match,
        error=error,
        refused=refused,
        prompt_scores=scores,
    )


class ScriptedEngine:
    """Plays one script per submit; the last script also serves all later submits. A script holds events, exceptions to
    raise, asyncio.Events to wait for, and seconds to wait."""

    def __init__(self, *scripts: Iterable[Step], info: ModelInfo = INFO) -> None:
        self.info = info
        self.submits: list[Submit] = []
        self.produced = 0
        """Events handed out so far, over all requests."""
        self.aborted: list[str] = []
        """Requests whose stream was closed before its terminal event."""
        self.alive = True
        self._scripts: list[list[Step]] = [list(script) for script in scripts] or [[ended()]]

    async def stream(self, submit: Submit) -> AsyncGenerator[Event, None]:
        self.submits.append(submit)
        script = self._scripts[min(len(self.submits), len(self._scripts)) - 1]
        finished = False
        try:
            for step in script:
                await asyncio.sleep(0)
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, int | float):
                    await asyncio.sleep(step)
                elif isinstance(step, Exception):
                    finished = True
                    raise step
                else:
                    finished = isinstance(step, FinishEvent)
                    self.produced += 1
                    yield step
        finally:
            if not finished:
                self.aborted.append(submit.request_id)

    def check_alive(self) -> None:
        if not self.alive:
            raise EngineClosedError("the engine is not running")

    async def stats(self) -> dict[str, Any]:
        return {"requests": len(self.submits)}
