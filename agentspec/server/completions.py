"""/v1/completions: token-id or text prompts, continued or scored.

Owns the way from a CompletionRequest to its answer, whole or in chunks. A checkpoint without a tokenizer serves
token-id prompts: its answers have no text, and always their token ids; those of the prompt where they are asked for.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.fair_queue import Flow
from agentspec.server import answer_shapes, events, openai, sse
from agentspec.server.answers import Head, metrics_body, of_choices, total, usage_body, usage_so_far
from agentspec.server.logprobs import CompletionLogprobs
from agentspec.server.openai import CompletionRequest
from agentspec.server.pipeline import TextPipeline
from agentspec.server.responding import FrameResponse, json_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.server.tables.completions import COMPLETIONS
from agentspec.server.token_room import clamped_to, headers, within_room
from agentspec.server.turn import for_choice
from agentspec.text.constraints import ToolDemand, turn_grammar
from agentspec.text.token_limit import TokenLimit
from agentspec.types import Breakpoint, CheckpointKind, TokenScore
from agentspec.wire import FinishEvent, ModelInfo, Submit, TokensEvent, Usage

MAX_CHOICES = 2048
"""Of one request: its prompts times `n`."""


async def encode_prompts(request: CompletionRequest, service: Service, flow: Flow) -> list[Sequence[int]]:
    """Token ids of every prompt. Raises RequestError or ApiError when there are too many, or a text has no tokenizer to
    encode it, or no tokens; and ContextLengthError for a text with too many."""
    prompts, text = request.prompts(), service.text
    if len(prompts) * request.n > MAX_CHOICES:
        raise RequestError(
            "prompt", f"{len(prompts)} prompts", f"with n={request.n} they make more than {MAX_CHOICES} choices"
        )
    service.check_choices("prompt", len(prompts) * request.n)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in prompts if not isinstance(prompt, str)]
    if text is None:
        raise RequestError("prompt", texts[0], "this checkpoint has no tokenizer: send token ids")
    encoded = iter(await text.work.encode(texts, TokenLimit(service.engine.info.max_context), flow))
    ids: list[Sequence[int]] = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    if not all(ids):
        raise RequestError("prompt", "", "must hold at least one token")
    return ids


def submits_of(
    request: CompletionRequest, prompts: Sequence[Sequence[int]], session_id: str | None, max_context: int
) -> list[Submit]:
    """One submit for each choice: those of the first prompt first."""
    request_id = uuid.uuid4().hex
    asked = request.sampling()
    num_forced = 0 if request.forced_output is None else len(request.forced_output)
    grammar = turn_grammar(None, ToolDemand(), request.output(), dialect=None, reasoning_open=False)
    breakpoints = [Breakpoint(point.offset, CheckpointKind[point.kind.upper()]) for point in request.breakpoints]
    return [
        Submit(
            request_id=f"{request_id}-{place * request.n + choice}",
            prompt_ids=prompt_ids,
            sampling=for_choice(within_room(asked, len(prompt_ids), max_context, num_forced=num_forced), choice),
            breakpoints=breakpoints,
            session_id=session_id,
            namespace=request.cache_salt,
            prompt_logprobs=request.logprobs if request.echo else None,
            logprobs=request.logprobs if request.max_tokens != 0 else None,
            grammar=grammar,
            skip_special_tokens=request.skip_special_tokens,
            forced_output=request.forced_output,
        )
        for place, prompt_ids in enumerate(prompts)
        for choice in range(request.n)
    ]


async def answer(service: Service, call: Call) -> Response:
    """POST /v1/completions."""
    asked = service.named(openai.parse_completion(call.body, call.notes))
    info = service.engine.info
    asked.sampling().validate(vocab_size=info.vocab_size)  # what no message to the engine can hold is out of range, too
    session_id = session_of(call.headers, asked.prompt_cache_key)
    prompts = await encode_prompts(asked, service, Flow(service.tenant.name, session_id or ""))
    submits = submits_of(asked, prompts, session_id, info.max_context)
    told = headers(_clamped(asked, submits))
    if asked.stream:
        chunks, head = CompletionChunks(asked, submits, service.text, info), sse.StreamHead()
        return await FrameResponse.begin(sse.frames(events.merge(service.engine, submits), chunks, head), head, told)
    return json_response(await complete(service, asked, submits), headers=told)


ROUTES = (
    Route(
        method="POST",
        path="/v1/completions",
        handle=answer,
        body=CompletionRequest,
        checked=openai.COMPLETION_CHECKED,
        table=COMPLETIONS,
        answers="json or events",
        answer=answer_shapes.Completion,
    ),
)


def _clamped(request: CompletionRequest, submits: Sequence[Submit]) -> int | None:
    """The token limit where the context leaves less than was asked for: the smallest one of all prompts."""
    asked = request.sampling()
    return min((limit for submit in submits if (limit := clamped_to(asked, submit.sampling)) is not None), default=None)


class _Choice:
    """One choice on its way. Its pieces are choices of OpenAI's chunks; the whole choice is the same pieces put
    together."""

    usage: Usage
    """Once it has finished."""
    num_generated = 0
    """Tokens so far, whether their text shows or waits for more."""

    def __init__(self, index: int, request: CompletionRequest, submit: Submit, text: TextPipeline | None) -> None:
        self._index = index
        self._request = request
        self.prompt_ids = submit.prompt_ids
        self._text = text
        self._with_ids = bool(request.return_token_ids) or text is None
        self._with_prompt_ids = request.return_token_ids is True or (request.echo and text is None)
        token_bytes = (
            None if text is None else text.tokenizer.shown_bytes(skip_special_tokens=request.skip_special_tokens)
        )
        self._logprobs = None if request.logprobs is None else CompletionLogprobs(token_bytes)
        self._waiting: list[TokensEvent] | None = None if submit.prompt_logprobs is None else []
        """What was generated behind a prompt whose scores come with the end; None when there is nothing to wait for."""

    def opening(self) -> list[dict[str, Any]]:
        return (
            []
            if self._waiting is not None or not (self._request.echo or self._with_prompt_ids)
            else [self._prompt_piece(None)]
        )

    def tokens(self, event: TokensEvent) -> list[dict[str, Any]]:
        self.num_generated += len(event.token_ids)
        if self._waiting is not None:
            self._waiting.append(event)
            return []
        if not (event.text or self._with_ids or self._logprobs or self._request.usage_so_far):
            return []
        return [self._piece(event.text, event.token_ids, event.scores)]

    def finish(self, event: FinishEvent) -> list[dict[str, Any]]:
        pieces = []
        if self._waiting is not None:
            scores = None if event.prompt_scores is None else [None, *event.prompt_scores]
            pieces.append(self._prompt_piece(scores))
            pieces += [self._piece(part.text, part.token_ids, part.scores) for part in self._waiting]
        self.usage = event.usage
        return [*pieces, self._piece(event.text, [], None) | {"finish_reason": event.reason.value}]

    def whole(self, pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The choice of a whole answer."""
        choice = dict(pieces[-1])
        choice["text"] = "".join(piece["text"] for piece in pieces)
        if self._logprobs is not None:
            scored = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            choice["logprobs"] = {name: [entry for part in scored for entry in part[name]] for name in names}
        if self._with_prompt_ids:
            choice["prompt_token_ids"] = list(self.prompt_ids)
        if self._with_ids:
            choice["token_ids"] = [token for piece in pieces for token in piece["token_ids"]]
        return choice

    def _prompt_piece(self, scores: Sequence[TokenScore | None] | None) -> dict[str, Any]:
        """What stands before the generated text. Ids of the model's padding have no text."""
        shown = ""
        if self._request.echo and self._text is not None:
            tokenizer, skips = self._text.tokenizer, self._request.skip_special_tokens
            shown = tokenizer.decode(
                [token for token in self.prompt_ids if token < tokenizer.vocab_size], skip_special_tokens=skips
            )
        piece = self._piece(shown, self.prompt_ids, scores)
        if self._with_prompt_ids:
            piece["prompt_token_ids"] = list(self.prompt_ids)
        return piece | {"token_ids": []} if self._with_ids else piece

    def _piece(self, text: str, ids: Sequence[int], scores: Sequence[TokenScore | None] | None) -> dict[str, Any]:
        logprobs = None if self._logprobs is None or scores is None else self._logprobs.body(ids, scores)
        piece = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return piece | {"token_ids": ids} if self._with_ids else piece


