"""Grammar requests in an engine: compiled in the background, refused by name, and dropped when no reader waits.

Except in one test, the compiler is a fake that makes random automata and can be told to wait;
tests/runtime/test_grammar.py tests the real one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, assemble
from agentspec.engine.in_process import AsyncEngine, Engine
from agentspec.engine.thread import COMPILE_THREADS, MAX_COMPILES
from agentspec.errors import EngineClosedError, OverloadedError, RequestError
from agentspec.runtime.constraint import Constraint
from agentspec.runtime.constraint_source import ConstraintSource
from agentspec.server.transport import InProcessTransport
from agentspec.types import FinishReason, SamplingParams
from agentspec.wire import FinishEvent, Grammar, Submit, TokensEvent
from tests.fakes.automaton import Automaton, Rules
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.hash_chain import HashChainModel, ReferenceRequest
from tests.test_engine import GREEDY, assembly, assert_nothing_left, expected, submit
from tests.test_engine_async import read, run, settle

MODEL = HashChainModel(seed=5)
RULES = Rules(
    1,
    vocab_size=MODEL.spec.vocab_size,
    num_real_tokens=MODEL.spec.num_real_tokens,
    stop_id=MODEL.spec.stop_token_ids[0],
)


class FakeCompiled:
    def constraint(self) -> Constraint:
        return Automaton(RULES)


class FakeCompiler:
    """Compiles `slow` grammars only when told to, refuses `bad` ones, and raises an internal error on `bug`."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.go_on = threading.Event()
        self.is_closed = False
        self.num_compiled = 0
        self.known_sources: set[str] = set()

    def known(self, grammar: Grammar) -> FakeCompiled | None:
        return FakeCompiled() if grammar.source in self.known_sources else None

    def compile(self, grammar: Grammar) -> FakeCompiled:
        self.threads.append(threading.current_thread().name)
        if grammar.source == "bad":
            raise RequestError("grammar.source", grammar.source, "is no grammar")
        if grammar.source == "bug":
            raise ZeroDivisionError("planted")
        if grammar.source == "slow":
            self.go_on.wait(60)
            if self.is_closed:
                raise EngineClosedError("the compiler was closed")
        self.num_compiled += 1
        return FakeCompiled()

    def close(self) -> None:
        self.is_closed = True
        self.go_on.set()


def constrained(request_id: str, source: str = "fast", *, sampling: SamplingParams = GREEDY, first: int = 1) -> Submit:
    return submit(request_id, sampling=sampling, first=first, grammar=Grammar(kind="regex", source=source))


def owned_by(asked: Submit, owner: str) -> Submit:
    return msgspec.structs.replace(asked, owner=owner)


def house(**settings: Any) -> tuple[Assembly, FakeCompiler]:
    compiler = FakeCompiler()
    return dataclasses.replace(assembly(**settings), constraints=ConstraintSource(lambda: compiler)), compiler


def expected_constrained(parts: Assembly, asked: Submit) -> list[int]:
    assert isinstance(parts.model, HashChainModel)
    return parts.model.reference_stream(
        ReferenceRequest(
            prompt=asked.prompt_ids,
            sampling=asked.sampling,
            seed=0,
            length_limit=len(asked.prompt_ids) + (asked.sampling.max_tokens or 0),
            stop_ids=parts.spec.stop_token_ids,
            allowed_after=RULES.allowed_after,
        )
    )


def test_engine_compiles_in_the_caller() -> None:
    parts, compiler = house()
    with Engine(parts) as engine:
        ids, _ = engine.generate(constrained("a"))
        assert ids == expected_constrained(parts, constrained("a"))
        assert ids != expected(parts, submit("a"))
        with pytest.raises(RequestError, match=r"grammar\.source='bad'"):
            engine.submit(constrained("b", "bad"))
        assert engine.generate(constrained("b"))[0] == ids, "the id of a refused submit is free"
        assert compiler.threads == [threading.current_thread().name] * 3
    assert compiler.is_closed
    assert_nothing_left(parts)


def test_no_compiler_is_built_before_the_first_grammar() -> None:
    built: list[FakeCompiler] = []

    def build() -> FakeCompiler:
        built.append(FakeCompiler())
        return built[-1]

    parts = dataclasses.replace(assembly(), constraints=ConstraintSource(build))
    with Engine(parts) as engine:
        engine.generate(submit("a"))
        assert built == []
        engine.generate(constrained("b"))
        engine.generate(constrained("c"))
        assert len(built) == 1
    with pytest.raises(EngineClosedError):
        parts.constraints.make(Grammar(kind="regex", source="fast"))


