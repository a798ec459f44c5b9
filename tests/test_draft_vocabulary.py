"""A draft vocabulary lowers acceptance but doesn't change streams; token counts of served text improve it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, assemble, build
from agentspec.engine.in_process import AsyncEngine, Engine
from agentspec.engine.remote import RemoteEngine
from agentspec.errors import ConfigError
from agentspec.mtp.token_counts import TokenCounts
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import SamplingParams
from agentspec.wire import Event, Submit, TokensEvent
from tests.fakes.hash_chain import HashChainModel, ReferenceRequest
from tests.fakes.text import byte_backend

SIZE = 64
"""Out of tiny-agent's 4,096 tokens, of which 26 are control tokens."""

LESSONS = ("Thanks, that was all.", "Cancel the order O-1187, please.", "Where is the parcel of order O-22?")
QUESTIONS = ("What is the status of order O-4071?", "Who is the customer C-33?", "Hello!")
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=40),
    SamplingParams(temperature=0.6, repetition_penalty=1.1, seed=8, max_tokens=40),
]
MEMORY = MemoryPlan(num_rows=60, num_pages=200, max_length=500)


@dataclass(frozen=True, kw_only=True)
class Heard:
    streams: list[list[int]]
    num_drafted: int
    num_accepted: int

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted


def tiny_agent(**settings: Any) -> Assembly:
    usual: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "draft_tokens": 3,
        "max_running": 4,
        "memory_gib": 0.2,
    }
    return assemble(EngineConfig(**usual | settings))


def ask(parts: Assembly, questions: tuple[str, ...], samplings: list[SamplingParams]) -> Heard:
    """Run every question with every sampling, all at the same time."""
    tokenizer = parts.tokenizer
    assert tokenizer is not None
    asked = [
        Submit(
            request_id=f"{place} {question}",
            prompt_ids=tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n"),
            sampling=sampling,
        )
        for place, sampling in enumerate(samplings)
        for question in questions
    ]
    with Engine(parts) as engine:
        for one in asked:
            engine.submit(one)
        streams = [tokens_of(engine.events(one.request_id)) for one in asked]
    metrics = parts.loop.metrics
    return Heard(streams=streams, num_drafted=metrics.drafted_tokens, num_accepted=metrics.accepted_tokens)


def tokens_of(events: Iterable[Event]) -> list[int]:
    return [token for event in events if isinstance(event, TokensEvent) for token in event.token_ids]


