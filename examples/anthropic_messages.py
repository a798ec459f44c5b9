"""The anthropic package: a session of two turns with tools, streaming, and the engine in this process.

python -m examples.anthropic_messages
"""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic import AsyncAnthropic

from agentspec import AsyncEngine, EngineConfig
from examples import orders


async def session(client: AsyncAnthropic, model: str, *, stream: bool) -> list[Any]:
    """Two user turns; returns all messages."""
    messages: list[Any] = []
    for question in (orders.FIRST, orders.SECOND):
        messages.append({"role": "user", "content": question})
        calling = True
        while calling:
            answer = await _answer(client, model, messages, stream=stream)
            messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": orders.call(block.name, block.input)}
                for block in answer.content
                if block.type == "tool_use"
            ]
            calling = bool(results)
            if calling:
                messages.append({"role": "user", "content": results})
    return messages


async def _answer(client: AsyncAnthropic, model: str, messages: list[Any], *, stream: bool) -> Any:
    asked: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "tools": orders.ANTHROPIC_TOOLS,
        "max_tokens": 1000,
        "extra_body": {"temperature": 0},
    }
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        return await events.get_final_message()


async def main() -> None:
    async with AsyncEngine(EngineConfig()) as engine:
        for message in await session(engine.anthropic_client(), engine.info.model_id, stream=True):
            print(message)


if __name__ == "__main__":
    asyncio.run(main())
