"""Writes the profiles workloads/profile_*.jsonl: traffic shapes as token runs without text; deterministic.

    python -m workloads.profiles

agentic: a coding agent. Each session starts with 50,000 tokens, of which 4,000 (system prompt and tools) are shared by
all; then every turn adds a tool's result of 800 tokens. Each session has twelve answers of 200 tokens. Waits are those
of tool runs measured on real agents.

agents: a fleet of agents without waits, one session per lane (`--concurrency N --sessions N`, up to 32). Each starts
with 16,384 tokens, of which 4,096 are shared by all; then eight turns add 800 tokens each. Each session has nine
answers of 160 tokens.

chat: people. A shared system prompt of 512 tokens; four to eight questions of 32 to 160 tokens per session with answers
of 64 to 320 tokens, and a few seconds between them.

A turn names the blocks of its answer, and the next prompt contains them. So with forced outputs a session is
append-only, like real agents' sessions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 6

TOOL_MS, TOOL_WEIGHTS = (180, 220, 250, 300, 470, 5100), (4, 4, 4, 4, 3, 1)
"""Durations of tool runs in mini-swe-agent sessions: p10 0.18 s, p50 0.25 s, p90 0.47 s."""

Json = dict[str, Any]


class Run:
    """One session of token runs; block ids come from `ids`, except those of the shared opening."""

    def __init__(self, session_id: str, *, group: str, block_size: int, opening: list[int], ids: Iterator[int]) -> None:
        self._line: Json = {"type": "session", "session_id": session_id, "group": group, "turns": []}
        self._block_size = block_size
        self._blocks = list(opening)
        self._ids = ids

    def turn(self, new_tokens: int, output_tokens: int, *, delay_ms: int, delay_kind: str) -> None:
        """Add a turn: `new_tokens` after the history, and the answer. Both are whole blocks."""
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
    block = 32  # the greatest common divisor of all four lengths
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
    """The text of a file."""
    source = {"generator": "workloads/profiles.py", "seed": seed, "license": "Apache-2.0"}
    meta = {"type": "meta", "schema": "agentspec.replay/1", "defaults": {"temperature": 0}, "source": source}
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in (meta, *PROFILES[name](seed)))


def main() -> None:
    for name in PROFILES:
        (Path(__file__).parent / name).write_text(generate(name), encoding="utf-8")


if __name__ == "__main__":
    main()
