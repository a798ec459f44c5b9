"""Whole turns of agents over HTTP: `python -m benchmarks.agents --model 4B --lanes 1 4 8 16`.

`agentspec replay workloads/profile_agents.jsonl` runs in its own process against `agentspec serve` with its defaults,
one session per lane: a first prompt of 16,384 tokens, 4,096 of them shared, eight appends of 800 tokens, answers of 160
tokens, no thinking time. The model has published shapes. Weights are random, answers are forced token by token, and
three drafts per step are accepted at a rate that emits 3.0 tokens. One server serves all runs; each run has its own
token ids (`--seed`), so that nothing is cached before it. The sum beside each row is the time of its prompts in
sequence and of its full decode steps, by the measured costs of dry runs.

`--storm N` sends N first prompts of 2,000 tokens at once, with answers of 300 tokens. `--newcomer` sends a prompt of
50,000 tokens beside eight streams. `--fleet N TOKENS` runs N sessions at once that share nothing: a first prompt of so
many tokens, and two appends of 800; it says whether they fit. Arguments after `--` go to the server (`--
--prefill-budget 2048`). Before the measurement, tiny-agent's tokens are compared with the CPU's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from agentspec.config import Device
from agentspec.replay.measure import Distribution
from agentspec.simulate.model_costs import ModelCosts, model_costs
from benchmarks.prefill_cases import Words
from benchmarks.prefill_checks import check_cached_turns
from benchmarks.published import CONFIG_FILES
from benchmarks.served_directory import write_directory

COMMAND = (sys.executable, "-c", "from agentspec.commands.cli import main; raise SystemExit(main())")
PROFILE = Path(__file__).resolve().parent.parent / "workloads" / "profile_agents.jsonl"
EMITTED = 3.0
SETTLE_SECONDS = 20
"""Idle time after the start, in which the server captures the remaining graphs."""
HOLD_SECONDS = 6
CEILING = 0.1
"""Seconds: the default of `--max-gap`."""
COUNTERS = ("cached_prompt_tokens_total", "prompt_tokens_total", "preemptions_total", "pages_used", "pages_free")
FIRST, COMMON, APPENDS, APPEND, ANSWER = 16_384, 4_096, 8, 800, 160


@contextmanager
def served(model: str, flags: Sequence[str]) -> Iterator[str]:
    """Start a server; yield its address when it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    forced = ("--random-weights", "--draft-tokens", "3", "--force-acceptance", str(EMITTED), "--allow-forced-output")
    with tempfile.TemporaryDirectory() as scratch:
        directory = str(write_directory(model, Path(scratch)))
        server = subprocess.Popen(
            [*COMMAND, "serve", directory, "--port", str(port), *forced, *flags], stdout=subprocess.PIPE, text=True
        )
        try:
            began = time.perf_counter()
            while not is_ready(url):
                assert server.poll() is None, "the server ended before it served"
                time.sleep(0.05)
            print(
                f"{model}: ready after {time.perf_counter() - began:.1f} s; flags {' '.join(flags) or 'none'}",
                flush=True,
            )
            time.sleep(SETTLE_SECONDS)
            yield url
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.stdout is not None
            page = server.stdout.read()
            server.wait()
        print(
            "\n".join(line for line in page.splitlines() if line.split()[:1] in (["memory"], ["requests"], ["graphs"])),
            flush=True,
        )


