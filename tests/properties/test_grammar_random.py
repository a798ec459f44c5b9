"""Output under a grammar always validates: random schemas, forms and sets of tools, with random walks over the masks.

The output is parsed like a real answer, by the segmenter and the dialect's own parser, and validated with jsonschema.
The masks of windows with drafts, correct ones and wrong ones, equal those of single steps.
"""

from __future__ import annotations

import json
import random
from typing import Any, Literal

import pytest
from jsonschema import Draft202012Validator

from agentspec.text.constraints import OutputForm, ToolDemand, turn_grammar
from agentspec.text.events import AssistantTurn
from agentspec.text.segmenter import Segmenter
from agentspec.text.tool_calls import DIALECTS, Dialect, ToolSchemas
from agentspec.wire import Grammar
from tests.fakes.grammar_walk import Admission, Walk, Writer, check_windows
from tests.fakes.schemas import random_parameters, random_schema

NUM_CASES = 1000
NUM_GROUPS = 20
MAX_TOKENS = 1500


class World(Admission):
    def write(self, grammar: Grammar, rng: random.Random) -> Walk:
        first, second = self.constraint(grammar), self.constraint(grammar)
        walk = Writer(self.tokenizer, self.stop_id, rng).write(first, MAX_TOKENS)
        check_windows(second, walk, rng, self.num_tokens)
        return walk

    def read(
        self,
        walk: Walk,
        rng: random.Random,
        *,
        dialect: Dialect | None,
        tools: Any,
        reasoning_open: bool,
        has_form: bool,
    ) -> AssistantTurn:
        segmenter = Segmenter(
            reasoning_open=reasoning_open,
            dialect=dialect,
            tools=None if tools is None else ToolSchemas(tools),
            has_form=has_form,
        )
        text = self.tokenizer.decode([token for token in walk.ids if token != self.stop_id])
        while text:
            cut = rng.randint(1, 40)
            segmenter.push(text[:cut])
            text = text[cut:]
        segmenter.finish(is_cut=not walk.is_complete)
        return segmenter.turn


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_output_under_grammar_validates(world: World, group: int) -> None:
    num_complete = 0
    num_cases = NUM_CASES // NUM_GROUPS
    for case in range(num_cases):
        seed = group * num_cases + case
        rng = random.Random(seed)
        run = check_form if rng.random() < 0.25 else check_calls
        num_complete += run(world, rng, f"seed {seed}")
    assert num_complete > 0.9 * num_cases, f"group {group}: only {num_complete} of {num_cases} walks came to an end"


def check_form(world: World, rng: random.Random, name: str) -> bool:
    schema = random_schema(rng, 3)
    reasoning_open = rng.random() < 0.3
    grammar = turn_grammar(
        None,
        ToolDemand(),
        OutputForm(kind="json_schema", source=schema, field="form"),
        dialect=None,
        reasoning_open=reasoning_open,
    )
    assert grammar is not None
    walk = world.write(grammar, rng)
    turn = world.read(walk, rng, dialect=None, tools=None, reasoning_open=reasoning_open, has_form=True)
    if walk.is_complete:
        check_value(schema, turn.content, name)
    return walk.is_complete


def check_calls(world: World, rng: random.Random, name: str) -> bool:
    dialect = DIALECTS[rng.choice(sorted(DIALECTS))]
    tools: list[dict[str, Any]] = [
        {
            "type": "function",
            "function": {"name": f"tool_{index}", "parameters": random_parameters(rng), "strict": rng.random() < 0.8},
        }
        for index in range(rng.randint(1, 3))
    ]
    tools[0]["function"]["strict"] = True
    choice: Literal["auto", "required"] = rng.choice(("auto", "required"))
    named = rng.choice(tools)["function"]["name"] if choice == "required" and rng.random() < 0.3 else None
    demand = ToolDemand(choice=choice, name=named, parallel=rng.random() < 0.7)
    form = (
        OutputForm(kind="json_schema", source=random_schema(rng, 1), field="form")
        if choice == "auto" and rng.random() < 0.2
        else None
    )
    reasoning_open = rng.random() < 0.5
    grammar = turn_grammar(tools, demand, form, dialect=dialect, reasoning_open=reasoning_open)
    assert grammar is not None
    walk = world.write(grammar, rng)
    turn = world.read(walk, rng, dialect=dialect, tools=tools, reasoning_open=reasoning_open, has_form=form is not None)
    schemas = {tool["function"]["name"]: tool["function"] for tool in tools}
    for call in turn.calls:
        assert call.name in schemas, name
        if schemas[call.name]["strict"] or choice == "required":
            check_value(schemas[call.name]["parameters"], call.arguments, f"{name}, {dialect.name}, {call.name}")
    if not walk.is_complete:
        return False
    assert not turn.is_call_cut, name
    assert "<tool_call>" not in turn.content or form is not None, f"{name}: a call was read as text: {turn.content!r}"
    assert demand.parallel or len(turn.calls) <= 1, name
    assert named is None or {call.name for call in turn.calls} == {named}, name
    if choice == "required":
        assert turn.calls, name
        assert not turn.content, f"{name}: {turn.content!r} beside the calls that were demanded"
    if form is not None and not turn.calls:
        check_value(form.source, turn.content, name)
    return True


def check_value(schema: Any, text: str, name: str) -> None:
    value = json.loads(text)
    errors = [error.message for error in Draft202012Validator(schema).iter_errors(value)]
    assert not errors, f"{name}: {text!r} doesn't validate: {errors}; schema {json.dumps(schema)}"
