"""The offline score of copies: its index and its steps against the copy rule, and a whole run."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from agentspec.mtp.copies import draft_copies
from benchmarks import copies_clock
from benchmarks.copies_offline import Matches, Score, Setting, Text, draw_right_drafts, main, score
from tests.kernels.test_copies import repetitive

ROOT = Path(__file__).resolve().parent.parent


def test_matches_at_every_position_equal_the_rule() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        tokens = repetitive(rng, rng.choice([1, 2, 30, 150]))
        matches = Matches.of(np.array(tokens, np.int64), 12)
        for last in range(len(tokens)):
            copies, length = draft_copies(tokens[: last + 1], [], num_copies=12, min_match=1)
            run = next(
                (i for i, pair in enumerate(zip(copies, tokens[last + 1 :], strict=False)) if pair[0] != pair[1]),
                min(len(copies), len(tokens) - last - 1),
            )
            assert (matches.length_N[last], matches.run_N[last]) == (length, run), f"{seed=} {last=}"


def decode_by_rule(
    tokens: list[int], start: int, stop: int, right: list[int], num_drafts: int, setting: Setting
) -> Score:
    """One answer, step by step, with the copy rule itself. A wrong draft is a token that occurs nowhere."""
    total, last, had_match = Score(), start, [False, False]
    while last < stop - 1:
        drafts = [*tokens[last + 1 : last + 1 + right[last]], *[-1] * num_drafts][:num_drafts]
        if last + num_drafts >= stop - 1:
            drafts = []  # nothing is left to copy for
        copies, _ = draft_copies(tokens[: last + 1], drafts, num_copies=max(setting.width, 1), min_match=setting.gate)
        had_match.append(bool(copies) and bool(drafts) and -1 not in drafts)
        if not had_match[-1] or not had_match[-1 - setting.late] or setting.width == 0:
            copies = []
        window = [*(drafts or tokens[last + 1 : last + 1 + right[last]]), *copies]
        num_accepted = 0
        while (
            num_accepted < min(len(window), stop - 1 - last) and window[num_accepted] == tokens[last + 1 + num_accepted]
        ):
            num_accepted += 1
        total.steps += 1
        total.fired += bool(copies)
        total.accepted += max(num_accepted - num_drafts, 0)
        emitted = min(num_accepted + 1, stop - 1 - last)
        total.tokens += emitted
        last += emitted
    return total


def test_steps_equal_the_rule() -> None:
    settings = [
        Setting(gate=gate, width=width, late=late) for gate in (2, 6) for width in (0, 4, 12) for late in (0, 1, 2)
    ]
    num_fired = 0
    for seed in range(40):
        rng = random.Random(seed)
        tokens, num_drafts = repetitive(rng, rng.randint(20, 200)), rng.randint(1, 3)
        cuts = sorted(rng.sample(range(len(tokens) + 1), 4))
        text = Text(tokens_N=np.array(tokens, np.int64), answers=[(cuts[0], cuts[1]), (cuts[2], cuts[3])])
        right_N = draw_right_drafts(len(tokens), [0.9] * num_drafts, np.random.default_rng(seed))
        got = score(text, Matches.of(text.tokens_N, 12), right_N, num_drafts, settings)
        for setting, scored in zip(settings, got, strict=True):
            parts = [
                decode_by_rule(tokens, start, stop, right_N.tolist(), num_drafts, setting)
                for start, stop in text.answers
            ]
            for field in ("steps", "tokens", "fired", "accepted"):
                assert getattr(scored, field) == sum(getattr(part, field) for part in parts), f"{seed=} {setting}"
            assert scored.tokens == sum(max(stop - start - 1, 0) for start, stop in text.answers)
            num_fired += scored.fired
    assert num_fired > 500


def test_drafts_are_right_at_the_given_rates() -> None:
    right_N = draw_right_drafts(100_000, (0.9, 0.5), np.random.default_rng(0))
    assert np.bincount(right_N) / len(right_N) == pytest.approx([0.1, 0.45, 0.45], abs=0.01)


def test_recorded_sessions_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "workloads" / "recorded.jsonl")
    assert main([path, "--sessions", "4", "--gates", "6", "--widths", "4,12"]) == 0
    first = capsys.readouterr().out
    assert "4 sessions" in first
    assert "| 6 | 4 / 12 |" in first
    assert main([path, "--sessions", "4", "--gates", "6", "--widths", "4,12"]) == 0
    assert capsys.readouterr().out == first, "the same seed must give the same figures"
    assert main([path, "--sessions", "4", "--mtp-rates", "0,0,0", "--without-calls"]) == 0
    assert "MTP alone: 1.00 tokens a step" in capsys.readouterr().out


def test_the_window_policy_is_timed_on_recorded_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "workloads" / "recorded.jsonl")
    for cost in ("dense", "experts"):
        assert copies_clock.main([path, "--sessions", "4", "--users", "1", "2", "--cost", cost, "--gates", "3,32"]) == 0
        rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| recorded")]
        assert [row[2] for row in rows] == ["1", "2"]
        for row in rows:
            alone, (low, _), (high, _) = float(row[3]), *(map(float, cell.rstrip(" |").split(", ")) for cell in row[4:])
            assert low >= high >= alone - 0.01, "fewer copies must not emit more"
