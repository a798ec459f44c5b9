"""An engine in its own process, with real processes: it behaves like an engine in this process, and every exit cleans
up.

`in_engine` runs code in the engine's process before it loads, for faults that no request can cause: a failing step, a
load that never ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
from array import array
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from agentspec.config import EngineConfig
from agentspec.engine import remote as remote_engine
from agentspec.engine.in_process import Engine
from agentspec.engine.link import Packed, error_data, frame, packed, to_error, unpacked
from agentspec.engine.remote import RemoteEngine
from agentspec.errors import (
    AgentspecError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineClosedError,
    OverloadedError,
    ReplayFileError,
    RequestError,
    UnsupportedModelError,
)
from agentspec.server.app import create_app
from agentspec.server.transport import InProcessTransport
from agentspec.types import FinishReason, SamplingParams
from agentspec.wire import Abort, Event, FinishEvent, FrameReader, Grammar, Submit, TokensEvent

CONFIG = EngineConfig(memory_gib=0.2, device="cpu", max_running=3, max_context=512)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
BETWEEN_LOOKS = 0.02
"""Seconds between two looks for a process that starts, which needs the processor."""
PATIENCE = 30
"""Seconds until a process that should end has failed to."""

InEngine = Callable[[str], None]
Shared = Callable[[Callable[[RemoteEngine], Coroutine[Any, Any, None]]], None]


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """One engine, shared by tests that leave it unchanged."""
    with asyncio.Runner() as runner:
        engine = runner.run(RemoteEngine.start(CONFIG))
        yield lambda main: runner.run(main(engine))
        runner.run(engine.close())
        assert (is_gone(engine), engine._process.returncode, engine.alive) == (True, 0, False)


@pytest.fixture
def in_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InEngine:
    def put(code: str) -> None:
        (tmp_path / "sitecustomize.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    return put


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)


def submit(name: str, length: int = 20, *, sampling: SamplingParams | None = None) -> Submit:
    ids = [(7 * index + len(name)) % 1000 for index in range(length)]
    return Submit(
        request_id=name,
        prompt_ids=ids,
        sampling=sampling or SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    )


def stream(engine: RemoteEngine, asked: Submit) -> AsyncGenerator[Event, None]:
    return cast(AsyncGenerator[Event, None], engine.stream(asked))


async def read(engine: RemoteEngine, asked: Submit) -> tuple[list[int], FinishEvent]:
    ids: list[int] = []
    events = [event async for event in engine.stream(asked)]
    for event in events[:-1]:
        assert isinstance(event, TokensEvent)
        ids += event.token_ids
    end = events[-1]
    assert isinstance(end, FinishEvent)
    return ids, end


async def refusal(engine: RemoteEngine, asked: Submit) -> RequestError:
    with pytest.raises(RequestError) as refused:
        await anext(stream(engine, asked))
    return refused.value


async def idle(engine: RemoteEngine) -> dict[str, Any]:
    """Wait until no request runs; return the engine's counters."""
    while (stats := await engine.stats())["running"] or stats["waiting"]:
        pass
    return stats


