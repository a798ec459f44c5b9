"""The OpenAPI document is correct: it lists all routes and fields, and schemathesis finds no undocumented answer."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import hypothesis
import jsonschema
import pytest
import schemathesis
from fastapi.routing import APIRoute
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.python import asgi
from schemathesis.python.asgi import ASGIClient, get_client

from agentspec.errors import RequestError
from agentspec.server.app import ROUTES, create_app
from agentspec.server.fields import Treatment, named
from agentspec.server.openapi import BOUNDS, document
from agentspec.server.pipeline import TextPipeline
from agentspec.server.transport import InProcessTransport
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.prompt import PromptBuilder
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from agentspec.wire import Event, Submit
from tests.fakes.engine_client import INFO, ScriptedEngine, ended, said
from tests.fakes.text import END_OF_TURN, byte_backend
from tests.server.conftest import TEMPLATE

POSTS = [route for route in ROUTES if route.body is not None]
DOCUMENT = document(ROUTES)
CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"

LEAST: dict[str, dict[str, Any]] = {
    "ChatRequest": {"messages": [{"role": "user", "content": "x"}]},
    "CompletionRequest": {"prompt": "x"},
    "MessagesRequest": {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    "CountRequest": {"messages": [{"role": "user", "content": "x"}]},
    "ResponsesRequest": {"input": "x"},
    "TokenizeRequest": {"prompt": "x"},
    "DetokenizeRequest": {"tokens": [1]},
}
"""The required fields of a body, beside the model."""


class Engine(ScriptedEngine):
    """Refuses negative ids as real engines do. The app leaves that to them."""

    async def stream(self, submit: Submit) -> AsyncGenerator[Event, None]:
        if any(token < 0 for token in submit.prompt_ids):
            raise RequestError("prompt_ids", min(submit.prompt_ids), "is not a token id")
        async for event in super().stream(submit):
            yield event


def new_app() -> Any:
    tokenizer = Tokenizer(byte_backend(), eos_token=END_OF_TURN)
    text = TextPipeline(tokenizer, PromptBuilder(tokenizer, ChatTemplate(TEMPLATE), TurnMemory()))
    return create_app(Engine([*said("well, ", CALL), ended()]), text)


def ask(*requests: tuple[str, str, Any]) -> list[httpx.Response]:
    """The answers to (method, path, JSON body or None), requested in order."""

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=InProcessTransport(new_app()), base_url="http://in-process", timeout=None
        ) as client:
            return [await client.request(method, path, json=body) for method, path, body in requests]

    return asyncio.run(run())


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    return functools.reduce(lambda node, name: node[name], reference.removeprefix("#/").split("/"), DOCUMENT)


def body_schema(path: str) -> dict[str, Any]:
    return resolved(DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema | {"components": DOCUMENT["components"]})


def test_document_lists_every_route() -> None:
    (answer,) = ask(("GET", "/openapi.json", None))
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == DOCUMENT
    routes = [route for route in new_app().routes if isinstance(route, APIRoute)]
    served = {(method, route.path.replace(":path}", "}")) for route in routes for method in route.methods or ()}
    assert served == {(method.upper(), path) for path, operations in DOCUMENT["paths"].items() for method in operations}


def test_fastapi_documentation_routes_are_disabled() -> None:
    assert [answer.status_code for answer in ask(("GET", "/docs", None), ("GET", "/redoc", None))] == [404, 404]


def test_schemas_are_valid_json_schemas() -> None:
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert validator(schema).is_valid([]) is False, name  # resolves every reference


@pytest.mark.parametrize("route", POSTS, ids=lambda route: route.path)
def test_documented_fields_are_the_accepted_ones(route: Any) -> None:
    """Each with a null, which means absent; and fields with only some allowed values, with each of these."""
    schema = body_schema(route.path)
    least = {"model": INFO.model_id, **LEAST[route.body.__name__]}
    names = schema["properties"].keys()
    bodies = [least | {name: None} for name in names if name not in least]
    bodies += [
        least | {name: value} for name in named(Treatment.REFUSED, route.table) for value in route.table[name].idle
    ]
    bodies += [least | {name: {"some": "thing"}} for name in ("unheard_of", *named(Treatment.ACCEPTED, route.table))]
    for body, answer in zip(bodies, ask(*[("POST", route.path, body) for body in bodies]), strict=True):
        assert answer.status_code == 200, (body, answer.text)
        assert validator(schema).is_valid(body), body
    refused = [least | {name: {"some": "thing"}} for name in named(Treatment.REFUSED, route.table)]
    for body, answer in zip(refused, ask(*[("POST", route.path, body) for body in refused]), strict=True):
        assert answer.status_code == 400, (body, answer.text)
        assert not validator(schema).is_valid(body), body
    without = ask(*[("POST", route.path, least | {name: None}) for name in schema["required"]])
    assert [(answer.status_code, answer.json()["error"]["message"]) for answer in without] == [
        (400, f"{name}=None: is required") for name in schema["required"]
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": {}}]},
        ),
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt": ["x", 1]}),
        ("/v1/responses", {"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/tokenize", {"messages": [{"role": "somebody", "content": "x"}]}),
    ],
)
def test_unconverted_fields_have_the_schema_of_their_checks(path: str, body: dict[str, Any]) -> None:
    body = {"model": INFO.model_id, **body}
    assert ask(("POST", path, body))[0].status_code == 400
    assert not validator(body_schema(path)).is_valid(body)


def test_bounds_refer_to_existing_fields() -> None:
    assert set(BOUNDS) <= {name for route in POSTS for name in body_schema(route.path)["properties"]}


@pytest.mark.parametrize(
    "name",
    [name for name, bound in BOUNDS.items() if bound.keys() & {"minimum", "exclusiveMinimum"} and name != "logprobs"],
)
def test_bounds_equal_the_limits_of_validation(name: str) -> None:
    bound = BOUNDS[name]
    taken = [bound[side] for side in ("minimum", "maximum") if side in bound]
    refused = [bound[side] for side in ("exclusiveMinimum", "exclusiveMaximum") if side in bound]
    refused += [bound[side] + step for side, step in (("minimum", -1), ("maximum", 1)) if side in bound]
    least = {"model": INFO.model_id, **LEAST["ChatRequest"], "logprobs": True}
    answers = ask(*[("POST", "/v1/chat/completions/render", least | {name: value}) for value in (*taken, *refused)])
    assert [answer.status_code for answer in answers] == [200] * len(taken) + [400] * len(refused)
    assert all(answer.json()["error"]["param"].startswith(name) for answer in answers[len(taken) :])


def test_routes_with_the_same_body_type_have_the_same_fields() -> None:
    for route in POSTS:
        for other in POSTS:
            if route.body is other.body:
                assert (route.checked, route.table) == (other.checked, other.table), route.path


def for_the_served_model() -> dict[str, Any]:
    """The document with the model's name in place of any text: otherwise most generated requests would get 404."""
    components = DOCUMENT["components"]
    schemas = {
        name: schema | {"properties": schema["properties"] | {"model": {"const": INFO.model_id}}}
        if name in LEAST
        else schema
        for name, schema in components["schemas"].items()
    }
    return DOCUMENT | {"components": components | {"schemas": schemas}}


