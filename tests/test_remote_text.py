"""Text work in its own process, with real processes: prompts equal those of a builder in this process, and a job that
hangs or crashes delays other requests by at most a deadline."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest

from agentspec.engine import bundled
from agentspec.engine.remote import EngineProcess
from agentspec.engine.remote_text import RemoteText, pipeline_of, text_process
from agentspec.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    OverloadedError,
    RequestError,
    TextProcessError,
)
from agentspec.fair_queue import Flow
from agentspec.server.app import create_app
from agentspec.server.pipeline import TextPipeline
from agentspec.server.transport import InProcessTransport
from agentspec.text.chat_template import ChatTemplate, MessageMark
from agentspec.text.prompt import BuiltPrompt, PromptAsk, PromptBuilder
from agentspec.text.token_limit import TokenLimit
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from tests.fakes.engine_client import ScriptedEngine, ended, said
from tests.text.conversations import TOOLS
from tests.text.test_remembered_prompts import DEEDS, Client

SECONDS = 30.0
ROOMY = TokenLimit(10**6)
FOREVER = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HANGS = (
    "{% if messages[-1].content == 'hang' %}"
    + FOREVER
    + "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{% endfor %}"
)
DIES = "import os, agentspec.text.prompt as p; b = p.PromptBuilder.build; p.PromptBuilder.build = "
"""Prefix of code for the process: the head of a replacement of `build`."""

_T = TypeVar("_T")


def local() -> tuple[Tokenizer, ChatTemplate]:
    """The bundled model's pipeline in this process."""
    tokenizer, template = Tokenizer.from_directory(bundled.DIRECTORY), ChatTemplate.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    assert template is not None
    return tokenizer, template


