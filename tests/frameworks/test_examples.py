"""The examples run unchanged: real agent frameworks and SDKs, two turns with tools on the bundled model."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from agentspec.config import EngineConfig
from agentspec.engine.in_process import AsyncEngine
from examples import orders

_MODEL = "tiny-agent"

SESSIONS: dict[str, tuple[str, str, dict[str, bool]]] = {
    "openai chat completions": ("openai", "openai_chat", {}),
    "openai responses": ("openai", "openai_responses", {}),
    "anthropic": ("anthropic", "anthropic_messages", {}),
    "Agents SDK, responses": ("agents", "openai_agents", {}),
    "Agents SDK, chat completions": ("agents", "openai_agents", {"responses": False}),
    "LangGraph": ("langgraph", "langgraph_agent", {}),
    "Pydantic AI": ("pydantic_ai", "pydantic_ai_agent", {}),
}
"""(package, example, session inputs). Each test imports its own package: importing all during collection takes
seconds."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", SESSIONS)
def test_example_session_calls_its_tools(name: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    package, module, settings = SESSIONS[name]
    pytest.importorskip(package)
    example = importlib.import_module(f"examples.{module}")
    called: list[tuple[str, str]] = []

    def recorded(function: Callable[[str], str]) -> Callable[[str], str]:
        original = function.__code__

        def run(order_id: str) -> str:
            called.append((original.co_name, order_id))
            return function(order_id)

        run.__name__, run.__doc__, run.__annotations__ = function.__name__, function.__doc__, function.__annotations__
        return run

    monkeypatch.setattr(orders, "FUNCTIONS", {tool: recorded(function) for tool, function in orders.FUNCTIONS.items()})

    async def run() -> tuple[Any, dict[str, Any]]:
        async with AsyncEngine(EngineConfig(device="cpu")) as engine:
            client = engine.anthropic_client() if package == "anthropic" else engine.openai_client()
            return await example.session(client, _MODEL, stream=stream, **settings), await engine.stats()

    result, stats = asyncio.run(run())
    assert called == [("orders_get", "O-4071"), ("orders_cancel", "O-4071")]
    assert "cancelled" in _shown(result[-1])
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["engine"]["finished"]["stop"] == 4, "two turns, each with a call and an answer"
    assert stats["engine"]["cached_tokens"] > 0


def _shown(last: Any) -> str:
    """Return the text of a framework's last message or result."""
    return json.dumps(last, default=lambda value: getattr(value, "final_output", None) or str(value))
