"""Writes the profiles of workloads/, profile_*.jsonl: shapes of traffic as token runs, without text, the same bytes
each time.

    python -m workloads.profiles

agentic: a coding agent. Each session opens with 50,000 tokens, of which 4,000 (system prompt and tools) are common to
all; then every turn adds a tool's result of 800 tokens. Answers are 200 tokens, twelve a session. Waits are tool runs
as measured on real agents.

agents: a fleet of agents without waits, one session a lane (`--concurrency N --sessions N`, up to 32). Each opens with
16,384 tokens, of which 4,096 are common to all; then eight turns add 800 tokens each. Answers are 160 tokens, nine a
session.

chat: people. A common system prompt of 512 tokens, questions of 32 to 160 and answers of 64 to 320 tokens, four to
eight a session, and a few seconds between them.

A turn names the blocks of its answer, and the next prompt holds them: so with forced outputs a session is append-only,
as agents are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 6

TOOL_MS, TOOL_WEIGHTS = (180, 220, 250, 300, 470, 5100), (4, 4, 4, 4, 3, 1)
"""Tool runs of mini-swe-agent sessions: a tenth is below 0.18 s, half below 0.25 s, nine tenths below 0.47 s."""

Json = dict[str, Any]


class Run:
    """One session of token runs; block ids come from `ids`, the shared opening's excepted."""

    def __init__(self, session_id: str, *, group: str, block_size: int, opening: list[int], ids: Iterator[int]) -> None:
        self._line: Json = {"type": "session", "session_id": session_id, "group": group, "turns": []}
        self._block_size = block_size
        self._blocks = list(opening)
        self._ids = ids

    def turn(self, new_tokens: int, output_tokens: int, *, delay_ms: int, delay_kind: str) -> None:
        """`new_tokens` behind all that was said so far, and the answer to them. Both are whole blocks."""
        self._blocks += self._new(new_tokens)
        answer = self._new(output_tokens)
        self._line["turns"].append(
            {
                "input_length": len(self._blocks) * self._block_size,
                "block_size": self._block_size,
                "hash_ids": list(self._blocks),
                "delay_ms": delay_ms,
                "delay_kind": delay_kind,
                "max_tokens": output_tokens,
                "expect": {"output_tokens": output_tokens, "hash_ids": answer},
            }
        )
        self._blocks += answer

    def line(self) -> Json:
        return self._line

    def _new(self, num_tokens: int) -> list[int]:
        assert num_tokens % self._block_size == 0, "lengths are whole blocks, so that what follows begins with one"
        return [next(self._ids) for _ in range(num_tokens // self._block_size)]


def agentic(seed: int) -> Iterator[Json]:
    rng, block = random.Random(seed), 200
    ids = iter(range(10**9))
    opening = [next(ids) for _ in range(4000 // block)]
    for number in range(1, 9):
        run = Run(f"agent-{number}", group="agentic", block_size=block, opening=opening, ids=ids)
        run.turn(46_000, 200, delay_ms=0, delay_kind="start")
        for _ in range(11):
            run.turn(800, 200, delay_ms=rng.choices(TOOL_MS, TOOL_WEIGHTS)[0], delay_kind="tool")
        yield run.line()


def agents(seed: int) -> Iterator[Json]:
    block = 32  # the largest that divides all four lengths
    ids = iter(range(10**9))
    opening = [next(ids) for _ in range(4096 // block)]
    for number in range(1, 33):
        run = Run(f"agent-{number}", group="agents", block_size=block, opening=opening, ids=ids)
        run.turn(16_384 - 4096, 160, delay_ms=0, delay_kind="start")
        for _ in range(8):
            run.turn(800, 160, delay_ms=0, delay_kind="tool")
        yield run.line()


def chat(seed: int) -> Iterator[Json]:
    rng, block = random.Random(seed), 32
    ids = iter(range(10**9))
    opening = [next(ids) for _ in range(512 // block)]
    for number in range(1, 17):
        run = Run(f"chat-{number}", group="chat", block_size=block, opening=opening, ids=ids)
        for turn in range(rng.randrange(4, 9)):
            question, answer = block * rng.randrange(1, 6), block * rng.randrange(2, 11)
            run.turn(
                question,
                answer,
                delay_ms=rng.randrange(2000, 9000, 100) if turn else 0,
                delay_kind="user" if turn else "start",
            )
        yield run.line()


PROFILES = {"profile_agentic.jsonl": agentic, "profile_agents.jsonl": agents, "profile_chat.jsonl": chat}


def generate(name: str, seed: int = SEED) -> str:
    """A file's text."""
    source = {"generator": "workloads/profiles.py", "seed": seed, "license": "Apache-2.0"}
    meta = {"type": "meta", "schema": "agentspec.replay/1", "defaults": {"temperature": 0}, "source": source}
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (meta, *PROFILES[name](seed)))


def main() -> None:
    for name in PROFILES:
        (Path(__file__).parent / name).write_text(generate(name), encoding="utf-8")


if __name__ == "__main__":
    main()
