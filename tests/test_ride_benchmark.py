"""The check in front of `python -m benchmarks.ride`: what it compares, and that it would notice."""

from __future__ import annotations

import pytest
import torch

from agentspec.runtime import executor
from agentspec.runtime.decode_step import Forward, decode_step
from benchmarks.decode_checks import CheckFailedError
from benchmarks.ride import check_rides

CPU = torch.device("cpu")


def test_tiny_agent_says_the_same_whether_windows_ride_or_not() -> None:
    assert "300 tokens on cpu with " in check_rides(CPU, num_requests=5)


def test_a_ride_that_loses_the_drafts_hiddens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = decode_step

    def step(*arguments: object, forward: Forward, **keywords: object) -> object:
        forward = Forward.PREFILLED if forward is Forward.RIDDEN else forward
        return original(*arguments, forward=forward, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "decode_step", step)
    with pytest.raises(CheckFailedError, match="say something else"):
        check_rides(CPU, num_requests=5)
