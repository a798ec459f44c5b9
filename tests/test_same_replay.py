"""`python -m benchmarks.same_replay`: its definition of a divergence, and a session of tiny-agent that doesn't depend
on drafts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import same_replay
from benchmarks.same_replay import Exchanges, differences

HEARD: Exchanges = {"a": [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])], "b": [([1], [2])]}


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (HEARD, []),
        (
            HEARD | {"a": [([1, 2], [3, 9]), ([1, 2, 3, 9, 5], [7])]},
            ["a, request 0: answer differs from token 1 on, [9] for [4]"],
        ),
        (
            HEARD | {"a": [([1, 2], [3, 4]), ([1, 8], [6])]},
            ["a, request 1: prompt differs from token 1 on, [8] for [2, 3, 4, 5]"],
        ),
        (HEARD | {"b": [([1], [2, 3])]}, ["b, request 0: answer differs from token 1 on, [3] for []"]),
        (HEARD | {"b": [([1], [2]), ([4], [5])]}, ["b: 2 requests for 1"]),
        ({"a": HEARD["a"]}, ["b: only one of both has it"]),
    ],
)
def test_the_first_difference_of_each_session_is_reported(found: Exchanges, told: list[str]) -> None:
    assert differences(found, HEARD) == told


def run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["same_replay", "--device", "cpu", "--sessions", "1", *flags])
    return same_replay.main()


def test_a_session_depends_neither_on_drafts_nor_on_copies_nor_on_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "streams.json"
    assert run(monkeypatch, "--save", str(path)) == 0
    for flags in (["--k", "1"], ["--copies", "12"], ["--tensor-parallel", "2"]):
        assert run(monkeypatch, *flags, "--expected", str(path)) == 0
        assert "0 sessions diverge" in capsys.readouterr().out
