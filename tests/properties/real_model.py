"""A real small model whose MTP head often agrees with its trunk, and agents that use it through the engine.

The checkpoint is random except for two things: the layers' additions to the residual stream are scaled down, and the
MTP head starts from the embedding of the same token as the trunk. So a good part of the head's drafts, computed from
its own keys and values, is accepted; the others are rejected because of the context. Every step runs the real kernels.

`Simulation` runs many agents on one Engine: shared system prompts, tool loops, turns that a template renders
differently, prompts that continue generated tokens. The tests check the outputs: `alone` runs one turn without cache,
drafts or other requests.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor

from agentspec import kernels
from agentspec.cache.host_tier import HostMemory
from agentspec.commands import cli
from agentspec.commands.quantize import quantize
from agentspec.config import EngineConfig
from agentspec.engine.assembly import Assembly, build
from agentspec.engine.in_process import Engine
from agentspec.kernels import reference
from agentspec.models.qwen3_5 import Qwen3_5Model
from agentspec.runtime.memory_plan import MemoryPlan, longest_sequence
from agentspec.types import (
    BLOCK_TOKENS,
    Breakpoint,
    CheckpointKind,
    FinishReason,
    SamplingParams,
    rows_of_request,
)
from agentspec.wire import FinishEvent, Submit, TokensEvent
from tests.fakes.checkpoints import Family, write_checkpoint, write_tensors
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver, poison
from tests.properties.engine_setup import RandomWindow

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
VOCAB = 160
STOP_ID = 2


def write_agreeing_checkpoint(
    directory: Path, family: Family = "dense", *, layer_scale: float = 0.25, **overrides: Any
) -> Path:
    """`write_checkpoint` with layer outputs scaled by `layer_scale`, and an MTP head that follows the trunk.

    A smaller scale gives more agreement, and streams that depend less on their context."""
    write_checkpoint(directory, family, vision=False, mtp_experts="fused", **overrides)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if any(part in name for part in ("o_proj", "out_proj", "down_proj")):
            tensor *= layer_scale
    fc = tensors["mtp.fc.weight"]
    hidden_size = fc.shape[0]
    fc[:, :hidden_size] = torch.eye(hidden_size)
    fc[:, hidden_size:] *= 0.1
    tensors["mtp.pre_fc_norm_embedding.weight"].zero_()
    trunk_norm = next(name for name in tensors if name in ("model.norm.weight", "model.language_model.norm.weight"))
    tensors["mtp.norm.weight"] = tensors[trunk_norm]
    write_tensors(directory, tensors)
    return directory


def write_agreeing_fp8_checkpoint(directory: Path, family: Family = "dense", **overrides: Any) -> Path:
    """`write_agreeing_checkpoint`, quantised."""
    quantize(write_agreeing_checkpoint(directory / "full", family, **overrides), directory / "fp8")
    return directory / "fp8"


WHOLE_TILES: dict[Family, dict[str, Any]] = {
    "dense": {"hidden_size": 128, "linear_num_value_heads": 8, "intermediate_size": 256},
    "moe": {
        "hidden_size": 128,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
}
"""Sizes of models whose quantised matrices have whole tiles (kernels/four_bit_tiles.py)."""


def write_agreeing_four_bit_checkpoint(
    directory: Path, target: str = "int4", family: Family = "dense", **overrides: Any
) -> Path:
    """`write_agreeing_checkpoint` of sizes that are whole tiles, with what `target` quantises in 4 bits."""
    full = write_agreeing_checkpoint(directory / "full", family, **WHOLE_TILES[family] | overrides)
    assert cli.main(["quantize", str(full), str(directory / target), "--to", target]) == 0
    return directory / target


def load(checkpoint: Path, device: torch.device = CPU) -> Qwen3_5Model:
    return load_model(checkpoint, device=device, dtype=torch.float32)


def load_with_fp8_pages(checkpoint: Path, device: torch.device = CPU) -> Qwen3_5Model:
    return load_model(checkpoint, device=device, dtype=torch.float32, fp8_pages=True)


Loader = Callable[[Path, torch.device], Qwen3_5Model]
"""Loads the model of a checkpoint: `load`, or one with other mixers."""


class Clock:
    """A clock that only a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSetup:
    """Settings of one engine."""

    seed: int = 0
    max_draft_tokens: int = 3
    random_depth: bool = False
    overlap: bool = True
    prefix_cache: bool = True
    prefill_budget: int = 512
    max_running: int = 4
    spare_rows: int = 60
    """Rows besides those of all slots."""
    num_pages: int = 200
    host_memory: HostMemory | None = None
    max_context: int = 1024
    system_tokens: tuple[int, int] = (50, 180)
    """Minimum and maximum length of a system prompt."""
    related_systems: int = 0
    """Number of further system prompts that share their first two thirds with the first one: agents with other
    tools."""
    ignoring_share: float = 0.3
    """Share of requests that continue past the model's stop ids."""
    forced_share: float = 0.0
    """Share of requests with a forced output."""
    has_ring: bool = False
    """Slots have rings."""
    max_copies: int = 0
    """Copies behind the MTP drafts."""

    @classmethod
    def random(cls, rng: random.Random, *, tight: bool = False) -> EngineSetup:
        """tight: pages for little more than two long requests, so that requests are preempted."""
        max_running = 3 if tight else rng.choice([1, 2, 4, 5])
        return cls(
            seed=rng.randrange(2**31),
            max_draft_tokens=rng.randint(1, 7),
            random_depth=rng.random() < 0.5,
            overlap=rng.random() < 0.6,
            prefill_budget=rng.choice([64, 65, 99, 130, 203, 512]),
            max_running=max_running,
            spare_rows=rng.choice([3, 8]) if tight else rng.choice([8, 60]),
            num_pages=10 if tight else rng.choice([60, 200]),
        )

    @property
    def is_tight(self) -> bool:
        return self.num_pages < 20

    @property
    def max_length(self) -> int:
        return min(self.max_context, longest_sequence(self.num_pages, self.max_drafts, BLOCK_TOKENS))

    @property
    def max_drafts(self) -> int:
        return self.max_draft_tokens + self.max_copies


