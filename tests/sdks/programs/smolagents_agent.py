"""smolagents: the variant is the agent's class, `ToolCallingAgent` or `CodeAgent`."""

from __future__ import annotations

import smolagents
import task

(kind,) = task.WAY
model = smolagents.OpenAIModel(model_id=task.MODEL, api_base=f"{task.URL}/v1", api_key="none")
tools = [smolagents.tool(function) for function in task.FUNCTIONS.values()]
agent = getattr(smolagents, kind)(tools=tools, model=model, max_steps=5, stream_outputs=task.STREAMED)
task.report([agent.run(task.QUESTION), agent.run(task.AGAIN, reset=False)])
