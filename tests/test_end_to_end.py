"""From the bundled model to a report, and from messages to cached tokens."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import msgspec
import pytest
import torch

from agentspec.commands.cli import main
from agentspec.config import EngineConfig
from agentspec.engine.local_server import load
from agentspec.replay.schema import Expect, Session, save
from agentspec.types import BLOCK_TOKENS
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.compare import TOLERANCE
from tests.fakes.oracle import Oracle
from tests.fakes.told import Told, cached, converse
from tests.replay.builders import TOOL, called, replay_file, result, said, system, turn, user

WORKLOAD = Path(__file__).parents[1] / "workloads" / "agentic.jsonl"
FAST = ("--sessions", "2", "--max-turns", "3", "--tool-delay", "zero", "--memory", "0.2", "--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sessions with a tool, whose answers are recorded with their lengths."""

    def answered(expect: Expect) -> Expect:
        return msgspec.structs.replace(expect, output_tokens=40)

    opening = system("Help people to find what they have lost. " * 8)
    turns = [
        turn(
            opening,
            user("Where is my parcel?"),
            expect=answered(called(("c1", "lookup", {"place": "depot 7"}))),
            max_tokens=40,
        ),
        turn(result("shelf 3, " * 60), expect=answered(said("On shelf 3.")), max_tokens=40),
        turn(user("And my umbrella?"), expect=answered(said("Gone.")), max_tokens=40),
    ]
    file = tmp_path_factory.mktemp("recorded") / "recorded.jsonl"
    save(
        replay_file(
            *(Session(session_id=name, turns=turns, toolset="desk") for name in ("a", "b")), toolsets={"desk": [TOOL]}
        ),
        file,
    )
    return file