@pytest.mark.parametrize("settings", [{}, {"force_acceptance": (0.5, 0.5, 0.5)}])
def test_an_unusable_grammar_is_refused_by_name(settings: dict[str, Any], tmp_path: Path) -> None:
    if settings:
        engine = Engine(EngineConfig(draft_tokens=3, **settings))
    else:
        engine = Engine(EngineConfig(model=str(write_checkpoint(tmp_path, "dense"))))
    with engine, pytest.raises(RequestError, match="grammar='regex': ") as caught:
        engine.submit(Submit(request_id="a", prompt_ids=[1, 2, 3], grammar=Grammar(kind="regex", source="a+")))
    assert ("forced" if settings else "tokenizer") in str(caught.value)


def test_a_compiler_can_be_built_before_the_first_grammar() -> None:
    built, begun = [], threading.Event()

    def new_compiler() -> FakeCompiler:
        built.append(FakeCompiler())
        begun.set()
        return built[-1]

    source = ConstraintSource(new_compiler)
    source.prepare()
    assert begun.wait(60)
    source.make(Grammar(kind="regex", source="fast"))
    source.prepare()
    source.close()
    assert [compiler.is_closed for compiler in built] == [True]
    source.prepare()
    with pytest.raises(EngineClosedError):
        source.make(Grammar(kind="regex", source="fast"))
    assert len(built) == 1, "none is built after the end"


def test_an_error_of_building_the_compiler_early_reaches_the_first_grammar() -> None:
    tried = threading.Semaphore(0)

    def new_compiler() -> FakeCompiler:
        tried.release()
        raise RequestError("grammar", "...", "needs the package xgrammar")

    source = ConstraintSource(new_compiler)
    source.prepare()
    assert tried.acquire(timeout=60)
    with pytest.raises(RequestError, match="needs the package"):
        source.make(Grammar(kind="regex", source="fast"))
    source.close()
    ConstraintSource(None, refusal="takes none").prepare()


def test_async_engine_compiles_off_its_thread_and_its_event_loop() -> None:
    async def main() -> None:
        parts, compiler = house()
        async with AsyncEngine(parts) as engine:
            waiting = asyncio.create_task(read(engine, constrained("slow", "slow")))
            await settle()
            plain = await read(engine, submit("plain"))
            assert plain[0] == expected(parts, submit("plain")), "the engine runs meanwhile"
            quick = await read(engine, constrained("quick"))
            assert quick[0] == expected_constrained(parts, constrained("quick")), "and so do other grammars"
            assert not waiting.done()
            assert (await engine.stats())["waiting"] == 0, "it enters the queue when it is compiled"
            compiler.go_on.set()
            assert (await waiting)[0] == expected_constrained(parts, constrained("slow"))
        assert all(name.startswith("agentspec-grammar") for name in compiler.threads)
        assert_nothing_left(parts)

    run(main())


def test_a_refused_or_crashing_grammar_affects_only_its_request() -> None:
    async def main() -> None:
        parts, _ = house()
        async with AsyncEngine(parts) as engine:
            other = asyncio.create_task(read(engine, submit("other")))
            with pytest.raises(RequestError, match=r"grammar\.source='bad': is no grammar"):
                await read(engine, constrained("a", "bad"))
            with pytest.raises(ZeroDivisionError):
                await read(engine, constrained("a", "bug"))
            assert (await read(engine, constrained("a")))[0] == expected_constrained(parts, constrained("a")), (
                "the id is free, the engine runs"
            )
            await other
        assert_nothing_left(parts)

    run(main())


def test_an_abort_while_compiling_ends_the_stream() -> None:
    async def main() -> None:
        parts, compiler = house()
        async with AsyncEngine(parts) as engine:
            waiting = asyncio.create_task(read(engine, constrained("a", "slow")))
            await settle()
            await engine.abort("a")
            ids, finish = await waiting
            assert (ids, finish.reason, finish.usage.prompt_tokens) == ([], FinishReason.ABORT, 40)
            await settle()
            assert (await read(engine, submit("a")))[0] == expected(parts, submit("a")), "the id is free"
            compiler.go_on.set()
        assert parts.loop.metrics.requests == 1, "it never entered the engine"
        assert_nothing_left(parts)

    run(main())


def test_a_reader_that_leaves_while_compiling_leaves_no_state() -> None:
    async def main() -> None:
        parts, compiler = house()
        async with AsyncEngine(parts) as engine:
            waiting = asyncio.create_task(read(engine, constrained("a", "slow")))
            await settle()
            waiting.cancel()
            await asyncio.wait((waiting,))
            assert waiting.cancelled()
            compiler.go_on.set()
            again = await read(engine, constrained("b"))
            assert again[1].usage.completion_tokens == len(again[0])
        assert parts.loop.metrics.requests == 1
        assert_nothing_left(parts)

    run(main())


