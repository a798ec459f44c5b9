"""Pydantic AI: an agent with two tools runs on the engine in this process.

python -m examples.pydantic_ai_agent
"""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agentspec import AsyncEngine, EngineConfig
from examples import orders


async def session(client: AsyncOpenAI, model: str, *, stream: bool) -> list[Any]:
    """Two user turns; returns all messages."""
    chat = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client), settings={"temperature": 0.0})
    agent = Agent(chat, tools=list(orders.FUNCTIONS.values()))
    messages: list[Any] = []
    for question in (orders.FIRST, orders.SECOND):
        if stream:
            async with agent.run_stream(question, message_history=messages) as running:
                await running.get_output()
            messages = running.all_messages()
        else:
            messages = (await agent.run(question, message_history=messages)).all_messages()
    return messages


async def main() -> None:
    async with AsyncEngine(EngineConfig()) as engine:
        for message in await session(engine.openai_client(), engine.info.model_id, stream=True):
            print(message)


if __name__ == "__main__":
    asyncio.run(main())
