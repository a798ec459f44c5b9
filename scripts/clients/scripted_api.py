"""Three APIs with scripted answers: each call of the script in its turn, then a text. For recording what agents send to
their own makers' servers.

It takes every body, so that nothing of ours decides what an agent goes on to send. Owns the shapes of these answers, as
small as agents take them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from scripts.clients.agents import ANSWER, Calls

Event = dict[str, Any]
Step = tuple[str, dict[str, Any]] | str
"""A call, or a text."""

THOUGHT = "The next step follows from the task."
"""Stands before every step, since agents send reasoning back in their own ways."""


def scripted_api(calls: Calls, model: str) -> Starlette:
    async def messages(request: Request) -> Response:
        body = await request.json()
        return _answer(body, _message(body, calls, model), _message_events)

    async def chat(request: Request) -> Response:
        body = await request.json()
        return _answer(body, _completion(body, calls, model), _completion_events, done=True)

    async def responses(request: Request) -> Response:
        body = await request.json()
        return _answer(body, _response(body, calls, model), _response_events)

    async def count(request: Request) -> Response:
        return JSONResponse({"input_tokens": len(await request.body()) // 4})

    async def models(request: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "scripted"}]}
        )

    async def nothing(request: Request) -> Response:
        return JSONResponse({})

    return Starlette(
        routes=[
            Route("/v1/messages", messages, methods=["POST"]),
            Route("/v1/messages/count_tokens", count, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/models", models),
            Route("/", nothing, methods=["GET", "HEAD"]),
        ]
    )


def _next_step(body: Any, calls: Calls) -> tuple[int, Step]:
    """The step's number, and the call behind those whose results are there; the text where all are, or where the tool
    isn't offered."""
    number = sum(1 for _ in _results(body))
    asked_form = (
        (body.get("output_config") or {}).get("format")
        or body.get("response_format")
        or (body.get("text") or {}).get("format")
    )
    if asked_form and asked_form["type"] == "json_schema":
        schema = asked_form.get("schema") or asked_form["json_schema"]["schema"]
        return number, json.dumps(dict.fromkeys(schema["properties"], "Shopping"))
    offered = {tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools") or []}
    if number < len(calls) and calls[number][0] in offered:
        return number, calls[number]
    return number, ANSWER


def _results(body: Any) -> Iterator[Event]:
    """Whatever in a body is a tool's result, in any of the APIs."""
    for item in [*body.get("messages", []), *(body["input"] if isinstance(body.get("input"), list) else [])]:
        if item.get("role") == "tool" or item.get("type") == "function_call_output":
            yield item
        elif isinstance(item.get("content"), list):
            yield from (block for block in item["content"] if block.get("type") == "tool_result")


def _answer(body: Any, whole: Event, events: Any, *, done: bool = False) -> Response:
    if not body.get("stream"):
        return JSONResponse(whole)

    async def lines() -> Any:
        for event in events(whole):
            kind = f"event: {event['type']}\n" if "type" in event else ""
            yield f"{kind}data: {json.dumps(event)}\n\n"
        if done:
            yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def _message(body: Any, calls: Calls, model: str) -> Event:
    number, step = _next_step(body, calls)
    content: list[Event] = [{"type": "text", "text": step}]
    if not isinstance(step, str):
        content = [{"type": "tool_use", "id": f"toolu_{number}", "name": step[0], "input": step[1]}]
    thinking = body.get("thinking") or {"type": "disabled"}
    if thinking["type"] != "disabled":
        shown = "" if thinking.get("display") == "omitted" else THOUGHT
        content.insert(0, {"type": "thinking", "thinking": shown, "signature": f"signature{number}"})
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "end_turn" if isinstance(step, str) else "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 10,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 6,
        },
    }


def _message_events(message: Event) -> Iterator[Event]:
    yield {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}
    for index, block in enumerate(message["content"]):
        place = {"index": index}
        if block["type"] == "tool_use":
            start, deltas = (
                {**block, "input": {}},
                [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}],
            )
        elif block["type"] == "text":
            start, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        else:
            start = {**block, "thinking": "", "signature": ""}
            deltas = [
                {"type": "thinking_delta", "thinking": block["thinking"]},
                {"type": "signature_delta", "signature": block["signature"]},
            ]
        yield {"type": "content_block_start", **place, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", **place, "delta": delta}
        yield {"type": "content_block_stop", **place}
    yield {
        "type": "message_delta",
        "delta": {"stop_reason": message["stop_reason"], "stop_sequence": None},
        "usage": message["usage"],
    }
    yield {"type": "message_stop"}


def _completion(body: Any, calls: Calls, model: str) -> Event:
    number, step = _next_step(body, calls)
    message: Event = {"role": "assistant", "reasoning_content": THOUGHT, "content": step}
    if not isinstance(step, str):
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": step[0], "arguments": json.dumps(step[1])},
        }
        message |= {"content": None, "tool_calls": [call]}
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {"index": 0, "message": message, "finish_reason": "stop" if isinstance(step, str) else "tool_calls"}
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 6, "total_tokens": 16},
    }


def _completion_events(completion: Event) -> Iterator[Event]:
    (choice,) = completion["choices"]
    head = {**completion, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    whole = choice["message"]
    deltas: list[Event] = [{"role": "assistant", "content": ""}, {"reasoning_content": whole["reasoning_content"]}]
    if "tool_calls" in whole:
        deltas.append({"tool_calls": [{"index": 0, **call} for call in whole["tool_calls"]]})
    else:
        deltas.append({"content": whole["content"]})
    for delta in deltas:
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    yield {**head, "choices": [], "usage": usage}


def _response(body: Any, calls: Calls, model: str) -> Event:
    number, step = _next_step(body, calls)
    thought = {"type": "reasoning_text", "text": THOUGHT}
    items: list[Event] = [
        {"id": f"rs_{number}", "type": "reasoning", "status": "completed", "summary": [], "content": [thought]}
    ]
    if isinstance(step, str):
        part = {"type": "output_text", "text": step, "annotations": []}
        items.append(
            {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        )
    else:
        called = {"call_id": f"call_{number}", "name": step[0], "arguments": json.dumps(step[1])}
        items.append({"id": f"fc_{number}", "type": "function_call", "status": "completed", **called})
    usage = {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    }
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 0,
        "status": "completed",
        "model": model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": usage,
    }


def _response_events(response: Event) -> Iterator[Event]:
    events: list[Event] = [
        {"type": "response.created", "response": {**response, "status": "in_progress", "output": [], "usage": None}}
    ]
    for index, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": index}
        start = {**item, "status": "in_progress", **({"arguments": ""} if "arguments" in item else {"content": []})}
        events.append({"type": "response.output_item.added", "output_index": index, "item": start})
        if item["type"] == "function_call":
            events.append({"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]})
            events.append(
                {
                    "type": "response.function_call_arguments.done",
                    **place,
                    "name": item["name"],
                    "arguments": item["arguments"],
                }
            )
        else:
            (part,) = item["content"]
            kind = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
            place["content_index"] = 0
            events.append({"type": "response.content_part.added", **place, "part": {**part, "text": ""}})
            events.append({"type": f"{kind}.delta", **place, "delta": part["text"]})
            events.append({"type": f"{kind}.done", **place, "text": part["text"]})
            events.append({"type": "response.content_part.done", **place, "part": part})
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": "response.completed", "response": response})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}
