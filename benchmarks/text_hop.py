"""Overhead of building prompts in a separate process: `python -m benchmarks.text_hop`.

Both variants return prompts that were built before, so only the transfer of messages and ids is measured. One variant
is the text process of `serve`, called as in `serve`; the other one is a thread, as in an embedded engine. They run
alternately in one program, and their prompts must be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from typing import Any

from agentspec.engine import bundled, text_process
from agentspec.engine.remote import EngineProcess
from agentspec.engine.remote_text import RemoteText, pipeline_of
from agentspec.fair_queue import Flow
from agentspec.server.text_work import TextWork, ThreadedText
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.prompt import BuiltPrompt, PromptAsk, PromptBuilder
from agentspec.text.token_limit import TokenLimit
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.turn_memory import TurnMemory
from benchmarks.first_token import source_text

CHILD = ("-m", "benchmarks.text_hop", "--child")
SECONDS = 30
SIZES = {"a short prompt": (1, 20), "50 KB of messages": (25, 50_000), "100 KB of messages": (50, 100_000)}
"""Number of messages, and their total bytes."""


class Prepared(PromptBuilder):
    """Builds each conversation once; conversations differ in their number of messages."""

    def __init__(self, *parts: Any, **settings: Any) -> None:
        super().__init__(*parts, **settings)
        self._built: dict[int, BuiltPrompt] = {}

    def build(self, asked: PromptAsk) -> BuiltPrompt:
        number = len(asked.messages)
        if number not in self._built:
            self._built[number] = super().build(asked)
        return self._built[number]


async def measured(times: int) -> None:
    tokenizer, template = Tokenizer.from_directory(bundled.DIRECTORY), ChatTemplate.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    assert template is not None
    remote = RemoteText(EngineProcess((*CHILD, str(SECONDS))), SECONDS)
    await pipeline_of(bundled.DIRECTORY, None, remote)
    ways: dict[str, TextWork] = {
        "process": remote,
        "thread": ThreadedText(tokenizer, Prepared(tokenizer, template, TurnMemory())),
    }
    rng = random.Random(1)
    print(
        "| ms | tokens | process: least | p25 | median | thread: least | p25 | median |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, (count, size) in SIZES.items():
        asked = PromptAsk(
            messages=[{"role": "user", "content": source_text(rng, size // count)} for _ in range(count)],
            limit=TokenLimit(10**6),
        )
        prompts = [await work.build(asked, Flow()) for work in ways.values()]
        assert prompts[0].prompt_ids == prompts[1].prompt_ids
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(times):
            for way, work in ways.items():
                began = time.perf_counter()
                await work.build(asked, Flow())
                taken[way].append((time.perf_counter() - began) * 1e3)
        figures = [
            f"{figure:.3f}"
            for found in taken.values()
            for figure in (min(found), *statistics.quantiles(found, n=4)[:2])
        ]
        print(f"| {name} | {len(prompts[0].prompt_ids):,} | {' | '.join(figures)} |")
    await remote.close()


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        del sys.argv[1]
        text_process.PromptBuilder = Prepared  # type: ignore[attr-defined]
        sys.exit(text_process.main())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=600, help="prompts of each kind, in each way")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}\n")
    asyncio.run(measured(options.times))


if __name__ == "__main__":
    main()
