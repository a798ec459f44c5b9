"""AsyncEngine: streams from its own thread, and their end when the reader leaves, the engine closes or its thread
fails.

`Gate` holds the engine's thread between two steps, so that no test depends on timing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from agentspec.engine.assembly import Assembly
from agentspec.engine.in_process import AsyncEngine
from agentspec.errors import EngineClosedError, RequestError
from agentspec.server.app import create_app
from agentspec.server.transport import InProcessTransport
from agentspec.types import FinishReason, SamplingParams
from agentspec.wire import Event, FinishEvent, Submit, TokensEvent
from tests.test_engine import GREEDY, assembly, assert_nothing_left, expected, submit

ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


async def read(engine: AsyncEngine, asked: Submit) -> tuple[list[int], FinishEvent]:
    ids: list[int] = []
    async for event in engine.stream(asked):
        if isinstance(event, FinishEvent):
            return ids, event
        ids += event.token_ids
    raise AssertionError("no terminal event")


async def settle() -> None:
    """Let every callback that is due run."""
    for _ in range(20):
        await asyncio.sleep(0)


class Gate:
    """Blocks the engine's thread before each step while it is closed. Initially open."""

    def __init__(self, parts: Assembly) -> None:
        self._passes = threading.Semaphore(0)
        self._is_open = threading.Event()
        self._is_open.set()
        self._arrived = threading.Semaphore(0)
        self.failure: Exception | None = None
        self._run_once = parts.loop.run_once
        parts.loop.run_once = self._wait_and_run  # type: ignore[method-assign]

    def _wait_and_run(self) -> list[Event]:
        if not self._is_open.is_set():
            self._arrived.release()
            self._passes.acquire()
        if self.failure is not None:
            raise self.failure
        return self._run_once()

    def close(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()
        self._passes.release(1000)

    async def arrival(self) -> None:
        """Wait until the thread is blocked before a step, and all its earlier events have been delivered."""
        await asyncio.to_thread(self._arrived.acquire)
        await settle()

    async def step(self) -> None:
        """Let the thread run one step, then wait until it is blocked before the next one."""
        self._passes.release()
        await self.arrival()


def test_concurrent_streams_generate_the_same_tokens_as_alone() -> None:
    async def main() -> None:
        parts = assembly()
        asked = [submit(f"r{number}", 30 + 7 * number, first=number) for number in range(8)]
        async with AsyncEngine(parts) as engine:
            heard = await asyncio.gather(*(read(engine, one) for one in asked))
        assert [ids for ids, _ in heard] == [expected(parts, one) for one in asked]
        assert all(finish.reason is FinishReason.LENGTH for _, finish in heard)
        assert_nothing_left(parts)

    run(main())


def test_a_refused_submit_raises_from_the_first_event() -> None:
    async def main() -> None:
        async with AsyncEngine(assembly()) as engine:
            for bad in (
                submit("a", sampling=SamplingParams(top_k=-1)),
                submit("a", 490),
                Submit(request_id="a", prompt_ids=[]),
            ):
                stream = engine.stream(bad)
                with pytest.raises(RequestError):
                    await anext(stream)
            assert (await read(engine, submit("a")))[1].reason is FinishReason.LENGTH, (
                "the id is free and the engine lives"
            )

    run(main())


def test_a_submit_of_the_wrong_type_does_not_affect_others() -> None:
    async def main() -> None:
        async with AsyncEngine(assembly()) as engine:
            bad = asyncio.ensure_future(anext(engine.stream(Submit(request_id="bad", prompt_ids=["one"]))))  # type: ignore[list-item]
            try:
                assert (await read(engine, submit("good")))[1].reason is FinishReason.LENGTH
                await settle()
                assert bad.done()
                assert isinstance(bad.exception(), TypeError)
            finally:
                bad.cancel()
                await asyncio.wait((bad,))

    run(main())


def test_an_id_in_use_is_refused() -> None:
    async def main() -> None:
        parts = assembly()
        async with AsyncEngine(parts) as engine:
            first = engine.stream(submit("a", sampling=ENDLESS))
            await anext(first)
            with pytest.raises(RequestError, match="request_id='a': is in use"):
                await anext(engine.stream(submit("a")))
            assert isinstance(await anext(first), TokensEvent)
            await first.aclose()  # type: ignore[attr-defined]

    run(main())


def test_leaving_a_stream_aborts_it_and_frees_its_memory() -> None:
    async def main() -> None:
        parts = assembly()
        async with AsyncEngine(parts) as engine:
            stream = engine.stream(submit("a", sampling=ENDLESS))
            await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await read(engine, submit("b"))
        assert parts.loop.metrics.finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}
        assert_nothing_left(parts)

    run(main())


