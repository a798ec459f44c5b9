"""Cost of 8 bits in acceptance: the same live sessions, greedy and with three drafts per step, in full precision and
with the drafting weights in FP8, or with keys and values in FP8.

    python -m tests.properties.draft_precision [--sessions 20] [--pages]

runs the bundled model and a mixture of experts made from it, on the CPU in float32. FP8 weights are dequantised once
there, so only the weights are rounded, as in a GPU's decode steps. With FP8 pages the text may differ, so fewer of the
sessions are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentspec.config import EngineConfig
from agentspec.engine import bundled, local_server
from scripts.tiny_agent import acceptance
from scripts.tiny_agent.acceptance import Acceptance
from scripts.tiny_agent.held_out import GREEDY, draw, play
from tests.fakes.upcycled import write_upcycled

NUM_DRAFTS = 3
SEED = 1_000_000
"""Seed of the sessions: the first ones of scripts/tiny_agent/evaluate.py, which training never used."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Acceptance and messages of all sessions."""

    acceptance: Acceptance
    said: list[Any]
    """All messages of each session except the last answer, without the calls' ids, which are random."""

    @property
    def accepted_per_step(self) -> float:
        return sum(self.acceptance.accepted) / self.acceptance.num_steps


def measure(checkpoint: Path, settings: dict[str, Any], *, num_sessions: int, concurrency: int = 8) -> Measured:
    """settings: of the engine, besides the usual ones."""
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        dtype="float32",
        draft_tokens=NUM_DRAFTS,
        max_running=concurrency,
        **settings,
    )

    async def run() -> Measured:
        async with local_server.load(config).client() as client:
            played, summary = await play(draw(SEED, num_sessions), client, concurrency=concurrency)
        assert summary.num_failed_sessions == 0, f"{checkpoint.name}, {settings}"
        found = acceptance.read(summary, sampling=GREEDY.name, num_drafts=NUM_DRAFTS)
        return Measured(acceptance=found, said=[_without_ids(one.messages) for one in played])

    return asyncio.run(run())


def _without_ids(said: Any) -> Any:
    if isinstance(said, dict):
        return {name: _without_ids(value) for name, value in said.items() if name not in ("id", "tool_call_id")}
    return [_without_ids(value) for value in said] if isinstance(said, list) else said


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.properties.draft_precision")
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--pages", action="store_true", help="keys and values in FP8 instead of drafting weights")
    arguments = parser.parse_args()
    full, fp8 = {"draft_precision": "checkpoint"}, {"draft_precision": "fp8"}
    if arguments.pages:
        full, fp8 = {}, {"kv_dtype": "fp8"}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, checkpoint in (("tiny-agent", bundled.DIRECTORY), ("with experts", write_upcycled(Path(folder)))):
            exact, rounded = (
                measure(checkpoint, settings, num_sessions=arguments.sessions) for settings in (full, fp8)
            )
            num_same = sum(one == other for one, other in zip(rounded.said, exact.said, strict=True))
            assert arguments.pages or num_same == len(exact.said), f"{name}: drafts change the output"
            print(f"{name}: {num_same} of {len(exact.said)} sessions have the same text")
            for what, found in (("full precision", exact), ("FP8", rounded)):
                shares = ", ".join(f"{share:.1%}" for share in found.acceptance.shares if share is not None)
                print(
                    f"{name}, {what}: {found.accepted_per_step:.4f} drafts accepted per step ({shares}) "
                    f"in {found.acceptance.num_steps:,} steps"
                )
            print(f"{name}: FP8 changes acceptance by {rounded.accepted_per_step / exact.accepted_per_step - 1:+.2%}")


if __name__ == "__main__":
    main()