def assemble_engine(setup: EngineSetup, model: Qwen3_5Model, clock: Clock | None = None) -> Assembly:
    """Build the engine around a model. Every pool is filled with NaN, except the zero row."""
    k = setup.max_draft_tokens
    assembly = build(
        model,
        config=EngineConfig(
            draft_tokens=k,
            copy_drafts=setup.max_copies,
            state_form="ring" if setup.has_ring else "rows",
            prefix_cache=setup.prefix_cache,
            overlap=setup.overlap,
            max_running=setup.max_running,
            prefill_budget=setup.prefill_budget,
            allow_forced_output=setup.forced_share > 0,
        ),
        memory=MemoryPlan(
            num_rows=2
            + setup.max_running * rows_of_request(setup.max_drafts, has_ring=setup.has_ring)
            + setup.spare_rows,
            num_pages=setup.num_pages,
            max_length=setup.max_length,
            host=setup.host_memory,
        ),
        device=model.device,
        window_policy=RandomWindow(k, setup.max_copies, random.Random(setup.seed)) if setup.random_depth else None,
        clock=clock or Clock(),
    )
    poison(model)
    return assembly


def alone(
    checkpoint: Path,
    device: torch.device = CPU,
    *,
    num_pages: int = 20,
    prefill_budget: int = 512,
    takes_forced_output: bool = False,
    loader: Loader = load,
) -> Engine:
    """An engine for one request at a time, without cache and drafts."""
    setup = EngineSetup(
        max_draft_tokens=0,
        overlap=False,
        prefix_cache=False,
        max_running=1,
        spare_rows=1,
        prefill_budget=prefill_budget,
        num_pages=num_pages,
        max_context=num_pages * BLOCK_TOKENS,
        forced_share=float(takes_forced_output),
    )
    return Engine(assemble_engine(setup, loader(checkpoint, device)))


