"""One assistant turn, whatever API asked for it: messages in, text events and an end out.

Owns the way from a TurnRequest to its submits, and from engine events to segmenter events. The APIs' modules (chat,
responses, messages) turn their bodies into TurnRequests and these events into their own shapes; none of them knows of
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
    """What every API asks of a turn."""

    messages: list[dict[str, Any]]
    """OpenAI's message objects."""
    sampling: SamplingParams
    tools: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI's function tools. The template is shown all of each but its `strict`, which speaks to the server."""
    hidden_tools: frozenset[str] = frozenset()
    """Names of tools that the template isn't shown: a message shows them, or nothing does yet. Their calls are read
    like all others."""
    demand: ToolDemand = field(default_factory=ToolDemand)
    callable_names: frozenset[str] | None = None
    """The tools that may be called, of those that the template is shown; None: all. Needs the choice "required"."""
    output: OutputForm | None = None
    effort: str | None = None
    """How much to reason: "none" switches thinking off. Without effect where the checkpoint's template knows nothing of
    it."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    marked: Sequence[CacheMark] = ()
    """Places of the prompt that later ones are to share (Anthropic's cache_control)."""
    edits: Sequence[ContextEdit] = ()
    """What the model is not to be shown of the messages (Anthropic's context_management)."""
    namespace: str = ""
    session_id: str | None = None
    logprobs: int | None = None
    forced_output: list[int] | None = None
    num_choices: int = 1
    skip_special_tokens: bool = True
    """False: control tokens stand in the text."""
    continues: bool = False
    """The last message is the beginning of the answer: an assistant's, without calls."""
    begins: bool = True
    """False: nothing is asked for, and the prompt ends behind the messages."""


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
    reasoning_tokens: int
    """Generated tokens up to the end of reasoning, the one that ends it included."""

    @property
    def has_whole_calls(self) -> bool:
        """The turn ended by itself, and with calls that are all complete: it waits for their results."""
        return bool(self.turn.calls) and not self.turn.is_call_cut and self.reason is FinishReason.STOP


class Turn:
    """One choice on its way: its submit, and what its text has become so far."""

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
        """clamped: the token limit, where the context leaves less than was asked for."""
        self.submit = submit
        self.prompt = prompt
        self.clamped = clamped
        self._text = text
        self._stop_ids = info.stop_token_ids
        self._ids: list[int] = []
        self.token_bytes = text.tokenizer.shown_bytes(skip_special_tokens=submit.skip_special_tokens)
        """What each token is in the turn's text."""
        assert text.prompts is not None
        tag_ids = text.prompts.tag_ids if submit.grammar is None else {}  # grammars take tags as text
        self._places = TokenPlaces(self.token_bytes, tag_ids.values())
        places = {tag: self._places.of_id[token] for tag, token in tag_ids.items()}
        self._segmenter = text.segmenter(tools, prompt, has_form=has_form, places=places)
        self._content_scores: list[TokenScore] = []

    def push(self, event: TokensEvent) -> list[TextEvent]:
        """What one engine event adds; nothing while its text waits for more."""
        self._ids += event.token_ids
        self._places.add(event.token_ids, event.scores)
        return self._scored(self._segmenter.push(event.text))

    def finish(self, event: FinishEvent) -> TurnEnd:
        """The end. Keeps the turn's ids for the prompt that returns it."""
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
            is_own_end=is_own_end,
            turn=turn,
            usage=event.usage,
            reasoning_tokens=self._places.count_before(self._segmenter.reasoning_end),
        )

    @property
    def num_generated(self) -> int:
        """Tokens so far, whether their text shows or waits for more."""
        return len(self._ids)

    def take_content_scores(self) -> list[TokenScore]:
        """Scores of the tokens behind the content deltas that came since the last call; none unless the request asked
        for scores."""
        taken, self._content_scores = self._content_scores, []
        return taken

    def _scored(self, added: list[TextEvent]) -> list[TextEvent]:
        if self.submit.logprobs is not None:
            for event in added:
                if isinstance(event, ContentDelta):
                    self._content_scores += self._places.take(event.at, event.at + len(event.text))
        return added


async def build_prompt(service: Service, asked: TurnRequest, *, counts: bool = False) -> BuiltPrompt:
    """The prompt of a turn, as the engine gets it; `counts`: it won't, so that it may be longer than the context.

    Raises RequestError for messages that can't be rendered, and for sampling that the engine would refuse;
    ContextLengthError for too many tokens."""
    asked.sampling.validate(vocab_size=service.engine.info.vocab_size)
    text = service.chat_text("messages", asked.messages)
    assert text.prompts is not None
    kwargs = {**asked.template_kwargs, **_reasoning_kwargs(asked, text.prompts.template_reads)}
    ask = PromptAsk(
        messages=asked.messages,
        limit=TokenLimit(service.engine.info.max_context, COUNTED_CONTEXTS if counts else 1),
        tools=shown_tools(asked) or None,
        template_kwargs=kwargs,
        namespace=service.tenant.namespace(asked.namespace),
        marked=asked.marked,
        edits=asked.edits,
        continues=asked.continues,
        begins=asked.begins,
    )
    return await text.work.build(ask, Flow(service.tenant.name, asked.session_id or ""))


async def begin(service: Service, asked: TurnRequest) -> list[Turn]:
    """Build the prompt and one turn for each choice.

    Raises RequestError for messages that can't be rendered, or demands that can't be met."""
    service.check_choices("n", asked.num_choices)
    text = service.chat_text("messages", asked.messages)
    assert text.prompts is not None
    may_call = [] if asked.demand.choice == "none" else asked.tools
    if asked.callable_names is not None:
        may_call = [tool for tool in may_call if tool["function"]["name"] in asked.callable_names]
    prompt = await build_prompt(service, asked)
    grammar = None
    if is_constrained(may_call, asked.demand, asked.output):
        dialect, reasoning_open = text.prompts.dialect, prompt.reasoning_open
        grammar = await asyncio.to_thread(
            turn_grammar, may_call or None, asked.demand, asked.output, dialect=dialect, reasoning_open=reasoning_open
        )
    num_forced = 0 if asked.forced_output is None else len(asked.forced_output)
    sampling = within_room(
        asked.sampling, len(prompt.prompt_ids), service.engine.info.max_context, num_forced=num_forced
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
        has_form = asked.output is not None
        turns.append(
            Turn(submit, prompt, text, may_call or None, service.engine.info, has_form=has_form, clamped=clamped)
        )
    return turns


def shown_tools(asked: TurnRequest) -> list[dict[str, Any]]:
    """The tools as the template sees them."""
    return [_shown(tool) for tool in asked.tools if tool["function"]["name"] not in asked.hidden_tools]


def _shown(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as the template sees it, so that the prompt is the same whether its calls are strict or not."""
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
    if name not in reads:  # clients send one whatever the model: it has no effect here
        return {}
    if asked.template_kwargs.get(name, value) != value:
        raise RequestError(_EFFORT, asked.effort, f"disagrees with {name}={asked.template_kwargs[name]!r}")
    return {name: value}


def _without_calls(sampling: SamplingParams, text: TextPipeline) -> SamplingParams:
    """The tools stay in the prompt, so that it is that of the turns around it, but the token that opens a call is
    banned."""
    opening = text.tokenizer.id_of(CALL_OPEN)
    if opening is None:
        return sampling
    return msgspec.structs.replace(sampling, logit_bias={opening: -100.0, **sampling.logit_bias})


def for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """Choices of one prompt differ by their seeds."""
    if sampling.seed is None or not index:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) % 2**63)
