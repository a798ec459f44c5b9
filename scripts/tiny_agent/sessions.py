"""Generates sessions: domains, tools, a system prompt and one to a few turns with gold trajectories, determined only by
seed and index.

    python -m scripts.tiny_agent.sessions --seed 0 --index 5 --split train

Knows nothing of tokens, templates or training.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from typing import Any

import msgspec

from agentspec.replay.simulator import Simulator
from agentspec.replay.world import Fails, Record, Table, World
from scripts.tiny_agent import catalog, invented, prompts, tasks, values
from scripts.tiny_agent.domain import Domain, Example, Operation, Split
from scripts.tiny_agent.phrases import TONES
from scripts.tiny_agent.play import Play, Setting

MAX_TOOLS = 16
_INVENTED_RATE = 0.8
_CALCULATOR = "calculation"
_CALCULATOR_RATE = 0.12
_FAILING_RATE = 0.17
_LONG_RATE = 0.1
_ENOUGH_CHARS = 30_000
"""No further turn beyond this length, so that all sessions fit into 8k tokens."""
_BUSY = (
    "service busy, try again",
    "the service is busy",
    "temporarily unavailable",
    "timeout, please try again",
    "the request timed out",
    "too many requests, try again later",
    "busy, please retry",
    "service temporarily unavailable (503)",
    "upstream timeout",
    "the server is busy at the moment, please retry",
)


def make_example(seed: int, index: int, *, split: Split, unseen: bool | None = None) -> Example:
    """The session of this seed and index. `unseen`: whether its tools never occur in training; None: the index decides
    (never in training).

    Raises ValueError for an unseen session of the train split."""
    return make(seed, index, split=split, unseen=unseen)[0]


def make(seed: int, index: int, *, split: Split, unseen: bool | None = None) -> tuple[Example, list[str]]:
    """`make_example`, and the names of the tasks that made its turns."""
    if split == "train" and unseen:
        raise ValueError(f"unseen: {unseen}, but the train split has no unseen tools")
    rng = random.Random(f"{seed}/{index}")
    unseen = split == "held_out" and (rng.random() < 0.5 if unseen is None else unseen)
    while True:
        made = _session(rng, f"{split}-{'unseen' if unseen else 'known'}-{seed}-{index}", split, unseen)
        if made is not None:
            return made


def _session(rng: random.Random, session_id: str, split: Split, unseen: bool) -> tuple[Example, list[str]] | None:
    """None when the domains allow no further turn."""
    long = rng.random() < _LONG_RATE
    domains = _domains(
        rng, split, unseen, rng.choice((3, 4)) if long else rng.choices((1, 2, 3, 4), (26, 42, 24, 8))[0]
    )
    domains = _with_failure(rng, domains if unseen else _with_calculator(rng, split, domains))
    if long:
        domains = [_with_long_pages(rng, split, domain) for domain in domains]
    others = _domains(rng, split, unseen, 1, taken=domains) if rng.random() < 0.3 else []
    operations = [operation for domain in domains for operation in domain.operations]
    tools = [operation.tool for operation in rng.sample(operations, len(operations))]
    me, today = _known(rng, domains, "person", 0.25), _known(rng, domains, "date", 0.25)
    prompt = prompts.draw(rng, split, me=me, today=today, long=rng.random() < (0.6 if long else 0.03))
    tables = {domain.table: domain.data for domain in domains if domain.data is not None}
    world = World(tables=tables, actions={operation.name: operation.action for operation in operations})
    setting = Setting(
        rng=rng,
        split=split,
        domains=domains,
        tools=tools,
        thinking=rng.random() < 0.5,
        tone=rng.choice(TONES),
        others=others,
        me=prompt.me,
        today=prompt.today,
        name=prompt.name,
    )
    play = Play(setting, Simulator(world, tools))
    num_turns = rng.randint(5, 22) if long else rng.choices((1, 2, 3, 4, 5), (24, 26, 22, 16, 12))[0]
    posed: list[str] = []
    size = len(json.dumps(tools)) + len(prompt.text or "")
    while len(play.turns) < num_turns and size + play.num_chars < _ENOUGH_CHARS:
        name = _go_on(play)
        if name is None:
            return None
        posed.append(name)
    example = Example(
        session_id=session_id,
        unseen=unseen,
        system=prompt.text,
        thinking=setting.thinking,
        tools=tools,
        world=msgspec.to_builtins(world),
        turns=play.turns,
    )
    return example, posed


def _go_on(play: Play) -> str | None:
    """Poses one more task and returns its name; None when none can be posed."""
    if play.gave_up and play.rng.random() < 0.5 and tasks.AGAIN(play):
        return "try_again"
    groups = [tasks.FOLLOWING, tasks.TASKS] if play.focus is not None and play.rng.random() < 0.5 else [tasks.TASKS]
    return next((name for group in groups for name in tasks.draw_order(play, group) if group[name][0](play)), None)


def _domains(
    rng: random.Random, split: Split, unseen: bool, num: int, taken: list[Domain] | None = None
) -> list[Domain]:
    """Domains that can be combined: no repeated tool, table, noun or key."""
    chosen: list[Domain] = []
    names = list(catalog.UNSEEN if unseen else catalog.TEMPLATES)
    for _ in range(40):
        if len(chosen) == num:
            break
        if (split == "held_out" and not unseen) or rng.random() >= _INVENTED_RATE:
            domain = catalog.domains(rng, split, [rng.choice(names)])[0]
        else:
            domain = invented.domain(rng, split)
        others = [*chosen, *(taken or [])]
        if (
            all(_apart(domain, other) for other in others)
            and sum(len(d.operations) for d in (*chosen, domain)) <= MAX_TOOLS
        ):
            chosen.append(domain)
    return chosen


def _with_calculator(rng: random.Random, split: Split, domains: list[Domain]) -> list[Domain]:
    """Numbers of any domain may have to be added up."""
    calculator = catalog.domains(rng, split, [_CALCULATOR])[0]
    room = sum(len(domain.operations) for domain in domains) < MAX_TOOLS
    return (
        [*domains, calculator]
        if room and rng.random() < _CALCULATOR_RATE and all(d.noun != _CALCULATOR for d in domains)
        else domains
    )


def _apart(a: Domain, b: Domain) -> bool:
    names, other_names = ({o.name for o in d.operations} for d in (a, b))
    nouns, other_nouns = ({d.noun.lower(), d.plural.lower()} for d in (a, b))
    keys, other_keys = ({str(r[d.key.name]) for r in d.records} for d in (a, b))
    return a.table != b.table and not (names & other_names or nouns & other_nouns or keys & other_keys)


def _with_failure(rng: random.Random, domains: list[Domain]) -> list[Domain]:
    """Sometimes let the first one or two calls of one tool fail."""
    if rng.random() >= _FAILING_RATE:
        return domains
    chosen = rng.choice([operation.name for domain in domains for operation in domain.operations])
    fails = Fails(times=rng.choice((1, 1, 2)), error=rng.choice(_BUSY))

    def changed(operation: Operation) -> Operation:
        return (
            replace(operation, action=msgspec.structs.replace(operation.action, fails=fails))
            if operation.name == chosen
            else operation
        )

    return [
        replace(domain, operations=tuple(changed(operation) for operation in domain.operations)) for domain in domains
    ]


def _with_long_pages(rng: random.Random, split: Split, domain: Domain) -> Domain:
    column = next((column for column in domain.columns if column.kind == "page"), None)
    if column is None or domain.data is None or not domain.records:
        return domain
    records: list[Record] = [dict(record) for record in domain.records]
    for record in rng.sample(records, min(2, len(records))):
        record[column.name] = values.page(rng, split, rng.randint(50, 160))[0]
    return replace(domain, data=Table(key=domain.data.key, records=records, next_key=domain.data.next_key))


def _known(rng: random.Random, domains: list[Domain], kind: str, rate: float) -> str | None:
    """A person or a date of the records, for the system prompt."""
    found = [str(r[c.name]) for d in domains for c in d.columns if c.kind == kind for r in d.records if c.name in r]
    return rng.choice(found) if found and rng.random() < rate else None


def replay_line(example: Example, *, max_tokens: int = 320) -> dict[str, Any]:
    """The session as a line of a replay file that is run live."""
    extra = {"chat_template_kwargs": {"enable_thinking": example.thinking}}
    turns = []
    for index, turn in enumerate(example.turns):
        system = [{"role": "system", "content": example.system}] if index == 0 and example.system else []
        turns.append(
            {
                "messages": [*system, {"role": "user", "content": turn.user}],
                "goal": turn.goal,
                "max_tokens": max_tokens,
                "delay_ms": 0,
                "delay_kind": "user" if index else "start",
                "extra": extra,
            }
        )
    return {
        "type": "session",
        "session_id": example.session_id,
        "group": "unseen" if example.unseen else "known",
        "tools": example.tools,
        "world": example.world,
        "turns": turns,
    }


def readable(example: Example) -> str:
    """Print a session for inspection."""
    lines = [f"=== {example.session_id}, thinking {'on' if example.thinking else 'off'}"]
    for tool in example.tools:
        function = tool["function"]
        lines.append(f"    {function['name']}: {function['description']}")
        required = function["parameters"].get("required", [])
        for name, schema in function["parameters"].get("properties", {}).items():
            kind = "|".join(schema["enum"]) if "enum" in schema else schema["type"]
            lines.append(f"        {name}{'*' if name in required else ''} ({kind}): {schema.get('description', '')}")
    if example.system:
        lines.append(f"SYSTEM {example.system}")
    for turn in example.turns:
        lines.append(f"USER   {turn.user}")
        for message in turn.messages:
            if message["role"] == "tool":
                lines.append(f"  TOOL   {message['content']}")
                continue
            if "reasoning_content" in message:
                lines.append(f"  THINK  {message['reasoning_content']}")
            lines += [
                f"  CALL   {call['function']['name']} {call['function']['arguments']}"
                for call in message.get("tool_calls", [])
            ]
            if message["content"]:
                lines.append(f"  SAYS   {message['content']}")
        lines.append(f"  GOAL   {json.dumps(turn.goal, ensure_ascii=False)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print sessions.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="how many, from this index on; default: %(default)s")
    parser.add_argument("--split", choices=("train", "held_out"), default="train")
    parser.add_argument("--unseen", action="store_true", help="with tools that never occur in training")
    arguments = parser.parse_args()
    unseen = arguments.unseen if arguments.split == "held_out" else None
    for index in range(arguments.index, arguments.index + arguments.count):
        print(readable(make_example(arguments.seed, index, split=arguments.split, unseen=unseen)), end="\n\n")


if __name__ == "__main__":
    main()