def replay(
    file: Path, folder: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> tuple[str, dict[str, Any], str]:
    """Replay the file's first sessions on the bundled model; return the table, the JSON report and the page."""
    table, page = folder / "out.json", folder / "out.html"
    assert main(["replay", str(file), *FAST, "--json", str(table), "--html", str(page), *flags]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out, json.loads(table.read_text()), page.read_text()


def assert_self_contained(page: str) -> None:
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    tags = {element.tag for element in root.iter()}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert any(tag.endswith("svg") for tag in tags)
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)|@import|url\(""", page)


def test_the_workload_is_replayed_and_reported_correctly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, report, page = replay(WORKLOAD, tmp_path, capsys)
    summary, requests = report["summary"], report["requests"]
    for field in (
        "sessions", "turns", "failures", "wall time", "prompt tokens", "output tokens", "output tokens a second",
        "prefix hit", "emitted tokens a step", "drafts accepted", "acceptance by position", "time to first token",
        "time between tokens", "p50", "p90", "p99",
    ):  # fmt: skip
        assert field in table
    assert (summary["sessions"], summary["failed_sessions"]) == (2, 0)
    assert len(requests) == summary["turns"] > 2
    for total in ("prompt_tokens", "cached_tokens", "decode_steps", "drafted_tokens", "accepted_tokens"):
        assert summary[total] == sum(request[total] for request in requests), total
    assert summary["output_tokens"] == sum(request["completion_tokens"] for request in requests)
    assert summary["hit_share"] == summary["cached_tokens"] / summary["prompt_tokens"]
    assert summary["emitted_per_step"] == pytest.approx(
        (summary["decode_steps"] + summary["accepted_tokens"]) / summary["decode_steps"]
    )
    assert f"{summary['cached_tokens']:,} of {summary['prompt_tokens']:,} prompt tokens" in table
    assert f"{summary['emitted_per_step']:.2f}" in table
    assert (report["model"], report["forced_acceptance"]) == ("tiny-agent", False)
    assert "warning" not in report
    for request in requests:
        assert request["cached_tokens"] % BLOCK_TOKENS == 0
        assert request["completion_tokens"] >= 1
        assert request["turn"] == 0 or request["cached_tokens"] > 0, "every later turn hits the one before"
    assert_self_contained(page)
    assert "FORCED" not in table + page


def test_forced_acceptance_is_labelled_everywhere(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, report, page = replay(
        recorded,
        tmp_path,
        capsys,
        "--draft-tokens",
        "3",
        "--force-acceptance",
        "1,1,1",
        "--output",
        "length",
        "--max-turns",
        "1",
    )
    assert "FORCED ACCEPTANCE" in table
    assert "(forced)" in table
    assert report["forced_acceptance"] is True
    assert "FORCED ACCEPTANCE" in report["warning"]
    assert all(request["forced_acceptance"] for request in report["requests"])
    assert "FORCED ACCEPTANCE" in page
    assert_self_contained(page)
    assert report["summary"]["emitted_per_step"] > 3, "only the last step of a turn may be cut"


def test_the_report_shows_zeros_without_cache_and_drafts(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, report, _ = replay(
        recorded, tmp_path, capsys, "--no-prefix-cache", "--draft-tokens", "0", "--max-turns", "1", "--no-overlap"
    )
    assert (
        report["summary"]["cached_tokens"],
        report["summary"]["drafted_tokens"],
        report["summary"]["emitted_per_step"],
    ) == (0, 0, 1.0)


def test_live_history_replays_to_the_end(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the model's calls don't fit the next recorded turn, the recorded answer replaces them; such turns are
    counted."""
    _, report, _ = replay(recorded, tmp_path, capsys, "--history", "live", "--max-turns", "2")
    assert report["summary"]["failed_turns"] == 0
    assert report["summary"]["diverged_turns"] == sum(request["diverged"] for request in report["requests"])


ANSWER = "Let me look that up."
REASONING = "The parcel must be somewhere, and the depot knows where parcels are."
CALL = (
    "\n</think>\n\n"
    + ANSWER
    + "\n\n<tool_call>\n<function=lookup>\n<parameter=place>\ndepot 7\n</parameter>\n</function>\n</tool_call>"
)
QUESTION: list[dict[str, Any]] = [
    {"role": "system", "content": "Help people to find what they have lost. " * 4},
    {"role": "user", "content": "Where is my parcel? It has been missing since Monday, and it is green."},
]


@pytest.mark.parametrize("keeps_reasoning", [True, False], ids=["reasoning returned", "reasoning dropped"])
def test_a_tool_loop_reuses_its_whole_last_turn(keeps_reasoning: bool, tmp_path: Path) -> None:
    async def talk(told: Told, client: httpx.AsyncClient) -> None:
        first = await told.ask(client, QUESTION, REASONING + CALL)
        choice = first["choices"][0]
        message = choice["message"]
        assert (choice["finish_reason"], message["content"], message["reasoning_content"]) == (
            "tool_calls",
            ANSWER,
            REASONING,
        )
        [call] = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("lookup", {"place": "depot 7"})
        returned = (
            message
            if keeps_reasoning
            else {name: value for name, value in message.items() if name != "reasoning_content"}
        )
        history = [*QUESTION, returned, {"role": "tool", "tool_call_id": call["id"], "content": "shelf 3"}]
        second = await told.ask(client, history)
        whole = first["prompt_token_ids"] + choice["token_ids"]
        prompt = second["prompt_token_ids"]
        assert prompt[: len(whole)] == whole, "the next prompt contains the generated ids unchanged"
        assert cached(second) == (len(whole) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, (
            "at most its new tokens and one block are computed"
        )

    converse(tmp_path, talk)


def test_a_new_question_reuses_the_prefix_up_to_the_last_question(tmp_path: Path) -> None:
    """The template drops the reasoning of answered questions, so the last turn's tokens change."""

    async def talk(told: Told, client: httpx.AsyncClient) -> None:
        first = await told.ask(client, QUESTION, REASONING + "\n</think>\n\nIt is in depot 7.")
        message = first["choices"][0]["message"]
        assert (first["choices"][0]["finish_reason"], message["content"]) == ("stop", "It is in depot 7.")
        history = [*QUESTION, message, {"role": "user", "content": "And my umbrella?"}]
        second = await told.ask(client, history)
        old, new = first["prompt_token_ids"], second["prompt_token_ids"]
        common = next(place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
        assert cached(second) == common // BLOCK_TOKENS * BLOCK_TOKENS
        assert common < len(old)

    converse(tmp_path, talk)


def test_a_second_session_hits_system_and_tools_on_its_first_turn(tmp_path: Path) -> None:
    async def talk(told: Told, client: httpx.AsyncClient) -> None:
        await told.ask(client, QUESTION, "\n</think>\n\nNo.")
        other = [QUESTION[0], {"role": "user", "content": "Something else entirely"}]
        body = {
            "model": "scripted",
            "messages": other,
            "tools": [TOOL],
            "temperature": 0,
            "max_tokens": 5,
            "return_token_ids": True,
        }
        second = (await client.post("/v1/chat/completions", json=body, headers={"x-session-id": "another"})).json()
        system = told.tokenizer.decode(second["prompt_token_ids"]).index("Something else")
        assert system - cached(second) <= 2 * BLOCK_TOKENS
        salted = (await client.post("/v1/chat/completions", json=body | {"cache_salt": "mine"})).json()
        assert cached(salted) == 0

    converse(tmp_path, talk)


def test_logprobs_over_http_equal_those_of_a_plain_forward(tmp_path: Path) -> None:
    """/v1/completions with token ids, echo, logprobs and max_tokens 0, as evaluation harnesses use it, against an
    independent forward pass."""
    directory = write_checkpoint(tmp_path / "tiny", "dense", vocab_size=160)
    prompt = [(7 * place * place + 3) % 160 for place in range(150)]
    oracle = Oracle(directory)
    expected = oracle.logits(oracle.hidden(prompt)).log_softmax(-1)

    async def run() -> None:
        local = load(EngineConfig(model=str(directory), device="cpu", memory_gib=0.1, prefill_budget=64))
        async with local.client() as client:
            body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 3, "max_tokens": 0}
            for _ in range(2):
                answer = (await client.post("/v1/completions", json=body)).json()
                choice = answer["choices"][0]
                scores = choice["logprobs"]
                assert scores["token_logprobs"][0] is None
                heard = torch.tensor(scores["token_logprobs"][1:])
                wanted = expected[torch.arange(149), prompt[1:]]
                torch.testing.assert_close(heard, wanted, rtol=TOLERANCE, atol=TOLERANCE)
                assert scores["tokens"] == [f"token_id:{token}" for token in prompt]
                for place, top in enumerate(scores["top_logprobs"][1:]):
                    best = expected[place].topk(3)
                    assert {f"token_id:{token}" for token in best.indices.tolist()} <= set(top)
                assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
                assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (150, 0)

    asyncio.run(run())
