"""The openai package's parsing helpers: `.parse()` or `.stream()` with strict tools made of pydantic models, and
answers in the form of such a model.

The variant is the API: `chat` or `responses`. The served model itself generates the output, constrained to these forms;
so the task is one that it knows. It prefers calls to an answer in an unseen form, so requests for an answer have no
tools to call.
"""

from __future__ import annotations

from collections.abc import Callable
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
TOOLS = [
    openai.pydantic_function_tool(OrderNumber, name=name, description=text)
    for name, text in orders.DESCRIPTIONS.items()
]


def run(name: str, arguments: Any) -> str:
    assert isinstance(arguments, OrderNumber), "arguments are parsed"
    task.calls.append((name, arguments.model_dump()))
    return orders.call(name, arguments.model_dump())


def chat(messages: list[Any], **asked: Any) -> tuple[Any, int]:
    """Send one request; append its message and the results of its calls to the history. Returns the parsed answer (None
    for calls) and the cached tokens."""
    asked |= {"model": task.MODEL, "messages": messages, "tools": TOOLS, "temperature": 0}
    if asked.pop("form", False):
        asked["response_format"] = Verdict
    if task.STREAMED:
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            completion = stream.get_final_completion()
    else:
        completion = client.chat.completions.parse(**asked)
    message = completion.choices[0].message
    messages.append(message)
    for call in message.tool_calls or []:
        messages.append(
            {
                "role": "tool",
                "tool_call_id": call.id,
                "content": run(call.function.name, call.function.parsed_arguments),
            }
        )
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    return message.parsed, completion.usage.prompt_tokens_details.cached_tokens or 0


def responses(history: list[Any], **asked: Any) -> tuple[Any, int]:
    """Like the chat variant, over the responses API."""
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked |= {"model": task.MODEL, "input": history, "tools": tools, "temperature": 0, "store": False}
    if asked.pop("form", False):
        asked["text_format"] = Verdict
    if task.STREAMED:
        with client.responses.stream(**asked) as events:
            response = events.get_final_response()
    else:
        response = client.responses.parse(**asked)
    history += response.output
    for item in response.output:
        if item.type == "function_call":
            # A dict, unlike in chat: these tools were made for the chat API.
            result = run(item.name, OrderNumber.model_validate(item.parsed_arguments))
            history.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    assert response.usage is not None
    return response.output_parsed, response.usage.input_tokens_details.cached_tokens


(way,) = task.WAY
ways: dict[str, Callable[..., tuple[Any, int]]] = {"chat": chat, "responses": responses}
ask = ways[way]
history: list[Any] = []
answers: list[Any] = []
cached: list[int] = []
for question in (orders.FIRST, orders.SECOND):
    history.append({"role": "user", "content": question})
    cached.append(ask(history)[1])
    answer, tokens = ask(history, form=True, tool_choice="none")
    answers.append(answer.model_dump())
    cached.append(tokens)
task.report(answers, cached)