def checkpoint(tmp_path: Path, template: str) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(bundled.DIRECTORY / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def with_code(code: str) -> EngineProcess:
    """A text process that runs `code` first."""
    return EngineProcess(
        ("-c", f"import sys\nfrom agentspec.engine import text_process\n{code}\nsys.exit(text_process.main())", "30")
    )


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[EngineProcess]:
    """Record the processes that are started."""
    started: list[EngineProcess] = []
    make = EngineProcess.__init__

    def note(self: EngineProcess, *arguments: Any) -> None:
        make(self, *arguments)
        started.append(self)

    monkeypatch.setattr(EngineProcess, "__init__", note)
    return started


def run(
    work: Callable[[RemoteText], Coroutine[Any, Any, _T]],
    directory: Path = bundled.DIRECTORY,
    *,
    seconds: float = SECONDS,
    code: str = "",
) -> _T:
    """Run `work` on loaded text work and return its result; check that no process is left."""

    async def main() -> _T:
        remote = RemoteText(with_code(code) if code else text_process(seconds), seconds)
        try:
            await remote.load(directory, None)
            return await work(remote)
        finally:
            await remote.close()

    return asyncio.run(main())


def ask(content: str, **asked: Any) -> PromptAsk:
    return PromptAsk(messages=[{"role": "user", "content": content}], limit=asked.pop("limit", ROOMY), **asked)


def facts(prompt: BuiltPrompt) -> tuple[Any, ...]:
    """All parts of a prompt that the server uses."""
    begun = prompt.begun
    return (
        *(
            prompt.prompt_ids,
            prompt.breakpoints,
            prompt.marked_end,
            prompt.reasoning_open,
            prompt.conversation,
            prompt.applied,
            prompt.is_mid_text,
        ),
        *(prompt.namespace, begun.turn.reasoning, begun.turn.content, begun.token_ids, begun.lead),
    )


class Beside:
    """A builder that calls both builders and compares their results. If the process is killed, both forget their
    remembered prompts."""

    def __init__(
        self,
        remote: RemoteText,
        make: Callable[[], PromptBuilder],
        loop: asyncio.AbstractEventLoop,
        processes: list[EngineProcess],
    ) -> None:
        """make: creates a new builder in this process."""
        self._remote, self._make, self._loop, self._processes = remote, make, loop, processes
        self._local = make()
        self.rng = random.Random(0)
        self.kill_rate = 0.0
        self.num_kills = 0
        self.dialect = self._local.dialect

    @property
    def num_spliced(self) -> int:
        return self._local.num_spliced

    def build(self, asked: PromptAsk) -> BuiltPrompt:
        killed = self.rng.random() < self.kill_rate
        answer = self._call(msgspec.structs.replace(asked, limit=ROOMY))
        if killed:  # before, during or after the job
            os.kill(self._processes[-1].process.pid, signal.SIGKILL)
            self.num_kills += 1
        found = answer.result(60)
        expected = facts(self._local.build(asked))
        if killed:
            self._call(ask("a process that lives")).result(60)
            self._local = self._make()
            assert facts(found) in (expected, facts(self._local.build(asked)))
            self._local = self._make()
            return self.build(asked)
        assert facts(found) == expected
        return found

    def remember(self, prompt: BuiltPrompt, turn: Any, ids: list[int], *, is_cut: bool) -> None:
        self._local.remember(prompt, turn, ids, is_cut=is_cut)
        self._loop.call_soon_threadsafe(
            lambda: self._remote.remember(prompt, turn, ids, is_cut=is_cut, skip_special_tokens=True)
        )

    def _call(self, wanted: PromptAsk) -> Any:
        return asyncio.run_coroutine_threadsafe(self._remote.build(wanted, Flow()), self._loop)


@pytest.fixture
def beside(processes: list[EngineProcess]) -> Iterator[Beside]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    async def made() -> RemoteText:
        remote = RemoteText(text_process(SECONDS), SECONDS)
        await remote.load(bundled.DIRECTORY, None)
        return remote

    tokenizer, template = local()
    remote = call(made())
    try:
        yield Beside(remote, lambda: PromptBuilder(tokenizer, template, TurnMemory()), loop, processes)
    finally:
        call(remote.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class OtherClient(Client):
    """The client of tests/text with a builder that compares both ways."""

    def __init__(self, builder: Any, seed: int) -> None:
        self._other = builder
        super().__init__(*local(), seed)

    def _builder(self) -> PromptBuilder:
        return self._other

    def _build(self, **asked: Any) -> BuiltPrompt:
        asked["marked"] = [MessageMark(self.rng.randrange(len(self.session.messages)))]
        return self.session.builder.build(PromptAsk(self.session.messages, TOOLS, **asked))


@pytest.mark.parametrize(("seed", "kill_rate"), [(0, 0.0), (1, 0.0), (2, 0.15), (3, 0.15)])
def test_prompts_equal_those_of_a_local_builder_also_after_kills(beside: Beside, seed: int, kill_rate: float) -> None:
    beside.rng, beside.kill_rate = random.Random(100 + seed), kill_rate
    client = OtherClient(beside, seed)
    try:
        for _ in range(60 if kill_rate else 150):
            client.do(client.rng.choice(DEEDS))
    except AssertionError as error:
        raise AssertionError(f"seed {seed}") from error
    assert beside.num_kills > 2 if kill_rate else beside.num_spliced > 3


def test_ids_of_texts_are_the_tokenizers() -> None:
    tokenizer, _ = local()
    texts = ["", "a b", "<|im_end|>", "東京 🙂", "word " * 500]

    async def work(remote: RemoteText) -> None:
        assert [list(ids) for ids in await remote.encode(texts, ROOMY, Flow())] == [
            tokenizer.encode(text) for text in texts
        ]
        with pytest.raises(ContextLengthError, match="exceeds the context limit of 100 tokens"):
            await remote.encode(texts, TokenLimit(100), Flow())
        with pytest.raises(RequestError, match="is not valid Unicode"):
            await remote.encode(["a \ud800"], ROOMY, Flow())

    run(work)


def test_a_first_text_waits_for_nothing_that_follows_from_the_vocabulary() -> None:
    async def work(text: RemoteText) -> int:
        [ids] = await text.encode(["some words"], ROOMY, Flow())
        return len(ids)

    code = """
from agentspec.text import tokenizer
answer = text_process._Worker._answer
def answer_text(worker, message):
    if isinstance(message, text_process.Encode):
        tokenizer.token_bounds = tokenizer._byte_table = None
    return answer(worker, message)
text_process._Worker._answer = answer_text
"""
    assert run(work, code=code) > 1


def test_numbers_beyond_64_bits_reach_the_template() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"maximum": 10**30}}}},
    }

    async def work(remote: RemoteText) -> BuiltPrompt:
        with pytest.raises(RequestError, match="the chat template refuses"):
            await remote.build(PromptAsk(messages=[{"role": "judge", "content": ""}], limit=ROOMY), Flow())
        return await remote.build(ask("x", tools=[tool]), Flow())

    expected = PromptBuilder(*local(), TurnMemory()).build(PromptAsk(ask("x").messages, [tool]))
    assert facts(run(work)) == facts(expected)


