"""The openai package, responses: the server keeps the conversation, each request refers to the one before it.

python -m examples.openai_responses
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI
from openai.types.responses import Response

from agentspec import AsyncEngine, EngineConfig
from examples import orders


async def session(client: AsyncOpenAI, model: str, *, stream: bool) -> list[Response]:
    """Two user turns; returns every response."""
    responses: list[Response] = []
    for question in (orders.FIRST, orders.SECOND):
        given: Any = question
        while given:
            responses.append(
                await _respond(client, model, given, responses[-1].id if responses else None, stream=stream)
            )
            given = [
                {
                    "type": "function_call_output",
                    "call_id": item.call_id,
                    "output": orders.call(item.name, json.loads(item.arguments)),
                }
                for item in responses[-1].output
                if item.type == "function_call"
            ]
    return responses


async def _respond(client: AsyncOpenAI, model: str, given: Any, previous: str | None, *, stream: bool) -> Response:
    asked: dict[str, Any] = {"model": model, "input": given, "tools": orders.RESPONSES_TOOLS, "temperature": 0}
    if previous is not None:
        asked["previous_response_id"] = previous
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        return await events.get_final_response()


async def main() -> None:
    async with AsyncEngine(EngineConfig()) as engine:
        for response in await session(engine.openai_client(), engine.info.model_id, stream=True):
            print([item.to_dict() for item in response.output])


if __name__ == "__main__":
    asyncio.run(main())
