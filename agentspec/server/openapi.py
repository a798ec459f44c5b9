"""The OpenAPI 3.1 document, generated from the routes and the types that validate their bodies.

Knows no endpoint, except for the bounds of fields, which are the same wherever a name occurs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any

import msgspec
from starlette.responses import Response

from agentspec import version
from agentspec.server.answer_shapes import AnthropicError, Error
from agentspec.server.door import GENERATING, OPEN_FOLDER, OPEN_PATHS
from agentspec.server.errors import is_anthropic
from agentspec.server.fields import Treatment, named
from agentspec.server.routes import Call, Route
from agentspec.server.service import SESSION_HEADERS, Service

Schema = dict[str, Any]

BOUNDS: Mapping[str, Schema] = {
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "logit_bias": {
        "propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "logprobs": {"minimum": 0, "maximum": 20},
    "max_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0, "maximum": 2**31 - 1},
    "min_p": {"minimum": 0, "exclusiveMaximum": 1},
    "n": {"minimum": 1, "maximum": 128},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 10},
    "seed": {"minimum": 0, "maximum": 2**63 - 1},
    "stop": {"minLength": 1, "maxItems": 16, "items": {"type": "string", "minLength": 1}},
    "stop_sequences": {"maxItems": 16, "items": {"type": "string", "minLength": 1}},
    "stop_token_ids": {"maxItems": 16, "items": {"type": "integer", "minimum": 0}},
    "temperature": {"minimum": 0, "maximum": 100},
    "tokens": {"items": {"type": "integer", "minimum": 0}},
    "top_k": {"minimum": -1},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
}
"""Constraints on a field's value beyond its type. types.SamplingParams and the endpoints check them."""

_COMPONENTS = "#/components/schemas/"
_JSON = "application/json"
_MEDIA = {
    "json": (_JSON,),
    "json or events": (_JSON, "text/event-stream"),
    "text": ("text/plain",),
    "html": ("text/html",),
    "asset": ("text/html", "text/css", "text/javascript"),
}

_STATUSES = {
    400: "The request is wrong; the message names the field.",
    401: "The API key is missing or wrong.",
    404: "It isn't served here, or is no longer kept.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    429: "Too many requests wait already, or the key has reached a limit; "
    "Retry-After says for how many seconds to stay away.",
    500: "The request failed.",
    503: "The engine is not running, or the server is about to stop.",
    504: "The request took longer than the server allows.",
}

_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_KEY_IF_ANY: list[Schema] = [{}, *({name: []} for name in _SECURITY)]


def described(routes: Sequence[Route]) -> tuple[Route, ...]:
    """The routes, and one that serves the document of them all."""

    @cache
    def encoded(root_path: str) -> bytes:
        servers = {"servers": [{"url": root_path}]} if root_path else {}
        return msgspec.json.encode(document(whole) | servers)

    async def describe(service: Service, call: Call) -> Response:
        """GET /openapi.json: this document."""
        return Response(encoded(service.root_path), media_type=_JSON)

    whole = (*routes, Route(method="GET", path="/openapi.json", handle=describe))
    return whole


def document(routes: Sequence[Route]) -> Schema:
    """The OpenAPI document of these routes, ready for JSON."""
    schema_of, components = _schemas(routes)
    for body, route in {route.body: route for route in routes if route.body is not None}.items():
        name = schema_of[body]["$ref"].removeprefix(_COMPONENTS)
        components[name] = _body(components[name], route, schema_of)
    paths: Schema = {}
    for route in routes:
        path = re.sub(
            r"{(\w+):path}", r"{\1}", route.path
        )  # OpenAPI can't express a path parameter that may contain slashes
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentspec", "version": version()},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
    }


