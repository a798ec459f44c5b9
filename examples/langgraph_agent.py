"""LangChain and LangGraph: an agent with two tools runs on the engine in this process.

python -m examples.langgraph_agent
"""

from __future__ import annotations

import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI
from pydantic import SecretStr

from agentspec import AsyncEngine, EngineConfig
from examples import orders


async def session(client: AsyncOpenAI, model: str, *, stream: bool) -> list[Any]:
    """Two user turns; returns all messages."""
    chat = ChatOpenAI(
        model=model,
        root_async_client=client,
        async_client=client.chat.completions,
        api_key=SecretStr("in-process"),
        temperature=0,
        streaming=stream,
    )
    agent = create_agent(chat, [tool(function, parse_docstring=True) for function in orders.FUNCTIONS.values()])
    messages: list[Any] = []
    for question in (orders.FIRST, orders.SECOND):
        messages = (await agent.ainvoke({"messages": [*messages, {"role": "user", "content": question}]}))["messages"]
    return messages


async def main() -> None:
    async with AsyncEngine(EngineConfig()) as engine:
        for message in await session(engine.openai_client(), engine.info.model_id, stream=True):
            message.pretty_print()


if __name__ == "__main__":
    asyncio.run(main())
