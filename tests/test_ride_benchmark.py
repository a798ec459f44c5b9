"""The check before `python -m benchmarks.ride`: it compares streams and detects a fault."""

from __future__ import annotations

import pytest
import torch

from agentspec.runtime import executor
from agentspec.runtime.decode_step import Forward, decode_step
from benchmarks.decode_checks import CheckFailedError
from benchmarks.ride import check_rides

CPU = torch.device("cpu")


def test_riding_windows_do_not_change_streams_of_tiny_agent() -> None:
    assert "300 tokens on cpu with " in check_rides(CPU, num_requests=5)


def test_the_check_detects_lost_hidden_states_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    original = decode_step

    def step(*arguments: object, forward: Forward, **keywords: object) -> object:
        forward = Forward.PREFILLED if forward is Forward.RIDDEN else forward
        return original(*arguments, forward=forward, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "decode_step", step)
    with pytest.raises(CheckFailedError, match="say something else"):
        check_rides(CPU, num_requests=5)