def test_cancelling_a_reader_aborts_its_request_and_frees_its_memory() -> None:
    async def main() -> None:
        parts = assembly()
        gate = Gate(parts)
        async with AsyncEngine(parts) as engine:
            gate.close()
            reader = asyncio.create_task(read(engine, submit("a", sampling=ENDLESS)))
            await gate.arrival()
            await gate.step()
            await gate.step()
            reader.cancel()
            await asyncio.wait((reader,))
            assert reader.cancelled()
            gate.open()
            await read(engine, submit("b"))
        assert parts.loop.metrics.finished["abort"] == 1
        assert_nothing_left(parts)

    run(main())


def test_a_submit_cancelled_in_the_inbox_leaves_no_state() -> None:
    async def main() -> None:
        parts = assembly()
        gate = Gate(parts)
        async with AsyncEngine(parts) as engine:
            gate.close()
            busy = asyncio.create_task(read(engine, submit("busy")))
            await gate.arrival()
            late = asyncio.create_task(read(engine, submit("late", first=2)))
            await settle()
            late.cancel()
            await asyncio.wait((late,))
            gate.open()
            assert (await busy)[0] == expected(parts, submit("busy"))
        assert parts.loop.metrics.finished["length"] == 1
        assert_nothing_left(parts)

    run(main())


@pytest.mark.parametrize("overlap", [True, False])
def test_a_stream_left_early_sends_no_events_to_the_next_one_with_its_id(overlap: bool) -> None:
    async def main() -> None:
        parts = assembly(overlap=overlap, max_running=1)
        gate = Gate(parts)
        async with AsyncEngine(parts) as engine:
            gate.close()
            busy = asyncio.create_task(read(engine, submit("busy")))
            await gate.arrival()
            left = asyncio.create_task(read(engine, submit("a", first=2)))
            await gate.step()  # it waits for the only slot now
            left.cancel()
            await asyncio.wait((left,))
            again = asyncio.create_task(read(engine, submit("a", first=3)))
            await settle()
            gate.open()
            try:
                ids, finish = await again
            except RequestError:
                pass  # refusing the id until the first one has ended is as good
            else:
                assert (ids, finish.reason) == (expected(parts, submit("a", first=3)), FinishReason.LENGTH)
            await busy

    run(main())


def test_abort_ends_a_stream_with_an_event() -> None:
    async def main() -> None:
        parts = assembly()
        async with AsyncEngine(parts) as engine:
            stream = engine.stream(submit("a", sampling=ENDLESS))
            await anext(stream)
            await engine.abort("a")
            await engine.abort("nobody")
            last = [event async for event in stream][-1]
            assert isinstance(last, FinishEvent)
            assert last.reason is FinishReason.ABORT
        assert_nothing_left(parts)

    run(main())


