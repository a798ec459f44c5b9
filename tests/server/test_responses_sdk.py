"""The openai package's tool loops over /v1/responses: `parse` and `stream`, the conversation stored by the client or by
the server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types.responses import ParsedResponse
from pydantic import BaseModel

from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.server.test_responses import sdk
from tests.server.test_responses_tools import PATCH, call_text, prompt

Connect = Callable[..., httpx.AsyncClient]


class Look(BaseModel):
    """Looks at a place."""

    where: str
    depth: int


class Found(BaseModel):
    what: str


CRM: dict[str, Any] = {
    "type": "namespace",
    "name": "crm",
    "description": "Customers.",
    "tools": [
        {
            "type": "function",
            "name": "fetch",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}},
                "required": ["key"],
                "additionalProperties": False,
            },
        }
    ],
}
TOOLS: list[Any] = [openai.pydantic_function_tool(Look), PATCH, CRM, {"type": "web_search"}]
SCRIPTS = [
    [*said("First I lo", "ok.</think>\n\n", call_text("Look", where="under it", depth="2")), ended()],
    [
        *said(
            "Then both.</think>\n\n", call_text("apply_patch", input="+ a\n"), "\n", call_text("crm__fetch", key="k")
        ),
        ended(),
    ],
    [*said('So.</think>\n\n{"what": ', '"a coin"}'), ended()],
]


async def respond(
    client: openai.AsyncOpenAI, asked: dict[str, Any], *, stream: bool
) -> tuple[ParsedResponse[Found], dict[str, str]]:
    """The answer, and the stream's deltas joined by kind."""
    usual: dict[str, Any] = {"model": "scripted", "tools": TOOLS, "text_format": Found}
    asked = usual | {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}} | asked
    if not stream:
        return await client.responses.parse(**asked), {}
    deltas: dict[str, str] = {}
    async with client.responses.stream(**asked) as events:
        async for event in events:
            if event.type.endswith(".delta"):
                deltas[event.type] = deltas.get(event.type, "") + str(getattr(event, "delta", ""))
        return await events.get_final_response(), deltas


def results(response: ParsedResponse[Found]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for item in response.output:
        if item.type == "function_call":
            found.append(
                {"type": "function_call_output", "call_id": item.call_id, "output": json.dumps({"done": item.name})}
            )
        elif item.type == "custom_tool_call":
            found.append(
                {"type": "custom_tool_call_output", "call_id": item.call_id, "output": f"applied {item.input}"}
            )
    return found


@pytest.mark.parametrize("kept", ["here", "by the client", "by the client, as dicts", "by the client, by names"])
@pytest.mark.parametrize("stream", [False, True])
def test_sdk_runs_a_loop_of_two_tool_turns(connect: Connect, stream: bool, kept: str) -> None:
    engine = ScriptedEngine(*SCRIPTS)

    async def run() -> list[tuple[ParsedResponse[Found], dict[str, str]]]:
        turns: list[tuple[ParsedResponse[Found], dict[str, str]]] = []
        history: list[Any] = [{"role": "user", "content": "What is there?"}]
        given: list[Any] = history
        asked: dict[str, Any] = {"store": kept in ("here", "by the client, by names")}
        if not asked["store"]:
            asked["include"] = ["reasoning.encrypted_content"]
        async with connect(engine) as http:
            while given:
                turns.append(await respond(sdk(http), asked | {"input": given}, stream=stream))
                response = turns[-1][0]
                given = results(response)
                if kept == "here":
                    asked["previous_response_id"] = response.id
                    continue
                said_items: dict[str, list[Any]] = {
                    "by the client": list(response.output),
                    "by the client, as dicts": [item.to_dict() for item in response.output],
                    "by the client, by names": [
                        {"type": "item_reference", "id": cast(Any, item).id} for item in response.output
                    ],
                }
                history += [*said_items[kept], *given]
                given = history if given else []
        return turns

    turns = asyncio.run(run())
    assert [[item.type for item in response.output] for response, _ in turns] == [
        ["reasoning", "function_call"],
        ["reasoning", "custom_tool_call", "function_call"],
        ["reasoning", "message"],
    ]
    (_, look), (_, patch, fetch), _ = [response.output for response, _ in turns]
    assert look.type == "function_call"
    assert look.parsed_arguments == Look(where="under it", depth=2)
    assert patch.type == "custom_tool_call"
    assert (patch.name, patch.input) == ("apply_patch", "+ a\n")
    assert fetch.type == "function_call"
    assert (fetch.name, fetch.namespace, fetch.parsed_arguments) == ("fetch", "crm", {"key": "k"})
    assert turns[-1][0].output_parsed == Found(what="a coin")
    assert prompt(engine).count("applied + a") == prompt(engine).count('{"done": "fetch"}') == 1
    if stream:
        assert turns[1][1]["response.custom_tool_call_input.delta"] == "+ a\n"
        assert json.loads(turns[1][1]["response.function_call_arguments.delta"]) == {"key": "k"}
    assert all(word in prompt(engine) for word in ("First I look.", "Then both."))
