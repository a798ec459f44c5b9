"""An engine client that records what passes through it, turn by turn: prompts, outputs, and how much of each prompt a
cache could have served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from agentspec.server.recorder import WatchedEngine
from agentspec.types import BLOCK_TOKENS
from agentspec.wire import EngineClient, Event, FinishEvent, Submit, Usage


@dataclass(kw_only=True)
class SeenTurn:
    prompt_ids: Sequence[int]
    earlier: list[SeenTurn]
    """Turns that had ended when this one came."""
    output: list[int] = field(default_factory=list)
    usage: Usage | None = None

    @property
    def computed(self) -> list[int]:
        """The tokens in the engine's state: all but the last, which no step has read."""
        return [*self.prompt_ids, *self.output[:-1]]

    @property
    def shared_len(self) -> int:
        """Tokens at the beginning of the prompt that an earlier turn has computed; after that the prompt differs or is
        new."""
        return max((_common_len(turn.computed, self.prompt_ids) for turn in self.earlier), default=0)

    @property
    def reusable_len(self) -> int:
        """Tokens up to the last block boundary of the shared part. At least one token of a prompt is always
        computed."""
        return min(self.shared_len, len(self.prompt_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def continues(self) -> bool:
        """Whether the prompt begins with all of an earlier turn and its output, unchanged."""
        return any(self.shared_len == len(turn.computed) for turn in self.earlier)


class SeenTurns(WatchedEngine):
    """Implements wire.EngineClient."""

    def __init__(self, engine: EngineClient) -> None:
        super().__init__(engine)
        self.turns: list[SeenTurn] = []

    async def stream(self, submit: Submit) -> AsyncIterator[Event]:
        turn = SeenTurn(prompt_ids=submit.prompt_ids, earlier=[turn for turn in self.turns if turn.usage is not None])
        self.turns.append(turn)
        async for event in self._engine.stream(submit):
            if isinstance(event, FinishEvent):
                turn.usage = event.usage
            else:
                turn.output += event.token_ids
            yield event


def _common_len(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
