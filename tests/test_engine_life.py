"""The heartbeat of an engine in its own process, and the handling of an engine without one, on a fake clock."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, cast

import httpx
import pytest

from agentspec.engine import remote as remote_engine
from agentspec.engine.in_process import AsyncEngine
from agentspec.engine.kept import AGAIN_SECONDS, KeptEngine
from agentspec.engine.remote import CPU_HEARTBEAT_SECONDS, TICK_SECONDS, Pulse, RemoteEngine
from agentspec.errors import AgentspecError, EngineClosedError, EngineStalledError
from agentspec.server.app import create_app
from agentspec.server.transport import InProcessTransport
from agentspec.types import FinishReason
from agentspec.wire import FinishEvent
from tests.test_engine import assembly, submit
from tests.test_engine_async import ENDLESS, Gate, read, settle
from tests.test_remote_engine import CONFIG


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def test_silence_is_measured_from_the_last_heartbeat() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    for _ in range(20):
        clock.now += TICK_SECONDS
        pulse.tick()
    assert pulse.seconds == 20 * TICK_SECONDS
    pulse.beat()
    assert pulse.seconds == 0


def test_time_in_which_the_server_was_stopped_is_no_silence() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    clock.now += 5
    for _ in range(10):
        pulse.tick()
    assert pulse.seconds == 2 * TICK_SECONDS
    clock.now += 3600  # such as the whole machine
    pulse.tick()
    assert pulse.seconds <= 4 * TICK_SECONDS


def test_a_heartbeat_means_that_the_engines_thread_runs() -> None:
    async def main() -> None:
        parts = assembly()
        gate = Gate(parts)
        async with AsyncEngine(parts) as engine:
            await engine.beat()  # idle
            gate.close()
            reader = asyncio.create_task(read(engine, submit("a", sampling=ENDLESS)))
            await gate.arrival()
            beat = asyncio.create_task(engine.beat())
            await settle()
            assert not beat.done(), "a step is running"
            gate.open()
            await beat
            reader.cancel()
            await asyncio.wait((reader,))
        await engine.beat()  # ended

    run(main())


def with_client(engine: RemoteEngine, ask: Callable[[httpx.AsyncClient], Awaitable[None]]) -> Awaitable[None]:
    async def main() -> None:
        async with httpx.AsyncClient(
            transport=InProcessTransport(create_app(engine, None)), base_url="http://in-process", timeout=None
        ) as client:
            await ask(client)

    return main()


COMPLETION = {"model": "tiny-agent", "prompt": [5, 6, 7], "max_tokens": 4}


def test_a_stopped_engine_is_reported_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "ASK_SECONDS", 0.05)
    clock = Clock()

    async def main() -> None:
        async with await RemoteEngine.start(CONFIG) as engine:
            assert engine._heartbeat_seconds == CPU_HEARTBEAT_SECONDS
            engine._pulse = Pulse(clock)
            engine._heartbeat_seconds = 30.0

            async def ask(client: httpx.AsyncClient) -> None:
                assert (await client.get("/health")).status_code == 200
                os.kill(engine._process.pid, signal.SIGSTOP)
                answer = await client.get("/stats")
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stalled")
                assert answer.json()["error"]["message"] == "the engine did not answer within 0.05 seconds"
                assert (await client.get("/health")).status_code == 200, "it hasn't been silent for long"
                assert (await client.get("/metrics")).status_code == 200
                clock.now += 31
                for path in ("/health", "/ping", "/ready", "/live", "/stats"):
                    answer = await client.get(path)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stalled"), path
                    assert answer.json()["error"]["message"] == "the engine has sent no heartbeat for 31 seconds"
                answer = await client.post("/v1/completions", json=COMPLETION)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stalled")
                assert 'agentspec_engine_alive{model_name="tiny-agent"} 0' in (await client.get("/metrics")).text
                os.kill(engine._process.pid, signal.SIGCONT)
                while (await client.get("/health")).status_code == 503:
                    await asyncio.sleep(0)
                assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200

            await with_client(engine, ask)

    run(main())


def test_an_engine_without_heartbeat_for_ten_times_as_long_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    async def main() -> None:
        async with await RemoteEngine.start(CONFIG) as engine:
            engine._pulse = Pulse(clock)
            engine._heartbeat_seconds = 10.0
            stream = cast(Any, engine.stream(submit("a", sampling=ENDLESS)))
            await anext(stream)
            os.kill(engine._process.pid, signal.SIGSTOP)
            for _ in range(int(100 / TICK_SECONDS)):
                clock.now += TICK_SECONDS
                engine.look()
            assert engine._death is None
            with pytest.raises(EngineStalledError):
                engine.check_alive()
            clock.now += TICK_SECONDS
            engine.look()
            *_, end = [event async for event in stream]
            assert isinstance(end, FinishEvent)
            assert (end.reason, end.is_lost) == (FinishReason.ERROR, True)
            assert end.error == "the engine is not running: it sent no heartbeat for 100 seconds and was killed"
            await engine.lost()

    run(main())
    assert "killed by SIGKILL" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_tokens_gets_503_when_its_engine_is_killed(stream: bool) -> None:
    async def main() -> None:
        async with await RemoteEngine.start(CONFIG) as engine:

            async def ask(client: httpx.AsyncClient) -> None:
                os.kill(engine._process.pid, signal.SIGSTOP)
                asked = asyncio.create_task(client.post("/v1/completions", json=COMPLETION | {"stream": stream}))
                while not engine._streams:
                    await asyncio.sleep(0)
                os.kill(engine._process.pid, signal.SIGKILL)
                answer = await asked
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_closed")
                assert answer.json()["error"]["message"] == "the engine is not running: its process died"

            await with_client(engine, ask)

    run(main())


class Mortal:
    """A fake engine for KeptEngine that ends when told to."""

    def __init__(self) -> None:
        self.died = asyncio.Event()
        self.is_closed = False

    async def lost(self) -> None:
        await self.died.wait()

    async def close(self) -> None:
        self.is_closed = True


def test_an_ended_engine_is_restarted_at_most_once_in_some_minutes() -> None:
    async def main() -> None:
        clock = Clock()
        started: list[Mortal] = [Mortal()]

        async def restart() -> RemoteEngine:
            assert started[-1].is_closed, "its resources are released"
            started.append(Mortal())
            return cast(RemoteEngine, started[-1])

        async with KeptEngine(cast(RemoteEngine, started[0]), restart, clock) as kept:
            lost = asyncio.create_task(kept.lost())
            for lifetime in (3.0, AGAIN_SECONDS + 1):
                clock.now += lifetime
                started[-1].died.set()
                await settle()
                assert not lost.done()
            assert len(started) == 3
            clock.now += AGAIN_SECONDS - 1
            started[-1].died.set()
            await lost
            assert len(started) == 3
        assert started[-1].is_closed

    run(main())


def test_an_engine_that_fails_to_restart_is_lost() -> None:
    async def restart() -> RemoteEngine:
        raise AgentspecError("no memory")

    async def main() -> None:
        dead = Mortal()
        dead.died.set()
        with pytest.raises(EngineClosedError, match="the engine could not be started again: no memory"):
            await KeptEngine(cast(RemoteEngine, dead), restart).lost()
        await KeptEngine(cast(RemoteEngine, dead), None).lost()

    run(main())
