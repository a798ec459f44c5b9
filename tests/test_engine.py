"""Engine, the synchronous embedding API, on the hash-chain model and on a small real checkpoint with a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentspec.cache import invariants
from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, build
from agentspec.engine.in_process import Engine
from agentspec.errors import ContextLengthError, EngineClosedError, RequestError
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.types import FinishReason, SamplingParams
from agentspec.wire import Event, FinishEvent, Submit, TokensEvent, Usage
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.hash_chain import HashChainModel, ReferenceRequest
from tests.fakes.text import write_text_assets

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
MEMORY = MemoryPlan(num_rows=60, num_pages=200, max_length=500)


def assembly(**settings: Any) -> Assembly:
    return build(
        HashChainModel(seed=5, max_context=600),
        config=EngineConfig(**{"draft_tokens": 3, "max_running": 3} | settings),
        memory=MEMORY,
    )


def submit(
    request_id: str, length: int = 40, *, first: int = 1, sampling: SamplingParams = GREEDY, **fields: Any
) -> Submit:
    return Submit(
        request_id=request_id,
        prompt_ids=[first, *((7 * place) % 46 for place in range(length - 1))],
        sampling=sampling,
        **fields,
    )


def expected(parts: Assembly, asked: Submit) -> list[int]:
    assert isinstance(parts.model, HashChainModel)
    limit = len(asked.prompt_ids) + (asked.sampling.max_tokens or 0)
    return parts.model.reference_stream(
        ReferenceRequest(
            prompt=asked.prompt_ids,
            sampling=asked.sampling,
            seed=0,
            length_limit=limit,
            stop_ids=parts.spec.stop_token_ids,
        )
    )


def read(events: Iterator[Event]) -> tuple[list[int], FinishEvent]:
    *parts, last = events
    assert isinstance(last, FinishEvent)
    return [token for part in parts if isinstance(part, TokensEvent) for token in part.token_ids], last


def assert_nothing_left(parts: Assembly) -> None:
    while parts.loop.has_work:
        assert parts.loop.run_once() == []
    invariants.check(parts.cache)
    assert not parts.cache.leases
    assert parts.loop.scheduler.num_running == parts.loop.scheduler.num_waiting == 0


@pytest.fixture
def parts() -> Assembly:
    return assembly()


def test_generate_runs_a_request_to_completion(parts: Assembly) -> None:
    with Engine(parts) as engine:
        ids, finish = engine.generate(submit("a"))
    assert ids == expected(parts, submit("a"))
    assert (finish.reason, finish.usage.prompt_tokens, finish.usage.completion_tokens) == (FinishReason.LENGTH, 40, 30)
    assert_nothing_left(parts)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft_tokens", [0, 3, "auto"])
def test_batched_requests_generate_the_same_tokens_as_alone(overlap: bool, draft_tokens: Any) -> None:
    parts = assembly(overlap=overlap, draft_tokens=draft_tokens)
    asked = [submit(f"r{number}", 30 + 9 * number, first=number) for number in range(6)]
    with Engine(parts) as engine:
        for one in asked:
            engine.submit(one)
        heard = {one.request_id: read(engine.events(one.request_id))[0] for one in reversed(asked)}
    assert [heard[one.request_id] for one in asked] == [expected(parts, one) for one in asked]
    assert parts.loop.metrics.decode_slots > parts.loop.metrics.decode_steps, "some steps held several"
    assert_nothing_left(parts)


def test_a_second_turn_hits_the_prefix_of_the_first(parts: Assembly) -> None:
    with Engine(parts) as engine:
        first = submit("one")
        ids, _ = engine.generate(first)
        second = Submit(request_id="two", prompt_ids=[*first.prompt_ids, *ids, 1, 2, 3], sampling=GREEDY)
        heard, finish = engine.generate(second)
    assert finish.usage.cached_tokens == 64
    assert heard == expected(parts, second)


def test_a_long_prompt_does_not_change_other_streams(parts: Assembly) -> None:
    with Engine(parts) as engine:
        engine.submit(submit("long", 450))
        engine.submit(submit("short", 5, first=9))
        assert read(engine.events("short"))[0] == expected(parts, submit("short", 5, first=9))
        assert read(engine.events("long"))[0] == expected(parts, submit("long", 450))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_read", [1, 2])
def test_closing_an_iterator_early_aborts_and_frees(overlap: bool, num_read: int) -> None:
    parts = assembly(overlap=overlap)
    with Engine(parts) as engine:
        events = engine.stream(submit("a"))
        engine.submit(submit("other", first=3))
        for _ in range(num_read):
            next(events)
        events.close()
        with pytest.raises(StopIteration):
            next(events)
        assert read(engine.events("other"))[0] == expected(parts, submit("other", first=3))
        assert parts.loop.metrics.finished["abort"] == 1
        assert read(engine.stream(submit("a")))[0] == expected(parts, submit("a")), "its id is free again"
    assert_nothing_left(parts)


def test_closing_an_iterator_before_its_first_event_aborts(parts: Assembly) -> None:
    with Engine(parts) as engine:
        engine.stream(submit("a")).close()
        assert not parts.loop.scheduler.knows("a")
        assert read(engine.stream(submit("a")))[0] == expected(parts, submit("a")), "its id is free again"
    assert_nothing_left(parts)


def test_breaking_out_of_the_loop_aborts(parts: Assembly) -> None:
    with Engine(parts) as engine:
        for event in engine.stream(submit("a")):
            assert isinstance(event, TokensEvent)
            break
        while engine.step():
            pass
    assert parts.loop.metrics.finished["abort"] == 1
    assert_nothing_left(parts)


def test_abort_ends_a_stream_with_an_event(parts: Assembly) -> None:
    with Engine(parts) as engine:
        events = engine.stream(submit("a"))
        first = next(events)
        assert isinstance(first, TokensEvent)
        engine.abort("a")
        ids, finish = read(events)
    whole = expected(parts, submit("a"))
    assert finish.reason is FinishReason.ABORT
    assert [*first.token_ids, *ids] == whole[: len(first.token_ids) + len(ids)]
    assert finish.usage.completion_tokens == len(first.token_ids) + len(ids)
    assert_nothing_left(parts)


def test_abort_of_an_unknown_or_ended_request_is_ignored(parts: Assembly) -> None:
    with Engine(parts) as engine:
        engine.abort("nobody")
        engine.generate(submit("a"))
        engine.abort("a")
        while engine.step():
            pass
    assert parts.loop.metrics.finished["abort"] == 0
    assert_nothing_left(parts)


def test_a_waiting_request_can_be_aborted() -> None:
    parts = assembly(max_running=1)
    with Engine(parts) as engine:
        engine.submit(submit("a"))
        engine.submit(submit("b", first=2))
        engine.abort("b")
        ids, finish = read(engine.events("b"))
        assert (ids, finish.reason, finish.usage) == ([], FinishReason.ABORT, Usage(prompt_tokens=40))
        assert read(engine.events("a"))[0] == expected(parts, submit("a"))


def test_an_id_in_use_is_refused(parts: Assembly) -> None:
    with Engine(parts) as engine:
        engine.submit(submit("a"))
        with pytest.raises(RequestError, match=r"request_id='a': is in use"):
            engine.submit(submit("a"))
        assert read(engine.events("a"))[0] == expected(parts, submit("a"))


def test_an_id_with_unread_events_is_in_use(parts: Assembly) -> None:
    with Engine(parts) as engine:
        engine.submit(submit("a"))
        while engine.step():
            pass
        with pytest.raises(RequestError, match="request_id='a'"):
            engine.submit(submit("a", first=2))


def test_aborting_a_waiting_request_does_not_end_the_next_one_with_its_id() -> None:
    parts = assembly(max_running=1)
    with Engine(parts) as engine:
        engine.submit(submit("busy", first=2))
        engine.step()
        engine.submit(submit("a"))
        engine.abort("a")
        try:
            engine.submit(submit("a"))
        except RequestError:
            return  # refusing it until its terminal event was read is as good
        assert read(engine.events("a"))[1].reason is FinishReason.LENGTH


def test_events_of_an_unknown_id_are_refused(parts: Assembly) -> None:
    with Engine(parts) as engine:
        with pytest.raises(RequestError, match="request_id='a': was not submitted"):
            next(engine.events("a"))
        engine.generate(submit("a"))
        with pytest.raises(RequestError, match="is read already"):
            next(engine.events("a"))


def test_an_id_accepts_only_one_reader(parts: Assembly) -> None:
    with Engine(parts) as engine:
        events = engine.stream(submit("a"))
        with pytest.raises(RequestError, match=r"request_id=.a.: .*is read already"):
            engine.events("a")
        assert read(events)[0] == expected(parts, submit("a"))


def test_a_refused_submit_leaves_no_state(parts: Assembly) -> None:
    with Engine(parts) as engine:
        with pytest.raises(ContextLengthError, match="500 tokens"):
            engine.submit(submit("a", 490))
        with pytest.raises(RequestError, match=r"top_p=2\.0"):
            engine.stream(submit("a", sampling=SamplingParams(top_p=2.0)))
        with pytest.raises(RequestError, match=r"stop=.*no"):
            engine.submit(submit("a", sampling=SamplingParams(stop=("x",))))
        assert engine.stats()["waiting"] == 0
        assert not engine.step()
        engine.generate(submit("a"))


def test_everything_but_stats_is_refused_after_close(parts: Assembly) -> None:
    engine = Engine(parts)
    events = engine.stream(submit("a"))
    next(events)
    engine.close()
    engine.close()
    for use in (
        lambda: engine.submit(submit("b")),
        engine.step,
        lambda: engine.abort("a"),
        lambda: list(engine.stream(submit("c"))),
    ):
        with pytest.raises(EngineClosedError):
            use()
    with pytest.raises(EngineClosedError):
        list(events)
    assert engine.stats()["running"] == 1


def test_stats_count_requests_and_tokens(parts: Assembly) -> None:
    with Engine(parts) as engine:
        engine.generate(submit("a"))
        engine.generate(submit("b", 40))
        engine.submit(submit("c", first=5))
        stats = engine.stats()
        assert (stats["model"], stats["waiting"], stats["running"]) == ("hash-chain", 1, 0)
        counters = stats["engine"]
        assert counters["requests"] == 3
        assert counters["finished"] == {"stop": 0, "length": 2, "abort": 0, "error": 0}
        assert counters["prompt_tokens"] == 120
        assert counters["cached_tokens"] == 32
        assert counters["emitted_tokens"] == 60
        assert stats["cache"]["leases"] == 0
        assert engine.stats() == stats, "asking changes nothing"


def test_info_is_the_models(parts: Assembly) -> None:
    engine = Engine(parts)
    assert engine.tokenizer is None
    info = engine.info
    assert (info.model_id, info.max_context, info.max_draft_tokens) == ("hash-chain", 500, 3)
    assert (info.vocab_size, info.stop_token_ids, info.forced_acceptance) == (
        parts.spec.vocab_size,
        parts.spec.stop_token_ids,
        None,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(
        tmp_path_factory.mktemp("tiny"), "dense", num_hidden_layers=4, vocab_size=272, eos_token_id=257
    )
    write_text_assets(directory)
    return directory


def real(checkpoint: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(checkpoint), memory_gib=0.05, max_running=2, device="cpu", **settings))


def test_a_real_checkpoint_yields_text(checkpoint: Path) -> None:
    with real(checkpoint) as engine:
        assert engine.tokenizer is not None
        prompt = engine.tokenizer.encode("Where is the parcel?")
        sampling = SamplingParams(
            temperature=1.0, seed=4, max_tokens=60, logit_bias=dict.fromkeys(range(256, 272), -100.0)
        )
        events = list(engine.stream(Submit(request_id="a", prompt_ids=prompt, sampling=sampling)))
        ids = [token for event in events if isinstance(event, TokensEvent) for token in event.token_ids]
        assert "".join(event.text for event in events) == engine.tokenizer.decode(ids)
        assert len(ids) == 60


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_stop_string_ends_text_and_stream(checkpoint: Path, overlap: bool, draft_tokens: int) -> None:
    plain = SamplingParams(
        temperature=1.0, seed=4, max_tokens=40, logit_bias=dict.fromkeys(range(32, 90), 60.0), ignore_eos=True
    )
    with real(checkpoint, overlap=overlap, draft_tokens=draft_tokens) as engine:
        assert engine.tokenizer is not None
        prompt = engine.tokenizer.encode("Say something")
        ids, _ = engine.generate(Submit(request_id="whole", prompt_ids=prompt, sampling=plain))
        text = engine.tokenizer.decode(ids)
        assert len(text) == 40
        stop = text[20:23]
        cut = text.index(stop)
        sampling = SamplingParams(
            **{**{name: getattr(plain, name) for name in plain.__struct_fields__}, "stop": (stop,)}
        )
        events = list(engine.stream(Submit(request_id="cut", prompt_ids=prompt, sampling=sampling)))
    *parts, finish = events
    assert isinstance(finish, FinishEvent)
    assert (finish.reason, finish.stop_match) == (FinishReason.STOP, stop)
    assert "".join(event.text for event in events) == text[:cut]
    assert [token for part in parts if isinstance(part, TokensEvent) for token in part.token_ids] == ids[: cut + 3]
    assert finish.usage.completion_tokens == cut + 3


VARIANTS: list[dict[str, Any]] = [
    {"draft_tokens": 0, "prefix_cache": False, "overlap": False},
    {"draft_tokens": 3},
    {"draft_tokens": "auto", "prefill_budget": 64},
]


def test_greedy_streams_do_not_depend_on_drafts_overlap_cache_or_batching(checkpoint: Path) -> None:
    prompt = [3 + place % 200 for place in range(150)]
    heard = []
    for settings in VARIANTS:
        with real(checkpoint, **settings) as engine:
            engine.submit(Submit(request_id="company", prompt_ids=[9, 8, 7], sampling=GREEDY))
            for turn in range(2):
                heard.append(engine.generate(Submit(request_id=f"t{turn}", prompt_ids=prompt, sampling=GREEDY))[0])
    assert all(ids == heard[0] for ids in heard)
