"""The openai package, chat completions: a loop over its own message objects, by `.create()` or by `.stream()`."""

from __future__ import annotations

from typing import Any

import task
from openai import OpenAI
from openai.types.chat import ChatCompletion

client = OpenAI(base_url=f"{task.URL}/v1", api_key="none", max_retries=0)


def complete(messages: list[Any]) -> ChatCompletion:
    asked: dict[str, Any] = {"model": task.MODEL, "messages": messages, "tools": task.CHAT_TOOLS}
    if not task.STREAMED:
        return client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        return stream.get_final_completion()


task.chat(complete)
