"""`python -m benchmarks.server`: the measured servers work, and all give the same answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.remote import EngineProcess, RemoteEngine
from agentspec.text.tokenizer import Tokenizer
from agentspec.wire import EngineClient, Event, Submit
from benchmarks import first_token, server
from benchmarks.no_op_engine import STEPS, NoOpEngine


@pytest.fixture
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in the repository's root, where `python -m benchmarks.server` finds the modules of its processes."""
    monkeypatch.chdir(Path(__file__).parent.parent)


def test_every_server_passes_the_check_before_the_measurement() -> None:
    with server.server_process() as port:
        assert asyncio.run(server.check(port)) > 1000


def test_the_prompts_of_a_whole_session_are_those_of_the_template(tokenizer: Tokenizer) -> None:
    async def main(port: int) -> int:
        connection = (
            await asyncio.get_running_loop().create_connection(first_token.TimedConnection, "127.0.0.1", port)
        )[1]
        num_tokens = await first_token.check(connection, tokenizer)
        assert all(took > 0 for took in await first_token.repeated(connection, first_token.ids_request, 1))
        connection.transport.close()
        return num_tokens

    with server.server_process() as port:
        assert asyncio.run(main(port)) > first_token.MESSAGE_BYTES / 4


def test_the_engine_in_its_own_process_is_the_no_op_one(tokenizer: Tokenizer) -> None:
    async def events(engine: EngineClient) -> list[Event]:
        return [event async for event in engine.stream(Submit(request_id="a", prompt_ids=[1, 2, 3]))]

    async def main() -> None:
        async with (
            NoOpEngine(tokenizer) as local,
            await RemoteEngine.start(EngineConfig(), EngineProcess(server.NO_OP_ENTRY)) as remote,
        ):
            assert (remote.setup.device, remote.info) == ("none", local.info)
            heard = await events(remote)
            assert len(heard) == STEPS + 1
            assert heard == await events(local)

    asyncio.run(main())
