"""A live session against agentspec's server: the loop and the server accept each other's messages, calls and ids."""

from __future__ import annotations

import asyncio
import json

import httpx

from agentspec.replay.options import ReplayOptions
from agentspec.replay.report import Report
from agentspec.replay.run import run_replay
from agentspec.replay.world import Goal
from agentspec.server.app import create_app
from agentspec.server.pipeline import TextPipeline
from agentspec.server.transport import InProcessTransport
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.prompt import PromptBuilder
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from agentspec.types import FinishReason
from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.fakes.text import END_OF_TURN, byte_backend
from tests.replay.builders import replay_file
from tests.replay.worlds import ask, live_session
from tests.server.conftest import TEMPLATE


def written(name: str, **arguments: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"\n\n<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def test_live_loop_works_with_generated_calls() -> None:
    scripts = [
        [
            *said(
                "I look.", written("get_order", order_id="A-098"), written("update_order", order_id="A-098", count="9")
            ),
            ended(),
        ],
        [*said("It is open and has 9."), ended()],
        [
            *said(written("update_order", order_id="A-098", count="ten")),
            ended(),
        ],  # text where the schema requires an integer
        [*said("<tool_call>\norder A-098"), ended()],
        [*said(written("delete_order", order_id="A-098")[:60]), ended(FinishReason.LENGTH, stop_match=None)],
        [*said("I stop."), ended()],
    ]
    goal = Goal(says=["open"], changes={"orders": {"A-098": {"count": 9}}})
    session = live_session(ask(goal=goal), *(ask(goal=Goal()) for _ in range(3)))
    tokenizer = Tokenizer(byte_backend(), eos_token=END_OF_TURN)
    app = create_app(
        ScriptedEngine(*scripts),
        TextPipeline(tokenizer, PromptBuilder(tokenizer, ChatTemplate(TEMPLATE), TurnMemory())),
    )

    async def main() -> Report:
        async with httpx.AsyncClient(
            transport=InProcessTransport(app), base_url="http://in-process", timeout=None
        ) as client:
            return await run_replay(replay_file(session), ReplayOptions(), client, None)

    report = asyncio.run(main())
    assert report.sessions[0].error is None
    outcome = report.sessions[0].outcome
    assert outcome is not None
    assert [(call.name, call.kind) for call in outcome.calls] == [
        ("get_order", None),
        ("update_order", None),
        ("update_order", "schema: type"),
        (None, "not read"),
        ("delete_order", "invalid JSON"),
    ]
    assert json.loads(outcome.calls[1].arguments) == {"order_id": "A-098", "count": 9}
    assert [turn.ending for turn in outcome.turns] == ["answered", "answered", "cut", "answered"]
    assert [turn.reached for turn in outcome.turns] == [True, False, False, True]
