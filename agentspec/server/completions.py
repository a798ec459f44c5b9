"""/v1/completions: token-id or text prompts, continued or scored.

Owns the way from a CompletionRequest to its answer, whole or in chunks. A checkpoint without a tokenizer serves token-id
prompts: its answers have no text, and always their token ids.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.server import events, openai, sse
from agentspec.server.answers import Head, metrics_body, total, usage_body
from agentspec.server.logprobs import logprobs_body
from agentspec.server.openai import CompletionRequest
from agentspec.server.pipeline import TextPipeline
from agentspec.server.responding import FrameResponse, json_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.types import SamplingParams, TokenScore
from agentspec.wire import EngineClient, FinishEvent, ModelInfo, Submit, TokensEvent


def encode_prompts(request: CompletionRequest, text: TextPipeline | None) -> list[list[int]]:
    """Token ids of every prompt. Raises RequestError when a text has no tokenizer to encode it, or no tokens."""
    encoded = []
    for prompt in request.prompts():
        if isinstance(prompt, str):
            if text is None:
                raise RequestError("prompt", prompt, "this checkpoint has no tokenizer: send token ids")
            prompt = text.tokenizer.encode(prompt)
            if not prompt:
                raise RequestError("prompt", "", "must hold at least one token")
        encoded.append(prompt)
    return encoded


def submit_of(request: CompletionRequest, prompt_ids: list[int], *, request_id: str, session_id: str | None) -> Submit:
    scored = request.logprobs if request.max_tokens == 0 else None
    return Submit(
        request_id=request_id,
        prompt_ids=prompt_ids,
        sampling=request.sampling(),
        session_id=session_id,
        namespace=request.cache_salt,
        prompt_logprobs=scored,
    )


async def answer(service: Service, call: Call) -> Response:
    """POST /v1/completions."""
    asked = openai.parse_completion(call.body)
    service.check_model(asked.model)
    request_id, session_id = uuid.uuid4().hex, session_of(call.headers, asked.prompt_cache_key)
    head = Head(id=f"cmpl-{request_id}", object="text_completion", model=asked.model)
    submits = [
        submit_of(asked, ids, request_id=f"{request_id}-{index}", session_id=session_id)
        for index, ids in enumerate(encode_prompts(asked, service.text))
    ]
    if asked.stream:
        (submit,) = submits
        chunks = CompletionChunks(head, asked, submit.prompt_ids, service.text, service.engine.info)
        return await FrameResponse.begin(sse.frames(events.generate(service.engine, submit), chunks))
    return json_response(await complete(service.engine, head, asked, submits, service.text))


ROUTES = (Route(method="POST", path="/v1/completions", handle=answer),)


class CompletionChunks:
    """The chunks of one streamed completion (see sse.Chunks)."""

    def __init__(self, head: Head, request: CompletionRequest, prompt_ids: list[int], text: TextPipeline | None, info: ModelInfo) -> None:
        self._head = head
        self._request = request
        self._prompt_ids = prompt_ids
        self._text = text
        self._info = info
        self._with_ids = request.return_token_ids or text is None

    def opening(self) -> list[dict[str, Any]]:
        if not self._request.echo and not self._with_ids:
            return []
        extra: dict[str, Any] = {"prompt_token_ids": self._prompt_ids, "token_ids": []} if self._with_ids else {}
        return [self._chunk(echoed(self._request, self._prompt_ids, self._text), **extra)]

    def tokens(self, event: TokensEvent) -> list[dict[str, Any]]:
        if self._with_ids:
            return [self._chunk(event.text, token_ids=event.token_ids)]
        return [self._chunk(event.text)] if event.text else []

    def finish(self, event: FinishEvent) -> list[dict[str, Any]]:
        metrics = metrics_body(event.usage.spec, self._info)
        last = self._chunk(event.text, finish_reason=event.reason.value)
        if not self._request.include_usage:
            return [last | {"metrics": metrics}]
        return [last, self._head.body(choices=[], usage=usage_body(event.usage), metrics=metrics)]

    def _chunk(self, text: str, *, finish_reason: str | None = None, **extra: Any) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason, **extra}
        return self._head.body(choices=[choice], **({"usage": None} if self._request.include_usage else {}))


async def complete(
    engine: EngineClient, head: Head, request: CompletionRequest, submits: Sequence[Submit], text: TextPipeline | None
) -> dict[str, Any]:
    """The whole answer: one choice per submit, all run at the same time. The first error ends them all."""
    tasks = [asyncio.create_task(_choice(engine, index, request, submit, text)) for index, submit in enumerate(submits)]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    usage = total(event.usage for _, event in results)
    return head.body(choices=[choice for choice, _ in results], usage=usage_body(usage), metrics=metrics_body(usage.spec, engine.info))


async def _choice(
    engine: EngineClient, index: int, request: CompletionRequest, submit: Submit, text: TextPipeline | None
) -> tuple[dict[str, Any], FinishEvent]:
    parts, end = await events.collect(engine, submit)
    ids = [token for part in parts for token in part.token_ids]
    said = "".join(part.text for part in parts) + end.text
    choice: dict[str, Any] = {
        "index": index,
        "text": echoed(request, submit.prompt_ids, text) + said,
        "logprobs": None,
        "finish_reason": end.reason.value,
    }
    if request.return_token_ids or text is None:
        choice |= {"prompt_token_ids": submit.prompt_ids, "token_ids": ids}
    if request.logprobs is not None:
        scores = await _scores(engine, submit, ids, request.logprobs) if ids else end.prompt_scores
        if scores is not None:
            choice["logprobs"] = logprobs_body(submit.prompt_ids + ids, scores, None if text is None else text.tokenizer.token_bytes)
    return choice, end


async def _scores(engine: EngineClient, submit: Submit, ids: list[int], top: int) -> list[TokenScore] | None:
    """Scores of prompt and answer, by a second request that computes them as one prompt: decoding itself keeps no scores."""
    scoring = Submit(
        request_id=submit.request_id + "-scores",
        prompt_ids=submit.prompt_ids + ids,
        sampling=SamplingParams(max_tokens=0),
        namespace=submit.namespace,
        prompt_logprobs=top,
    )
    _, end = await events.collect(engine, scoring)
    return end.prompt_scores


def echoed(request: CompletionRequest, prompt_ids: list[int], text: TextPipeline | None) -> str:
    """What `echo` puts before the answer. Ids of the model's padding have no text."""
    if not request.echo or text is None:
        return ""
    return text.tokenizer.decode([token for token in prompt_ids if token < text.tokenizer.vocab_size])
