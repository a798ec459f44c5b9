"""The LiteLLM library: a loop over its own message objects. The variant is the provider name that it uses for the
server."""

from __future__ import annotations

from typing import Any

import litellm
import task

(provider,) = task.WAY


def complete(messages: list[Any]) -> Any:
    asked: dict[str, Any] = {
        "model": f"{provider}/{task.MODEL}",
        "api_base": task.URL if provider == "anthropic" else f"{task.URL}/v1",
        "api_key": "none",
        "messages": messages,
        "tools": task.CHAT_TOOLS,
        "max_retries": 0,
    }
    if not task.STREAMED:
        return litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    return litellm.stream_chunk_builder(chunks, messages=messages)


task.chat(complete)