@dataclass(slots=True)
class Turn:
    """One request and its output."""

    submit: Submit
    emitted: list[int] = field(default_factory=list)
    last_event: int = 0
    """Number of tokens of the last event, all from one step."""
    finish: FinishEvent | None = None

    @property
    def ended(self) -> FinishEvent:
        assert self.finish is not None
        return self.finish

    @property
    def stopped_inside_a_window(self) -> bool:
        return self.ended.reason is FinishReason.STOP and self.last_event > 1


@dataclass(slots=True)
class Agent:
    """A session as its client stores it."""

    name: str
    system: list[int]
    turns_left: int
    history: list[int] = field(default_factory=list)
    user_mark: int = 0
    """End of the last user message: what follows may be rendered differently."""


class Simulation:
    """Runs an engine's agents, some of them at a time, until each has had its turns."""

    def __init__(
        self,
        setup: EngineSetup,
        checkpoint: Path,
        *,
        num_agents: int,
        num_turns: int = 3,
        sampled: bool = False,
        device: torch.device = CPU,
        words: Sequence[int] | None = None,
        loader: Loader = load,
    ) -> None:
        """words: a token sequence from which all prompts are cut; None: random tokens."""
        self.setup = setup
        self.rng = random.Random(setup.seed)
        self.clock = Clock()
        self.model = loader(checkpoint, device)
        self.assembly = assemble_engine(setup, self.model, self.clock)
        self.engine = Engine(self.assembly)
        self.metrics = self.assembly.loop.metrics
        self.turns: list[Turn] = []
        self._sampled = sampled
        self._words = words
        systems = [self._tokens(self.rng.randint(*setup.system_tokens)) for _ in range(2)]
        shared = systems[0][: len(systems[0]) * 2 // 3]
        systems += [shared + self._tokens(len(systems[0]) - len(shared)) for _ in range(setup.related_systems)]
        self._agents = [
            Agent(f"s{i}", self.rng.choice(systems), self.rng.randint(2, num_turns)) for i in range(num_agents)
        ]
        for agent in self._agents:
            agent.history = list(agent.system)

    def run(self) -> None:
        waiting, running = list(self._agents), dict[str, tuple[Agent, Turn, Iterator[Any]]]()
        concurrency = self.setup.max_running + 1
        while waiting or running:
            while waiting and len(running) < concurrency:
                agent = waiting.pop(self.rng.randrange(len(waiting)))
                turn = Turn(self._next_submit(agent))
                self.turns.append(turn)
                self.engine.submit(turn.submit)
                running[agent.name] = agent, turn, self.engine.events(turn.submit.request_id)
            for agent, turn, events in list(running.values()):
                event = next(events)
                if isinstance(event, TokensEvent):
                    turn.emitted.extend(event.token_ids)
                    turn.last_event = len(event.token_ids)
                    continue
                turn.finish = event
                assert next(events, None) is None
                agent.history = list(turn.submit.prompt_ids) + turn.emitted
                agent.turns_left -= 1
                del running[agent.name]
                if agent.turns_left:
                    waiting.append(agent)
            self.clock.now += self.rng.choice([0.0, 0.1, 2.0])

    def _tokens(self, count: int) -> list[int]:
        if self._words is None:
            return [self.rng.randrange(3, VOCAB) for _ in range(count)]
        first = self.rng.randrange(len(self._words) - count)
        return list(self._words[first : first + count])

    def _next_submit(self, agent: Agent) -> Submit:
        rng = self.rng
        new_query = agent.user_mark == 0 or rng.random() < 0.4
        if new_query and agent.user_mark and rng.random() < 0.5:
            agent.history = agent.history[: agent.user_mark] + self._tokens(
                rng.randrange(4)
            )  # the template drops the reasoning
        prompt = agent.history + self._tokens(rng.choice([1, 5, 30, 64, 90]))
        max_tokens = rng.choice([30, 100] if self.setup.is_tight else [1, 3, 12, 24, 24, 40])
        if len(prompt) + max_tokens > self.setup.max_length:
            new_query = True
            prompt = agent.system + self._tokens(30)
        if new_query:
            agent.user_mark = len(prompt)
            prompt = prompt + self._tokens(2)
        return Submit(
            request_id=f"{agent.name}.{agent.turns_left}",
            prompt_ids=prompt,
            sampling=self._sampling(max_tokens),
            breakpoints=[
                Breakpoint(len(agent.system), CheckpointKind.SYSTEM),
                Breakpoint(agent.user_mark, CheckpointKind.USER),
            ],
            session_id=agent.name if rng.random() < 0.8 else None,
            forced_output=self._tokens(rng.randint(1, max_tokens))
            if self.setup.forced_share and rng.random() < self.setup.forced_share
            else None,
        )

    def _sampling(self, max_tokens: int) -> SamplingParams:
        rng = self.rng
        common: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": rng.random() < self.setup.ignoring_share}
        if rng.random() < 0.4:
            common["stop_token_ids"] = tuple(rng.sample(range(VOCAB), 8))
        if rng.random() < 0.3:
            common |= {
                "presence_penalty": rng.choice([0.0, 0.6]),
                "frequency_penalty": rng.choice([0.0, 0.3]),
                "repetition_penalty": 1.2,
            }
        if rng.random() < 0.2:
            common["logit_bias"] = {rng.randrange(VOCAB): 1.5, rng.randrange(VOCAB): -100.0}
        if not self._sampled:
            return SamplingParams(temperature=0.0, **common)
        return SamplingParams(
            temperature=rng.choice([0.3, 0.7, 1.0]),
            top_k=rng.choice([0, 0, 5, 40]),
            top_p=rng.choice([1.0, 0.9, 0.6]),
            min_p=rng.choice([0.0, 0.05]),
            seed=rng.randrange(2**40),
            **common,
        )


def explain(checkpoint: Path, turn: Turn, expected: list[int], *, loader: Loader = load) -> str:
    """Where a stream differs from the expected one, and the plain model's two best logits there, to distinguish
    rounding from a wrong state."""
    pairs = enumerate(zip(turn.emitted, expected, strict=False))
    at = next((i for i, (got, wanted) in pairs if got != wanted), min(len(turn.emitted), len(expected)))
    logits = Scratch(checkpoint, loader=loader).logits([*turn.submit.prompt_ids, *expected[:at]])[-1]
    best, second = logits.topk(2).values.tolist()
    return f"token {at} differs; the plain model's best raw logits there: {best:.7g}, {second:.7g}"


class Scratch:
    """States and logits of from-scratch prefills, in one chunk and by the reference's operations."""

    def __init__(self, checkpoint: Path, device: torch.device = CPU, *, loader: Loader = load) -> None:
        with patch.object(kernels, "backend", lambda _: reference):
            self._model = loader(checkpoint, device)
        self._known: dict[bytes, tuple[Tensor, ...]] = {}

    @torch.inference_mode()
    def state(self, tokens: Sequence[int]) -> tuple[Tensor, ...]:
        """As `read_state`; MTP's position 0 has no meaning."""
        key = array("i", tokens).tobytes()
        if key not in self._known:
            driver = Driver(self._model, max_tokens=len(tokens))
            driver.mtp_prefill(tokens, driver.prefill(tokens))
            sequence = driver.sequences[0]
            self._known[key] = read_state(self._model, sequence.read_row, sequence.pages, len(tokens))
        return self._known[key]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[N, V] after each token."""
        return self.logits_of([tokens])[0]

    @torch.inference_mode()
    def logits_of(self, token_lists: Sequence[Sequence[int]]) -> list[Tensor]:
        """`logits` of several sequences, from one pass."""
        driver = Driver(self._model, num_sequences=len(token_lists), max_tokens=max(map(len, token_lists)))
        return [self._model.logits(hidden_NH) for hidden_NH in driver.prefill_together(token_lists)]

    def check(
        self,
        model: Qwen3_5Model,
        row: int,
        page_ids: Sequence[int],
        tokens: Sequence[int],
        *,
        with_mtp: bool,
        context: str,
    ) -> None:
        """Raise AssertionError unless row and pages contain the state after `tokens`, to 1e-4 of its largest value."""
        *held, got_A2NGD = read_state(model, row, page_ids, len(tokens))
        *rows, kv_A2NGD = self.state(tokens)
        parts = [(f"part {i}", got, expected) for i, (got, expected) in enumerate(zip(held, rows, strict=True))]
        parts.append(("K/V", got_A2NGD[:-1], kv_A2NGD[:-1]))
        if with_mtp:
            parts.append(("MTP K/V", got_A2NGD[-1, :, 1:], kv_A2NGD[-1, :, 1:]))
        for name, got, expected in parts:
            error = relative_error(got, expected)
            assert error < TOLERANCE, f"{context}: {name} of row {row}, {len(tokens)} tokens, is off by {error:.3g}"


def read_state(model: Qwen3_5Model, row: int, page_ids: Sequence[int], length: int) -> tuple[Tensor, ...]:
    """Copies, on the host, of a row's parts, layer by layer, the hidden last, and of the first `length` positions of
    its pages, kv_A2NGD."""
    kv_A2NGD = model.pools["kv_AP2SGD"][:, list(page_ids)].transpose(1, 2).flatten(2, 3)[:, :, :length]
    return tuple(part.to(CPU, copy=True) for part in (*(part_R[row] for part_R in model.row_tensors()), kv_A2NGD))


class StateSpy:
    """Compares states with a from-scratch prefill at publish, at resume, and after a fetch from the host."""

    def __init__(self, simulation: Simulation, scratch: Scratch) -> None:
        self.num_published = dict.fromkeys(CheckpointKind, 0)
        self.num_resumed = 0
        self.num_fetched = 0
        cache: Any = simulation.assembly.cache
        match, acquire, finish_fetch, publish = cache.match, cache.acquire, cache.finish_fetch, cache.publish
        looked_up: list[array[int]] = []

        def check(row: int, page_ids: list[int], tokens: array[int], length: int, what: str) -> None:
            context, pages = f"{simulation.setup}: {what}", page_ids[: length // BLOCK_TOKENS]
            scratch.check(simulation.model, row, pages, tokens[:length].tolist(), with_mtp=True, context=context)

        def spy_match(namespace: str, tokens: array[int], **keywords: Any) -> Any:
            looked_up[:] = [tokens]
            return match(namespace, tokens, **keywords)

        def spy_acquire(found: Any, **keywords: Any) -> Any:
            lease = acquire(found, **keywords)
            if lease.num_cached:
                self.num_resumed += 1
                check(lease.read_row, lease.page_ids, looked_up[0], lease.num_cached, "resumed")
            return lease

        def spy_finish_fetch(lease: Any, namespace: str, tokens: array[int]) -> None:
            finish_fetch(lease, namespace, tokens)
            self.num_fetched += 1
            check(lease.read_row, lease.page_ids, tokens, lease.num_cached, "fetched")

        def spy_publish(
            lease: Any, namespace: str, tokens: array[int], length: int, row: int, kind: CheckpointKind
        ) -> bool:
            self.num_published[kind] += 1
            check(row, lease.page_ids, tokens, length, f"published {kind.name}")
            taken: bool = publish(lease, namespace, tokens, length, row, kind)
            return taken

        cache.match, cache.acquire, cache.finish_fetch, cache.publish = (
            spy_match,
            spy_acquire,
            spy_finish_fetch,
            spy_publish,
        )