def test_a_small_vocabulary_keeps_streams_and_counts_restore_acceptance(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    lessons = ask(tiny_agent(token_counts=str(file)), LESSONS, [GREEDY])
    assert TokenCounts(str(file), num_tokens=4096).known == Counter(
        token for stream in lessons.streams for token in stream
    )
    everything = ask(tiny_agent(), QUESTIONS, SAMPLINGS[:2])
    lowest = ask(tiny_agent(draft_vocab_size=SIZE), QUESTIONS, SAMPLINGS[:2])
    most_served = ask(tiny_agent(draft_vocab_size=SIZE, token_counts=str(file)), QUESTIONS, SAMPLINGS[:2])
    assert lowest.streams == everything.streams
    assert most_served.streams == everything.streams
    figures = lowest.acceptance, most_served.acceptance, everything.acceptance
    assert figures[0] + 0.2 < figures[1] < figures[2], figures


def test_no_draft_vocabulary_changes_the_hash_chain() -> None:
    asked = [
        Submit(
            request_id=f"{name} {first}",
            prompt_ids=[first, *((5 * place + first) % 46 for place in range(30))],
            sampling=sampling,
        )
        for name, sampling in enumerate(SAMPLINGS)
        for first in range(3)
    ]
    accepted = {}
    for size in (1, 5, 20, 48):
        model = HashChainModel(seed=2, draft_accuracy=0.95)
        parts = build(model, config=EngineConfig(draft_tokens=3, draft_vocab_size=size, max_running=4), memory=MEMORY)
        with Engine(parts) as engine:
            for one in asked:
                engine.submit(one)
            for one in asked:
                said = tokens_of(engine.events(one.request_id))
                expected = model.reference_stream(
                    ReferenceRequest(
                        prompt=one.prompt_ids,
                        sampling=one.sampling,
                        seed=one.sampling.seed or 0,
                        length_limit=len(one.prompt_ids) + 40,
                        stop_ids=parts.spec.stop_token_ids,
                    )
                )
                assert said == expected, (size, one.request_id)
        accepted[size] = parts.loop.metrics.accepted_tokens / parts.loop.metrics.drafted_tokens
    assert accepted[1] < accepted[5] < accepted[20] < accepted[48], accepted


def test_an_async_engine_writes_the_counts_when_it_closes(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    parts = tiny_agent(token_counts=str(file))

    async def main() -> list[int]:
        async with AsyncEngine(parts) as engine:
            said = [
                event async for event in engine.stream(Submit(request_id="a", prompt_ids=[4071, 9, 9], sampling=GREEDY))
            ]
            assert not file.exists()
        return tokens_of(said)

    said = asyncio.run(main())
    assert said
    assert json.loads(file.read_text())["counts"] == {str(token): times for token, times in Counter(said).items()}


def test_the_engine_of_a_server_writes_the_counts_when_it_is_closed(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    config = EngineConfig(
        device="cpu", dtype="float32", memory_gib=0.2, max_running=4, token_counts=str(file), draft_vocab_size=SIZE
    )

    async def main() -> list[int]:
        async with await RemoteEngine.start(config) as engine:
            assert engine.setup.draft_vocabulary.startswith("64 of 4,096 tokens")
            return tokens_of(
                [
                    event
                    async for event in engine.stream(Submit(request_id="a", prompt_ids=[4071, 9, 9], sampling=GREEDY))
                ]
            )

    assert TokenCounts(str(file), num_tokens=4096).known == {}
    said = asyncio.run(main())
    assert TokenCounts(str(file), num_tokens=4096).known == Counter(said)


def test_an_engine_closes_even_if_its_counts_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "counts.json"
    with Engine(tiny_agent(token_counts=str(file))) as engine:
        engine.generate(
            Submit(request_id="a", prompt_ids=[4071, 9], sampling=SamplingParams(temperature=0.0, max_tokens=4))
        )
        file.write_text("broken")
    assert "what was served is not counted: token_counts=" in caplog.text
    assert file.read_text() == "broken"


def test_the_start_page_shows_the_draft_vocabulary() -> None:
    assert (
        tiny_agent(draft_vocab_size=SIZE).draft_vocabulary
        == f"64 of 4,096 tokens (the lowest ids; {SIZE * (256 * 4 + 8) / 2**20:.1f} MiB)"
    )
    assert tiny_agent().draft_vocabulary == "all 4,096 tokens"
    assert tiny_agent(draft_tokens=0).draft_vocabulary == "nothing: there are no drafts"


def test_control_tokens_and_stop_ids_are_always_drafted() -> None:
    limits: list[list[int]] = []

    class Watched(HashChainModel):
        def limit_drafts(self, ids: Sequence[int]) -> int:
            limits.append(list(ids))
            return super().limit_drafts(ids)

    model = Watched(num_real_tokens=300)
    for size, tokenizer in ((12, None), (12, Tokenizer(byte_backend())), (0, None)):
        build(model, config=EngineConfig(draft_vocab_size=size), memory=MEMORY, tokenizer=tokenizer)
    assert limits == [
        [*range(11), 299],
        [*range(2), *range(256, 265), 299],
        [*range(300)],  # A reused model must have no limit left.
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"draft_vocab_size": -1}, "draft_vocab=-1: must be a number of tokens"),
        ({"draft_vocab_size": 25}, "draft_vocab=25: must be at least 26"),
        ({"draft_vocab_size": 4097}, "draft_vocab=4097: the model has 4096 tokens"),
        ({"draft_vocab_size": 64, "draft_tokens": 0}, "draft_vocab=64: there are no drafts to choose"),
        ({"token_counts": ""}, "token_counts='': name a file"),
        (
            {"token_counts": "no/such/directory/counts.json"},
            "token_counts='no/such/directory/counts.json': its directory does not exist",
        ),
        (
            {"token_counts": "counts.json", "force_acceptance": (0.5, 0.5, 0.5)},
            "token_counts='counts.json': can't be learned from",
        ),
    ],
    ids=str,
)
def test_invalid_settings_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny_agent(**settings)