def test_a_hanging_template_fails_its_request_and_delays_others_by_a_deadline(
    tmp_path: Path, processes: list[EngineProcess]
) -> None:
    async def work(remote: RemoteText) -> None:
        jobs = [asyncio.create_task(remote.build(ask(text), Flow(session=text))) for text in ("hang", "a", "b")]
        done = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(done[0], TextProcessError)
        assert "messages: the request took longer" in str(done[0])
        assert "--text-timeout" in str(done[0])
        assert [len(prompt.prompt_ids) > 3 for prompt in done[1:] if isinstance(prompt, BuiltPrompt)] == [True, True]
        assert len(processes) == 2
        large = PromptAsk(messages=[{"role": "user", "content": "x" * 300_000}, *ask("hang").messages], limit=ROOMY)
        with pytest.raises(
            RequestError, match=r"^messages='300,.* bytes': took longer"
        ) as refused:  # a request of that size may be the cause itself
            await remote.build(large, Flow())
        assert refused.value.field == "messages"

    run(work, checkpoint(tmp_path, HANGS), seconds=1)
    assert processes[0].process.returncode == -signal.SIGKILL


def test_a_waiting_job_of_a_client_that_left_is_dropped(tmp_path: Path, processes: list[EngineProcess]) -> None:
    """The waiting job of a client that left is never started, and others don't wait for it."""

    async def work(remote: RemoteText) -> None:
        running = asyncio.create_task(remote.build(ask("hang"), Flow()))
        waiting = [asyncio.create_task(remote.build(ask("hang"), Flow(session=str(number)))) for number in range(20)]
        last = asyncio.create_task(remote.build(ask("x"), Flow(session="last")))
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        assert isinstance((await asyncio.gather(running, return_exceptions=True))[0], TextProcessError)
        assert len((await last).prompt_ids) > 3

    run(work, checkpoint(tmp_path, HANGS), seconds=1)
    assert len(processes) == 2


