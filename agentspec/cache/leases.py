"""What the cache hands to a running request: the answer to a look-up, and the hold on what it uses.

Plain records. The cache changes them; the scheduler reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentspec.cache.prefix_tree import Checkpoint, HostCopy, Node
from agentspec.types import CheckpointKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Where a prompt may resume. Good until the next call that changes the cache."""

    num_tokens: int
    """Tokens that need not be computed: the block-aligned depth of the deepest checkpoint on the path, within the
    limit."""
    row: int
    """State row of that checkpoint; ZERO_ROW when num_tokens is 0."""
    kind: CheckpointKind | None
    branch_tokens: int
    """Block-aligned depth, within the limit, to which the token ids are known, pages or not; >= num_tokens."""
    checkpoint: Checkpoint | None = field(default=None, repr=False, compare=False)
    """The cache's own; None when num_tokens is 0."""
    host_copy: HostCopy | None = field(default=None, repr=False, compare=False)
    """A deeper state that could be fetched from the host's memory, where that saves enough."""

    @property
    def num_reachable(self) -> int:
        """Tokens that need not be computed if the state on the host is fetched."""
        return self.num_tokens if self.host_copy is None else self.host_copy.node.depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """A state on its way from the host's memory into a row of a lease's own, with the pages that the device lacked into
    its own pages."""

    number: int
    """Of the copy order."""
    num_tokens: int
    row: int
    kind: CheckpointKind


@dataclass(slots=True, eq=False)
class Lease:
    """One running request's hold on rows and pages."""

    num_cached: int
    """Tokens behind the state that the request resumed from."""
    read_row: int
    """Row of that state; the tree's, never written by this request."""
    page_ids: list[int]
    """In block order. Pages in `own_pages` are the lease's; the others are the tree's and locked."""
    session_id: str | None = None
    own_pages: set[int] = field(default_factory=set)
    own_rows: set[int] = field(default_factory=set)
    fetch: Fetch | None = None
    """What is on its way from the host: row and pages hold nothing to rely on before it has landed."""

    anchor: Node | None = None
    """Deepest node on the request's path that the lease locks; None while it uses nothing of the tree."""
    locked: Checkpoint | None = None
    """The checkpoint whose row the lease locks: the deepest that it resumed from or published. At or above `anchor`."""
    deepest: Checkpoint | None = None
    """The deepest checkpoint on the request's path that it used, published or found standing; may have died since."""
    mine: list[Checkpoint] = field(default_factory=list)
    """Checkpoints that it resumed from or published, and that a deeper one of its own may supersede."""
