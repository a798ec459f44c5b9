"""The openai package, responses: a loop over its own items, by `.create()` or by `.stream()`; `stored`: the server
stores them."""

from __future__ import annotations

from typing import Any

import task
from openai import OpenAI
from openai.types.responses import Response

client = OpenAI(base_url=f"{task.URL}/v1", api_key="none", max_retries=0)
stored = "stored" in task.WAY


def respond(given: list[Any], previous: str | None) -> Response:
    asked: dict[str, Any] = {"model": task.MODEL, "input": given, "tools": task.RESPONSES_TOOLS}
    if stored:
        asked["previous_response_id"] = previous
    else:
        asked |= {"store": False, "include": ["reasoning.encrypted_content"]}
    if not task.STREAMED:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        return events.get_final_response()


history: list[Any] = []
answers: list[Any] = []
cached: list[int] = []
previous: str | None = None
for question in (task.QUESTION, task.AGAIN):
    history.append({"role": "user", "content": question})
    while True:
        response = respond(history, previous)
        previous = response.id
        assert response.usage is not None
        cached.append(response.usage.input_tokens_details.cached_tokens)
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": task.call(item.name, item.arguments)}
            for item in response.output
            if item.type == "function_call"
        ]
        history = results if stored else [*history, *response.output, *results]
        if not results:
            break
    answers.append(response.output_text)
task.report(answers, cached)
