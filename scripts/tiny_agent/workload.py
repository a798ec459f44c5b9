"""Writes workloads/agentic.jsonl: twenty live held-out sessions, sixteen of known tools and four of unseen tools.

    python -m scripts.tiny_agent.workload [--seed N] [--out FILE]

Which sessions: those of index 0, 1, 2, ... of the seed, in this order, as far as their shape (see `shapes`) is still
wanted in their group (`WANTED`). The shape is that of the generated session; no model is asked, so nothing is chosen by
how a model does. The same seed and generator give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from scripts.tiny_agent.domain import Example
from scripts.tiny_agent.sessions import make_example, replay_line

SEED = 2_000_000
"""Training and evaluation have other ones."""
OUT = Path(__file__).parents[2] / "workloads" / "agentic.jsonl"

Shape = Literal["long", "parallel", "row", "error", "any"]

WANTED: dict[str, dict[Shape, int]] = {
    "known": {"long": 1, "parallel": 2, "row": 2, "error": 2, "any": 1},
    "unseen": {"parallel": 1, "any": 1},
}
"""Sessions of each shape in each group: as many that think, and as many that don't."""

LONG = range(9_000, 14_000)
"""Characters of a long session: tools, prompts, answers and results. About 3.3 of them are a token."""
SHORT = range(6_000)
"""Characters of any other session."""
SHORT_ANSWERS = range(1_200)
"""Characters of its answers alone, calls and reasoning included: they take most of the time."""
SHORT_TURNS = range(2, 6)


def shapes(example: Example) -> list[Shape]:
    """What a session can stand for, in the order in which it is wanted; nothing if it is of no size that is wanted.

    `long`: a size in LONG. The others are short, with two to five turns of the user: `parallel` has an answer with
    several calls, `row` a turn with calls behind the result of a call, `error` a result that is an error."""
    size = len(json.dumps(example.tools)) + sum(_size(message) for message in example.messages())
    if size in LONG:
        return ["long"]
    answers = [[message for message in turn.messages if message["role"] == "assistant"] for turn in example.turns]
    if (
        size not in SHORT
        or len(answers) not in SHORT_TURNS
        or sum(_size(message) for turn in answers for message in turn) not in SHORT_ANSWERS
    ):
        return []
    calls = [[len(message.get("tool_calls", [])) for message in turn] for turn in answers]
    results = [message["content"] for turn in example.turns for message in turn.messages if message["role"] == "tool"]
    found: dict[Shape, bool] = {
        "parallel": any(num > 1 for turn in calls for num in turn),
        "row": any(sum(num > 0 for num in turn) > 1 for turn in calls),
        "error": any(result.startswith('{"error"') for result in results),
        "any": True,
    }
    return [shape for shape, is_so in found.items() if is_so]


def choose(seed: int) -> list[Example]:
    """The sessions, in the order of their indices."""
    wanted = Counter(
        {
            (group, shape, thinking): num
            for group, nums in WANTED.items()
            for shape, num in nums.items()
            for thinking in (True, False)
        }
    )
    chosen = []
    index = 0
    while wanted.total():
        for group in WANTED:
            example = make_example(seed, index, split="held_out", unseen=group == "unseen")
            slots = [(group, shape, example.thinking) for shape in shapes(example)]
            slot = next((slot for slot in slots if wanted[slot]), None)
            if slot is not None:
                wanted[slot] -= 1
                chosen.append(example)
        index += 1
    return chosen


def generate(seed: int) -> str:
    """The file's text."""
    source = {"generator": "python -m scripts.tiny_agent.workload", "seed": seed, "license": "Apache-2.0"}
    meta = {"type": "meta", "schema": "agentspec.replay/1", "defaults": {"temperature": 0}, "source": source}
    rng = random.Random(seed)
    sessions = [_line(example, rng) for example in choose(seed)]
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in (meta, *sessions))


def _line(example: Example, rng: random.Random) -> dict[str, Any]:
    """The session with a small wait before every turn but its first."""
    line = replay_line(example)
    for turn in line["turns"][1:]:
        turn["delay_ms"] = rng.randrange(120, 420, 10)
    return line


def _size(message: dict[str, Any]) -> int:
    """Characters of a message."""
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return (
        len(message["content"] or "")
        + len(message.get("reasoning_content", ""))
        + sum(len(call["name"] + call["arguments"]) for call in calls)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write workloads/agentic.jsonl.")
    parser.add_argument("--seed", type=int, default=SEED, help="of the sessions; default: %(default)s")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FILE", help="default: workloads/agentic.jsonl")
    arguments = parser.parse_args()
    arguments.out.write_text(generate(arguments.seed), encoding="utf-8")


if __name__ == "__main__":
    main()
