"""Domains of tiny-agent: valid schemas, calls that run, disjoint words of training and held-out data, and
determinism."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import get_args

import jsonschema
import pytest

from agentspec.replay.simulator import Simulator
from agentspec.replay.world import World
from scripts.tiny_agent import catalog, invented, invented_words, pages, pools, values
from scripts.tiny_agent.domain import Column, Domain, Kind, Operation, Split
from scripts.tiny_agent.pools import is_held_out

SPLITS: tuple[Split, ...] = get_args(Split)
NUM_INVENTED = 150


def all_domains(split: Split) -> Iterator[tuple[str, Domain]]:
    """Every hand-written domain and many generated ones, each with a label for failures."""
    names = [*catalog.TEMPLATES, *catalog.UNSEEN]
    for domain in catalog.domains(random.Random(3), split, names):
        yield f"catalog {domain.noun}", domain
    for seed in range(NUM_INVENTED):
        yield f"invented seed {seed}, {split}", invented.domain(random.Random(seed), split)


def world_of(domain: Domain) -> World:
    tables = {domain.table: domain.data} if domain.data is not None else {}
    return World(tables=tables, actions={operation.name: operation.action for operation in domain.operations})


def sample(domain: Domain, operation: Operation, rng: random.Random, split: Split) -> dict[str, object]:
    """Arguments for the required parameters: the first record's values for lookups, new ones otherwise."""
    match = getattr(operation.action, "match", {})
    arguments: dict[str, object] = {}
    for name in operation.required:
        column = operation.params[name]
        arguments[name] = domain.records[0][column.name] if name in match else values.draw(column, rng, split)
    if operation.verb == "calculate":
        arguments[operation.required[0]] = "3 * (4 + 5)"
    return arguments


@pytest.mark.parametrize("split", SPLITS)
def test_tools_and_their_actions_agree(split: Split) -> None:
    for label, domain in all_domains(split):
        names = [operation.name for operation in domain.operations]
        assert len(set(names)) == len(names), label
        columns = {column.name for column in (domain.key, *domain.columns)}
        assert len(columns) == len(domain.columns) + 1, label
        for operation in domain.operations:
            parameters = operation.tool["function"]["parameters"]
            jsonschema.Draft202012Validator.check_schema(parameters)
            assert list(parameters["properties"]) == list(operation.params), (label, operation.name)
            assert tuple(parameters.get("required", ())) == operation.required, (label, operation.name)
            action = operation.action
            used = {
                *getattr(action, "match", {}).values(),
                *getattr(action, "contains", {}).values(),
                *getattr(action, "show", []),
            }
            assigned = getattr(action, "set", {})
            used |= {*assigned.values(), *getattr(action, "fixed", {})}
            assert used <= columns, (label, operation.name)
            for name, column in (getattr(action, "match", {}) | assigned).items():
                assert operation.params[name].name == column, (label, operation.name)


@pytest.mark.parametrize("split", SPLITS)
def test_a_sample_call_of_each_tool_runs(split: Split) -> None:
    for label, domain in all_domains(split):
        rng = random.Random(label)
        for operation in domain.operations:
            simulator = Simulator(world_of(domain), [one.tool for one in domain.operations])
            arguments = sample(domain, operation, rng, split)
            outcome = simulator.call(operation.name, json.dumps(arguments))
            assert outcome.problem is None, (label, operation.name, arguments, outcome)
            if operation.verb in ("get", "read", "find", "create", "calculate"):
                assert '"error"' not in outcome.text, (label, operation.name, arguments, outcome)


@pytest.mark.parametrize("split", SPLITS)
def test_records_fit_their_table(split: Split) -> None:
    for label, domain in all_domains(split):
        if domain.data is None:
            continue
        keys = [str(record[domain.key.name]) for record in domain.records]
        assert len({key.casefold() for key in keys}) == len(keys), label
        assert domain.data.next_key not in keys, label
        for record in domain.records:
            assert list(record) == [domain.key.name, *(column.name for column in domain.columns)], label
            for column in domain.columns:
                assert not column.choices or record[column.name] in column.choices, (label, column.name)


