"""Service level objectives: upper bounds on the times of a turn, and goodput, the rate of turns that meet all of them.

Goodput is defined as in DistServe (Zhong et al., OSDI 2024), vLLM and aiperf: turns that meet every bound, per second
of the run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentspec.errors import ConfigError

if TYPE_CHECKING:  # measure.py imports numpy, which would slow down the parsing of flags
    from agentspec.replay.measure import TurnRecord

FAILED = "failed"
"""The bound that a failed turn misses."""

TIMES: dict[str, Callable[[TurnRecord], float | None]] = {
    "turn": lambda turn: turn.latency,
    "ttft": lambda turn: turn.time_to_first_token,
    "tpot": lambda turn: turn.time_per_token,
    "gap": lambda turn: turn.longest_gap,
}
"""Times that can be bounded, in seconds: sending to last token, sending to first token, mean between tokens, longest
gap between stream events. None when a turn has no such time: an answer in one event has no gaps."""

_UNITS = {"": 1.0, "s": 1.0, "ms": 0.001}
_BOUND = re.compile(r"(?P<name>[a-z]+)=(?P<number>[0-9]*\.?[0-9]+)(?P<unit>|s|ms)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """How many sent turns met the bounds."""

    num_turns: int
    """Number of sent turns, answered or failed."""
    num_met: int
    missed: Mapping[str, int]
    """Bound -> number of turns that missed it, in the order of the bounds, then FAILED if any failed. A turn may miss
    several."""
    rate: float | None
    """Turns within all bounds, per second of the run."""

    @property
    def share(self) -> float | None:
        return self.num_met / self.num_turns if self.num_turns else None


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds on a turn, in seconds by names of TIMES."""

    bounds: Mapping[str, float]

    @classmethod
    def parse(cls, flags: Sequence[str]) -> Slo:
        """Parse all `--slo` flags, each a list like `turn=10,ttft=150ms`. The default unit is seconds. Raises
        ConfigError."""
        bounds: dict[str, float] = {}
        for part in (part.strip() for flag in flags for part in flag.split(",")):
            found = _BOUND.fullmatch(part)
            if found is None:
                raise ConfigError("slo", part, "must be NAME=TIME with a time in s or ms: turn=10s, ttft=150ms")
            name, seconds = found["name"], float(found["number"]) * _UNITS[found["unit"]]
            if name not in TIMES:
                raise ConfigError("slo", part, f"{name} can't be bounded; {', '.join(TIMES)} can")
            if name in bounds:
                raise ConfigError("slo", part, f"{name} has two bounds")
            if not 0 < seconds < float("inf"):
                raise ConfigError("slo", part, "the bound must be above 0")
            bounds[name] = seconds
        return cls(bounds)

    def missed(self, turn: TurnRecord) -> list[str]:
        """Return the names of the bounds that the turn exceeded, in order; empty when it met all."""
        if turn.error is not None:
            return [FAILED]
        times = ((name, bound, TIMES[name](turn)) for name, bound in self.bounds.items())
        return [name for name, bound, seconds in times if seconds is not None and seconds > bound]

    def goodput(self, turns: Iterable[TurnRecord], wall: float) -> Goodput:
        """Return the goodput of all turns sent in a run of `wall` seconds."""
        missed = [self.missed(turn) for turn in turns]
        counts = Counter(name for names in missed for name in names)
        num_met = sum(not names for names in missed)
        return Goodput(
            num_turns=len(missed),
            num_met=num_met,
            missed={name: counts[name] for name in self.bounds} | ({FAILED: counts[FAILED]} if counts[FAILED] else {}),
            rate=num_met / wall if wall > 0 else None,
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} {_shown(seconds)}" for name, seconds in self.bounds.items())


def _shown(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"