def _schemas(routes: Iterable[Route]) -> tuple[Mapping[Any, Schema], Schema]:
    """The schema of every type that the routes refer to, and the components that these schemas refer to."""
    kinds: dict[Any, None] = {Error: None, AnthropicError: None}
    for route in routes:
        named = (route.body, route.answer, *chain.from_iterable(route.checked.values()))
        kinds.update(dict.fromkeys(kind for kind in named if kind is not None))
    schemas, components = msgspec.json.schema_components(list(kinds), ref_template=_COMPONENTS + "{name}")
    for schema in components.values():
        if schema.get("additionalProperties") is False:
            del schema["additionalProperties"]  # fields.check leaves unknown fields out
    return dict(zip(kinds, schemas, strict=True)), components


def _body(schema: Schema, route: Route, schema_of: Mapping[Any, Schema]) -> Schema:
    """The schema of a whole body: the struct's, extended by the table's fields. Every optional field may be null, as in
    fields.read."""
    required = schema["required"]
    fields: Schema = {}
    for name, given in schema["properties"].items():
        asked = (_checked(name, route, schema_of) or given) | BOUNDS.get(name, {})
        fields[name] = asked if name in required else _or_null(asked)
    fields |= {name: {"enum": [*route.table[name].idle, None]} for name in named(Treatment.REFUSED, route.table)}
    fields |= {name: {} for name in named(Treatment.ACCEPTED, route.table)}
    return schema | {"properties": fields, "additionalProperties": True}


def _checked(name: str, route: Route, schema_of: Mapping[Any, Schema]) -> Schema:
    options = [schema_of[kind] for kind in route.checked.get(name, ())]
    if f"{name}[]" in route.checked:
        options.append({"type": "array", "items": {"anyOf": [schema_of[kind] for kind in route.checked[f"{name}[]"]]}})
    return options[0] if len(options) == 1 else {"anyOf": options} if options else {}


def _or_null(schema: Schema) -> Schema:
    if {"type": "null"} in schema.get("anyOf", ()):
        return schema
    default = {"default": schema["default"]} if "default" in schema else {}
    return {"anyOf": [{key: value for key, value in schema.items() if key != "default"}, {"type": "null"}]} | default


def _operation(route: Route, schema_of: Mapping[Any, Schema]) -> Schema:
    answer = {"type": "object"} if route.answer is None else schema_of[route.answer]
    # OpenAPI 3.1 can't describe the events of a stream.
    schemas: Schema = {_JSON: {"schema": answer}, "text/event-stream": {}}
    content = {media: schemas.get(media, {"schema": {"type": "string"}}) for media in _MEDIA[route.answers]}
    error = {_JSON: {"schema": schema_of[AnthropicError if is_anthropic(route.path) else Error]}}
    responses: Schema = {"200": {"description": "The answer.", "content": content}}
    for status in sorted(_errors(route)):
        responses[str(status)] = {"description": _STATUSES[status], "content": error}
    operation: Schema = {
        "summary": (route.handle.__doc__ or "").strip().partition("\n")[0],
        "parameters": _parameters(route),
        "responses": responses,
        "security": _KEY_IF_ANY if 401 in _errors(route) else [],
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema_of[route.body]}}}
    return operation


def _errors(route: Route) -> set[int]:
    statuses = set(route.errors)
    if route.path not in OPEN_PATHS and not route.path.startswith(OPEN_FOLDER):
        statuses.add(401)
    if route.body is not None:
        statuses |= {400, 404, 408, 413, 429}
    if route.query is not None:
        statuses.add(400)
    if "{" in route.path:
        statuses.add(404)
    if route.path in GENERATING:
        statuses |= {500, 503, 504}
    return statuses


def _parameters(route: Route) -> list[Schema]:
    named = re.findall(r"{(\w+)(?::path)?}", route.path)
    of_path = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in named]
    of_query = [{"name": name, "in": "query", "schema": schema} for name, schema in (route.query or {}).items()]
    session = "The session: requests of one agent share it. The first of these headers counts."
    headers = SESSION_HEADERS if route.path in GENERATING else ()
    return [
        *of_path,
        *of_query,
        *({"name": name, "in": "header", "description": session, "schema": {"type": "string"}} for name in headers),
    ]
