"""The openai package's helpers that parse: `.parse()` or `.stream()` with strict tools made of pydantic models, and an answer that is one, too.

The way is the API: `chat` or `responses`. The served model itself answers, held to these forms; so the task is one that it knows.
"""

from __future__ import annotations

from typing import Any, Literal

import openai
import task
from openai import OpenAI
from pydantic import BaseModel

from examples import orders


class Verdict(BaseModel):
    order_id: Literal["O-4071", "O-4072"]
    status: Literal["paid", "shipped", "cancelled"]


class OrderNumber(BaseModel):
    order_id: str


client = OpenAI(base_url=f"{task.URL}/v1", api_key="none", max_retries=0)
(way,) = task.WAY
answers: list[Any] = []
cached: list[int] = []


def run(name: str, arguments: Any) -> str:
    assert isinstance(arguments, OrderNumber), "arguments are parsed"
    task.calls.append((name, arguments.model_dump()))
    return orders.call(name, arguments.model_dump())


def chat() -> None:
    tools = [openai.pydantic_function_tool(OrderNumber, name=name, description=text) for name, text in orders.DESCRIPTIONS.items()]
    messages: list[Any] = []
    for question in (orders.FIRST, orders.SECOND):
        messages.append({"role": "user", "content": question})
        while True:
            asked: dict[str, Any] = {"model": task.MODEL, "messages": messages, "tools": tools, "response_format": Verdict, "temperature": 0}
            if task.STREAMED:
                with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
                    completion = stream.get_final_completion()
            else:
                completion = client.chat.completions.parse(**asked)
            message = completion.choices[0].message
            messages.append(message)
            cached.append(completion.usage.prompt_tokens_details.cached_tokens)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": run(call.function.name, call.function.parsed_arguments)})
        answers.append(message.parsed.model_dump())


def responses() -> None:
    tools = [openai.pydantic_function_tool(OrderNumber, name=name, description=text)["function"] for name, text in orders.DESCRIPTIONS.items()]
    history: list[Any] = []
    for question in (orders.FIRST, orders.SECOND):
        history.append({"role": "user", "content": question})
        while True:
            asked: dict[str, Any] = {
                "model": task.MODEL,
                "input": history,
                "tools": [{"type": "function", **tool} for tool in tools],
                "text_format": Verdict,
                "temperature": 0,
                "store": False,
            }
            if task.STREAMED:
                with client.responses.stream(**asked) as events:
                    response = events.get_final_response()
            else:
                response = client.responses.parse(**asked)
            history += response.output
            cached.append(response.usage.input_tokens_details.cached_tokens)
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                parsed = OrderNumber.model_validate(call.parsed_arguments)
                history.append({"type": "function_call_output", "call_id": call.call_id, "output": run(call.name, parsed)})
        answers.append(response.output_parsed.model_dump())


{"chat": chat, "responses": responses}[way]()
task.report(answers, cached)
