"""/v1/completions: token-id or text prompts, continued or scored.

Owns the conversion of a CompletionRequest to its answer, whole or in chunks. A checkpoint without a tokenizer serves
token-id prompts only. Its answers have no text and always have token ids; the prompt's ids are included on request.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.fair_queue import Flow
from agentspec.server import answer_shapes, openai
from agentspec.server.answers import Head
from agentspec.server.choices import Answer, Piece
from agentspec.server.logprobs import CompletionLogprobs
from agentspec.server.openai import CompletionRequest
from agentspec.server.pipeline import TextPipeline
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.server.sse import StreamHead
from agentspec.server.tables.completions import COMPLETIONS
from agentspec.server.token_room import clamped_to, within_room
from agentspec.server.turn import for_choice
from agentspec.text.constraints import ToolDemand, turn_grammar
from agentspec.text.token_limit import TokenLimit
from agentspec.types import Breakpoint, CheckpointKind, TokenScore
from agentspec.wire import FinishEvent, Submit, TokensEvent, Usage

MAX_CHOICES = 2048
"""Choices of one request: its prompts times `n`."""


async def encode_prompts(request: CompletionRequest, service: Service, flow: Flow) -> list[Sequence[int]]:
    """Token ids of every prompt.

    Raises RequestError or ApiError for too many prompts, for a text without a tokenizer to encode it or without tokens;
    ContextLengthError for a text with too many tokens."""
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
    """One submit for each choice, ordered by prompt."""
    request_id = uuid.uuid4().hex
    asked = request.sampling()
    num_forced = len(request.forced_output or ())
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
    asked.sampling().validate(
        vocab_size=info.vocab_size
    )  # also refuses numbers that a message to the engine can't hold
    session_id = session_of(call.headers, asked.prompt_cache_key)
    prompts = await encode_prompts(asked, service, Flow(service.tenant.name, session_id or ""))
    submits = submits_of(asked, prompts, session_id, info.max_context)
    head = Head(id="cmpl-" + submits[0].request_id.partition("-")[0], object="text_completion", model=asked.model)
    choices = [_Choice(index, asked, submit, service.text) for index, submit in enumerate(submits)]
    made = Answer(asked, head, choices, info, clamped=_clamped(asked, submits))
    return await made.respond(service.engine, submits, StreamHead())


ROUTES = (
    Route(
        method="POST",
        path="/v1/completions",
        handle=answer,
        body=CompletionRequest,
        checked=openai.COMPLETION_CHECKED,
        table=COMPLETIONS,
        id_fields=frozenset({"prompt"}),
        answers="json or events",
        answer=answer_shapes.Completion,
    ),
)


def _clamped(request: CompletionRequest, submits: Sequence[Submit]) -> int | None:
    """The token limit, if the context leaves less than was asked for: the smallest over all prompts. None: no
    clamping."""
    asked = request.sampling()
    return min((limit for submit in submits if (limit := clamped_to(asked, submit.sampling)) is not None), default=None)


class _Choice:
    """One running choice (see choices.Choice)."""

    usage: Usage
    """Set when the choice has finished."""
    reasoning_tokens = 0
    num_generated = 0
    """Tokens so far, including those whose text is still held back."""

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
        """Token events held back until the prompt's scores arrive at the end; None when nothing has to wait."""

    def opening(self) -> list[Piece]:
        return (
            []
            if self._waiting is not None or not (self._request.echo or self._with_prompt_ids)
            else [self._prompt_piece(None)]
        )

    def tokens(self, event: TokensEvent) -> list[Piece]:
        self.num_generated += len(event.token_ids)
        if self._waiting is not None:
            self._waiting.append(event)
            return []
        if not (event.text or self._with_ids or self._logprobs or self._request.usage_so_far):
            return []
        return [self._piece(event.text, event.token_ids, event.scores)]

    def finish(self, event: FinishEvent) -> list[Piece]:
        pieces = []
        if self._waiting is not None:
            scores = None if event.prompt_scores is None else [None, *event.prompt_scores]
            pieces.append(self._prompt_piece(scores))
            pieces += [self._piece(part.text, part.token_ids, part.scores) for part in self._waiting]
        self.usage = event.usage
        return [*pieces, self._piece(event.text, [], None) | {"finish_reason": event.reason.value}]

    def whole(self, pieces: Sequence[Piece]) -> Piece:
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

    def _prompt_piece(self, scores: Sequence[TokenScore | None] | None) -> Piece:
        """The piece before the generated text. Padding ids of the model have no text."""
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

    def _piece(self, text: str, ids: Sequence[int], scores: Sequence[TokenScore | None] | None) -> Piece:
        logprobs = None if self._logprobs is None or scores is None else self._logprobs.body(ids, scores)
        piece = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return piece | {"token_ids": ids} if self._with_ids else piece
