"""Writes workloads/recorded.jsonl: about twenty short scripts of agent sessions over three sets of tools, the same
bytes for the same seed.

    python -m workloads.generate [--seed N] [--out FILE]

Answers are recorded, so the file works in every replay mode and in dry runs. All content is invented: people, shops,
code and timetables. As with real agents, sessions of one set share their tools and the beginning of their system
prompt. Results vary from a few words to several pages, waits from zero to some tenths of a second.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from workloads import coding, office, support

SEED = 20
OUT = Path(__file__).parent / "recorded.jsonl"


def generate(seed: int) -> str:
    """The file's text."""
    rng = random.Random(seed)
    meta = {
        "type": "meta",
        "schema": "agentspec.replay/1",
        "toolsets": {room.TOOLSET: room.TOOLS for room in (coding, office, support)},
        "defaults": {"temperature": 0},
        "source": {
            "generator": "workloads/generate.py",
            "seed": seed,
            "license": "Apache-2.0",
            "lengths": "planned at 4 characters a token",
        },
    }
    sessions = [script.line() for room in (coding, office, support) for script in room.scripts(rng)]
    rng.shuffle(sessions)
    return "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in (meta, *sessions))


def main() -> None:
    parser = argparse.ArgumentParser(description="write workloads/recorded.jsonl")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    args.out.write_text(generate(args.seed), encoding="utf-8")


if __name__ == "__main__":
    main()
