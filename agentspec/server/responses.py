"""/v1/responses: items in, items out, with the conversation stored by the client or by the server.

Owns the endpoints, and the stored data. A request's fields are in responses_request.py, the meaning of its items in
responses_items.py, the response in responses_answer.py.
"""

from __future__ import annotations

import re
import uuid
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response

from agentspec.errors import RequestError
from agentspec.server import answer_shapes, events
from agentspec.server.errors import ApiError
from agentspec.server.responding import FrameResponse, json_response
from agentspec.server.response_store import ResponseStore, StoredResponse
from agentspec.server.responses_answer import Answer
from agentspec.server.responses_items import Conversation, Item, is_own_id, read_items
from agentspec.server.responses_request import CHECKED, ResponsesRequest, parse
from agentspec.server.responses_tools import Toolset
from agentspec.server.routes import Call, Route
from agentspec.server.service import Service, session_of
from agentspec.server.sse import StreamHead, frames, named_frame
from agentspec.server.tables.responses import RESPONSES
from agentspec.server.token_room import headers
from agentspec.server.turn import TurnRequest, begin_turns, build_prompt

_MAX_LISTED = 100
_RENAMED = {
    "prompt_ids": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
}
_RETRIEVE_QUERY = {"stream": {"enum": ["false"]}, "include_obfuscation": {"enum": ["false"]}}
_LIST_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": _MAX_LISTED, "default": 20},
    "order": {"enum": ["asc", "desc"], "default": "desc"},
    "after": {"type": "string"},
}
_TOOL_FIELD = re.compile(r"tools\[(\d+)\](?:\.function)?(?:(\.parameters\.properties\.input\.pattern)|(.*))", re.DOTALL)


class _References:
    """The stored items that one request refers to by id."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._items: dict[str, Item] = {}
        """Items of the records found so far, by id."""
        self.records: list[StoredResponse] = []
        """The records that contained them."""

    def find(self, item_id: str, field: str) -> Item:
        """A stored item. Raises ApiError (404) if it isn't stored."""
        if item_id not in self._items:
            record = self._store.holder(item_id)
            if record is None:
                reason = "no such item is stored, or no longer; items of responses with store=false never were"
                raise ApiError(404, f"{field}={item_id!r}: {reason}", param=field, code="item_not_found")
            self.records.append(record)
            self._items |= {item["id"]: item for item in _items_of(record)}
        return self._items[item_id]


class _Asked:
    """A parsed request with the conversation that it continues."""

    def __init__(self, service: Service, call: Call) -> None:
        self.request = service.named(parse(call.body, call.notes))
        self.tools = Toolset.of(self.request.tools, call.notes)
        stored = _stored_conversation(service, self.request.previous_response_id)
        history = [("previous_response_id", item) for record in stored for item in _items_of(record)]
        references = _References(service.responses)
        named = read_items(self.request.input, call.notes, references.find)
        self.items = [item for _, item in named]
        self._conversation = Conversation.of(self.request.instructions, history + named)
        self._callable = list(zip(self.tools.names, self.tools.places, strict=True))
        """Callable functions and the field names of their tools. Errors refer to functions by index in this list."""
        self.session_id = session_of(call.headers, self.request.prompt_cache_key) or self._own_session(
            stored or references.records
        )

    def _own_session(self, stored: list[StoredResponse]) -> str | None:
        """The session of the conversation in `stored`. A first response starts a session if a continuation is
        likely."""
        if stored and stored[-1].session_id is not None:
            return stored[-1].session_id
        return uuid.uuid4().hex if stored or (self.request.store and self.request.tools) else None

    def turn_request(self) -> TurnRequest:
        asked = self.request.turn_request(self._conversation.messages, self.tools, self.session_id)
        allowed = asked.callable_names
        self._callable = [one for one in self._callable if allowed is None or one[0] in allowed]
        return asked

    def public(self, error: RequestError) -> RequestError:
        """The error with this API's field names. Clients sent items and several kinds of tools, which became messages
        and functions."""
        field = error.field
        if found := re.match(r"messages\[(\d+)\]", field):
            rest = field[found.end() :].replace("tool_call_id", "call_id")
            field = self._conversation.names[int(found[1])] + rest
        elif found := _TOOL_FIELD.fullmatch(field):
            name, place = self._callable[int(found[1])]
            is_format = found[2] and self.tools.tool(name).kind == "custom"
            field = place + (".format.definition" if is_format else found[2] or found[3])
        else:
            field = _RENAMED.get(field, field.replace("tool_choice.allowed_tools.", "tool_choice."))
        return type(error)(field, error.value, error.reason)


