"""Points in the device's time, and the seconds between them. Owns the difference between a GPU and a CPU, where work is
done when its call returns."""

from __future__ import annotations

import time
from typing import TypeAlias

import torch

Moment: TypeAlias = float | torch.cuda.Event
"""The host's clock in seconds on a CPU, otherwise an event."""


def moment_on(device: torch.device) -> Moment:
    """When the device is done with what is enqueued."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_past(moment: Moment) -> bool:
    return isinstance(moment, float) or moment.query()


def wait_for(moment: Moment) -> None:
    if isinstance(moment, torch.cuda.Event):
        moment.synchronize()


def seconds_between(started: Moment, done: Moment) -> float:
    """The device must have passed both."""
    if isinstance(started, float):
        assert isinstance(done, float)
        return done - started
    assert isinstance(done, torch.cuda.Event)
    milliseconds: float = started.elapsed_time(done)
    return milliseconds / 1000.0