def is_gone(engine: RemoteEngine) -> bool:
    """Whether the process has been reaped and its process group is empty."""
    if engine._process.returncode is None:
        return False
    try:
        os.killpg(engine._process.pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_streams_equal_those_of_an_engine_in_this_process(shared: Shared) -> None:
    asked = [submit(f"r{'x' * number}", 30 + 40 * number) for number in range(6)]
    with Engine(CONFIG) as local:
        expected = [local.generate(one) for one in asked]
        info = local.info

    async def main(engine: RemoteEngine) -> None:
        assert (engine.info, engine.alive) == (info, True)
        before = await engine.stats()
        heard = await asyncio.gather(*(read(engine, one) for one in asked))
        assert [ids for ids, _ in heard] == [ids for ids, _ in expected]
        assert [(end.reason, end.usage.prompt_tokens) for _, end in heard] == [
            (FinishReason.LENGTH, len(one.prompt_ids)) for one in asked
        ]
        after = await engine.stats()
        assert (after["model"], after["running"], after["waiting"]) == ("tiny-agent", 0, 0)
        assert after["engine"]["requests"] - before["engine"]["requests"] == 6
        assert engine.setup.device == "cpu"
        assert (
            engine.setup.num_pages * engine.setup.page_bytes + engine.setup.num_rows * engine.setup.row_bytes
            <= 0.2 * 2**30
        )

    shared(main)


def test_refusals_keep_their_type_field_value_and_text(shared: Shared) -> None:
    huge = 2**70

    async def main(engine: RemoteEngine) -> None:
        error = await refusal(engine, submit("a", sampling=SamplingParams(top_k=-1)))
        assert (type(error), error.field, error.value) == (RequestError, "top_k", -1)
        assert str(error) == f"top_k=-1: {error.reason}"
        error = await refusal(engine, submit("a", 600))
        assert type(error) is ContextLengthError, "the requested context is used, not the model's"
        assert "512" in str(error)
        error = await refusal(engine, Submit(request_id="a", prompt_ids=[]))
        assert (error.field, error.value) == ("prompt_ids", [])
        assert (await refusal(engine, submit("a", sampling=SamplingParams(seed=huge)))).field == "seed"
        assert (await refusal(engine, Submit(request_id="a", prompt_ids=[huge]))).field == "prompt_ids"
        for bad in (-5, 2**31, 2**40):
            error = await refusal(engine, Submit(request_id="a", prompt_ids=[1, bad]))
            assert (error.field, error.value, "is not a token id below" in error.reason) == ("prompt_ids", bad, True)
        assert (await refusal(engine, Submit(request_id="a", prompt_ids=[1], namespace="\ud800"))).field == "namespace"
        assert "malformed" in str(await refusal(engine, Submit(request_id="a", prompt_ids=[1], namespace=5)))  # type: ignore[arg-type]
        assert "malformed" in str(await refusal(engine, Submit(request_id="a", prompt_ids=["one"])))  # type: ignore[list-item]
        running = stream(engine, submit("a", sampling=ENDLESS))
        await anext(running)
        assert (await refusal(engine, submit("a"))).field == "request_id"
        await running.aclose()
        await idle(engine)
        assert (await read(engine, submit("a")))[1].reason is FinishReason.LENGTH, "the id is free and the engine runs"

    shared(main)


def test_a_refusal_during_generation_keeps_its_field(shared: Shared) -> None:
    grammar = Grammar(kind="ebnf", source=f'root ::= "{"zqxjv" * 14}" []')

    async def main(engine: RemoteEngine) -> None:
        asked = Submit(request_id="dead", prompt_ids=[5, 6, 7], grammar=grammar)
        ids, end = await read(engine, asked)
        assert (end.reason, end.refused, end.usage.completion_tokens) == (
            FinishReason.ERROR,
            "grammar.source",
            len(ids),
        )
        error = end.refusal(asked)
        assert error is not None
        assert (error.field, error.value) == ("grammar.source", grammar.source)
        await idle(engine)

    shared(main)


def test_each_request_of_a_random_mix_ends_exactly_once(shared: Shared) -> None:
    seed = 1
    rng = random.Random(seed)

    async def reader(engine: RemoteEngine, name: str) -> str:
        kind = rng.choice(["whole", "left", "left at once", "cancelled", "refused"])
        if kind == "whole":
            assert (await read(engine, submit(name)))[1].reason is FinishReason.LENGTH
        elif kind == "left":
            events = stream(engine, submit(name, sampling=ENDLESS))
            for _ in range(rng.randint(1, 3)):
                await anext(events)
            await events.aclose()
        elif kind == "refused":
            await refusal(engine, submit(name, sampling=SamplingParams(top_p=0)))
        else:
            task = asyncio.ensure_future(anext(stream(engine, submit(name, sampling=ENDLESS))))
            for _ in range(0 if kind == "left at once" else rng.randint(1, 3)):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait((task,))
        return kind

    async def main(engine: RemoteEngine) -> None:
        kinds: list[str] = []
        before = (await engine.stats())["engine"]["finished"]
        for batch in range(5):
            kinds += await asyncio.gather(*(reader(engine, f"{batch}-{number}") for number in range(8)))
        after = (await idle(engine))["engine"]["finished"]
        finished = {reason: after[reason] - before[reason] for reason in after}
        assert finished["length"] == kinds.count("whole"), (seed, kinds)
        assert finished["abort"] <= len(kinds) - kinds.count("whole") - kinds.count("refused"), (seed, kinds)
        assert finished["error"] == finished["stop"] == 0, (seed, kinds)
        await read(engine, submit("last"))
        assert not engine._streams, f"seed {seed}: every request got its last message"

    shared(main)


def test_killing_the_process_ends_every_stream_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with await RemoteEngine.start(CONFIG) as engine:
            transport = InProcessTransport(create_app(engine, None))
            async with httpx.AsyncClient(transport=transport, base_url="http://in-process") as client:
                assert (await client.get("/health")).status_code == 200
                streams = [stream(engine, submit(name, sampling=ENDLESS)) for name in ("a", "b", "c", "d")]
                await asyncio.gather(*(anext(one) for one in streams[:3]))
                waiting = asyncio.ensure_future(anext(streams[3]))
                await asyncio.sleep(0)
                os.kill(engine._process.pid, signal.SIGKILL)
                ends = [[event async for event in one if isinstance(event, FinishEvent)] for one in streams[:3]]
                ends.append([cast(FinishEvent, await waiting)])
                for (end,) in ends:
                    assert end.reason is FinishReason.ERROR
                    assert end.error is not None
                    assert "its process died" in end.error
                assert not engine.alive
                with pytest.raises(EngineClosedError, match="its process died"):
                    await anext(stream(engine, submit("e")))
                with pytest.raises(EngineClosedError):
                    await engine.stats()
                assert (await client.get("/health")).status_code == 503
                assert (await client.get("/metrics")).status_code == 200
        assert is_gone(engine)

    run(main())
    assert "killed by SIGKILL" in caplog.text


def test_a_failing_engine_ends_its_process(in_engine: InEngine, caplog: pytest.LogCaptureFixture) -> None:
    in_engine("""
from agentspec.runtime.step_loop import StepLoop
steps, run_once = [], StepLoop.run_once
def dying(self):
    steps.append(1)
    if len(steps) > 20:
        raise ValueError("the step failed")
    return run_once(self)
StepLoop.run_once = dying
""")

    async def main() -> None:
        async with await RemoteEngine.start(CONFIG) as engine:
            heard = await asyncio.gather(*(read(engine, submit(name, sampling=ENDLESS)) for name in ("a", "b")))
            assert [(end.reason, end.error) for _, end in heard] == [
                (FinishReason.ERROR, "ValueError: the step failed")
            ] * 2
            await engine._lost.wait()
            assert not engine.alive
            with pytest.raises(EngineClosedError, match="ValueError: the step failed"):
                await anext(stream(engine, submit("c")))
        assert is_gone(engine)

    run(main())
    assert "exit status 1" in caplog.text


def test_close_ends_running_requests() -> None:
    async def main() -> None:
        engine = await RemoteEngine.start(CONFIG)
        streams = [stream(engine, submit(name, sampling=ENDLESS)) for name in ("a", "b", "c", "waits")]
        await asyncio.gather(*(anext(one) for one in streams[:3]))
        waiting = asyncio.ensure_future(read(engine, submit("late", sampling=ENDLESS)))
        await asyncio.sleep(0)
        await asyncio.gather(engine.close(), engine.close())
        assert is_gone(engine)
        assert engine._process.returncode == 0
        for one in streams[:3]:
            assert [event.reason for event in [event async for event in one] if isinstance(event, FinishEvent)] == [
                FinishReason.ABORT
            ]
        assert (await waiting)[1].reason is FinishReason.ABORT
        with pytest.raises(EngineClosedError, match="closed"):
            await anext(streams[3])
        await engine.close()

    run(main())


def test_an_engine_that_does_not_close_is_killed(in_engine: InEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "CLOSE_SECONDS", 0.2)
    in_engine("""
import threading
from agentspec.runtime.step_loop import StepLoop
StepLoop.run_once = lambda self: threading.Event().wait()
""")

    async def main() -> None:
        engine = await RemoteEngine.start(CONFIG)
        reading = asyncio.ensure_future(read(engine, submit("a")))
        await asyncio.sleep(0)
        await engine.close()
        assert is_gone(engine)
        assert (await reading)[1].reason is FinishReason.ERROR

    run(main())


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"model": "./nowhere"}, CheckpointError, "model='./nowhere': no such directory"),
        ({"max_context": 16384, "memory_gib": 0.06}, ConfigError, "max_context=16384: the memory holds"),
    ],
)
def test_an_unloadable_model_is_refused(settings: dict[str, Any], kind: type[AgentspecError], words: str) -> None:
    async def main() -> None:
        with pytest.raises(kind, match=words) as refused:
            await RemoteEngine.start(EngineConfig(device="cpu", **settings))
        assert type(refused.value) is kind

    run(main())


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_context=1000000: tiny-agent has a context of 16384 tokens"):
        Engine(EngineConfig(device="cpu", max_context=10**6))