def test_a_job_is_retried_after_its_process_crashed(processes: list[EngineProcess]) -> None:
    """The first process crashes in the job; the second one, without the fault, does it."""
    dying = DIES + "lambda *a, **k: os.kill(os.getpid(), 9)"
    prompt = run(lambda remote: remote.build(ask("x"), Flow()), code=dying)
    assert len(prompt.prompt_ids) > 3
    assert [process.process.returncode for process in processes] == [-signal.SIGKILL, -signal.SIGKILL]


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), 9)", "(_ for _ in ()).throw(MemoryError())"])
def test_a_job_that_crashes_every_process_gets_503_and_the_next_one_runs(
    death: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = DIES + f"lambda s, asked: {death} if asked.messages[0]['content'] == 'die' else b(s, asked)"
    monkeypatch.setattr("agentspec.engine.remote_text.text_process", lambda seconds: with_code(code))

    async def work(remote: RemoteText) -> None:
        with pytest.raises(TextProcessError, match="ended 2 times at this request"):
            await remote.build(ask("die"), Flow())
        assert len((await remote.build(ask("x"), Flow())).prompt_ids) > 3

    run(work, code=code)


def test_a_process_killed_while_idle_is_replaced(processes: list[EngineProcess]) -> None:
    async def work(remote: RemoteText) -> None:
        for _ in range(3):
            processes[-1].kill()
            assert len((await remote.build(ask("x"), Flow())).prompt_ids) > 3

    run(work)


def test_waiting_bytes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.fair_queue.MAX_OWNER_BYTES", 100_000)

    async def work(remote: RemoteText) -> None:
        first = asyncio.create_task(remote.build(ask("hang"), Flow("key")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = asyncio.create_task(remote.build(ask("x" * 90_000), Flow("key")))
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="would exceed 100,000"):
            await remote.build(ask("x" * 90_000), Flow("key", "another"))
        monkeypatch.setattr("agentspec.fair_queue.MAX_WAITING_BYTES", 150_000)
        with pytest.raises(OverloadedError, match=r"of all clients .* would exceed 150,000"):
            await remote.build(ask("x" * 90_000), Flow("another key"))
        await asyncio.gather(first, waiting, return_exceptions=True)

    run(work, checkpoint(tmp_path, HANGS), seconds=1)


def test_closing_ends_running_and_waiting_jobs(tmp_path: Path, processes: list[EngineProcess]) -> None:
    async def work(remote: RemoteText) -> None:
        jobs = [asyncio.create_task(remote.build(ask("hang"), Flow(session=str(number)))) for number in range(3)]
        await asyncio.sleep(0)
        await remote.close()
        done = await asyncio.gather(*jobs, return_exceptions=True)
        assert [(type(error), str(error)) for error in done] == [(TextProcessError, "the server is about to stop")] * 3
        with pytest.raises(TextProcessError):
            await remote.encode(["x"], ROOMY, Flow())

    run(work, checkpoint(tmp_path, HANGS))
    assert [process.process.poll() for process in processes] == [-signal.SIGKILL]


@pytest.mark.parametrize(
    "code", ["", DIES + "lambda *a, **k: any(False for _ in iter(int, 1))"], ids=["idle", "in a job"]
)
def test_the_process_ends_when_its_socket_is_closed(code: str) -> None:
    """As when the server is killed; also during a job that never ends."""

    async def main() -> EngineProcess:
        process = with_code(code)
        remote = RemoteText(process, SECONDS)
        await remote.load(bundled.DIRECTORY, None)
        job = asyncio.create_task(remote.build(ask("x"), Flow()))
        if not code:
            await job
        while code and remote._running is None:
            await asyncio.sleep(0)
        assert remote._link is not None
        remote._link._wire.close()
        assert remote._worker is not None
        remote._worker.cancel()
        job.cancel()
        await asyncio.to_thread(process.process.wait, 20)
        return process

    assert asyncio.run(main()).process.returncode in ((-signal.SIGKILL,) if code else (0, -signal.SIGKILL))


@pytest.mark.parametrize(
    ("template", "words"),
    [(FOREVER, "chat template did not end within 1 seconds"), ("{% for %}", "not a valid chat template")],
)
def test_an_unusable_template_is_refused_at_load(
    tmp_path: Path, template: str, words: str, processes: list[EngineProcess]
) -> None:
    async def main(load: Callable[[RemoteText], Coroutine[Any, Any, Any]]) -> None:
        remote = RemoteText(text_process(1), 1)
        try:
            with pytest.raises(CheckpointError, match=words) as refused:
                await load(remote)
            assert str(tmp_path) in str(refused.value)
        finally:
            await remote.close()

    directory = checkpoint(tmp_path, template)
    asyncio.run(main(lambda remote: remote.load(directory, None)))
    asyncio.run(main(lambda remote: remote.check(directory / "chat_template.jinja")))
    assert all(process.process.returncode is not None for process in processes)


def test_checkpoints_without_template_or_tokenizer(tmp_path: Path) -> None:
    async def main(directory: Path, template: Path | None) -> tuple[TextPipeline | None, RemoteText]:
        remote = RemoteText(text_process(SECONDS), SECONDS)
        try:
            pipeline = await pipeline_of(directory, template, remote)
            if pipeline is not None:
                assert len((await pipeline.work.encode(["a"], ROOMY, Flow()))[0]) == 1
            return pipeline, remote
        finally:
            await remote.close()

    (tmp_path / "empty").mkdir()
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}<function={{ tools }}")
    assert asyncio.run(main(tmp_path / "empty", None))[0] is None
    with pytest.raises(ConfigError, match="no tokenizer"):
        asyncio.run(main(tmp_path / "empty", own))
    directory = checkpoint(tmp_path, "")
    (directory / "chat_template.jinja").unlink()
    config = (directory / "tokenizer_config.json").read_text()
    if "chat_template" not in config:
        bare = asyncio.run(main(directory, None))[0]
        assert bare is not None
        assert bare.prompts is None
    served = asyncio.run(main(directory, own))[0]
    local = TextPipeline.from_checkpoint(Tokenizer.from_directory(directory), directory, chat_template=own)
    assert served is not None
    assert local is not None
    assert served.settings == local.settings
    assert served.prompts is not None
    assert local.prompts is not None
    assert (served.prompts.dialect, served.prompts.template_reads) == (
        local.prompts.dialect,
        local.prompts.template_reads,
    )


def test_health_ids_and_streams_work_while_a_template_hangs(tmp_path: Path) -> None:
    """Over HTTP: a chat that hangs, one that waits behind it, and requests that need no text work."""
    engine = ScriptedEngine([*said("a", "b"), ended()])

    async def main() -> None:
        remote = RemoteText(text_process(2), 2)
        app = create_app(engine, await pipeline_of(checkpoint(tmp_path, HANGS), None, remote))
        async with httpx.AsyncClient(
            transport=InProcessTransport(app), base_url="http://in-process", timeout=None
        ) as client:

            def chat(content: str) -> asyncio.Task[httpx.Response]:
                body = {"model": engine.info.model_id, "messages": [{"role": "user", "content": content}]}
                return asyncio.create_task(client.post("/v1/chat/completions", json=body))

            hangs, waits = chat("hang"), chat("x")
            await asyncio.sleep(0)
            assert (await client.get("/health")).status_code == 200
            ids = {"model": engine.info.model_id, "prompt": [1, 2], "stream": True}
            streamed = await client.post("/v1/completions", json=ids)
            assert streamed.text.endswith("data: [DONE]\n\n")
            assert not hangs.done()
            refused = await hangs
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "text_process")
            assert (await waits).json()["choices"][0]["message"]["content"] == "ab"
        await remote.close()

    asyncio.run(main())


def test_the_text_process_does_not_import_the_server_or_torch() -> None:
    code = (
        "import sys, agentspec.engine.text_process\n"
        "print(sorted({'torch', 'fastapi', 'uvicorn', 'starlette', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
