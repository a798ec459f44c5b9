"""A cache with simulated contents: every row and page stores a hash of the prefix that was written to it.

`World` drives a HybridCache as the scheduler does, and audits it after every operation, contents included: a row or
page that the tree offers or a running request reads must contain exactly its prefix. A row or page loses its content
when it gets a new owner. Copies to and from the host tier are carried out late, when the test says so, and read the
contents of that moment.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from agentspec.cache import invariants
from agentspec.cache.host_tier import CopyOrder, HostMemory
from agentspec.cache.hybrid_cache import HybridCache, Lease
from agentspec.cache.prefix_tree import Checkpoint, HostCopy, Node, path_of
from agentspec.types import ZERO_ROW, CheckpointKind, tokens

BLOCK = 4
ROW_BYTES = 1000
PAGE_BYTES = 10

Key = tuple[str, tuple[int, ...]]
"""Namespace and token ids of a prefix."""


def prefix_tags(namespace: str, ids: Iterable[int]) -> tuple[int, ...]:
    """The simulated content for each prefix: tags[n] is a hash chain over the first n tokens."""
    return _prefix_tags(namespace, tuple(ids))


@functools.lru_cache(maxsize=4096)
def _prefix_tags(namespace: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    tags = [hash(namespace)]
    for token in ids:
        tags.append(hash((tags[-1], token)))
    return tuple(tags)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Run:
    """A running request: `length` tokens of its sequence are computed."""

    lease: Lease
    namespace: str
    sequence: list[int]
    length: int
    state_row: int
    snapshots: dict[int, int] = field(default_factory=dict)
    """Row by length."""
    tags: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.tags = prefix_tags(self.namespace, self.sequence)


class World:
    def __init__(
        self,
        *,
        rows: int = 50,
        pages: int = 200,
        budget_bytes: int | None = None,
        ghost_blocks: int = 1000,
        enabled: bool = True,
        host_memory: HostMemory | None = None,
        note: str = "",
    ) -> None:
        """`rows` and `pages` count usable ones."""
        self.clock = Clock()
        self.note = note
        self.cache = HybridCache(
            num_rows=rows + 2,
            num_pages=pages + 1,
            row_bytes=ROW_BYTES,
            page_bytes=PAGE_BYTES,
            block_tokens=BLOCK,
            budget_bytes=budget_bytes,
            enabled=enabled,
            ghost_blocks=ghost_blocks,
            host_memory=host_memory,
            clock=self.clock,
        )
        self.row_content: dict[int, int] = {}
        self.page_content: dict[int, int] = {}
        self.host_row_content: dict[int, int] = {}
        self.host_page_content: dict[int, int] = {}
        self.to_host: deque[CopyOrder] = deque()
        self.to_device: deque[CopyOrder] = deque()
        self.num_to_device = 0
        """Number of the last order to the device that has been carried out."""
        self.num_fetches = 0
        self.runs: list[Run] = []

    def start(
        self, sequence: Iterable[int], *, namespace: str = "", session: str | None = None, limit: int | None = None
    ) -> Run:
        """Match and acquire; check that the hit is the deepest checkpoint on the path."""
        ids = list(sequence)
        live = self.live()
        bound = min(len(ids) - 1 if limit is None else limit, len(ids))
        match = self.cache.match(namespace, tokens(ids), limit=limit)
        best = max(
            (
                len(key[1])
                for key in live
                if key[0] == namespace and len(key[1]) <= bound and list(key[1]) == ids[: len(key[1])]
            ),
            default=0,
        )
        assert match.num_tokens == best, f"{self.note}: hit {match.num_tokens}, deepest checkpoint {best}"
        assert match.num_tokens <= match.branch_tokens <= max(bound, 0)
        if best:
            key = namespace, tuple(ids[:best])
            assert match.kind == live[key].kind
            assert self.row_content[match.row] == prefix_tags(*key)[-1], (
                f"{self.note}: the row of a hit holds another prefix"
            )
        else:
            assert match.row == ZERO_ROW
            assert match.kind is None
        kept = [
            key[1]
            for key in self.live_copies()
            if key[0] == namespace and len(key[1]) <= bound and list(key[1]) == ids[: len(key[1])]
        ]
        deepest = max((len(key) for key in kept), default=0)
        least = best if self.cache.host is None else best + self.cache.host.memory.min_fetch_blocks * BLOCK
        assert match.num_reachable == (deepest if deepest >= least else best)
        self.audit()
        lease = self.cache.acquire(match, session_id=session)
        assert lease.num_cached == match.num_tokens
        assert lease.read_row == match.row
        assert best // BLOCK <= len(lease.page_ids) <= match.num_reachable // BLOCK
        run = Run(lease, namespace, ids, best, match.row)
        self.runs.append(run)
        self.audit()
        if match.host_copy is not None:
            before = len(lease.page_ids)
            if (
                self.cache.grow_pages(lease, match.num_reachable // BLOCK)
                and (fetch := self.cache.start_fetch(lease, match)) is not None
            ):
                self.num_fetches += 1
                self.row_content.pop(fetch.row, None)
            for page in lease.page_ids[before:]:
                self.page_content.pop(page, None)
            self.audit()
            if lease.fetch is None:
                self.release(run)
                lease = self.cache.acquire(
                    replace(self.cache.match(namespace, tokens(ids), limit=limit), host_copy=None), session_id=session
                )
                run = Run(lease, namespace, ids, lease.num_cached, lease.read_row)
                self.runs.append(run)
                self.audit()
        return run

    def copy_ahead(self) -> None:
        self.cache.copy_ahead()
        self.audit()

    def carry_out(self, num_to_device: int, num_to_host: int) -> None:
        """Carry out some orders: first those to the device, and those to the host only when no order to the device is
        left."""
        self._collect_orders()
        for _ in range(min(num_to_device, len(self.to_device))):
            order = self.to_device.popleft()
            _copy(order.rows, self.host_row_content, self.row_content)
            _copy(order.pages, self.host_page_content, self.page_content)
            self.num_to_device = order.number
        for _ in range(0 if self.to_device else min(num_to_host, len(self.to_host))):
            assert self.cache.host is not None
            order = self.to_host.popleft()
            _copy(order.rows, self.row_content, self.host_row_content)
            _copy(order.pages, self.page_content, self.host_page_content)
            self.cache.complete_copies_to_host(order.number)
        self.audit()

    def settle(self) -> None:
        """Order all wanted copies, and carry out every order."""
        self.copy_ahead()
        self.carry_out(1 << 30, 1 << 30)

    def finish_fetch(self, run: Run) -> bool:
        """Finish the run's fetch, if its order has been carried out. Returns whether it was."""
        fetch = run.lease.fetch
        assert fetch is not None
        if fetch.number > self.num_to_device:
            return False
        self.cache.finish_fetch(run.lease, run.namespace, tokens(run.sequence))
        run.length, run.state_row = run.lease.num_cached, run.lease.read_row
        assert run.length == fetch.num_tokens
        self.audit()
        return True

    def _collect_orders(self) -> None:
        orders = self.cache.take_copy_orders()
        self.to_host.extend(orders.to_host)
        self.to_device.extend(orders.to_device)

    def compute(self, run: Run, length: int) -> bool:
        """Compute the run's state up to `length`: pages for it, and an own row that contains it. False when there is no
        room."""
        assert run.length <= length <= len(run.sequence)
        before = list(run.lease.page_ids)
        if not self.cache.grow_pages(run.lease, -(-length // BLOCK)):
            assert run.lease.page_ids == before
            self.audit()
            return False
        assert run.lease.page_ids[: len(before)] == before, "pages changed under a running request"
        for page in run.lease.page_ids[len(before) :]:
            self.page_content.pop(page, None)
        if run.state_row not in run.lease.own_rows:
            rows = self.take_rows(run, 1)
            if rows is None:
                return False
            run.state_row = rows[0]
        for block in range(run.length // BLOCK, -(-length // BLOCK)):
            page = run.lease.page_ids[block]
            assert page in run.lease.own_pages, f"{self.note}: a request writes to a page of the tree"
            self.page_content[page] = run.tags[min((block + 1) * BLOCK, length)]
        self.row_content[run.state_row] = run.tags[length]
        run.length = length
        self.audit()
        return True

    def take_rows(self, run: Run, count: int) -> list[int] | None:
        rows = self.cache.take_rows(run.lease, count)
        for row in rows or ():
            self.row_content.pop(row, None)
        self.audit()
        return rows

    def snapshot(self, run: Run) -> bool:
        """Keep the state at the run's length in one more row, to publish it later."""
        rows = self.take_rows(run, 1)
        if rows is not None:
            self.row_content[rows[0]] = run.tags[run.length]
            run.snapshots[run.length] = rows[0]
        return rows is not None

    def publish(self, run: Run, kind: CheckpointKind = CheckpointKind.TURN, length: int | None = None) -> bool:
        """Publish the state at the run's length from its state row, or a snapshot at another length."""
        row = run.state_row if length is None else run.snapshots.pop(length)
        length = run.length if length is None else length
        taken = self.cache.publish(run.lease, run.namespace, tokens(run.sequence), length, row, kind)
        assert taken == (row not in run.lease.own_rows)
        if not taken and row != run.state_row:
            self.cache.give_rows(run.lease, [row])
        self.audit()
        return taken

    def release(self, run: Run, hold_seconds: float = 0.0) -> None:
        self.runs.remove(run)
        self.cache.release(run.lease, hold_seconds=hold_seconds)
        self.audit()

    def turn(
        self,
        sequence: Iterable[int],
        *,
        kinds: dict[int, CheckpointKind] | None = None,
        session: str | None = None,
        hold_seconds: float = 0.0,
        namespace: str = "",
    ) -> int:
        """Run a whole request: resume, compute and publish at the wanted lengths (default: a TURN at the last
        boundary), release. Returns the hit."""
        ids = list(sequence)
        run = self.start(ids, session=session, namespace=namespace)
        if run.lease.fetch is not None:
            self.carry_out(1 << 30, 0)
            assert self.finish_fetch(run)
        hit = run.length
        for length, kind in sorted((kinds or {len(ids) // BLOCK * BLOCK: CheckpointKind.TURN}).items()):
            if length > run.length:
                assert self.compute(run, length), f"{self.note}: no room for {length} tokens"
                self.publish(run, kind)
        self.release(run, hold_seconds)
        return hit

    def live(self) -> dict[Key, Checkpoint]:
        """Every live checkpoint, by its prefix in the tree."""
        return {_key(checkpoint.node): checkpoint for checkpoint in self.cache.checkpoints.live}

    def live_copies(self) -> dict[Key, HostCopy]:
        """Every copy in the host tier, complete or not, by its prefix."""
        return {} if self.cache.host is None else {_key(copy.node): copy for copy in self.cache.host.live}

    def lengths(self, namespace: str = "") -> list[int]:
        """Depths of all live checkpoints of a namespace."""
        return sorted(len(key[1]) for key in self.live() if key[0] == namespace)

    def audit(self) -> None:
        try:
            invariants.check(self.cache)
            self._check_contents()
        except AssertionError as error:
            raise AssertionError(f"{self.note}: {error}") from error

    def _check_contents(self) -> None:
        for (namespace, ids), checkpoint in self.live().items():
            tags = prefix_tags(namespace, ids)
            assert self.row_content.get(checkpoint.row) == tags[-1], (
                f"row {checkpoint.row} of a checkpoint holds another prefix"
            )
            pages = [page for node in path_of(checkpoint.node) for page in node.page_ids or ()]
            for block, page in enumerate(pages):
                assert self.page_content.get(page) == tags[(block + 1) * BLOCK], (
                    f"page {page} of the tree holds another prefix"
                )
        for (namespace, ids), copy in self.live_copies().items():
            assert self.cache.host is not None
            if self.cache.host.is_complete(copy):
                tags = prefix_tags(namespace, ids)
                assert self.host_row_content.get(copy.row) == tags[-1], f"host row {copy.row} holds another prefix"
                for block, page in enumerate(self.cache.tree.host_page_ids(copy.node)):
                    assert self.host_page_content.get(page) == tags[(block + 1) * BLOCK], (
                        f"host page {page} holds another prefix"
                    )
        for run in self.runs:
            for block in range(-(-run.length // BLOCK)):
                page = run.lease.page_ids[block]
                expected = run.tags[min((block + 1) * BLOCK, run.length)]
                assert self.page_content.get(page) == expected, f"page {page} changed under a running request"
            if run.state_row in run.lease.own_rows:
                assert self.row_content[run.state_row] == run.tags[run.length], (
                    f"row {run.state_row} changed under a running request"
                )


def _key(node: Node) -> Key:
    path = path_of(node)
    ids = tokens()
    for step in path:
        ids.frombytes(step.run)
    return node.namespace, tuple(ids)


def _copy(ids: list[tuple[int, int]], source: dict[int, int], target: dict[int, int]) -> None:
    for from_id, to_id in ids:
        target.pop(to_id, None)
        if from_id in source:
            target[to_id] = source[from_id]
