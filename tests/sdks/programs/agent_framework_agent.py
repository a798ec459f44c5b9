"""Microsoft's Agent Framework: an agent with its responses client (`OpenAIChatClient`) or its chat client
(`OpenAIChatCompletionClient`)."""

from __future__ import annotations

import asyncio

import task
from agent_framework import Agent, openai

(kind,) = task.WAY


async def main() -> None:
    client = getattr(openai, kind)(model=task.MODEL, base_url=f"{task.URL}/v1", api_key="none")
    agent = Agent(client=client, name="Clerk", instructions="You book rooms.", tools=list(task.FUNCTIONS.values()))
    session = agent.create_session()
    answers = []
    for question in (task.QUESTION, task.AGAIN):
        running = agent.run(question, session=session, stream=task.STREAMED)
        answer = await running.get_final_response() if task.STREAMED else await running
        answers.append(answer.text)
    task.report(answers)


asyncio.run(main())
