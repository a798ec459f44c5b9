"""`python -m benchmarks.copies` on a small CPU model: recorded turns are emitted as they are, copies follow the rule,
times are those of plain steps, and cases without figures have a reason."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentspec.engine import bundled, settings
from agentspec.mtp.window_policy import FixedWindow
from agentspec.replay.encoders import find_encoder
from agentspec.runtime import decode_step, forcing
from agentspec.types import WindowShape, widest_window
from benchmarks import copies
from benchmarks.copies_report import HEADER, Report, Result, figures_of
from benchmarks.decode_checks import CheckFailedError
from benchmarks.published import PrefilledModel, make_model
from benchmarks.recorded_turns import (
    WARM_UP,
    Played,
    RecordedTurn,
    Recording,
    Step,
    Window,
    check_copies,
    play,
    read_recording,
)
from benchmarks.running_engine import Case, windows_of_one_width
from tests.test_decode_benchmark import CPU, TOY

CONFIG = replace(TOY, vocab_size=4_096, max_position=16_384)
RATES = (0.9, 0.8, 0.8)


@pytest.fixture(autouse=True)
def widest_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's window policy goes by measured times, and what it chooses is not tested here."""
    monkeypatch.setattr(
        settings, "AdaptiveWindow", lambda most, copies, min_mtp, shares: FixedWindow(WindowShape(most, max(copies)))
    )


