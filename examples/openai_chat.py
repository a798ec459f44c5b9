"""The openai package, chat completions: a session of two turns with tools, streaming, and the engine in this process.

python -m examples.openai_chat
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from openai import AsyncOpenAI

from agentspec import AsyncEngine, EngineConfig
from examples import orders


async def session(client: AsyncOpenAI, model: str, *, stream: bool) -> list[Any]:
    """Two user turns; returns all messages."""
    messages: list[Any] = []
    for question in (orders.FIRST, orders.SECOND):
        messages.append({"role": "user", "content": question})
        while messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
            messages.append(await (_streamed if stream else _whole)(client, model, messages))
            for call in messages[-1].get("tool_calls") or []:
                function = call["function"]
                result = orders.call(function["name"], json.loads(function["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return messages


async def _whole(client: AsyncOpenAI, model: str, messages: list[Any]) -> dict[str, Any]:
    answer = await client.chat.completions.create(
        model=model, messages=messages, tools=orders.OPENAI_TOOLS, temperature=0
    )
    return answer.choices[0].message.model_dump(exclude_none=True)


async def _streamed(client: AsyncOpenAI, model: str, messages: list[Any]) -> dict[str, Any]:
    """The SDK joins the deltas."""
    async with client.chat.completions.stream(
        model=model, messages=messages, tools=orders.OPENAI_TOOLS, temperature=0
    ) as stream:
        answer = await stream.get_final_completion()
    return answer.choices[0].message.model_dump(exclude_none=True, exclude={"parsed": True})


async def main() -> None:
    async with AsyncEngine(EngineConfig()) as engine:
        for message in await session(engine.openai_client(), engine.info.model_id, stream=True):
            print(json.dumps(message))


if __name__ == "__main__":
    asyncio.run(main())
