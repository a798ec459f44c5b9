"""Prompts as the engine sees them, without generation: /tokenize, /detokenize, /v1/chat/completions/render and
/tokenizer_info.

Owns the shapes of these endpoints, which follow vLLM's. Prompts are built in turn.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.fair_queue import Flow
from agentspec.server import answer_shapes, chat, fields, openai
from agentspec.server.errors import ApiError
from agentspec.server.responding import json_response
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.server.tables.chat import CHAT
from agentspec.server.tables.tokenize import DETOKENIZE, TOKENIZE
from agentspec.server.turn import begin_turns, build_prompt
from agentspec.text.token_limit import COUNTED_CONTEXTS, TokenLimit
from agentspec.text.tokenizer import Tokenizer

_OF_CHAT = ("tools", "chat_template_kwargs", "reasoning_effort", "cache_salt")


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt`, or `messages` with the fields of a chat request that affect its prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    cache_salt: str | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    """False without continue_final_message: the ids of the messages alone, which chat doesn't support."""
    add_special_tokens: bool = False
    """Without effect: the tokenizers of this family add none."""
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


async def tokenize(service: Service, call: Call) -> Response:
    """POST /tokenize: the ids of a text, or of the prompt that chat messages become."""
    asked = fields.read(call.body, TokenizeRequest, TOKENIZE, call.notes, required=())
    _check_model(service, asked.model)
    ids = await _ids_of(service, asked)
    names = (
        [_tokenizer(service, "prompt", asked.prompt).name_of(token) for token in ids]
        if asked.return_token_strs
        else None
    )
    return json_response(
        {"count": len(ids), "max_model_len": service.engine.info.max_context, "tokens": ids, "token_strs": names}
    )


async def detokenize(service: Service, call: Call) -> Response:
    """POST /detokenize: the text of token ids, control tokens written out."""
    asked = fields.read(call.body, DetokenizeRequest, DETOKENIZE, call.notes, required=("tokens",))
    _check_model(service, asked.model)
    vocab_size = service.engine.info.vocab_size
    for index, token in enumerate(asked.tokens):
        if not 0 <= token < vocab_size:
            raise RequestError(f"tokens[{index}]", token, f"is not a token id below {vocab_size}")
    return json_response({"prompt": _tokenizer(service, "tokens", asked.tokens).spell(asked.tokens)})


async def tokenizer_info(service: Service, call: Call) -> Response:
    """GET /tokenizer_info: what the checkpoint says of its tokenizer, and the chat template."""
    if service.text is None:
        raise ApiError(404, "this checkpoint has no tokenizer", code="no_tokenizer")
    return json_response(service.text.settings)


async def render(service: Service, call: Call) -> Response:
    """POST /v1/chat/completions/render: what the engine would be asked for this chat request; of several choices, for
    the first."""
    asked = service.named(openai.parse_chat(call.body, call.notes))
    turns = await begin_turns(service, chat.turn_request(asked, session_of(call.headers, asked.prompt_cache_key)))
    submit = turns[0].submit
    body = {
        "model": asked.model,
        "prompt": _tokenizer(service, "messages", asked.messages).spell(submit.prompt_ids),
        "token_ids": list(submit.prompt_ids),
        "count": len(submit.prompt_ids),
        "max_model_len": service.engine.info.max_context,
        "breakpoints": [{"offset": mark.offset, "kind": mark.kind.name.lower()} for mark in submit.breakpoints],
        "sampling_params": submit.sampling,
        "grammar": submit.grammar,
        "session_id": submit.session_id,
    }
    return json_response(body)


ROUTES = (
    Route(
        method="POST",
        path="/tokenize",
        handle=tokenize,
        body=TokenizeRequest,
        checked=openai.CHAT_CHECKED,
        table=TOKENIZE,
        answer=answer_shapes.Tokens,
    ),
    Route(
        method="POST",
        path="/detokenize",
        handle=detokenize,
        body=DetokenizeRequest,
        table=DETOKENIZE,
        answer=answer_shapes.Text,
    ),
    Route(method="GET", path="/tokenizer_info", handle=tokenizer_info, errors=(404,)),
    Route(
        method="POST",
        path="/v1/chat/completions/render",
        handle=render,
        body=openai.ChatRequest,
        checked=openai.CHAT_CHECKED,
        table=CHAT,
        answer=answer_shapes.RenderedChat,
    ),
)


async def _ids_of(service: Service, asked: TokenizeRequest) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise RequestError("prompt", asked.prompt, "send either a prompt or messages")
    of_chat = {name: value for name in _OF_CHAT if (value := getattr(asked, name)) is not None}
    if asked.continue_final_message:
        of_chat["continue_final_message"] = True
    if not asked.add_generation_prompt:
        of_chat["add_generation_prompt"] = False
    if asked.prompt is not None:
        for name, value in of_chat.items():
            raise RequestError(name, value, "goes with messages, not with a prompt")
        _tokenizer(service, "prompt", asked.prompt)
        assert service.text is not None
        limit = TokenLimit(service.engine.info.max_context, COUNTED_CONTEXTS)
        (found,) = await service.text.work.encode([asked.prompt], limit, Flow(service.tenant.name))
        return list(found)
    if not asked.continue_final_message:
        of_chat.pop("add_generation_prompt", None)  # false alone is not valid in chat
    body = {"model": service.engine.info.model_id, "messages": asked.messages, **of_chat}
    turn = chat.turn_request(openai.parse_chat(body), None)
    return list(
        (await build_prompt(service, replace(turn, begins=asked.add_generation_prompt), counts=True)).prompt_ids
    )


def _check_model(service: Service, name: str | None) -> None:
    """Check the model's name, which may be absent here, as in vLLM."""
    if name is not None:
        service.answer_name(name)


def _tokenizer(service: Service, field: str, value: object) -> Tokenizer:
    if service.text is None:
        raise RequestError(field, value, "this checkpoint has no tokenizer")
    return service.text.tokenizer
