"""The benchmark of the text process: it runs, and both ways build the same prompt."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import text_hop


def test_it_builds_the_same_prompt_in_both_ways(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A regression test: its process once failed to start, because its builder refused a setting."""
    monkeypatch.setattr(text_hop, "SIZES", {"a short prompt": (1, 20)})
    asyncio.run(text_hop.measured(2))
    assert "| a short prompt | " in capsys.readouterr().out
