"""Cost of FP8 drafts in acceptance: the same live sessions, greedy and with three drafts per step, drafted with the
checkpoint's weights and with FP8 weights.

    python -m tests.properties.draft_precision [--sessions 20]

runs the bundled model and a mixture of experts made from it, on the CPU in float32. FP8 weights are dequantised once
there, so only the weights are rounded, as in a GPU's decode steps.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentspec.config import DraftPrecision, EngineConfig
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


def measure(checkpoint: Path, precision: DraftPrecision, *, num_sessions: int, concurrency: int = 8) -> Measured:
    config = EngineConfig(
        model=str(checkpoint),
        device="cpu",
        dtype="float32",
        draft_tokens=NUM_DRAFTS,
        draft_precision=precision,
        max_running=concurrency,
    )

    async def run() -> Measured:
        async with local_server.load(config).client() as client:
            played, summary = await play(draw(SEED, num_sessions), client, concurrency=concurrency)
        assert summary.num_failed_sessions == 0, f"{checkpoint.name}, {precision}"
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
    num_sessions = parser.parse_args().sessions
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name, checkpoint in (("tiny-agent", bundled.DIRECTORY), ("with experts", write_upcycled(Path(folder)))):
            exact, rounded = (
                measure(checkpoint, precision, num_sessions=num_sessions) for precision in ("checkpoint", "fp8")
            )
            assert rounded.said == exact.said, f"{name}: drafts change the output"
            for what, found in (("checkpoint", exact), ("FP8", rounded)):
                shares = ", ".join(f"{share:.1%}" for share in found.acceptance.shares if share is not None)
                print(
                    f"{name}, {what}: {found.accepted_per_step:.4f} drafts accepted per step ({shares}) "
                    f"in {found.acceptance.num_steps:,} steps"
                )
            print(f"{name}: FP8 changes acceptance by {rounded.accepted_per_step / exact.accepted_per_step - 1:+.2%}")


if __name__ == "__main__":
    main()