def test_a_compile_without_a_waiting_reader_is_not_started() -> None:
    async def main() -> None:
        parts, compiler = house()
        async with AsyncEngine(parts) as engine:
            readers = [
                asyncio.create_task(read(engine, constrained(f"r{number}", "slow")))
                for number in range(COMPILE_THREADS + 8)
            ]
            await settle()
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)
            compiler.go_on.set()
            await read(engine, constrained("last"))
        assert len(compiler.threads) < len(readers)

    run(main())


def test_a_known_grammar_does_not_wait_behind_new_ones() -> None:
    """Issue 18, finding 9: it waited 17 s behind 34 new ones."""

    async def main() -> None:
        parts, compiler = house()
        compiler.known_sources.add("known")
        async with AsyncEngine(parts) as engine:
            new = [asyncio.create_task(read(engine, constrained(f"r{number}", "slow"))) for number in range(40)]
            await settle()
            known = await asyncio.wait_for(read(engine, constrained("k", "known")), 60)
            assert known[0] == expected_constrained(parts, constrained("k", "known"))
            assert not any(reader.done() for reader in new)
            compiler.go_on.set()
            await asyncio.gather(*new)
        assert_nothing_left(parts)

    run(main())


def test_compiles_take_turns_by_owner_and_session() -> None:
    async def main() -> None:
        parts, compiler = house()
        order: list[str] = []
        compile_one = compiler.compile

        def compile_and_note(grammar: Grammar) -> FakeCompiled:
            order.append(grammar.source)
            return compile_one(grammar)

        compiler.compile = compile_and_note  # type: ignore[method-assign]
        async with AsyncEngine(parts) as engine:
            blocked = [
                asyncio.create_task(read(engine, constrained(f"b{number}", "slow")))
                for number in range(COMPILE_THREADS)
            ]
            await settle()
            asked = [owned_by(constrained(f"m{number}", f"m{number}"), "many") for number in range(20)]
            asked.append(owned_by(constrained("o", "one"), "one"))
            readers = [asyncio.create_task(read(engine, one)) for one in asked]
            await settle()
            compiler.go_on.set()
            await asyncio.gather(*blocked, *readers)
        assert order.index("one") <= COMPILE_THREADS + 2, order

    run(main())


def test_a_full_compile_queue_refuses_the_owner_with_the_most_jobs() -> None:
    async def main() -> None:
        parts, compiler = house()
        short = SamplingParams(temperature=0.0, max_tokens=1)
        async with AsyncEngine(parts) as engine:
            many = [
                asyncio.create_task(read(engine, owned_by(constrained(f"m{number}", "slow", sampling=short), "many")))
                for number in range(MAX_COMPILES + COMPILE_THREADS)
            ]
            await settle()
            one = asyncio.create_task(read(engine, owned_by(constrained("one", "slow", sampling=short), "one")))
            await settle()
            with pytest.raises(OverloadedError, match="256 grammars wait"):
                await many.pop()
            compiler.go_on.set()
            await asyncio.gather(one, *many)

    run(main())


def test_an_id_is_in_use_while_its_grammar_compiles() -> None:
    async def main() -> None:
        parts, compiler = house()
        async with AsyncEngine(parts) as engine:
            waiting = asyncio.create_task(read(engine, constrained("a", "slow")))
            await settle()
            with pytest.raises(RequestError, match="request_id='a': is in use"):
                await anext(engine.stream(submit("a")))
            compiler.go_on.set()
            await waiting

    run(main())


def test_closing_ends_requests_that_wait_for_a_compile() -> None:
    async def main() -> None:
        parts, compiler = house()
        async with AsyncEngine(parts) as engine:
            waiting = [asyncio.create_task(read(engine, constrained(f"r{number}", "slow"))) for number in range(7)]
            await settle()
            await engine.close()
            for reader in waiting:
                with pytest.raises(EngineClosedError):
                    await reader
        assert compiler.is_closed
        assert compiler.num_compiled == 0

    run(main())