def test_a_process_that_ends_while_it_loads_is_reported(in_engine: InEngine) -> None:
    in_engine(
        "import agentspec.engine.assembly, os\n"
        "agentspec.engine.assembly.assemble = lambda config, progress, **keywords: os._exit(3)"
    )

    async def main() -> None:
        with pytest.raises(AgentspecError, match=r"before its model was loaded \(exit status 3\)"):
            await RemoteEngine.start(CONFIG)

    run(main())


STARTS = """
import asyncio
from agentspec.config import EngineConfig
from agentspec.engine.remote import RemoteEngine
async def main():
    engine = await RemoteEngine.start(EngineConfig(device="cpu"))
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["loading", "ready"])
def test_the_engine_ends_with_its_server(moment: str, in_engine: InEngine) -> None:
    """The engine's process has the same pipe, so the end of the pipe means that both have ended."""
    if moment == "loading":
        in_engine("""
import sys, threading
if "agentspec.engine.start" in sys.orig_argv:
    import agentspec.engine.assembly
    def never_ends(config, progress, **keywords):
        print("loading", flush=True)
        threading.Event().wait()
    agentspec.engine.assembly.assemble = never_ends
""")
    with subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"{moment}\n"
        server.kill()
        assert server.stdout.read() == ""


def test_a_start_reports_its_stages() -> None:
    stages: list[tuple[str, int, int]] = []

    async def run() -> None:
        async with await RemoteEngine.start(CONFIG, progress=lambda *stage: stages.append(stage)):
            pass

    asyncio.run(run())
    assert stages[0] == ("loading weights", 0, 0)
    name, done, total = stages[-1]
    assert (name, done) == ("loading weights", total)
    assert total > 0


