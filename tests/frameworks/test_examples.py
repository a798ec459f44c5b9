"""Agent frameworks and SDKs, the real packages, run sessions of two turns with tools on the bundled model: the examples, as they are."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentspec.config import EngineConfig
from agentspec.engine import AsyncEngine

pytest.importorskip("openai")
pytest.importorskip("anthropic")
pytest.importorskip("agents")
pytest.importorskip("langgraph")
pytest.importorskip("pydantic_ai")

from examples import anthropic_messages, langgraph_agent, openai_agents, openai_chat, openai_responses, orders, pydantic_ai_agent

_MODEL = "tiny-agent"

Session = Callable[[AsyncEngine, bool], Awaitable[Any]]

SESSIONS: dict[str, Session] = {
    "openai chat completions": lambda engine, stream: openai_chat.session(engine.openai_client(), _MODEL, stream=stream),
    "openai responses": lambda engine, stream: openai_responses.session(engine.openai_client(), _MODEL, stream=stream),
    "anthropic": lambda engine, stream: anthropic_messages.session(engine.anthropic_client(), _MODEL, stream=stream),
    "Agents SDK, responses": lambda engine, stream: openai_agents.session(engine.openai_client(), _MODEL, stream=stream),
    "Agents SDK, chat completions": lambda engine, stream: openai_agents.session(engine.openai_client(), _MODEL, stream=stream, responses=False),
    "LangGraph": lambda engine, stream: langgraph_agent.session(engine.openai_client(), _MODEL, stream=stream),
    "Pydantic AI": lambda engine, stream: pydantic_ai_agent.session(engine.openai_client(), _MODEL, stream=stream),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_calls_its_tools(name: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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
            return await SESSIONS[name](engine, stream), await engine.stats()

    result, stats = asyncio.run(run())
    assert called == [("orders_get", "O-4071"), ("orders_cancel", "O-4071")]
    assert "cancelled" in _shown(result[-1])
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert stats["engine"]["finished"]["stop"] == 4, "two turns, each with a call and an answer"
    assert stats["engine"]["cached_tokens"] > 0


def _shown(last: Any) -> str:
    """Whatever a framework's last message or result says."""
    return json.dumps(last, default=lambda value: getattr(value, "final_output", None) or str(value))
