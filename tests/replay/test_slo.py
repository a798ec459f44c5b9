"""Service level objectives: flags, turns that miss them, and the goodput of a run."""

from __future__ import annotations

import pytest

from agentspec.errors import ConfigError
from agentspec.replay.measure import TurnRecord
from agentspec.replay.slo import Slo


def record(*times: float, error: str | None = None) -> TurnRecord:
    """Return a turn sent at 10 s, with a token at each of `times` after that."""
    tokens = [(10.0 + time, 1) for time in times]
    end = tokens[-1][0] if tokens else 10.0
    return TurnRecord(
        session_id="s", turn=0, delay_kind="none", due=10.0, sent=10.0, tokens=tokens, end=end, error=error
    )


def test_slo_flags_are_parsed() -> None:
    slo = Slo.parse(["turn=10, ttft=1500ms", "tpot=.05", "gap=0.25s"])
    assert slo.bounds == {"turn": 10.0, "ttft": 1.5, "tpot": 0.05, "gap": 0.25}
    assert str(slo) == "turn 10 s, ttft 1.5 s, tpot 50 ms, gap 250 ms"


@pytest.mark.parametrize(
    ("flag", "part", "reason"),
    [
        ("", "", "NAME=TIME"),
        ("turn", "turn", "NAME=TIME"),
        ("turn=10,", "", "NAME=TIME"),
        ("ttft:500", "ttft:500", "NAME=TIME"),
        ("ttft=1m", "ttft=1m", "in s or ms"),
        ("ttft=-1", "ttft=-1", "NAME=TIME"),
        ("ttft=nan", "ttft=nan", "NAME=TIME"),
        ("turn=10,ttft=0ms", "ttft=0ms", "above 0"),
        ("turn=" + "9" * 400, "turn=" + "9" * 400, "above 0"),
        ("speed=10", "speed=10", "speed can't be bounded; turn, ttft, tpot, gap can"),
        ("turn=10,turn=9", "turn=9", "two bounds"),
    ],
)
def test_invalid_flag_error_names_flag_and_value(flag: str, part: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Slo.parse([flag])
    assert (caught.value.field, caught.value.value) == ("slo", part)


def test_missed_bounds_of_a_turn() -> None:
    slo = Slo.parse(["gap=0.5,turn=2,ttft=1,tpot=0.4"])
    assert slo.missed(record(0.5, 0.6)) == []
    assert slo.missed(record(1.0, 1.5, 1.5, 2.0)) == [], "on the bound is within it"
    assert slo.missed(record(1.1, 1.2)) == ["ttft"]
    assert slo.missed(record(0.1, 0.2, 0.3, 0.4, 1.0)) == ["gap"]
    assert slo.missed(record(0.1, 2.1)) == ["gap", "turn", "tpot"]
    assert slo.missed(record(0.5)) == [], "an answer in one piece has no time between tokens"
    assert slo.missed(record(0.5, error="gone")) == ["failed"]


def test_goodput_counts_turns_that_met_all_bounds() -> None:
    turns = [record(0.5), record(1.5), record(1.5, 9.0), record(0.1, 0.2), record(error="gone")]
    goodput = Slo.parse(["turn=5,ttft=1,gap=60"]).goodput(turns, 4.0)
    assert (goodput.num_turns, goodput.num_met, goodput.share, goodput.rate) == (5, 2, 0.4, 0.5)
    assert dict(goodput.missed) == {"turn": 1, "ttft": 2, "gap": 0, "failed": 1}
    empty = Slo.parse(["turn=5"]).goodput([], 0.0)
    assert (empty.num_turns, empty.share, empty.rate, dict(empty.missed)) == (0, None, None, {"turn": 0})
