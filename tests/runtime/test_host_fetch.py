"""Prompts whose state is in host memory: they wait for it, no other request does, and they resume as if it had never
been evicted."""

from __future__ import annotations

from agentspec.cache.host_tier import CopyOrder, CopyOrders, HostMemory
from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, build
from agentspec.engine.in_process import Engine
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.types import FinishReason, SamplingParams, tokens
from agentspec.wire import FinishEvent, Submit, TokensEvent
from tests.fakes.hash_chain import HashChainModel

BLOCK = 16
PROMPT_BLOCKS = 8


class Gate:
    """A copier that holds back copies to the device until it is opened. Wraps the loop's own copier."""

    def __init__(self, assembly: Assembly) -> None:
        assert assembly.copies is not None
        self.is_open = True
        self.to_device: list[CopyOrder] = []
        self.num_fetches = 0
        self._copies = assembly.copies

    def launch(self, orders: CopyOrders) -> None:
        self._copies.launch(CopyOrders(to_host=orders.to_host))
        self.num_fetches += len(orders.to_device)
        self.to_device += orders.to_device

    def poll(self) -> tuple[int, int]:
        if self.is_open and self.to_device:
            self._copies.launch(CopyOrders(to_device=self.to_device))
            self.to_device = []
        return self._copies.poll()


class Place:
    """An engine with memory for little more than two prompts on the device and for many on the host."""

    def __init__(self) -> None:
        self.model = HashChainModel(block_tokens=BLOCK)
        host = HostMemory(num_rows=40, num_pages=400, ready_share=1.0, min_fetch_blocks=1)
        self.assembly = build(
            self.model,
            config=EngineConfig(draft_tokens=0, max_running=3, prefill_budget=512, session_hold_seconds=0.0),
            memory=MemoryPlan(num_rows=2 + 9 + 6, num_pages=3 * (PROMPT_BLOCKS + 3), max_length=30 * BLOCK, host=host),
        )
        self.loop = self.assembly.loop
        self.gate = Gate(self.assembly)
        self.loop._copier = self.gate
        self.engine = Engine(self.assembly)
        self.metrics = self.loop.metrics
        self.events: list[TokensEvent | FinishEvent] = []

    def submit(self, request_id: str, prompt: list[int], max_tokens: int = 4) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.submit(Submit(request_id=request_id, prompt_ids=prompt, sampling=sampling))

    def step(self) -> None:
        self.events += self.loop.run_once()

    def finish(self, request_id: str) -> FinishEvent:
        for _ in range(200):
            ended = [
                event for event in self.events if isinstance(event, FinishEvent) and event.request_id == request_id
            ]
            if ended:
                (event,) = ended
                return event
            self.step()
        raise AssertionError(f"{request_id} never ends")

    def num_tokens(self, request_id: str) -> int:
        return sum(
            len(event.token_ids)
            for event in self.events
            if isinstance(event, TokensEvent) and event.request_id == request_id
        )

    def serve(self, request_id: str, prompt: list[int]) -> FinishEvent:
        self.submit(request_id, prompt)
        return self.finish(request_id)

    def evict(self, prompt: list[int]) -> None:
        """Serve the prompt, then others until the device holds nothing of it."""
        self.serve("first", prompt)
        number = 0
        while self.assembly.cache.match("", tokens(prompt)).num_tokens:
            number += 1
            self.serve(f"other {number}", story(10 + number))
        assert self.assembly.cache.match("", tokens(prompt)).num_reachable == PROMPT_BLOCKS * BLOCK


def story(seed: int) -> list[int]:
    return [(seed * 7 + index * (seed + 3)) % 40 for index in range(PROMPT_BLOCKS * BLOCK + 5)]


def test_fetched_prompt_gives_the_same_stream_and_computes_only_its_end() -> None:
    place = Place()
    place.evict(story(1))
    expected = [
        event.token_ids for event in place.events if isinstance(event, TokensEvent) and event.request_id == "first"
    ]
    computed = place.metrics.prefill_tokens
    usage = place.serve("again", story(1)).usage
    assert [
        event.token_ids for event in place.events if isinstance(event, TokensEvent) and event.request_id == "again"
    ] == expected
    assert usage.cached_tokens == PROMPT_BLOCKS * BLOCK
    assert place.metrics.prefill_tokens - computed == 5
    assert place.gate.num_fetches == 1


def test_streams_continue_while_a_prompt_waits_for_its_fetch() -> None:
    place = Place()
    place.evict(story(1))
    place.submit("stream", story(2), max_tokens=60)
    while not place.num_tokens("stream"):
        place.step()
    place.gate.is_open = False
    place.submit("again", story(1))
    before = place.num_tokens("stream")
    for _ in range(20):
        place.step()
    assert place.num_tokens("stream") - before >= 19, "one token per step"
    assert place.num_tokens("again") == 0
    assert place.gate.num_fetches == 1
    place.gate.is_open = True
    assert place.finish("again").usage.cached_tokens == PROMPT_BLOCKS * BLOCK
    place.finish("stream")


def test_loop_has_work_but_launches_nothing_during_a_fetch() -> None:
    place = Place()
    place.evict(story(1))
    place.gate.is_open = False
    place.submit("again", story(1))
    steps = place.metrics.steps
    for _ in range(10):
        place.step()
    assert place.loop.has_work
    assert place.metrics.steps <= steps + 1
    place.gate.is_open = True
    place.finish("again")


def test_abort_ends_after_its_fetch_and_keeps_the_fetched_state() -> None:
    place = Place()
    place.evict(story(1))
    place.gate.is_open = False
    place.submit("again", story(1))
    place.step()
    place.loop.abort("again")
    for _ in range(5):
        place.step()
    assert not [event for event in place.events if event.request_id == "again"], (
        "the copy still writes to the request's memory"
    )
    place.gate.is_open = True
    assert place.finish("again").reason is FinishReason.ABORT
    assert place.assembly.cache.match("", tokens(story(1))).num_tokens == PROMPT_BLOCKS * BLOCK
    assert place.loop.scheduler.num_running == 0


def test_common_prefix_is_fetched_once() -> None:
    place = Place()
    place.evict(story(1))
    place.gate.is_open = False
    place.submit("again", story(1))
    place.submit("beside", [*story(1)[:-2], 41, 42, 43])
    for _ in range(5):
        place.step()
    place.gate.is_open = True
    assert place.finish("again").usage.cached_tokens == PROMPT_BLOCKS * BLOCK
    assert place.finish("beside").usage.cached_tokens == PROMPT_BLOCKS * BLOCK
    assert place.gate.num_fetches == 1
