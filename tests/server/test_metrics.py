"""/metrics: valid exposition text, correct figures, and the names that dashboards read."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import aclosing
from itertools import pairwise
from typing import Any, cast

import httpx
import msgspec
import pytest

from agentspec.config import EngineConfig
from agentspec.engine.in_process import AsyncEngine
from agentspec.errors import EngineClosedError, RequestError
from agentspec.server.app import create_app
from agentspec.server.metrics import Family, exposition
from agentspec.server.pipeline import TextPipeline
from agentspec.server.recorder import Figures, RecordedEngine
from agentspec.server.transport import InProcessTransport
from agentspec.types import FinishReason, Histogram, SamplingParams
from agentspec.wire import Event, FinishEvent, Submit, TokensEvent, Usage
from tests.fakes.engine_client import INFO, SPEC, ScriptedEngine, ended

Connect = Callable[..., httpx.AsyncClient]
Labels = frozenset[tuple[str, str]]

SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{(.*)\} (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"(?:,|$)')

VLLM_NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:num_preemptions_total": "counter",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:spec_decode_num_drafts_total": "counter",
    "vllm:spec_decode_num_draft_tokens_total": "counter",
    "vllm:spec_decode_num_accepted_tokens_total": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
}

VLLM_NAMES_OF_ENGINES = {
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:iteration_tokens_total",
}
"""Histograms that only a real engine has."""


class Exposition:
    """A strict parser of the text format."""

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self.values: dict[tuple[str, Labels], float] = {}
        assert text.endswith("\n")
        described = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                described = line.split(" ")[2]
                assert described not in self.kinds, f"{described} twice"
            elif line.startswith("# TYPE "):
                name, kind = line.split(" ")[2:]
                assert name == described
                self.kinds[name] = kind
            else:
                self._sample(line, described)
        for name in (name for name, kind in self.kinds.items() if kind == "histogram"):
            self._check_histogram(name)

    def _sample(self, line: str, family: str) -> None:
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, labels, value = match.groups()
        kind = self.kinds[family]
        assert name in ({f"{family}_bucket", f"{family}_sum", f"{family}_count"} if kind == "histogram" else {family})
        assert kind != "counter" or family.endswith("_total")
        found = LABEL.findall(labels)
        assert "".join(f'{key}="{text}",' for key, text in found) == labels + ",", line
        key = (name, frozenset(found))
        assert key not in self.values, line
        self.values[key] = float(value)

    def _check_histogram(self, name: str) -> None:
        buckets: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
        for (sample, labels), value in self.values.items():
            if sample == f"{name}_bucket":
                bound = float(dict(labels)["le"])
                buckets[frozenset(pair for pair in labels if pair[0] != "le")].append((bound, value))
        assert buckets
        for labels, counts in buckets.items():
            assert counts == sorted(counts), f"{name} isn't cumulated"
            assert counts[-1] == (math.inf, self.values[f"{name}_count", labels])

    def value(self, name: str, **labels: str) -> float:
        (found,) = [
            value
            for (sample, held), value in self.values.items()
            if sample == name and set(labels.items()) <= held - {("model_name", "scripted")}
        ]
        return found


class CountingEngine(ScriptedEngine):
    """An engine with the counters of a real one."""

    async def stats(self) -> dict[str, Any]:
        if not self.alive:
            raise EngineClosedError("gone")
        return {
            "running": 2,
            "waiting": 5,
            "engine": {"prompt_tokens": 70, "cached_tokens": 30, "preemptions": 1},
            "cache": {"pages_used": 60, "pages_free": 40, "tree_pages": 50, "tree_pages_locked": 15},
        }


def scrape(connect: Connect, engine: ScriptedEngine, **overrides: Any) -> Exposition:
    async def run() -> httpx.Response:
        async with connect(engine, **overrides) as client:
            return await client.get("/metrics")

    response = asyncio.run(run())
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Exposition(response.text)


def test_vllm_names_are_exposed_beside_our_names(connect: Connect) -> None:
    found = scrape(connect, CountingEngine())
    assert found.kinds.items() >= VLLM_NAMES.items()
    assert all(name.startswith(("agentspec_", "vllm:")) for name in found.kinds)
    assert all(("model_name", "scripted") in labels for _, labels in found.values)
    assert all((("engine", "0") in labels) == name.startswith("vllm:") for name, labels in found.values)
    assert found.value("agentspec_requests_running") == found.value("vllm:num_requests_running") == 2
    assert found.value("vllm:num_requests_waiting") == 5
    assert (found.value("vllm:prefix_cache_queries_total"), found.value("vllm:prefix_cache_hits_total")) == (70, 30)
    assert found.value("vllm:kv_cache_usage_perc") == 0.25, "evictable pages count as free"
    assert found.value("vllm:cache_config_info", block_size="64", num_gpu_blocks="100") == 1


def test_dead_engine_is_reported_and_server_figures_remain(connect: Connect) -> None:
    engine = CountingEngine()
    engine.alive = False
    found = scrape(connect, engine)
    assert found.value("agentspec_engine_alive") == 0
    assert "vllm:num_requests_running" not in found.kinds
    assert "vllm:time_to_first_token_seconds" in found.kinds


def test_unknown_counters_and_no_tokenizer_are_supported(connect: Connect) -> None:
    info = msgspec.structs.replace(INFO, forced_acceptance=(0.5,))
    found = scrape(connect, ScriptedEngine(info=info), pipeline=None)
    assert found.value("agentspec_forced_acceptance") == 1
    assert "agentspec_turns_spliced_total" not in found.kinds


def test_requests_over_http_are_counted(connect: Connect) -> None:
    tokens = TokensEvent(request_id="", token_ids=[97, 98], text="ab")
    engine = ScriptedEngine(
        [tokens, tokens, ended()], [RequestError("prompt_ids", [], "no")], [ended(FinishReason.ERROR, error="broke")]
    )
    body = {"model": "scripted", "prompt": "hi"}

    async def run() -> str:
        async with connect(engine) as client:
            statuses = [(await client.post("/v1/completions", json=body)).status_code for _ in range(3)]
            assert statuses == [200, 400, 500]
            return (await client.get("/metrics")).text

    found = Exposition(asyncio.run(run()))
    assert {reason: found.value("vllm:request_success_total", finished_reason=reason) for reason in FinishReason} == {
        FinishReason.STOP: 1,
        FinishReason.LENGTH: 0,
        FinishReason.ABORT: 0,
        FinishReason.ERROR: 1,
    }
    assert found.value("vllm:generation_tokens_total") == 4
    assert found.value("vllm:spec_decode_num_drafts_total") == 2 * SPEC.drafted_by_position[0]
    assert (
        found.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="1")
        == 2 * SPEC.accepted_by_position[1]
    )
    assert found.value("vllm:time_to_first_token_seconds_count") == 1
    assert found.value("vllm:request_prompt_tokens_sum") == 20


@pytest.mark.parametrize("seed", range(20))
def test_histograms_contain_the_times_of_the_events(seed: int) -> None:
    """Compared with sums computed from the script, on a clock that the engine sets."""
    rng = random.Random(seed)
    now = [0.0]
    counts = [rng.choice([0, 1, 1, 3, 5]) for _ in range(rng.randint(0, 12))]
    arrivals: list[tuple[float, int]] = []

    class Timed(ScriptedEngine):
        async def stream(self, submit: Submit) -> Any:
            for count in counts:
                now[0] += rng.choice([0.0005, 0.02, 0.3])
                if count:
                    arrivals.append((now[0], count))
                yield TokensEvent(request_id="", token_ids=[1] * count, text="")
            now[0] += 0.1
            yield FinishEvent(
                request_id="", reason=FinishReason.STOP, usage=Usage(prompt_tokens=9, completion_tokens=sum(counts))
            )

    figures = Figures()
    start = 7.0
    now[0] = start

    async def run() -> None:
        async for _ in RecordedEngine(Timed(), figures, lambda: now[0]).stream(Submit(request_id="a", prompt_ids=[1])):
            pass

    asyncio.run(run())
    gaps = [later[0] - earlier[0] for earlier, later in pairwise(arrivals)]
    assert figures.first_token.sum == pytest.approx(arrivals[0][0] - start if arrivals else 0), seed
    assert sum(figures.first_token.counts) == bool(arrivals), seed
    assert sum(figures.between_steps.counts) == len(gaps), seed
    assert figures.between_steps.sum == pytest.approx(sum(gaps)), seed
    behind = sum(count for _, count in arrivals[1:])
    assert figures.per_token.sum == pytest.approx(sum(gaps) / behind if behind else 0), seed
    assert figures.whole.sum == pytest.approx(now[0] - start), seed
    assert figures.generated_tokens == sum(counts), seed


@pytest.mark.parametrize("num_read", [0, 1])
def test_disconnect_counts_as_one_abort(num_read: int) -> None:
    engine = ScriptedEngine([TokensEvent(request_id="", token_ids=[1], text="a"), asyncio.Event(), ended()])
    figures = Figures()

    async def run() -> None:
        stream = cast(Any, RecordedEngine(engine, figures).stream(Submit(request_id="a", prompt_ids=[1])))
        async with aclosing(stream):
            for _ in range(num_read):
                await anext(stream)
            waiting = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))

    asyncio.run(run())
    assert figures.finished == {**dict.fromkeys(FinishReason, 0), FinishReason.ABORT: 1}
    assert engine.aborted == ["a"]


def test_closing_after_the_end_counts_nothing() -> None:
    figures = Figures()

    async def run() -> None:
        stream = cast(
            Any, RecordedEngine(ScriptedEngine([ended()]), figures).stream(Submit(request_id="a", prompt_ids=[1]))
        )
        await anext(stream)
        await stream.aclose()

    asyncio.run(run())
    assert sum(figures.finished.values()) == 1


def test_bucket_bounds_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.sum) == ([2, 2, 1], 7.5)


def test_labels_are_escaped() -> None:
    text = exposition(
        [Family("gauge", "thing", "A \\ thing\nof two lines.", [({"name": 'a"b\\c\nd'}, 1.5)])], 'm"1'
    ).decode()
    assert text == "# HELP agentspec_thing A \\\\ thing\\nof two lines.\n# TYPE agentspec_thing gauge\n" + (
        'agentspec_thing{model_name="m\\"1",name="a\\"b\\\\c\\nd"} 1.5\n'
    )
    Exposition(text)


def test_every_counter_of_the_real_engine_is_exposed() -> None:
    """On the bundled model: stats, usages and exposed figures agree."""
    prompt = list(range(100, 300))

    async def run() -> tuple[str, dict[str, Any], list[Event]]:
        engine = AsyncEngine(EngineConfig())
        app = create_app(engine, TextPipeline.from_checkpoint(engine.tokenizer, engine.model_dir))
        async with (
            engine,
            httpx.AsyncClient(transport=InProcessTransport(app), base_url="http://in-process", timeout=None) as client,
        ):
            body = {
                "model": engine.info.model_id,
                "prompt": prompt,
                "max_tokens": 20,
                "temperature": 0,
                "ignore_eos": True,
            }
            for _ in range(2):
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            asked = Submit(
                request_id="x",
                prompt_ids=prompt,
                sampling=SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
            )
            events = [event async for event in engine.stream(asked)]
            return (await client.get("/metrics")).text, await engine.stats(), events

    text, stats, events = asyncio.run(run())
    found = Exposition(text)
    assert found.kinds.items() >= VLLM_NAMES.items()
    assert found.kinds.items() >= dict.fromkeys(VLLM_NAMES_OF_ENGINES, "histogram").items()
    for name in VLLM_NAMES_OF_ENGINES - {"vllm:iteration_tokens_total"}:
        assert found.value(f"{name}_count") == 3, name
    parts = [found.value(f"vllm:request_{part}_time_seconds_sum") for part in ("prefill", "decode", "inference")]
    assert parts[0] > 0
    assert parts[1] > 0
    assert parts[2] == pytest.approx(parts[0] + parts[1])
    assert (
        found.value("vllm:iteration_tokens_total_sum")
        == stats["engine"]["prefill_tokens"] + stats["engine"]["emitted_tokens"]
    )
    assert (
        found.value("vllm:request_max_num_generation_tokens_sum")
        == found.value("vllm:request_generation_tokens_sum")
        == 40
    )
    spec = cast(FinishEvent, events[-1]).usage.spec
    assert found.value("agentspec_prompt_tokens_total") == stats["engine"]["prompt_tokens"] == 3 * len(prompt)
    assert found.value("agentspec_cached_prompt_tokens_total") == stats["engine"]["cached_tokens"] > 0
    assert found.value("agentspec_generation_tokens_total") == 40
    assert found.value("agentspec_gap_seconds_count") == sum(stats["engine"]["gap_counts"]) > 0
    assert found.value("agentspec_longest_gap_seconds") == stats["engine"]["longest_gap_seconds"] > 0
    assert found.value("agentspec_drafted_tokens_total") >= spec.num_drafted
    assert found.value("agentspec_kv_usage_ratio") < 0.5
    assert found.value("agentspec_requests_finished_total", finished_reason="length") == 2
    assert found.value("agentspec_checkpoints") == stats["cache"]["checkpoints_live"]
