"""Messages between the engine's process and the processes of its other ranks, beside the plans in shared memory.

The leader sends `RankStart`, `RankBuild` and `RankMemory`, in this order; each follower answers with `Here`, `Planned`
and `Built`. A follower that fails sends `Broken` last. The end of the socket means that the other side has ended."""

from __future__ import annotations

import msgspec

from agentspec.config import EngineConfig
from agentspec.runtime.memory_plan import MemoryPlan


class RankStart(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    config: EngineConfig
    model_dir: str | None
    """None: the entry's own model, in tests."""
    index: int
    """The rank, from 1; 0 is the leader."""
    count: int
    meeting: str
    """A file through which the ranks find each other; the leader deletes it."""
    num_slots: int
    num_threads: int
    """Of torch, on a CPU: equal on all ranks, since sums depend on it."""
    shares_device: bool
    """See RankOptions."""
    check_every: int
    """Plans between two comparisons of outcomes."""


class RankBuild(msgspec.Struct, frozen=True, kw_only=True, tag="build"):
    """The leader's settings, where they are its choice."""

    max_running: int
    max_copies: int
    draft_ids: bytes | None
    """A types.tokens array for StepModel.limit_drafts; None: there are no drafts."""
    most_riders: int
    early: bool
    """See ModelExecutor.capture."""
    given: MemoryPlan | None


class RankMemory(msgspec.Struct, frozen=True, tag="memory"):
    memory: MemoryPlan
    """Fits on every rank."""


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The process runs, and is about to meet the other ranks."""


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    memory: MemoryPlan
    """What fits on this rank."""


class Built(msgspec.Struct, frozen=True, tag="built"):
    """The rank follows the ring from now on."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    text: str
    by_peer: bool
    """Whether the end of another rank has caused it."""


ToRank = RankStart | RankBuild | RankMemory
FromRank = Here | Planned | Built | Broken