def test_a_cancelled_start_leaves_no_process(in_engine: InEngine, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    in_engine(f"""
import os, threading
import agentspec.engine.assembly
def never_ends(config, progress, **keywords):
    open({str(pid)!r}, "w").write(str(os.getpid()))
    os.kill({os.getpid()}, {int(signal.SIGUSR1)})
    threading.Event().wait()
agentspec.engine.assembly.assemble = never_ends
""")

    async def main() -> None:
        loads = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, loads.set)
        starting = asyncio.create_task(RemoteEngine.start(CONFIG))
        await asyncio.wait((starting, asyncio.create_task(loads.wait())), return_when=asyncio.FIRST_COMPLETED)
        assert not starting.done()
        starting.cancel()
        await asyncio.wait((starting,))
        assert starting.cancelled()

    run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_frames_are_complete_for_any_chunks() -> None:
    rng = random.Random(5)
    bodies = [frame([Abort("x" * rng.randint(0, 300))]) for _ in range(50)]
    data = b"".join(bodies)
    reader, found = FrameReader(), []
    while data:
        size = rng.choice([1, 3, 5, 100, 1000])
        found += reader.feed(data[:size])
        data = data[size:]
    assert found == [body[4:] for body in bodies]


@pytest.mark.parametrize("ids", [[1], [0, 2**31 - 1, -(2**31)], array("i", [3, 4]), array("q", [3, 4])])
def test_a_prompt_is_sent_as_bytes(ids: Sequence[int]) -> None:
    asked = submit("a", sampling=ENDLESS)
    sent = packed(msgspec.structs.replace(asked, prompt_ids=ids))
    assert isinstance(sent, Packed)
    (crossed,) = msgspec.msgpack.decode(frame([sent])[4:], type=list[Packed])
    assert list(unpacked(crossed).prompt_ids) == list(ids)
    assert msgspec.structs.replace(unpacked(crossed), prompt_ids=asked.prompt_ids) == asked


@pytest.mark.parametrize("ids", [[], [2**31], [1.5], ["one"], None])
def test_an_invalid_prompt_is_sent_unchanged(ids: Any) -> None:
    asked = Submit(request_id="a", prompt_ids=ids)
    assert packed(asked) is asked


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("stop", ("a", ""), "is wrong"), RequestError),
        (RequestError("seed", 2**80, "is too large"), RequestError),
        (ContextLengthError("prompt_ids", list(range(500)), "is too long"), ContextLengthError),
        (ConfigError("memory", object(), "is not a number"), ConfigError),
        (UnsupportedModelError("llama"), UnsupportedModelError),
        (EngineClosedError("closed"), EngineClosedError),
        (OverloadedError("busy", 1), OverloadedError),
        (ReplayFileError("f", 1, "bad"), AgentspecError),
    ],
)
def test_errors_are_sent_unchanged(error: AgentspecError, kind: type[AgentspecError]) -> None:
    crossed = to_error(error_data(error))
    assert (type(crossed), str(crossed)) == (kind, str(error))
    if isinstance(error, RequestError):
        assert isinstance(crossed, RequestError)
        assert (crossed.field, crossed.reason) == (error.field, error.reason)


def children(pid: int) -> list[int]:
    found = [file.read_text().split() for file in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for some in found for child in some]


def grammar_workers(engine: RemoteEngine) -> list[int]:
    return [
        pid for pid in children(engine._process.pid) if b"grammar.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("is_killed", [False, True])
def test_the_grammar_worker_starts_and_ends_with_the_engine(is_killed: bool) -> None:
    async def main() -> None:
        async with await RemoteEngine.start(CONFIG) as engine:
            while not (workers := grammar_workers(engine)):
                await asyncio.sleep(BETWEEN_LOOKS)
            descriptor = os.pidfd_open(workers[0])
            if is_killed:
                os.kill(engine._process.pid, signal.SIGKILL)
            else:
                await engine.stats()
        assert len(workers) == 1
        # Where the engine is killed, the worker isn't: it ends at the end of its input.
        assert select.select([descriptor], [], [], PATIENCE if is_killed else 0)[0], "the worker outlives the engine"
        os.close(descriptor)

    run(main())