def is_ready(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def replay(url: str, lanes: int, seed: int) -> dict[str, Any]:
    """Run one replay; return its report."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        flags = [
            "--output",
            "forced",
            "--concurrency",
            lanes,
            "--sessions",
            lanes,
            "--seed",
            seed,
            "--json",
            report.name,
            "--quiet",
        ]
        command = [*COMMAND, "replay", PROFILE, "--base-url", url, *flags]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(Path(report.name).read_text())
    assert not result["summary"]["failed_sessions"], result["summary"]["errors"]
    return result


@dataclass(frozen=True, slots=True)
class EngineGaps:
    """Times between two steps of running streams, as /metrics counts them since the server's start."""

    count: int
    over_ceiling: int
    longest: float
    """Seconds."""

    @classmethod
    def read(cls, url: str) -> EngineGaps:
        page = httpx.get(url + "/metrics").text
        count = int(metric(page, "gap_seconds_count"))
        within = int(metric(page, "gap_seconds_bucket", f'le="{CEILING}"'))
        return cls(count, count - within, metric(page, "longest_gap_seconds"))

    def since(self, before: EngineGaps) -> str:
        return (
            f"in the engine {self.count - before.count:,} gaps, {self.over_ceiling - before.over_ceiling} over "
            f"{CEILING * 1e3:.0f} ms, "
            f"longest since the start {self.longest * 1e3:.0f} ms"
        )


def arithmetic(costs: ModelCosts, lanes: int) -> float:
    """Seconds of the prompts in sequence and of the answers' full decode steps, by the costs of dry runs."""
    first = costs.pass_seconds([(0, COMMON)]) + lanes * costs.pass_seconds([(COMMON, FIRST - COMMON)])
    later = [FIRST + turn * (APPEND + ANSWER) for turn in range(1, APPENDS + 1)]
    prompts = first + lanes * sum(
        costs.pass_seconds([(length - APPEND, APPEND)]) + costs.join_seconds for length in later
    )
    steps = ANSWER / EMITTED * sum(costs.step_seconds([length] * lanes) for length in [FIRST, *later])
    return prompts + steps


def row(model: str, lanes: int, report: dict[str, Any]) -> str:
    summary = report["summary"]
    turn, later, first = summary["e2el_ms"], summary["ttft_later_turns_ms"], summary["ttft_first_turns_ms"]
    wall, least = summary["wall_s"], arithmetic(model_costs(model.lower()), lanes)
    gaps = [gap for request in report["requests"] for gap in request["itl_ms"]]
    return (
        f"| {model} | {lanes} | {wall:.2f} | {least:.2f} | {wall / least:.2f} | "
        f"{summary['output_tokens_per_s']:,.0f} | {turn['mean']:,.0f} | "
        f"{turn['p50']:,.0f} | {turn['p99']:,.0f} | {first['p50']:,.0f} | {later['p50']:.1f} | {later['p99']:.1f} | "
        f"{max(gaps):.0f} |"
    )


HEADER = (
    "| model | lanes | wall, s | arithmetic, s | times it | tokens/s | turn, mean | p50 | p99 | first token of "
    "first turns, p50 | "
    "of later turns, p50 | p99 | longest gap at the client |\n|" + "---|" * 13
)


async def ask(
    client: httpx.AsyncClient, model: str, prompt: list[int], max_tokens: int, output: list[int]
) -> list[float]:
    """Times of the events with tokens, from the moment of sending."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "forced_output": output,
    }
    began, times = time.perf_counter(), []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][:1]:
                times.append(time.perf_counter() - began)
    return times


async def storm(url: str, model: str, count: int, seed: int) -> None:
    """Send first prompts of 2,000 tokens, all at once, to an idle server, which holds sessions of earlier runs for some
    seconds."""
    words = Words(seed, 2_000)
    await asyncio.sleep(HOLD_SECONDS)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        alone = [(await ask(client, name, words(2_000), 2, words(2)))[0] for _ in range(5)]
        began = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, name, words(2_000), 300, words(300)) for _ in range(count)))
        wall = time.perf_counter() - began
    first, turns = Distribution.of(times[0] for times in answers), Distribution.of(times[-1] for times in answers)
    gaps = max(after - before for times in answers for before, after in pairwise(times))
    assert first.largest is not None
    back_to_back = count * model_costs(model.lower()).pass_seconds([(0, 2_000)])
    print(
        f"{model}, {count} first prompts of 2,000 at once: first tokens p50 {first.p50:.2f} s, last "
        f"{first.largest:.2f} s "
        f"({first.largest / back_to_back:.2f} of the passes back to back, {back_to_back:.2f} s; one alone "
        f"{sorted(alone)[2] * 1e3:.0f} ms); "
        f"turns mean {turns.mean:.2f}, p99 {turns.p99:.2f}; wall {wall:.2f} s; longest gap {gaps * 1e3:.0f} ms",
        flush=True,
    )


async def newcomer(url: str, model: str, seed: int) -> None:
    """Send a prompt of 50,000 tokens beside eight streams of 2,000."""
    words = Words(seed, 2_000)
    await asyncio.sleep(HOLD_SECONDS)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        alone = min([(await ask(client, name, words(50_000), 2, words(2)))[0] for _ in range(2)])
        streams = [asyncio.create_task(ask(client, name, words(2_000), 3_000, words(3_000))) for _ in range(8)]
        await asyncio.sleep(1.5)
        since = time.perf_counter()
        first = (await ask(client, name, words(50_000), 2, words(2)))[0]
        until = time.perf_counter()
        began = since - 1.5
        answers = await asyncio.gather(*streams)
    inside = [(a, b) for times in answers for a, b in pairwise(times) if since - began < b and a < until - began]
    gaps = Distribution.of(b - a for a, b in inside)
    assert gaps.p50 is not None
    assert gaps.p99 is not None
    assert gaps.largest is not None
    print(
        f"{model}, 50,000 tokens beside eight streams: first token {first * 1e3:.0f} ms, alone {alone * 1e3:.0f} "
        f"ms, {first / alone:.2f} of it; "
        f"gaps of the streams meanwhile p50 {gaps.p50 * 1e3:.0f}, p99 {gaps.p99 * 1e3:.0f}, longest "
        f"{gaps.largest * 1e3:.0f} ms",
        flush=True,
    )


async def fleet(url: str, model: str, count: int, tokens: int, seed: int) -> None:
    """Run sessions with long first prompts, all at once."""
    words, before = Words(seed, 2_000), counters(url)

    async def session(client: httpx.AsyncClient, name: str) -> list[float]:
        prompt, first_tokens = words(tokens), []
        for _ in range(3):
            output = words(ANSWER)
            first_tokens.append((await ask(client, name, prompt, ANSWER, output))[0])
            prompt = prompt + output + words(APPEND)
        return first_tokens

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        began = time.perf_counter()
        first_tokens = await asyncio.gather(*(session(client, name) for _ in range(count)))
        wall = time.perf_counter() - began
    after = counters(url)
    cached, asked, preempted, *_ = (after[name] - before[name] for name in COUNTERS)
    later = Distribution.of(seconds for turns in first_tokens for seconds in turns[1:])
    assert later.p50 is not None
    print(
        f"{model}, {count} sessions of {tokens:,} tokens at once: all turns ended in {wall:.1f} s; last first token of "
        f"a first turn after {max(turns[0] for turns in first_tokens):.1f} s, of later turns p50 {later.p50:.2f}; "
        f"{cached:,.0f} of {asked:,.0f} prompt tokens cached, {preempted:.0f} preemptions; "
        f"{after['pages_used']:.0f} pages in use, {after['pages_free']:.0f} free",
        flush=True,
    )


def counters(url: str) -> dict[str, float]:
    page = httpx.get(url + "/metrics").text
    return {name: metric(page, name) for name in COUNTERS}


def metric(page: str, name: str, labels: str = "") -> float:
    """A value of /metrics."""
    found = re.search(rf"^agentspec_{name}{{[^}}]*{re.escape(labels)}}} (.+)$", page, re.MULTILINE)
    assert found is not None, f"no {name} in /metrics"
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agents", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(CONFIG_FILES), default="4B")
    parser.add_argument("--lanes", type=int, nargs="*", default=[1, 4, 8, 16])
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs of each kind; one of two lanes warms up before all"
    )
    parser.add_argument("--storm", type=int, metavar="N", help="N first prompts at once")
    parser.add_argument("--newcomer", action="store_true", help="a long prompt beside eight streams")
    parser.add_argument("--fleet", type=int, nargs=2, metavar=("N", "TOKENS"), help="long sessions at once")
    parser.add_argument("--json", type=Path, metavar="DIR", help="keep the replays' reports here")
    parser.add_argument("flags", nargs="*", help="for the server, behind --")
    options = parser.parse_args()
    if options.json is not None:
        options.json.mkdir(parents=True, exist_ok=True)  # before a server starts, in case it can't be made
    device: Device = "cuda" if os.path.exists("/dev/nvidia0") else "cpu"
    print(f"checked: {check_cached_turns(device)}", flush=True)
    with served(options.model, options.flags) as url:
        seed = 100
        if options.lanes:
            replay(url, min(2, max(options.lanes)), seed)
            print(HEADER, flush=True)
        for lanes in options.lanes:
            for _ in range(options.repeats):
                seed += 1
                before = EngineGaps.read(url)
                report = replay(url, lanes, seed)
                print(row(options.model, lanes, report), EngineGaps.read(url).since(before), flush=True)
                if options.json is not None:
                    (options.json / f"agents-{options.model}-{lanes}-{seed}.json").write_text(
                        json.dumps(report["summary"], indent=1)
                    )
        if options.storm:
            for seed in range(options.repeats):
                before = EngineGaps.read(url)
                asyncio.run(storm(url, options.model, options.storm, seed))
                print(EngineGaps.read(url).since(before), flush=True)
        if options.newcomer:
            for seed in range(options.repeats):
                before = EngineGaps.read(url)
                asyncio.run(newcomer(url, options.model, 1_000 + seed))
                print(EngineGaps.read(url).since(before), flush=True)
        if options.fleet:
            count, tokens = options.fleet
            asyncio.run(fleet(url, options.model, count, tokens, 2_000))


if __name__ == "__main__":
    main()
