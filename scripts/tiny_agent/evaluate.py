"""Measures a model on sessions that aren't in its training data: tool calls, goals reached, and accepted drafts.

    python -m scripts.tiny_agent.evaluate                         the figures of the model card, for the bundled model
    python -m scripts.tiny_agent.evaluate --model DIR --errors 5  five turns that missed, next to the gold answers
    python -m scripts.tiny_agent.evaluate --kv-dtype fp8          with keys and values in FP8
    python -m scripts.tiny_agent.evaluate --what quality --check  exit status 1 below 95 % valid calls or 80 % sessions
    at goal

Sessions are played live, in process, several at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, get_args

import torch

from agentspec.config import EngineConfig, KvDtype
from agentspec.engine import bundled, local_server
from agentspec.errors import AgentspecError, ConfigError
from scripts.tiny_agent import acceptance, misses, quality
from scripts.tiny_agent.acceptance import MAX_DRAFTS, Acceptance
from scripts.tiny_agent.held_out import GREEDY, HeldOut, Sampling, draw, play
from scripts.tiny_agent.quality import Quality

SEED = 1_000_000
CONCURRENCY = 16
"""Concurrent sessions. On two cores, 32 sessions give the same throughput, and 8 give a third less."""
PARTS = ("quality", "acceptance")
FAILED = 1


def main() -> int:
    arguments = _arguments()
    parts = arguments.what.split(",")
    if not set(parts) <= set(PARTS):
        raise ConfigError("what", arguments.what, f"must name some of {','.join(PARTS)}")
    if "quality" not in parts and (arguments.check or arguments.errors):
        raise ConfigError("what", arguments.what, "--check and --errors need quality")
    for field in ("sessions", "acceptance_sessions", "concurrency"):
        if getattr(arguments, field) < 1:
            raise ConfigError(field, getattr(arguments, field), "must be at least 1")
    if arguments.json is not None and not arguments.json.resolve().parent.is_dir():
        raise ConfigError("json", arguments.json, "there is no such directory")
    config = EngineConfig(
        model=arguments.model,
        device=arguments.device,
        kv_dtype=arguments.kv_dtype,
        max_running=arguments.concurrency,
        seed=arguments.seed,
    )
    progress = None if arguments.quiet else sys.stderr
    judged, rows = None, None
    if "quality" in parts:
        judged = measure_quality(config, draw(arguments.seed, arguments.sessions), progress)
        for miss in misses.find_misses(judged.played)[: arguments.errors]:
            print(misses.listing(miss), end="\n\n")
        print(quality.diagnosis(judged), end="\n\n")
    if "acceptance" in parts:
        rows = measure_acceptance(config, draw(arguments.seed, arguments.acceptance_sessions), progress)
    print(card(arguments, judged, rows))
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps(_to_json(arguments, judged, rows), ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )
    if not arguments.check or judged is None:
        return 0
    for shortfall in judged.shortfalls:
        print(f"check failed: {shortfall}", file=sys.stderr)
    return FAILED if judged.shortfalls else 0


def measure_quality(config: EngineConfig, sessions: list[HeldOut], progress: TextIO | None = None) -> Quality:
    """Play the sessions greedily and count. Raises CheckpointError or ConfigError for a model that can't be loaded."""

    assert config.max_running != "auto"
    num_at_once = config.max_running

    async def run() -> Quality:
        async with local_server.load(config).client() as client:
            played, summary = await play(sessions, client, concurrency=num_at_once, progress=progress)
        return quality.judge(played, seconds=summary.wall, num_failed=summary.num_failed_sessions)

    return asyncio.run(run())


def measure_acceptance(
    config: EngineConfig, sessions: list[HeldOut], progress: TextIO | None = None
) -> list[Acceptance]:
    """Play the sessions with 1 to MAX_DRAFTS drafts a step, greedily and sampled."""
    sampled = Sampling(name="temperature 0.6, top-p 0.95", fields={"temperature": 0.6, "top_p": 0.95}, seed=config.seed)

    assert config.max_running != "auto"
    num_at_once = config.max_running

    async def run(sampling: Sampling, num_drafts: int) -> Acceptance:
        async with local_server.load(replace(config, draft_tokens=num_drafts)).client() as client:
            _, summary = await play(sessions, client, sampling=sampling, concurrency=num_at_once, progress=progress)
        return acceptance.read(summary, sampling=sampling.name, num_drafts=num_drafts)

    return [
        asyncio.run(run(sampling, num_drafts))
        for sampling in (GREEDY, sampled)
        for num_drafts in range(1, MAX_DRAFTS + 1)
    ]


def card(arguments: argparse.Namespace, judged: Quality | None, rows: list[Acceptance] | None) -> str:
    """The figures of the model card, in Markdown."""
    device = _device(arguments)
    lines = ["## Evaluation", "", f"`python -m scripts.tiny_agent.evaluate`, seed {arguments.seed}, on {device}."]
    if judged is not None:
        head = f"{arguments.sessions} sessions, four of known tools to each one of unseen tools, played live, greedy:"
        lines += ["", head, "", quality.markdown(judged), "", quality.EXPLANATION]
    if rows is not None:
        lines += ["", "### Drafts accepted, by position", "", acceptance.markdown(rows), "", acceptance.EXPLANATION]
        lines += [
            f"Measured on {arguments.acceptance_sessions} sessions of the same mix; a measurement of this model, "
            f"larger models differ."
        ]
    return "\n".join(lines)


def _to_json(arguments: argparse.Namespace, judged: Quality | None, rows: list[Acceptance] | None) -> dict[str, Any]:
    return {
        "model": arguments.model or bundled.NAME,
        "seed": arguments.seed,
        "device": _device(arguments),
        "sessions": arguments.sessions,
        "acceptance_sessions": arguments.acceptance_sessions,
        **({"quality": quality.to_json(judged)} if judged is not None else {}),
        **({"acceptance": acceptance.to_json(rows)} if rows is not None else {}),
    }


def _device(arguments: argparse.Namespace) -> str:
    """The device and the precision of the model for `--device` (the engine's `auto`)."""
    return "GPU in bfloat16" if arguments.device != "cpu" and torch.cuda.is_available() else "CPU in float32"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure a model on held-out sessions.")
    parser.add_argument("--model", metavar="DIR", help="checkpoint directory (default: the bundled model)")
    parser.add_argument("--seed", type=int, default=SEED, metavar="N", help="of the sessions; default: %(default)s")
    parser.add_argument("--sessions", type=int, default=200, metavar="N", help="for quality; default: %(default)s")
    parser.add_argument(
        "--acceptance-sessions", type=int, default=20, metavar="N", help="for acceptance; default: %(default)s"
    )
    parser.add_argument("--what", default=",".join(PARTS), metavar="PARTS", help="default: %(default)s")
    parser.add_argument(
        "--errors", type=int, default=0, metavar="N", help="print the first N missed turns of the users in full"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit status 1 below 95%% valid calls or 80%% sessions at goal"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and every call")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--kv-dtype", choices=get_args(KvDtype), default="auto", help="as of an engine")
    parser.add_argument(
        "--concurrency", type=int, default=CONCURRENCY, metavar="N", help="sessions at a time; default: %(default)s"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AgentspecError as error:
        sys.exit(f"evaluate: {error}")