load_all_checks()
WANTED: Any = CHECKS.get_by_names(
    ["not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)


@pytest.fixture(
    params=[(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods],
    ids=lambda operation: " ".join(operation),
)
def api(request: pytest.FixtureRequest) -> Any:
    """The document's description of one operation. Generating its cases is slow, so each test does it for itself
    instead of every process that collects the tests."""
    request.node._nodeid = request.node.nodeid  # schemathesis 4.32 reads it, pytest 9.2 no longer has it
    path, method = request.param
    schema = schemathesis.openapi.from_dict(
        for_the_served_model() | {"paths": {path: {method: DOCUMENT["paths"][path][method]}}}
    )
    schema.app = new_app()
    return schema


class SameThread:
    """Runs what schemathesis would run in an event loop of another thread, one call after the other. Handing over each
    request takes longer than most answers."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        async def run() -> Any:
            result = function(*args)
            return await result if inspect.isawaitable(result) else result

        return self.loop.run_until_complete(run())


@pytest.fixture(scope="module", autouse=True)
def _same_thread() -> Iterator[None]:
    portal = SameThread()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asgi, "_get_portal", lambda: portal)
        yield
    portal.loop.close()


@functools.lru_cache(maxsize=1)
def client_of(app: Any) -> ASGIClient:
    """One client for all requests to an app. It doesn't look through the environment for proxies before each."""
    client = get_client(app)
    client.trust_env = False
    return client


@schemathesis.pytest.from_fixture("api").parametrize()
@hypothesis.settings(max_examples=8, derandomize=True, deadline=None, database=None)
def test_every_answer_matches_the_document(case: schemathesis.Case[Any]) -> None:
    case.call_and_validate(session=client_of(case.operation.app), checks=WANTED)
