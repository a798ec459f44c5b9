"""Real command-line agents solve a small task against the server over a socket, with their own prompts and tools.

The engine is real, with the bundled model at a longer context; its answers are scripted by forced output. npm installs
the agents (`make test-clients`); missing ones are skipped.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.in_process import AsyncEngine
from agentspec.server.app import create_app
from agentspec.server.pipeline import TextPipeline
from agentspec.server.unknown_fields import HEADER
from scripts.clients.agents import AGENTS, ANSWER, Agent, Calls, Place
from scripts.clients.record import Recorder, in_place
from tests.fakes.scripted_outputs import ScriptedOutputs
from tests.fakes.seen_turns import SeenTurns
from tests.server.loopback import served

CONTEXT = 65536
"""qwen-code's tools alone have 30,000 tokens in the bundled model's tokenizer."""

REFUSED: dict[str, str] = {}
"""Agents that don't finish yet, and the server error that they show."""

LEFT_OUT: dict[str, set[str]] = {"codex": {"tools.web_search"}}
"""Request fields that answers report as ignored. The other agents send no unknown fields."""

PAGE = Path(__file__).parents[2] / "docs" / "api.md"

CHANGES: dict[str, str] = {
    "claude-code": "moves its cache marks on; sends thinking back without its text; "
    "puts a tool that ToolSearch found into the middle of `tools`",
    "codex": "nothing",
    "opencode": "nothing; asks for a title of the session beside it, in a conversation of its own",
    "qwen-code": "nothing",
    "pi": "nothing",
}
"""What each agent changes between turns, besides appending. None of it changes the prompt before the end of the last
answer."""


class Watched:
    """The app with this engine, and its requests."""

    def __init__(self, model: Path, calls: Calls) -> None:
        self.recorder: Recorder
        self.engine: ScriptedOutputs
        self.seen: SeenTurns
        self._model, self._calls = model, calls

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        config = EngineConfig(model=str(self._model), allow_forced_output=True, max_context=CONTEXT)
        async with AsyncEngine(config) as engine:
            self.engine = ScriptedOutputs(engine, self._calls)
            self.seen = SeenTurns(self.engine)
            self.recorder = Recorder(
                create_app(self.seen, TextPipeline.from_checkpoint(engine.tokenizer, engine.model_dir))
            )
            yield self.recorder


@pytest.fixture
def long_model(tmp_path: Path) -> Path:
    """The bundled model, configured with a longer context than it was trained for."""
    directory = tmp_path / "model"
    directory.mkdir()
    for file in bundled.DIRECTORY.iterdir():
        (directory / file.name).symlink_to(file)
    config = json.loads((bundled.DIRECTORY / "config.json").read_text())
    (directory / "config.json").unlink()
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return directory


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_agent_finishes_its_task(agent: Agent, long_model: Path, tmp_path: Path) -> None:
    if why := agent.why_not():
        pytest.skip(why)
    watched = Watched(long_model, in_place(agent.calls, tmp_path / "workspace"))
    with served(watched.open) as url:
        done = agent.run(Place(scratch=tmp_path, url=url.rstrip("/")))
    requests = [(request["method"], request["path"], request["status"]) for request in watched.recorder.requests]
    if agent.name in REFUSED:
        assert done.returncode != 0, "it finishes now: take it out of REFUSED"
        assert REFUSED[agent.name] in done.stdout + done.stderr
        pytest.xfail(REFUSED[agent.name])
    assert done.returncode == 0, (requests, done.stdout[-4000:], done.stderr[-4000:])
    assert ANSWER in done.stdout
    assert {status for _, _, status in requests} == {200}, requests
    assert len(watched.engine.finished) > len(agent.calls), "every call was made, and answered"
    assert {answer[HEADER] for answer in watched.recorder.answers if HEADER in answer} == LEFT_OUT.get(
        agent.name, set()
    )
    later = [turn for turn in watched.seen.turns if turn.continues]
    assert len(later) == len(agent.calls), f"it changes more than what CHANGES says: {CHANGES[agent.name]}"
    for turn in watched.seen.turns:
        assert turn.usage is not None
        cached = turn.usage.cached_tokens
        print(
            f"{agent.name}: {cached:,} of {len(turn.prompt_ids):,} tokens from the cache, "
            f"{turn.shared_len:,} were known"
        )
        assert cached >= turn.reusable_len, (cached, turn.shared_len, len(turn.prompt_ids))


def test_documentation_lists_what_each_agent_changes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert CHANGES.keys() == {agent.name for agent in AGENTS}
    for name, words in CHANGES.items():
        assert f"| {name} | {words} |" in page
