"""The HTML page: well-formed, self-contained, with missing and forced values labelled."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from agentspec.replay import plots
from agentspec.replay.measure import SessionRecord, TurnRecord, summarize
from agentspec.replay.page import render_page, write_page
from agentspec.replay.page_plots import MAX_TIMELINES
from agentspec.replay.reply import Positions, Speculation
from agentspec.replay.report import Report
from agentspec.replay.slo import Slo


def make_report(
    num_sessions: int = 3,
    num_turns: int = 4,
    *,
    reports: bool = True,
    forced: bool = False,
    fails: bool = False,
    slo: str | None = None,
) -> Report:
    sessions = []
    for number in range(num_sessions):
        session = SessionRecord(session_id=f"<s&{number}>", group=None, num_planned=num_turns)
        for place in range(num_turns):
            sent = place * 2.0 + number * 0.1
            turn = TurnRecord(session_id=session.session_id, turn=place, delay_kind="user", due=sent, sent=sent)
            turn.tokens = [(sent + 0.2, 1), (sent + 0.3, 2), (sent + 0.5, 1)]
            turn.end = sent + 0.5
            if reports:
                turn.prompt_tokens, turn.completion_tokens, turn.cached_tokens = 1000 + place * 100, 4, place * 300
                turn.speculation = Speculation(
                    num_steps=3,
                    num_drafted=6,
                    num_accepted=1 + place,
                    by_source={"mtp": Positions(drafted=[3, 3], accepted=[3, place])},
                )
                turn.forced_acceptance = forced
            session.turns.append(turn)
        if fails and number == 0:
            session.turns[-1].error = session.error = "server said <no>"
        sessions.append(session)
    return Report(
        file="a&b.jsonl",
        source={"license": "MIT"},
        model="model <x>",
        url="http://h",
        settings={"history": "auto"},
        sessions=sessions,
        summary=summarize(sessions, wall=8.0),
        slo=None if slo is None else Slo.parse([slo]),
    )


def parse(page: str) -> ElementTree.Element:
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


@pytest.mark.parametrize(
    "report",
    [
        make_report(),
        make_report(1, 1),
        make_report(2, 60),
        make_report(reports=False),
        make_report(forced=True),
        make_report(fails=True),
        make_report(1, 1, fails=True),
        make_report(MAX_TIMELINES + 5, 1),
        make_report(0, 0),
        make_report(fails=True, slo="turn=1ms,ttft=150ms"),
        make_report(0, 0, slo="turn=1ms"),
    ],
    ids=[
        "usual",
        "one turn",
        "many turns",
        "nothing reported",
        "forced",
        "failed",
        "all failed",
        "many sessions",
        "empty",
        "over bounds",
        "empty with bounds",
    ],
)
def test_page_is_well_formed_and_self_contained(report: Report) -> None:
    page = render_page(report)
    root = parse(page)
    assert root.tag == "html"
    assert not list(root.iter("script"))
    assert not list(root.iter("link"))
    assert not re.findall(r"(?:src|href|srcset|@import|url\()", page)
    assert "nan" not in re.sub(r">[^<]*<", "><", page).lower()


def test_page_shows_the_figures() -> None:
    page = render_page(make_report())
    text = " ".join(parse(page).itertext())
    assert "model <x>" in text
    assert "first token after 200 ms" in text
    assert "position 2: 18 of 36 drafts, 50.0%" in text
    assert len(list(parse(page).iter("svg"))) == 5


def test_page_marks_turns_over_a_bound() -> None:
    """All turns have their first token after 200 ms and the last after 500 ms."""
    page = render_page(make_report(2, 3, fails=True, slo="turn=1s,ttft=150ms"))
    text = " ".join(parse(page).itertext())
    assert page.count('class="dot over"') == 5
    assert page.count('class="wait over"') == page.count('class="stream over"') == 5
    assert (
        "first token after 200 ms, last after 500 ms, 1,000 prompt, 0 cached, 4 output tokens, over the bounds of ttft"
        in text
    )
    assert "Turns over a bound" in text
    assert "ttft 5, failed 1" in text
    within = render_page(make_report(2, 3, slo="turn=1s"))
    assert "6 of 6" in within
    assert "over a bound</h2>" not in within.lower()
    assert not re.search('class="(dot|wait|stream) over"', within)


def test_page_names_failures_and_missing_figures() -> None:
    text = " ".join(parse(render_page(make_report(fails=True))).itertext())
    assert "server said <no>" in text
    text = " ".join(parse(render_page(make_report(reports=False))).itertext())
    assert "does not report cached tokens" in text
    assert "not reported" in text


def test_page_shows_forced_acceptance_at_the_top() -> None:
    page = render_page(make_report(forced=True))
    assert page.index("FORCED ACCEPTANCE") < page.index('class="cards"')
    assert "FORCED to set rates" in page
    assert "FORCED" not in render_page(make_report())


def test_page_is_written_to_a_file(tmp_path: Path) -> None:
    write_page(make_report(), str(tmp_path / "r.html"))
    parse((tmp_path / "r.html").read_text(encoding="utf-8"))


def test_page_fits_a_phone_screen(browser: Any, tmp_path: Path) -> None:
    """Nothing is wider than the screen, and all plot text is large enough to read."""
    report = make_report(12, 14, fails=True, slo="turn=1s,ttft=150ms")
    report.settings["a setting with a long value"] = "x" * 200
    write_page(report, str(tmp_path / "r.html"))
    tab = browser.new_page(viewport={"width": 375, "height": 800})
    tab.goto((tmp_path / "r.html").as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") == 375
    sizes = tab.evaluate(
        """() => [...document.querySelectorAll("svg text")].map((text) => {
            const plot = text.ownerSVGElement;
            const scale = plot.getBoundingClientRect().width / plot.viewBox.baseVal.width;
            return parseFloat(getComputedStyle(text).fontSize) * scale;
        })"""
    )
    assert min(sizes) >= 9
    tab.close()


@pytest.mark.parametrize("high", [1e-6, 0.3, 1.0, 7.0, 99.0, 100.0, 12345.0])
def test_ticks_are_round_and_within_range(high: float) -> None:
    marks = plots.ticks(high)
    assert marks[0] == 0
    assert marks[-1] <= high * (1 + 1e-9)
    assert 2 <= len(marks) <= 6
    assert f"{marks[1]:e}"[0] in "125"