def test_a_failed_thread_refuses_requests_that_are_compiling(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        parts, _ = house()
        async with AsyncEngine(parts) as engine:
            waiting = asyncio.create_task(read(engine, constrained("a", "slow")))
            await settle()
            parts.loop.run_once = lambda: (_ for _ in ()).throw(RuntimeError("gone"))  # type: ignore[method-assign]
            _, finish = await read(engine, submit("b"))
            assert finish.reason is FinishReason.ERROR
            with pytest.raises(EngineClosedError, match="gone"):
                await waiting

    run(main())


def test_a_compile_that_finishes_while_the_engine_closes_is_refused() -> None:
    async def main() -> None:
        parts, compiler = house()
        made = threading.Event()
        make = parts.constraints.make

        def make_and_tell(grammar: Grammar) -> Constraint:
            constraint = make(grammar)
            made.set()
            return constraint

        parts.constraints.make = make_and_tell  # type: ignore[method-assign]
        async with AsyncEngine(parts) as engine:
            waiting = asyncio.create_task(read(engine, constrained("a", "slow")))
            await settle()
            compiler.go_on.set()
            made.wait(60)  # both the constraint and the close wait for this event loop
            closing = asyncio.create_task(engine.close())
            with pytest.raises(EngineClosedError):
                await waiting
            await closing
        assert parts.loop.metrics.requests == 0

    run(main())


def test_scores_and_constraints_reach_the_reader() -> None:
    async def main() -> None:
        parts, _ = house()
        async with AsyncEngine(parts) as engine:
            asked = submit("a", grammar=Grammar(kind="regex", source="fast"), logprobs=2)
            scored = []
            async for event in engine.stream(asked):
                if not isinstance(event, FinishEvent):
                    assert event.scores is not None
                    scored += event.scores
            assert [score.token_id for score in scored] == expected_constrained(parts, asked)
            assert {len(score.top) for score in scored} == {2}

    run(main())


LATE = "".join(random.Random(1).choices("zqxjv", k=70))
DEAD_END = f'root ::= "{LATE}" dead\ndead ::= []'
"""Longer than the trial walk: most of these letters are single tokens."""


def test_a_dead_end_during_generation_ends_with_a_refusal() -> None:
    heard = []
    for draft_tokens in (0, 3):
        parts = assemble(EngineConfig(draft_tokens=draft_tokens, device="cpu", memory_gib=0.2))
        with Engine(parts) as engine:
            assert engine.tokenizer is not None
            asked = Submit(request_id="a", prompt_ids=[5, 6, 7], grammar=Grammar(kind="ebnf", source=DEAD_END))
            *steps, finish = engine.stream(asked)
            assert isinstance(finish, FinishEvent)
            assert (finish.reason, finish.refused) == (FinishReason.ERROR, "grammar.source")
            ids = [token for event in steps if isinstance(event, TokensEvent) for token in event.token_ids]
            assert (
                engine.tokenizer.decode(ids)
                == "".join(event.text for event in steps if isinstance(event, TokensEvent)) + finish.text
                == LATE
            )
            with pytest.raises(RequestError, match=r"grammar\.source='root.*nothing may follow") as refused:
                engine.generate(asked)
            assert refused.value.value == DEAD_END
            assert engine.generate(submit("b"))[1].reason is FinishReason.LENGTH
            heard.append(ids)
        assert_nothing_left(parts)
    assert heard[0] == heard[1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_server_names_the_field_of_a_dead_end_during_generation(path: str) -> None:
    async def main() -> None:
        parts = assemble(EngineConfig(device="cpu", memory_gib=0.2))
        prompt = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
        body = {"model": "tiny-agent", "guided_grammar": DEAD_END, "max_tokens": 100, **prompt}
        async with (
            AsyncEngine(parts) as engine,
            httpx.AsyncClient(
                transport=InProcessTransport(engine.app), base_url="http://in-process", timeout=None
            ) as client,
        ):
            whole = await client.post(path, json=body)
            assert (whole.status_code, whole.json()["error"]["param"]) == (400, "guided_grammar"), whole.text
            streamed = await client.post(path, json={**body, "stream": True})
            *chunks, last = [json.loads(frame.removeprefix("data: ")) for frame in streamed.text.strip().split("\n\n")]
            assert (streamed.status_code, last["error"]) == (200, whole.json()["error"])
            choices = [chunk["choices"][0] for chunk in chunks]
            assert (
                "".join(choice["delta"].get("content", "") if "chat" in path else choice["text"] for choice in choices)
                != ""
            )
            assert (await engine.stats())["engine"]["finished"]["error"] == 2
        assert_nothing_left(parts)

    run(main())


def test_the_real_compiler_on_the_bundled_model() -> None:
    """The answers to a schema with and without drafts are equal, and the JSON validates."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
    }
    heard = []
    for draft_tokens in (0, 3):
        with Engine(EngineConfig(draft_tokens=draft_tokens, device="cpu")) as engine:
            assert engine.tokenizer is not None
            asked = Submit(
                request_id="a",
                prompt_ids=list(engine.tokenizer.encode("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")),
                sampling=SamplingParams(temperature=0.0, max_tokens=60),
                grammar=Grammar(kind="json_schema", source=json.dumps(schema | {"additionalProperties": False})),
            )
            ids, finish = engine.generate(asked)
            assert finish.reason is FinishReason.STOP
            answer = json.loads(engine.tokenizer.decode(ids[:-1]))
            assert set(answer) == {"name", "old"}
            assert isinstance(answer["old"], bool)
            assert len(answer["name"]) <= 8
            heard.append(ids)
    assert heard[0] == heard[1]
