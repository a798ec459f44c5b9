"""Records that the cache gives to a running request: the result of a look-up, and the lease on rows and pages.

The cache changes them; the scheduler reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agentspec.cache.prefix_tree import Checkpoint, HostCopy, Node
from agentspec.types import CheckpointKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Where a prompt can resume. Valid until the next call that changes the cache."""

    num_tokens: int
    """Tokens that need not be computed: the block-aligned depth of the deepest checkpoint on the path, within the
    limit."""
    row: int
    """State row of that checkpoint; ZERO_ROW when num_tokens is 0."""
    kind: CheckpointKind | None
    branch_tokens: int
    """Block-aligned depth, within the limit, to which the token ids are known, with or without pages; >= num_tokens."""
    checkpoint: Checkpoint | None = field(default=None, repr=False, compare=False)
    """For the cache's own use; None when num_tokens is 0."""
    host_copy: HostCopy | None = field(default=None, repr=False, compare=False)
    """A deeper state that is worth fetching from host memory."""

    @property
    def num_reachable(self) -> int:
        """Tokens that need not be computed if the state on the host is fetched."""
        return self.num_tokens if self.host_copy is None else self.host_copy.node.depth


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetch:
    """A running fetch of a state from host memory into a row of the lease, with the pages that the device lacks."""

    number: int
    """Number of the copy order."""
    num_tokens: int
    row: int
    kind: CheckpointKind


@dataclass(slots=True, eq=False)
class Lease:
    """A running request's rows, pages and locks."""

    num_cached: int
    """Tokens of the state that the request resumed from."""
    read_row: int
    """Row of that state. Owned by the tree, never written by this request."""
    page_ids: list[int]
    """In block order. Those in `own_pages` are the lease's; the others are the tree's and locked."""
    session_id: str | None = None
    own_pages: set[int] = field(default_factory=set)
    own_rows: set[int] = field(default_factory=set)
    fetch: Fetch | None = None
    """The running fetch: its row and pages must not be read before `finish_fetch`."""

    anchor: Node | None = None
    """Deepest node on the request's path that the lease locks; None while it uses nothing of the tree."""
    locked: Checkpoint | None = None
    """The checkpoint whose row the lease locks: the deepest one that it resumed from or published. At or above
    `anchor`."""
    deepest: Checkpoint | None = None
    """The deepest checkpoint on the request's path that it used, published or found when it published; may have been
    removed."""
    used_checkpoints: list[Checkpoint] = field(default_factory=list)
    """Checkpoints that it resumed from or published, and that one of its deeper ones may supersede."""
