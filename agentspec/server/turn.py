"""One assistant turn of any API: messages in, text events and an end out.

Owns the conversion of a TurnRequest to its submits, and of engine events to segmenter events. The APIs' modules (chat,
responses, messages) convert their bodies to TurnRequests and these events to their own shapes; none of them knows of
prompts or grammars.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentspec.errors import RequestError
from agentspec.fair_queue import Flow
from agentspec.server.pipeline import TextPipeline
from agentspec.server.service import Service
from agentspec.server.token_places import TokenPlaces
from agentspec.server.token_room import clamped_to, within_room
from agentspec.text.chat_template import CacheMark, Tools
from agentspec.text.constraints import OutputForm, ToolDemand, is_constrained, turn_grammar
from agentspec.text.context_edits import ContextEdit
from agentspec.text.events import AssistantTurn, ContentDelta, TextEvent
from agentspec.text.prompt import BuiltPrompt, PromptAsk
from agentspec.text.token_limit import COUNTED_CONTEXTS, TokenLimit
from agentspec.text.tool_calls.protocol import CALL_OPEN
from agentspec.types import FinishReason, SamplingParams, TokenScore
from agentspec.wire import FinishEvent, ModelInfo, Submit, TokensEvent, Usage

_THINKING_SWITCH = "enable_thinking"
_EFFORT = "reasoning_effort"


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRequest:
    """A request for one turn, in a form common to all APIs."""

    messages: list[dict[str, Any]]
    """OpenAI's message objects."""
    sampling: SamplingParams
    tools: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's function tools. The template sees everything but `strict`, which is for the server."""
    hidden_tools: frozenset[str] = frozenset()
    """Names of tools that the template isn't shown: a message shows them, or nothing yet. Their calls are parsed like
    all others."""
    demand: ToolDemand = field(default_factory=ToolDemand)
    callable_names: frozenset[str] | None = None
    """The shown tools that may be called; None: all. Requires the choice "required"."""
    output: OutputForm | None = None
    effort: str | None = None
    """How much to reason; "none" switches thinking off. Without effect if the template has no such variable."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    marked: Sequence[CacheMark] = ()
    """Positions of the prompt that later prompts will share (Anthropic's cache_control)."""
    edits: Sequence[ContextEdit] = ()
    """Parts of the messages to hide from the model (Anthropic's context_management)."""
    namespace: str = ""
    session_id: str | None = None
    logprobs: int | None = None
    forced_output: list[int] | None = None
    num_choices: int = 1
    skip_special_tokens: bool = True
    """False: control tokens are part of the text."""
    continues: bool = False
    """The last message is the start of the answer: an assistant message without calls."""
    begins: bool = True
    """False: the prompt ends after the messages, without the tokens that start an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnEnd:
    """The end of a turn."""

    events: list[TextEvent]
    """The last text events."""
    reason: FinishReason
    stop_match: int | str | None
    turn: AssistantTurn
    """The whole turn."""
    usage: Usage
    reasoning_tokens: int
    """Generated tokens up to the end of reasoning, including the token that ends it."""

    @property
    def has_whole_calls(self) -> bool:
        """The turn ended by itself, with calls that are all complete: it waits for their results."""
        return bool(self.turn.calls) and not self.turn.is_call_cut and self.reason is FinishReason.STOP


class Turn:
    """One running choice: its submit, and its text so far."""

    def __init__(
        self,
        submit: Submit,
        prompt: BuiltPrompt,
        text: TextPipeline,
        tools: Tools | None,
        info: ModelInfo,
        *,
        has_form: bool = False,
        clamped: int | None = None,
    ) -> None:
        """clamped: the token limit, if the context leaves less than was asked for."""
        self.submit = submit
        self.prompt = prompt
        self.clamped = clamped
        self._text = text
        self._stop_ids = info.stop_token_ids
        self._ids: list[int] = []
        self.token_bytes = text.tokenizer.shown_bytes(skip_special_tokens=submit.skip_special_tokens)
        """By token id: its bytes in the turn's text."""
        assert text.prompts is not None
        tag_ids = text.prompts.tag_ids if submit.grammar is None else {}  # a grammar constrains tags as text
        self._places = TokenPlaces(self.token_bytes, tag_ids.values())
        places = {tag: self._places.of_id[token] for tag, token in tag_ids.items()}
        self._segmenter = text.segmenter(tools, prompt, has_form=has_form, places=places)
        self._content_scores: list[TokenScore] = []

    def push(self, event: TokensEvent) -> list[TextEvent]:
        """The text events that one engine event adds; empty while its text is held back."""
        self._ids += event.token_ids
        self._places.add_tokens(event.token_ids, event.scores)
        return self._scored(self._segmenter.push(event.text))

    def finish(self, event: FinishEvent) -> TurnEnd:
        """The end of the turn. Stores the turn's ids for a later prompt that contains the turn."""
        is_own_end = event.reason is FinishReason.STOP and event.stop_match in self._stop_ids
        last = self._scored([*self._segmenter.push(event.text), *self._segmenter.finish(is_cut=not is_own_end)])
        turn = self._segmenter.turn
        self._text.work.remember(
            self.prompt, turn, self._ids, is_cut=not is_own_end, skip_special_tokens=self.submit.skip_special_tokens
        )
        return TurnEnd(
            events=last,
            reason=event.reason,
            stop_match=event.stop_match,
            turn=turn,
            usage=event.usage,
            reasoning_tokens=self._places.count_before(self._segmenter.reasoning_end),
        )

    @property
    def num_generated(self) -> int:
        """Tokens so far, including those whose text is still held back."""
        return len(self._ids)

    def take_content_scores(self) -> list[TokenScore]:
        """Scores of the tokens in the content deltas since the last call; empty unless the request asked for scores."""
        taken, self._content_scores = self._content_scores, []
        return taken

    def _scored(self, added: list[TextEvent]) -> list[TextEvent]:
        if self.submit.logprobs is not None:
            for event in added:
                if isinstance(event, ContentDelta):
                    self._content_scores += self._places.take_scores(event.at, event.at + len(event.text))
        return added


async def build_prompt(service: Service, asked: TurnRequest, *, counts: bool = False) -> BuiltPrompt:
    """Build the prompt of a turn. counts: it is only counted, so it may be longer than the context.

    Raises RequestError for messages that can't be rendered, and for sampling that the engine would refuse;
    ContextLengthError for too many tokens."""
    asked.sampling.validate(vocab_size=service.engine.info.vocab_size)
    text, prompts = service.chat_text("messages", asked.messages)
    ask = PromptAsk(
        messages=asked.messages,
        limit=TokenLimit(service.engine.info.max_context, COUNTED_CONTEXTS if counts else 1),
        tools=shown_tools(asked) or None,
        template_kwargs={**asked.template_kwargs, **_reasoning_kwargs(asked, prompts.template_reads)},
        namespace=service.tenant.namespace(asked.namespace),
        marked=asked.marked,
        edits=asked.edits,
        continues=asked.continues,
        begins=asked.begins,
    )
    return await text.work.build(ask, Flow(service.tenant.name, asked.session_id or ""))


async def begin_turns(service: Service, asked: TurnRequest) -> list[Turn]:
    """Build the prompt and one turn for each choice.

    Raises RequestError for messages that can't be rendered, or demands that can't be met."""
    service.check_choices("n", asked.num_choices)
    text, prompts = service.chat_text("messages", asked.messages)
    may_call = [] if asked.demand.choice == "none" else asked.tools
    if asked.callable_names is not None:
        may_call = [tool for tool in may_call if tool["function"]["name"] in asked.callable_names]
    prompt = await build_prompt(service, asked)
    grammar = None
    if is_constrained(may_call, asked.demand, asked.output):
        grammar = await asyncio.to_thread(
            turn_grammar,
            may_call or None,
            asked.demand,
            asked.output,
            dialect=prompts.dialect,
            reasoning_open=prompt.reasoning_open,
        )
    sampling = within_room(
        asked.sampling,
        len(prompt.prompt_ids),
        service.engine.info.max_context,
        num_forced=len(asked.forced_output or ()),
    )
    clamped = clamped_to(asked.sampling, sampling)
    if asked.tools and not may_call:
        sampling = _without_calls(sampling, text)
    request_id = uuid.uuid4().hex
    turns = []
    for index in range(asked.num_choices):
        submit = Submit(
            request_id=request_id if asked.num_choices == 1 else f"{request_id}-{index}",
            prompt_ids=prompt.prompt_ids,
            sampling=for_choice(sampling, index),
            breakpoints=prompt.breakpoints,
            session_id=asked.session_id,
            namespace=asked.namespace,
            logprobs=asked.logprobs,
            grammar=grammar,
            skip_special_tokens=asked.skip_special_tokens,
            forced_output=asked.forced_output,
        )
        turns.append(
            Turn(
                submit,
                prompt,
                text,
                may_call or None,
                service.engine.info,
                has_form=asked.output is not None,
                clamped=clamped,
            )
        )
    return turns


def shown_tools(asked: TurnRequest) -> list[dict[str, Any]]:
    """The tools as the template sees them."""
    return [_shown(tool) for tool in asked.tools if tool["function"]["name"] not in asked.hidden_tools]


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool without `strict`, so that strict and other tools make the same prompt."""
    function = tool["function"]
    return (
        {**tool, "function": {name: value for name, value in function.items() if name != "strict"}}
        if "strict" in function
        else tool
    )


def _reasoning_kwargs(asked: TurnRequest, reads: frozenset[str]) -> dict[str, Any]:
    if asked.effort is None:
        return {}
    name, value = (
        (_THINKING_SWITCH, False) if asked.effort == "none" and _THINKING_SWITCH in reads else (_EFFORT, asked.effort)
    )
    if name not in reads:  # clients send it to every model: without the variable it has no effect
        return {}
    if asked.template_kwargs.get(name, value) != value:
        raise RequestError(_EFFORT, asked.effort, f"disagrees with {name}={asked.template_kwargs[name]!r}")
    return {name: value}


def _without_calls(sampling: SamplingParams, text: TextPipeline) -> SamplingParams:
    """Ban the token that opens a call. The tools stay in the prompt, so that it shares its prefix with the other
    turns."""
    opening = text.tokenizer.id_of(CALL_OPEN)
    if opening is None:
        return sampling
    return msgspec.structs.replace(sampling, logit_bias={opening: -100.0, **sampling.logit_bias})


def for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The sampling of one choice: choices of a prompt differ by their seeds."""
    if sampling.seed is None or not index:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % 2**63)