def test_close_ends_running_streams_with_abort() -> None:
    async def main() -> None:
        parts = assembly(max_running=1)
        gate = Gate(parts)
        engine = AsyncEngine(parts)
        async with engine:
            gate.close()
            readers = [
                asyncio.create_task(read(engine, submit(f"r{number}", first=number, sampling=ENDLESS)))
                for number in range(3)
            ]
            await gate.arrival()
            await gate.step()
            closing = asyncio.create_task(engine.close())
            await settle()
            assert not engine.alive
            with pytest.raises(EngineClosedError):
                await anext(engine.stream(submit("late")))
            gate.open()
            await closing
            heard = await asyncio.gather(*readers)
            await engine.close()
        assert [finish.reason for _, finish in heard] == [FinishReason.ABORT] * 3
        with pytest.raises(EngineClosedError, match="not running"):
            await anext(engine.stream(submit("later")))

    run(main())


def test_an_engine_that_was_not_started_refuses_submits() -> None:
    async def main() -> None:
        engine = AsyncEngine(assembly())
        assert not engine.alive
        with pytest.raises(EngineClosedError):
            await anext(engine.stream(submit("a")))
        await engine.close()

    run(main())


def test_a_failed_thread_ends_every_stream_and_refuses_every_submit(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        parts = assembly(max_running=2)
        gate = Gate(parts)
        async with AsyncEngine(parts) as engine:
            gate.close()
            readers = [
                asyncio.create_task(read(engine, submit(f"r{number}", first=number, sampling=ENDLESS)))
                for number in range(4)
            ]
            await gate.arrival()
            await gate.step()
            pending = asyncio.create_task(read(engine, submit("pending")))
            await settle()
            gate.failure = RuntimeError("the device fell off the bus")
            gate.open()
            heard = await asyncio.gather(*readers)
            assert all(finish.reason is FinishReason.ERROR for _, finish in heard)
            assert all("RuntimeError: the device fell off the bus" in str(finish.error) for _, finish in heard)
            with pytest.raises(EngineClosedError, match="fell off the bus"):
                await pending
            assert not engine.alive
            with pytest.raises(EngineClosedError, match="fell off the bus"):
                await anext(engine.stream(submit("later")))
            assert (await engine.stats())["model"] == "hash-chain"

    run(main())
    assert "the engine's thread died" in caplog.text


def test_a_submit_while_the_thread_fails_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        parts = assembly()
        gate = Gate(parts)
        async with AsyncEngine(parts) as engine:
            gate.close()
            reader = asyncio.create_task(read(engine, submit("a", sampling=ENDLESS)))
            await gate.arrival()
            gate.failure = RuntimeError("gone")
            inbox: Any = engine._inbox
            put = inbox.put

            class Crossing:
                """An inbox where the thread fails after the submit found it alive, and before the submit is in the
                inbox."""

                def put(self, item: Any) -> None:
                    gate.open()
                    assert engine._thread is not None
                    engine._thread.join()
                    put(item)

                def __getattr__(self, name: str) -> Any:
                    return getattr(inbox, name)

            engine._inbox = Crossing()  # type: ignore[assignment]
            crossing = asyncio.create_task(read(engine, submit("b")))
            await settle()
            engine._inbox = inbox
            await settle()
            try:
                assert (await reader)[1].reason is FinishReason.ERROR
                assert crossing.done()
                assert isinstance(crossing.exception(), EngineClosedError)
            finally:
                crossing.cancel()
                await asyncio.wait((crossing,))

    run(main())


def test_the_server_of_a_failed_engine_answers_503(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        parts = assembly()
        gate = Gate(parts)
        async with AsyncEngine(parts) as engine:
            app = create_app(engine, None)
            async with httpx.AsyncClient(
                transport=InProcessTransport(app), base_url="http://in-process", timeout=None
            ) as client:
                body = {"model": "hash-chain", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}
                assert (await client.get("/health")).status_code == 200
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                gate.failure = RuntimeError("gone")
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 503
                assert "gone" in answer.json()["error"]["message"]
                assert (await client.get("/health")).status_code == 503
                answer = await client.post("/v1/completions", json=body)
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_closed")
                assert (await client.get("/stats")).status_code == 200

    run(main())


def test_stats_read_the_cache_on_the_engines_thread() -> None:
    async def main() -> None:
        parts = assembly()
        callers: set[str] = set()
        checkpoints: Any = parts.cache.checkpoints
        expire = checkpoints.expire_holds

        def spy() -> None:
            callers.add(threading.current_thread().name)
            expire()

        checkpoints.expire_holds = spy
        async with AsyncEngine(parts) as engine:
            await read(engine, submit("a", session_id="s"))
            assert (await engine.stats())["cache"]["checkpoints_live"] > 0
            assert callers == {"agentspec-engine"}
        assert (await engine.stats())["cache"]["checkpoints_live"] > 0, (
            "a closed engine still reports its last counters"
        )

    run(main())


def test_stats_requested_while_the_engine_fails_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        parts = assembly()
        gate = Gate(parts)
        async with AsyncEngine(parts) as engine:
            gate.close()
            reader = asyncio.create_task(read(engine, submit("a")))
            await gate.arrival()
            asked = asyncio.create_task(engine.stats())
            await settle()
            gate.failure = RuntimeError("gone")
            gate.open()
            assert (await asked)["running"] == 0
            assert (await reader)[1].reason is FinishReason.ERROR

    run(main())


def test_usage_and_prompt_scores_reach_the_reader() -> None:
    async def main() -> None:
        parts = assembly()
        async with AsyncEngine(parts) as engine:
            await read(engine, submit("warm"))
            _, finish = await read(engine, submit("a"))
            assert (finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.usage.cached_tokens) == (
                40,
                len(expected(parts, submit("a"))),
                32,
            )
            _, finish = await read(engine, submit("b", sampling=SamplingParams(max_tokens=0), prompt_logprobs=1))
            assert finish.prompt_scores is not None
            assert [score.token_id for score in finish.prompt_scores] == submit("b").prompt_ids[1:]

    run(main())


def test_streams_with_stop_ids_and_seeds_do_not_depend_on_batching() -> None:
    sampled = SamplingParams(temperature=1.0, seed=11, max_tokens=40, stop_token_ids=(7,))

    async def main() -> None:
        parts = assembly()
        async with AsyncEngine(parts) as engine:
            alone, _ = await read(engine, submit("alone", sampling=sampled))
            company = [read(engine, submit(f"c{number}", first=number, sampling=GREEDY)) for number in range(5)]
            (beside, finish), *_ = await asyncio.gather(read(engine, submit("beside", sampling=sampled)), *company)
        assert beside == alone
        assert (finish.reason, finish.stop_match) == (
            (FinishReason.STOP, 7) if 7 in alone else (FinishReason.LENGTH, None)
        )

    run(main())


class Pieces:
    """A fake for start-up work that the engine's thread does while it is idle."""

    def __init__(self, parts: Assembly, number: int) -> None:
        self.left, self.asked = number, 0
        self.done = threading.Event()
        parts.loop.prepare = self._prepare  # type: ignore[method-assign]

    def _prepare(self) -> bool:
        self.asked += 1
        if not self.left:
            self.done.set()
            return False
        self.left -= 1
        return True


def test_an_idle_engine_finishes_its_start_up_work_then_waits() -> None:
    async def main() -> None:
        parts = assembly()
        pieces = Pieces(parts, 5)
        async with AsyncEngine(parts) as engine:
            await asyncio.to_thread(pieces.done.wait)
            assert (pieces.left, pieces.asked) == (0, 6), "the last call finds that nothing is left"
            asked = submit("a")
            assert (await read(engine, asked))[0] == expected(parts, asked)

    run(main())


def test_a_request_runs_before_the_next_piece_of_start_up_work() -> None:
    async def main() -> None:
        parts = assembly()
        pieces = Pieces(parts, 10**9)
        async with AsyncEngine(parts) as engine:
            asked = submit("a")
            assert (await read(engine, asked))[0] == expected(parts, asked)
        assert 0 < pieces.left < 10**9, "the request didn't wait for it"

    run(main())
