"""OpenAI's Agents SDK: an agent with two function tools runs on the engine in this process.

python -m examples.openai_agents
"""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.result import RunResultBase
from openai import AsyncOpenAI

from agentspec import AsyncEngine, EngineConfig
from examples import orders


async def session(client: AsyncOpenAI, model: str, *, stream: bool, responses: bool = True) -> list[RunResultBase]:
    """Two user turns; returns both results. `responses`: with /v1/responses, else with /v1/chat/completions."""
    set_tracing_disabled(True)
    agent = Agent(
        name="Clerk",
        model=(OpenAIResponsesModel if responses else OpenAIChatCompletionsModel)(model, client),
        model_settings=ModelSettings(temperature=0),
        tools=[function_tool(tool, strict_mode=False) for tool in orders.FUNCTIONS.values()],
    )
    results: list[RunResultBase] = []
    history: list[Any] = []
    for question in (orders.FIRST, orders.SECOND):
        history.append({"role": "user", "content": question})
        if stream:
            running = Runner.run_streamed(agent, history)
            async for _ in running.stream_events():
                pass
            results.append(running)
        else:
            results.append(await Runner.run(agent, history))
        history = results[-1].to_input_list()
    return results


async def main() -> None:
    async with AsyncEngine(EngineConfig()) as engine:
        for result in await session(engine.openai_client(), engine.info.model_id, stream=True):
            print(result.final_output)


if __name__ == "__main__":
    asyncio.run(main())