async def create(service: Service, call: Call) -> Response:
    """POST /v1/responses."""
    asked = _Asked(service, call)
    try:
        (turn,) = await begin_turns(service, asked.turn_request())
        answer = Answer(asked.request, asked.tools, turn, service, lambda response: _store(service, asked, response))
        stream = events.generate(service.engine, turn.submit)
        if asked.request.stream:
            head = StreamHead(renamed=asked.public, frame=named_frame, ending=b"")
            return await FrameResponse.begin(frames(stream, answer, head), head, headers(turn.clamped))
        async with aclosing(stream):
            async for event in stream:
                answer.convert(event)
    except RequestError as error:
        raise asked.public(error) from None
    return json_response(answer.response, headers=headers(turn.clamped))


async def count_input(service: Service, call: Call) -> Response:
    """POST /v1/responses/input_tokens: what the same body would cost as a prompt."""
    asked = _Asked(service, call)
    try:
        prompt = await build_prompt(service, asked.turn_request(), counts=True)
    except RequestError as error:
        raise asked.public(error) from None
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.prompt_ids)})


async def retrieve(service: Service, call: Call) -> Response:
    """GET /v1/responses/{response_id}."""
    _check_query(call, {"stream": "false", "include_obfuscation": "false"})
    return Response(_stored(service, call).response, media_type="application/json")


async def delete(service: Service, call: Call) -> Response:
    """DELETE /v1/responses/{response_id}."""
    _check_query(call, {})
    _stored(service, call)
    response_id = call.path["response_id"]
    service.responses.delete(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input(service: Service, call: Call) -> Response:
    """GET /v1/responses/{response_id}/input_items: what its request added to the conversation."""
    _check_query(call, {"limit": None, "order": None, "after": None})
    items: list[Item] = msgspec.json.decode(_stored(service, call).input_items)
    order = call.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError("order", order, "must be 'asc' or 'desc'")
    if order == "desc":
        items.reverse()
    after = call.query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise RequestError("after", after, "is not the id of an input item of this response")
        items = items[places[0] + 1 :]
    limit = call.query.get("limit", "20")
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= _MAX_LISTED:
        raise RequestError("limit", limit, f"must be between 1 and {_MAX_LISTED}")
    shown = items[: int(limit)]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return json_response({"object": "list", "data": shown, **ends, "has_more": len(items) > len(shown)})


ROUTES = (
    Route(
        method="POST",
        path="/v1/responses",
        handle=create,
        body=ResponsesRequest,
        checked=CHECKED,
        table=RESPONSES,
        answers="json or events",
        answer=answer_shapes.ResponseObject,
    ),
    Route(
        method="POST",
        path="/v1/responses/input_tokens",
        handle=count_input,
        body=ResponsesRequest,
        checked=CHECKED,
        table=RESPONSES,
        answer=answer_shapes.ResponseInputTokens,
    ),
    Route(
        method="GET",
        path="/v1/responses/{response_id}",
        handle=retrieve,
        query=_RETRIEVE_QUERY,
        answer=answer_shapes.ResponseObject,
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{response_id}",
        handle=delete,
        query={},
        answer=answer_shapes.DeletedResponse,
    ),
    Route(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        handle=list_input,
        query=_LIST_QUERY,
        answer=answer_shapes.ItemList,
    ),
)


def _store(service: Service, asked: _Asked, response: dict[str, Any]) -> None:
    if not asked.request.store:
        return
    record = StoredResponse(
        response=msgspec.json.encode(response),
        input_items=msgspec.json.encode(asked.items),
        item_ids=tuple(
            dict.fromkeys(item["id"] for item in (*asked.items, *response["output"]) if is_own_id(item["id"]))
        ),
        previous_id=asked.request.previous_response_id,
        session_id=asked.session_id,
    )
    service.responses.put(response["id"], record)


def _stored(service: Service, call: Call) -> StoredResponse:
    response_id = call.path["response_id"]
    record = service.responses.get(response_id)
    if record is None:
        raise _not_found("response_id", response_id)
    return record


def _stored_conversation(service: Service, response_id: str | None) -> list[StoredResponse]:
    if response_id is None:
        return []
    records = service.responses.conversation(response_id)
    if records is None:
        raise _not_found("previous_response_id", response_id)
    return records


def _not_found(field: str, response_id: str) -> ApiError:
    reason = "no such response, or no longer: it or one before it was deleted, or made room for others"
    return ApiError(404, f"{field}={response_id!r}: {reason}", param=field, code="response_not_found")


def _items_of(record: StoredResponse) -> list[Item]:
    output: list[Item] = msgspec.json.decode(record.response)["output"]
    return [*msgspec.json.decode(record.input_items), *output]


def _check_query(call: Call, known: dict[str, str | None]) -> None:
    """Refuse other query parameters. known: each parameter's only supported value, None for any."""
    for name, value in call.query.items():
        if name not in known:
            raise RequestError(name, value, "is not supported")
        if known[name] not in (None, value.lower()):
            raise RequestError(name, value, f"is not supported (only {known[name]})")