def test_the_same_seed_gives_the_same_domain() -> None:
    for split in SPLITS:
        for seed in range(20):
            assert invented.domain(random.Random(seed), split) == invented.domain(random.Random(seed), split), (
                f"seed {seed}, {split}"
            )
        assert catalog.domains(random.Random(7), split) == catalog.domains(random.Random(7), split)


def test_pools_have_disjoint_training_and_held_out_values() -> None:
    words = (
        *vars(pools).values(),
        invented_words.RECORD_NOUNS,
        invented_words.CHOICE_LABELS,
        *invented_words.LABELS.values(),
    )
    for pool in (one for one in words if isinstance(one, pools.Pool)):
        assert not set(pool.train) & set(pool.held_out)
    for split in SPLITS:
        for seed in range(200):
            made = pools.made_up(random.Random(seed), split)
            assert is_held_out(made) == (split == "held_out"), f"seed {seed}"


@pytest.mark.parametrize("kind", ["person", "city", "word", "tags", "people"])
def test_training_never_draws_a_held_out_name(kind: Kind) -> None:
    held_out = {
        word.casefold() for pool in vars(pools).values() if isinstance(pool, pools.Pool) for word in pool.held_out
    }
    column = Column(name="c", label="c", kind=kind)
    drawn = {
        part.casefold()
        for seed in range(2000)
        for part in str(values.draw(column, random.Random(seed), "train")).split()
    }
    drawn = {re.sub(r"\W", "", part) for part in drawn}
    assert not drawn & held_out


def test_values_of_held_out_sessions_are_mostly_new() -> None:
    column = Column(name="c", label="c", kind="person")
    names = [values.draw(column, random.Random(seed), "held_out").split() for seed in range(500)]
    assert sum(any(is_held_out(part) for part in name) for name in names) > 400


def test_unseen_tools_and_parameters_never_occur_in_training() -> None:
    def names(domains: Iterator[Domain]) -> tuple[set[str], set[str]]:
        operations = [operation for domain in domains for operation in domain.operations]
        return {operation.name for operation in operations}, {
            name for operation in operations for name in operation.params
        }

    rng = random.Random(1)
    train = names(iter([*catalog.domains(rng, "train"), *(invented.domain(rng, "train") for _ in range(3000))]))
    unseen = [
        *catalog.domains(rng, "held_out", list(catalog.UNSEEN)),
        *(invented.domain(rng, "held_out") for _ in range(500)),
    ]
    assert all(domain.unseen for domain in unseen)
    tools, parameters = names(iter(unseen))
    assert not tools & train[0]
    assert not parameters & train[1]


@pytest.mark.parametrize("split", SPLITS)
def test_facts_of_a_page_are_single_and_verbatim(split: Split) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        num_lines = rng.randint(10, 120)
        text, facts = values.page(rng, split, num_lines)
        assert len(text.split("\n")) == num_lines, f"seed {seed}"
        assert len(facts) >= 3, f"seed {seed}"
        assert facts == values.facts(text), f"seed {seed}"
        lines = values.fact_lines(text)
        assert list(lines) == [label for label, _ in facts], f"seed {seed}"
        for label, value in facts:
            assert text.count(lines[label]) == 1, f"seed {seed}: {label}"
            assert value in lines[label], f"seed {seed}: {label}"


def test_sentences_hold_no_facts() -> None:
    for seed in range(2000):
        assert pages.facts(values.sentence(random.Random(seed), "train")) == [], f"seed {seed}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "yes"),
        (False, "no"),
        (12.5, "12.5"),
        (7, "7"),
        (["Ana", "Bo", "Cy"], "Ana, Bo and Cy"),
        (["Ana", "Bo"], "Ana and Bo"),
        (["Ana"], "Ana"),
    ],
)
def test_values_are_spelled_as_people_say_them(value: object, text: str) -> None:
    assert values.spoken(Column(name="c", label="c", kind="word"), value) == text
