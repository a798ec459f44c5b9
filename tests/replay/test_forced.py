"""`--output forced`: requests and cache hits equal those of a dry run; sessions that can't be forced are rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentspec.commands.cli import main
from agentspec.errors import ConfigError
from agentspec.replay.encoders import Encoder
from agentspec.replay.options import ReplayOptions
from agentspec.replay.render import TraceRenderer
from agentspec.replay.report import Report
from agentspec.replay.run import make_plans, run_replay
from agentspec.replay.schema import Expect, ReplayFile, Session, Turn, save
from tests.fakes.pieces import RegexPieces
from tests.replay.builders import TOOL, called, replay_file, result, runs, said, system, turn, user
from tests.replay.fakes import FakeServer, run
from tests.replay.worlds import ask, live_session

LOOP = [
    turn(
        system("Find parcels. " * 20),
        user("where is it?"),
        expect=called(("c1", "lookup", {"k": 1}), text="I look."),
        extra={"top_p": 0.5},
    ),
    turn(result("in depot 4 " * 30, "c1"), expect=said("There, in depot 4.")),
    turn(user("and now?"), expect=said("Gone, I am afraid.")),
]


def answered(input_length: int, hash_ids: list[int], answer: list[int], output_tokens: int) -> Turn:
    """Return a token-run turn whose answer later prompts contain."""
    return Turn(
        input_length=input_length,
        block_size=8,
        hash_ids=hash_ids,
        expect=Expect(output_tokens=output_tokens, hash_ids=answer),
    )


def replay(file: ReplayFile, server: FakeServer, encoder: Encoder, **settings: Any) -> Report:
    async def ask_all() -> Report:
        renderer = TraceRenderer(encoder, "qwen35")
        async with server.client() as client:
            return await run_replay(file, ReplayOptions(output="forced", **settings), client, None, renderer=renderer)

    report = run(ask_all())
    assert isinstance(report, Report)
    return report


def test_forced_requests_equal_the_dry_run() -> None:
    encoder, server = RegexPieces(), FakeServer(owner="agentspec")
    sessions = [
        Session(session_id="a", turns=LOOP, toolset="desk"),
        Session(session_id="b", turns=[runs(20, [1, 2, 3]), runs(26, [1, 2, 4, 5])]),
    ]
    file = replay_file(*sessions, toolsets={"desk": [TOOL]}, defaults={"temperature": 0.7})
    replay(file, server, encoder, concurrency=1)
    rendered = [one for session in file.sessions for one in TraceRenderer(encoder, "qwen35").turns(file, session)]
    assert len(server.requests) == len(rendered) == 5
    for seen, expected in zip(server.requests, rendered, strict=True):
        assert seen.path == "/v1/completions"
        assert seen.body == {
            "model": "fake-model",
            "prompt": expected.prompt_ids.tolist(),
            "breakpoints": [
                {"offset": point.offset, "kind": point.kind.name.lower()} for point in expected.breakpoints
            ],
            "forced_output": expected.output_ids.tolist(),
            "max_tokens": len(expected.output_ids),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    assert [point["kind"] for point in server.requests[0].body["breakpoints"]] == ["system", "user"]
    assert [seen.session for seen in server.requests] == ["a"] * 3 + ["b"] * 2


def test_token_run_answer_blocks_are_in_later_prompts() -> None:
    server = FakeServer(owner="agentspec")
    turns = [answered(16, [1, 2], [3], 8), answered(32, [1, 2, 3, 4], [5], 5)]
    replay(replay_file(Session(session_id="s", turns=turns)), server, RegexPieces())
    first, second = (seen.body for seen in server.requests)
    assert second["prompt"][:24] == first["prompt"] + first["forced_output"]
    assert len(second["forced_output"]) == 5


@pytest.mark.parametrize(
    ("session", "reason"),
    [
        (Session(session_id="s", turns=[turn(user())]), "session 's': turns[0] has no expect.message"),
        (
            Session(session_id="s", turns=[Turn(input_length=8, block_size=8, hash_ids=[1])]),
            "session 's': turns[0] has neither expect.output_tokens",
        ),
        (live_session(ask()), "has a world"),
    ],
)
def test_missing_recorded_answer_error_names_the_turn(session: Session, reason: str) -> None:
    with pytest.raises(ConfigError, match="output='forced'") as caught:
        make_plans(replay_file(session), ReplayOptions(output="forced"))
    assert reason in str(caught.value)


def test_forced_output_requires_an_agentspec_server() -> None:
    with pytest.raises(ConfigError, match="output='forced': http://server is not agentspec's server"):
        replay(replay_file(Session(session_id="s", turns=LOOP)), FakeServer(owner="somebody"), RegexPieces())


@pytest.mark.parametrize(("flag", "value"), [("template", "stable"), ("tokenizer", "somewhere")])
def test_token_flags_are_rejected_without_forced_output(
    flag: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    save(replay_file(Session(session_id="s", turns=LOOP)), path)
    assert main(["replay", str(path), f"--{flag}", value]) == 2
    assert f"{flag}='{value}': is for --dry-run and --output forced" in capsys.readouterr().err
    assert main(["replay", str(path), "--output", "forced", "--tokenizer", str(tmp_path)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_bundled_model_hits_equal_the_dry_run(tmp_path: Path) -> None:
    """Through flags, HTTP and the engine thread, one session at a time."""
    path, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    tokens = [answered(160, list(range(20)), [90, 91, 92], 20), answered(200, [*range(20), 90, 91, 92, 7, 8], [93], 6)]
    sessions = [Session(session_id=name, turns=LOOP, toolset="desk") for name in ("a", "b")]
    save(replay_file(*sessions, Session(session_id="c", turns=tokens), toolsets={"desk": [TOOL]}), path)

    def rows(*flags: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        assert main(["replay", str(path), "--concurrency", "1", "--json", str(out), *flags]) == 0
        written = json.loads(out.read_text())
        return written["requests"], written["summary"]

    real, _ = rows("--output", "forced", "--quiet")
    dry, dry_summary = rows("--dry-run", "4b")
    assert [row["cached_tokens"] for row in real] == [row["cached_tokens"] for row in dry]
    assert [row["prompt_tokens"] for row in real] == [row["prompt_tokens"] for row in dry]
    assert [f"{row['session_id']}/{row['turn']}" for row in real] == [row["request"] for row in dry]
    assert sum(row["completion_tokens"] for row in real) == dry_summary["output_tokens"]
    assert real[3]["cached_tokens"] > 0, "the second session shares its opening with the first"
