"""One assistant turn, whatever API asked for it: messages in, text events and an end out.

Owns the way from a TurnRequest to its submits, and from engine events to segmenter events. The APIs' modules (chat, responses, messages)
turn their bodies into TurnRequests and these events into their own shapes; none of them knows of prompts or grammars.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentspec.server.pipeline import TextPipeline
from agentspec.server.service import Service
from agentspec.text.chat_template import Tools
from agentspec.text.constraints import OutputForm, ToolDemand, turn_grammar
from agentspec.text.events import AssistantTurn, TextEvent
from agentspec.text.prompt import BuiltPrompt
from agentspec.types import FinishReason, SamplingParams
from agentspec.wire import FinishEvent, ModelInfo, Submit, TokensEvent, Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """What every API asks of a turn."""

    messages: list[dict[str, Any]]
    """OpenAI's message objects."""
    sampling: SamplingParams
    tools: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's function tools, as the template is to show them."""
    demand: ToolDemand = field(default_factory=ToolDemand)
    output: OutputForm | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = ""
    session_id: str | None = None
    logprobs: int | None = None
    num_choices: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEnd:
    """How a turn ended."""

    events: list[TextEvent]
    """The last ones."""
    reason: FinishReason
    stop_match: int | str | None
    is_own_end: bool
    """The model ended the turn by a stop id of its own."""
    turn: AssistantTurn
    """The whole turn."""
    usage: Usage

    @property
    def has_whole_calls(self) -> bool:
        """The turn ended by itself, and with calls that are all complete: it waits for their results."""
        return bool(self.turn.calls) and not self.turn.is_call_cut and self.reason is FinishReason.STOP


class Turn:
    """One choice on its way: its submit, and what its text has become so far."""

    def __init__(self, submit: Submit, prompt: BuiltPrompt, text: TextPipeline, tools: Tools | None, info: ModelInfo) -> None:
        self.submit = submit
        self._prompt = prompt
        self._text = text
        self._segmenter = text.segmenter(tools, reasoning_open=prompt.reasoning_open)
        self._stop_ids = info.stop_token_ids
        self._ids: list[int] = []

    def push(self, event: TokensEvent) -> list[TextEvent]:
        """What one engine event adds; nothing while its text waits for more."""
        self._ids += event.token_ids
        return self._segmenter.push(event.text)

    def finish(self, event: FinishEvent) -> TurnEnd:
        """The end. Keeps the turn's ids for the prompt that returns it."""
        is_own_end = event.reason is FinishReason.STOP and event.stop_match in self._stop_ids
        last = [*self._segmenter.push(event.text), *self._segmenter.finish(is_cut=not is_own_end)]
        turn = self._segmenter.turn
        assert self._text.prompts is not None
        self._text.prompts.remember(self._prompt, turn, self._ids, is_cut=not is_own_end)
        return TurnEnd(events=last, reason=event.reason, stop_match=event.stop_match, is_own_end=is_own_end, turn=turn, usage=event.usage)


async def begin(service: Service, asked: TurnRequest) -> list[Turn]:
    """Build the prompt and one turn for each choice.

    Raises RequestError for messages that can't be rendered, or demands that can't be met."""
    text = service.chat_text("messages", asked.messages)
    assert text.prompts is not None
    tools: Tools | None = asked.tools or None
    async with text.lock:
        prompt = await asyncio.to_thread(text.prompts.build, asked.messages, tools, asked.template_kwargs, namespace=asked.namespace)
    grammar = turn_grammar(
        tools, asked.demand, asked.output, dialect=text.prompts.dialect, reasoning_end=text.reasoning_end if prompt.reasoning_open else None
    )
    may_call = None if asked.demand.choice == "none" else tools
    request_id = uuid.uuid4().hex
    turns = []
    for index in range(asked.num_choices):
        submit = Submit(
            request_id=request_id if asked.num_choices == 1 else f"{request_id}-{index}",
            prompt_ids=prompt.prompt_ids,
            sampling=_of_choice(asked.sampling, index),
            breakpoints=prompt.breakpoints,
            session_id=asked.session_id,
            namespace=asked.namespace,
            logprobs=asked.logprobs,
            grammar=grammar,
        )
        turns.append(Turn(submit, prompt, text, may_call, service.engine.info))
    return turns


def _of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Choices differ by their seeds."""
    if sampling.seed is None or not index:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % 2**63)
