"""Constrained output under speculation, through the whole engine: 1,000 random schemas, forms and sets of tools, k from
0 to 5.

With and without drafts the output is the same, token for token, and complete outputs validate. Unconstrained requests
run beside them, and their output is the same as alone. (tests/runtime/test_constrained.py counts that they are never
delayed.)
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tokenizers import AddedToken

from agentspec.config import EngineConfig
from agentspec.engine.assembly import build
from agentspec.engine.in_process import Engine
from agentspec.runtime.constraint_source import ConstraintSource
from agentspec.runtime.memory_plan import MemoryPlan
from agentspec.text.constraints import OutputForm, ToolDemand, turn_grammar
from agentspec.text.segmenter import Segmenter
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import DIALECTS, ToolSchemas
from agentspec.types import FinishReason, SamplingParams
from agentspec.wire import FinishEvent, Grammar, Submit
from tests.fakes.schemas import random_parameters, random_schema
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.text import END_OF_TURN, byte_backend

NUM_CASES = 1000
NUM_GROUPS = 20
MAX_TOKENS = 400
PROMPT = [7, 11, 13]
CLOSERS = ("\n</parameter>\n", "</function>\n")
"""Tokens of the test's vocabulary, beside the bytes."""


@dataclass(frozen=True)
class Case:
    name: str
    grammar: Grammar
    schema: Any
    """Of the whole content; None for calls."""
    tools: list[dict[str, Any]]
    reasoning_open: bool
    seed: int


def case_of(seed: int) -> Case:
    rng = random.Random(seed)
    reasoning_open = rng.random() < 0.3
    if rng.random() < 0.5:
        schema = random_schema(rng, 2)
        form = OutputForm(kind="json_schema", source=schema, field="form")
        grammar = turn_grammar(None, ToolDemand(), form, dialect=None, reasoning_open=reasoning_open)
        assert grammar is not None
        return Case(f"seed {seed}", grammar, schema, [], reasoning_open, seed)
    tools = [
        {
            "type": "function",
            "function": {"name": f"tool_{index}", "parameters": random_parameters(rng, 1), "strict": True},
        }
        for index in range(rng.randint(1, 3))
    ]
    demand = ToolDemand(choice="required", parallel=rng.random() < 0.5)
    grammar = turn_grammar(tools, demand, None, dialect=DIALECTS["qwen3_coder"], reasoning_open=reasoning_open)
    assert grammar is not None
    return Case(f"seed {seed}", grammar, None, tools, reasoning_open, seed)


class Runner:
    """An engine with k drafts, and the outputs of cases that run on it together."""

    def __init__(self, num_drafts: int, shared: ConstraintSource | None = None) -> None:
        """shared: another runner's constraint source, so that each grammar compiles once."""
        backend = byte_backend()
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*CLOSERS, "<never>")])
        self.tokenizer = Tokenizer(backend, eos_token=END_OF_TURN)
        self.stop_id = self.tokenizer.special_ids[END_OF_TURN]
        model = ScriptedModel(num_tokens=self.tokenizer.vocab_size, stop_id=self.stop_id)
        memory = MemoryPlan(num_rows=500, num_pages=1200, max_length=2048)
        config = EngineConfig(draft_tokens=num_drafts, max_running=32, device="cpu")
        assembly = build(model, config=config, memory=memory, tokenizer=self.tokenizer)
        self.constraints = shared or assembly.constraints
        self.engine = Engine(dataclasses.replace(assembly, constraints=self.constraints))

    def run(self, cases: list[Case], free_seeds: list[int]) -> tuple[dict[str, tuple[list[int], FinishReason]], int]:
        """Ids and finish reasons by name, and the number of accepted drafts."""
        for case in cases:
            sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logit_bias=self._bias(case.seed))
            self.engine.submit(
                Submit(
                    request_id=case.name, prompt_ids=[*PROMPT, case.seed % 256], sampling=sampling, grammar=case.grammar
                )
            )
        for seed in free_seeds:
            sampling = SamplingParams(temperature=0.8, seed=seed, max_tokens=60)
            self.engine.submit(Submit(request_id=f"free {seed}", prompt_ids=[*PROMPT, seed % 200], sampling=sampling))
        outputs, num_accepted = {}, 0
        for name in [*(case.name for case in cases), *(f"free {seed}" for seed in free_seeds)]:
            ids: list[int] = []
            for event in self.engine.events(name):
                if isinstance(event, FinishEvent):
                    outputs[name] = (ids, event.reason)
                    num_accepted += event.usage.spec.num_accepted
                else:
                    ids += event.token_ids
        return outputs, num_accepted

    def _bias(self, seed: int) -> dict[int, float]:
        """The hash model never ends a text by itself: make closing characters likelier, by random amounts."""
        rng = random.Random(seed)
        closers = {'"': 7.0, "}": 7.0, "]": 7.0, ",": 3.0, "</think>": 5.0, **dict.fromkeys(CLOSERS, 7.0)}
        biased = {self.tokenizer.encode(text)[0]: strength + rng.uniform(-2, 2) for text, strength in closers.items()}
        return {**biased, self.stop_id: 12.0}


@pytest.fixture(scope="module")
def runners() -> Iterator[list[Runner]]:
    plain = Runner(0)
    runners = [plain, *(Runner(num_drafts, plain.constraints) for num_drafts in range(1, 6))]
    yield runners
    for runner in runners:
        runner.engine.close()


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_constrained_output_is_valid_and_independent_of_drafts(runners: list[Runner], group: int) -> None:
    num_cases = NUM_CASES // NUM_GROUPS
    cases = [case_of(group * num_cases + index) for index in range(num_cases)]
    free_seeds = [group * 100 + index for index in range(5)]
    plain, _ = runners[0].run(cases, free_seeds)
    num_drafts = 1 + group % 5
    drafted, num_accepted = runners[num_drafts].run(cases, free_seeds)
    assert num_accepted > 0
    for name in plain:
        assert drafted[name] == plain[name], f"{name}: k {num_drafts} differs from k 0"
    num_whole = sum(check(runners[0], case, *plain[case.name]) for case in cases)
    assert num_whole > 0.8 * num_cases, f"group {group}: only {num_whole} of {num_cases} outputs came to their end"


def check(runner: Runner, case: Case, ids: list[int], reason: FinishReason) -> bool:
    """A whole output validates. False when the token limit cut it."""
    if reason is FinishReason.LENGTH:
        return False
    assert reason is FinishReason.STOP, case.name
    segmenter = Segmenter(
        reasoning_open=case.reasoning_open,
        dialect=DIALECTS["qwen3_coder"] if case.tools else None,
        tools=ToolSchemas(case.tools) if case.tools else None,
        has_form=not case.tools,
    )
    segmenter.push(runner.tokenizer.decode(ids[:-1]))
    segmenter.finish(is_cut=False)
    turn = segmenter.turn
    if not case.tools:
        validate(case.schema, turn.content, case.name)
        return True
    assert turn.calls, case.name
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case.tools}
    for call in turn.calls:
        validate(schemas[call.name], call.arguments, case.name)
    return True


def validate(schema: Any, text: str, name: str) -> None:
    errors = [error.message for error in Draft202012Validator(schema).iter_errors(json.loads(text))]
    assert not errors, f"{name}: {text!r} doesn't validate: {errors}; schema {json.dumps(schema)}"