@pytest.fixture(scope="module")
def model() -> PrefilledModel:
    return make_model(copies.TINY, CONFIG, device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def recording() -> Recording:
    encoder = find_encoder(bundled.checkpoint_of(bundled.NAME))
    return read_recording(copies.SESSIONS, encoder, max_context=2_000, num_tokens=200, most_copies=12, seed=1)


def case(recording: Recording, *, users: int = 1, num_copies: int = 12) -> Case:
    return Case(
        model=copies.TINY, context=recording.context, batch=users, depth=3, state_form="ring", copies=num_copies
    )


def played(recording: Recording, model: PrefilledModel, **options: Any) -> Played:
    return play(case(recording, **options), recording.turns, model, CPU, rates=RATES, time_is_up=lambda: False)


# Recorded turns


def test_turns_are_chosen_by_seed_and_fit(recording: Recording) -> None:
    encoder = find_encoder(bundled.checkpoint_of(bundled.NAME))
    assert recording.num_tokens >= 200
    assert recording.num_tokens - len(recording.turns[-1].answer) < 200
    assert recording.context <= 2_000
    longer = read_recording(copies.SESSIONS, encoder, max_context=4_096, num_tokens=200, most_copies=12, seed=1)
    assert 0 < longer.num_cut < recording.num_cut <= recording.num_all
    again = read_recording(copies.SESSIONS, encoder, max_context=2_000, num_tokens=200, most_copies=12, seed=1)
    assert [turn.prompt for turn in again.turns] == [turn.prompt for turn in recording.turns]
    with pytest.raises(ValueError, match="no recorded answer fits 10 tokens"):
        read_recording(copies.SESSIONS, encoder, max_context=10, num_tokens=200, most_copies=12, seed=1)


def test_mtp_drafts_are_right_at_the_same_places_for_any_users(recording: Recording, model: PrefilledModel) -> None:
    """The answers are checked inside `play`."""
    alone, together = (played(recording, model, users=users, num_copies=0) for users in (1, 3))
    windows = [{(one.turn, one.last): one for _, one in found.windows} for found in (alone, together)]
    assert windows[0] == windows[1]
    assert sum(one.accepted + 1 for one in windows[0].values()) == recording.num_tokens - len(recording.turns)
    assert {one.offered for one in windows[0].values()} == {3}
    assert {one.accepted for one in windows[0].values()} == {0, 1, 2, 3}


def fixed_window(monkeypatch: pytest.MonkeyPatch, num_copies: int) -> None:
    monkeypatch.setattr(settings, "AdaptiveWindow", lambda *_, **__: FixedWindow(WindowShape(3, num_copies)))


def test_copies_follow_the_rule(recording: Recording, model: PrefilledModel) -> None:
    found = played(recording, model, users=2)
    assert check_copies(found, recording.turns, 3, 12) > 20
    assert any(window.accepted > 3 for _, window in found.windows)


def test_a_window_may_have_more_copies_than_the_mean(
    recording: Recording, model: PrefilledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixed_window(monkeypatch, num_copies=6)
    found = played(recording, model, users=3)
    assert check_copies(found, recording.turns, 3, 12) > 20
    assert max(window.offered for _, window in found.windows) == 3 + 12
    assert any(3 < window.offered < 3 + 12 for _, window in found.windows), "two slots with copies share 18 rows"


class WideForFew(FixedWindow):
    """Copies in every step of so few slots that their windows may have some."""

    def choose(self, batch_size: int, num_matched: int = 0) -> WindowShape:
        return WindowShape(3, min(12, widest_window(batch_size) - 4))


def test_steps_of_many_slots_look_for_no_copies(model: PrefilledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = find_encoder(bundled.checkpoint_of(bundled.NAME))
    recording = read_recording(copies.SESSIONS, encoder, max_context=2_000, num_tokens=1_000, most_copies=12, seed=1)
    monkeypatch.setattr(settings, "AdaptiveWindow", lambda *_, **__: WideForFew(WindowShape(3)))
    found = played(recording, model, users=9)
    assert check_copies(found, recording.turns, 3, 12) > 20
    many, few = ([step for step in found.steps if bool(step.without_copies) is many] for many in (True, False))
    assert {step.num_drafted for step in many} == {3}
    assert any(window.offered > 3 for step in few for window in step.windows)


def test_windows_of_one_width_have_the_mean(
    recording: Recording, model: PrefilledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with windows_of_one_width():
        fixed_window(monkeypatch, num_copies=4)
        found = played(recording, model, users=3)
    assert check_copies(found, recording.turns, 3, 12, shares=False) > 20
    assert {window.offered for _, window in found.windows} == {3, 3 + 4}


def test_wrong_tokens_and_wrong_copies_are_detected(
    recording: Recording, model: PrefilledModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        right = forcing._forced
        patch.setattr(forcing, "_forced", lambda *arguments: right(*arguments) ^ 1)
        with pytest.raises(CheckFailedError, match=r"turn 0 of session .* token 0 is \[\d+\], recorded is \[\d+\]"):
            played(recording, model)
    with_copies = decode_step._with_copies

    def stale(*arguments: Any) -> Any:
        drafts_Bk, num_valid_B = with_copies(*arguments)
        drafts_Bk[:, 4:] = drafts_Bk[:, 3:-1].clone()
        return drafts_Bk, num_valid_B

    monkeypatch.setattr(decode_step, "_with_copies", stale)
    wrong = played(recording, model)
    with pytest.raises(CheckFailedError, match="copies are offered and accepted, by the rule"):
        check_copies(wrong, recording.turns, 3, 12)


# Figures


def by_hand(*, num_drafted: int, accepted: int, seconds: float, before: float, is_plain: bool = True) -> Step:
    window = Window(turn=0, last=9, offered=num_drafted, accepted=accepted)
    return Step(num_drafted=num_drafted, is_plain=is_plain, occupants={0: 0}, windows=[window], end=before + seconds)


def test_figures_are_of_plain_steps_between_plain_ones() -> None:
    turn = RecordedTurn(session_id="s", prompt=[*range(10), 1, 2, 3], answer=[4, 5, 6, 7], most_copies=4)
    steps = [by_hand(num_drafted=3, accepted=0, seconds=1.0, before=0.0) for _ in range(WARM_UP)]
    for seconds, is_plain in ((0.5, True), (0.004, True), (0.008, True), (0.1, True), (0.3, False), (0.2, True)):
        is_wide = seconds == 0.008
        steps.append(
            by_hand(
                num_drafted=7 if is_wide else 3,
                accepted=5 if is_wide else 2,
                seconds=seconds,
                before=steps[-1].end,
                is_plain=is_plain,
            )
        )
    ended = Step(num_drafted=3, is_plain=True, occupants={0: 0}, end=steps[WARM_UP + 2].end)
    steps.insert(WARM_UP + 3, ended)
    found = Played(steps=steps, num_turns=1, start_seconds=0.0)
    assert [round(seconds, 6) for _, seconds in found.timed] == [0.004, 0.008]
    figures = figures_of(found, [turn], num_mtp=3, num_checked=0)
    assert figures is not None
    assert figures.num_windows == WARM_UP + 6
    assert figures.accepted == pytest.approx([6 / 26, 6 / 26, 1 / 26, 1 / 26, 1 / 26])
    assert figures.tokens_a_step == pytest.approx(1 + 15 / 26)
    assert figures.tokens_per_second == pytest.approx((3 + 6) / 0.012)
    assert {width: round(ms, 3) for width, (_, ms) in figures.by_width.items()} == {4: 4.0, 8: 8.0}
    assert figures_of(replace(found, steps=steps[:5]), [turn], num_mtp=3, num_checked=0) is None


# The command


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *flags: str) -> dict[str, Any]:
    monkeypatch.setattr(copies, "resolved_config", lambda *arguments, **options: CONFIG)
    monkeypatch.setattr(copies, "check_small_model", lambda device, num_copies: "nothing")
    common = ["--device", "cpu", "--models", "tiny", "--tokens", "130", "--max-context", "2000", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["copies", *common, *flags])
    assert copies.main() == 0
    written: dict[str, Any] = json.loads(path.read_text())
    return written


def test_the_command_measures_cases_against_mtp_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = run(monkeypatch, tmp_path / "figures.json", "--users", "1", "--state-form", "rows", "ring")
    found = written["results"]
    shown = [(one["case"]["state_form"], one["case"]["copies"]) for one in found]
    assert shown == [("rows", 0), ("ring", 0), ("ring", 12)]
    for one in found:
        assert (one["note"], "of 21, of which" in one["sessions"]) == ("", True)
        assert one["figures"]["tokens_a_step"] == pytest.approx(1 + sum(one["figures"]["accepted"]))
    rows, ring, copied = (one["figures"] for one in found)
    assert rows["accepted"] == ring["accepted"], "the same drafts in every case"
    assert len(ring["accepted"]) == 3
    assert (rows["num_checked"], ring["num_checked"]) == (0, 0)
    assert copied["num_checked"] > 0
    assert copied["tokens_a_step"] >= ring["tokens_a_step"]
    table = capsys.readouterr().out.partition(HEADER)[2]
    assert table.count("| 1.000 |") == 1, "the first case without copies is what the others are compared with"
    assert "tiny-agent" in written["tokenizer"]


def test_cases_beyond_the_time_limit_stay_in_the_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = run(monkeypatch, tmp_path / "figures.json", "--minutes", "0")
    assert [one["figures"] for one in written["results"]] == [None] * 4
    assert capsys.readouterr().out.count("not run: the time was up") == 4


def test_a_case_that_was_cut_short_says_so(recording: Recording, model: PrefilledModel) -> None:
    moments = itertools.count()
    found = play(case(recording), recording.turns, model, CPU, rates=RATES, time_is_up=lambda: next(moments) >= 2)
    assert found.num_turns == 2
    result = Result(case=case(recording), recording=recording, note="the time was up after 2 turns")
    report = Report(machine="m", command="c", tokenizer="t", rates=RATES, checks=["x"], results=[result])
    assert "the time was up after 2 turns" in report.line(result)
    assert report.line(result).count("|") == HEADER.count("|")