class _Answer:
    """All choices of one answer, and what they cost together."""

    def __init__(
        self, request: CompletionRequest, submits: Sequence[Submit], text: TextPipeline | None, info: ModelInfo
    ) -> None:
        self._request = request
        self._info = info
        self._clamped = _clamped(request, submits)
        self._num_open = len(submits)
        self.head = Head(
            id="cmpl-" + submits[0].request_id.partition("-")[0], object="text_completion", model=request.model
        )
        self.choices = [_Choice(index, request, submit, text) for index, submit in enumerate(submits)]

    def finish(self, index: int, event: FinishEvent) -> list[dict[str, Any]]:
        self._num_open -= 1
        return self.choices[index].finish(event)

    @property
    def is_complete(self) -> bool:
        return not self._num_open

    def costs(self) -> dict[str, Any]:
        n = self._request.n
        usage = total(
            of_choices([choice.usage for choice in self.choices[first : first + n]])
            for first in range(0, len(self.choices), n)
        )
        return {"usage": usage_body(usage, clamped=self._clamped), "metrics": metrics_body(usage.spec, self._info)}


class CompletionChunks:
    """The chunks of a streamed completion (see sse.Chunks)."""

    def __init__(
        self, request: CompletionRequest, submits: Sequence[Submit], text: TextPipeline | None, info: ModelInfo
    ) -> None:
        self._answer = _Answer(request, submits, text, info)
        self._with_usage = request.include_usage
        self._with_usage_so_far = request.usage_so_far

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(piece) for choice in self._answer.choices for piece in choice.opening()]

    def tokens(self, index: int, event: TokensEvent) -> list[dict[str, Any]]:
        return [self._chunk(piece) for piece in self._answer.choices[index].tokens(event)]

    def finish(self, index: int, event: FinishEvent) -> list[dict[str, Any]]:
        chunks = [self._chunk(piece) for piece in self._answer.finish(index, event)]
        if self._answer.is_complete:
            costs = self._answer.costs()
            if self._with_usage:
                chunks.append(self._answer.head.body(choices=[], **costs))
            else:
                chunks[-1]["metrics"] = costs["metrics"]
        return chunks

    def _chunk(self, piece: dict[str, Any]) -> dict[str, Any]:
        if self._with_usage_so_far:
            choice = self._answer.choices[piece["index"]]
            return self._answer.head.body(
                choices=[piece], usage=usage_so_far(len(choice.prompt_ids), choice.num_generated)
            )
        return self._answer.head.body(choices=[piece], **({"usage": None} if self._with_usage else {}))


async def complete(service: Service, request: CompletionRequest, submits: Sequence[Submit]) -> dict[str, Any]:
    """The whole answer; its choices run at the same time, and the first error ends them all."""
    answer = _Answer(request, submits, service.text, service.engine.info)
    pieces = [choice.opening() for choice in answer.choices]
    async with aclosing(events.merge(service.engine, submits)) as merged:
        async for index, event in merged:
            pieces[index] += (
                answer.finish(index, event) if isinstance(event, FinishEvent) else answer.choices[index].tokens(event)
            )
    choices = [choice.whole(parts) for choice, parts in zip(answer.choices, pieces, strict=True)]
    return answer.head.body(choices=choices, **answer.costs())
