"""Where a prompt is cut into chunks and where its checkpoints go: pure decisions on integers.

Checkpoints stand where templates diverge, not on a regular grid: at the last block boundary at or before each
breakpoint that the text layer marked, at an observed branching point, and on a coarse grid over long stretches without
either. The last boundary before the prompt's last token is kept in one of the request's own rows, as the turn's first
rolling checkpoint. It is published at once if the generated turn is not expected to come back unchanged
(turn_trust.py). An identical prompt can use it too, since at least one token is always computed. A boundary exactly at
the prompt's end is kept by the first step, like any boundary that a step reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from agentspec.cache.hybrid_cache import Match
from agentspec.runtime.pace import Room
from agentspec.runtime.plan import ChunkPlan
from agentspec.runtime.request import PendingCheckpoint, Request
from agentspec.types import BY_PROTECTION, CheckpointKind

BRANCH_GAP_BLOCKS = 4
"""A branching checkpoint must save at least this many blocks (256 tokens): a nearer one costs a row and saves
little."""

GRID_BLOCKS = 64
"""Spacing of the grid over unstructured prefill (4,096 tokens)."""

SYSTEM_GRID_BLOCKS = 6
"""Spacing of the grid inside a new system prompt (384 tokens): agents with other tools often share its beginning, which
is then computed once for all of them."""

_OLDEST_SHARE = 0.5
"""Share of each pass for the prompt that was admitted first."""

_AGING_TOKENS = 64
"""For each pass in which it got no tokens, a prompt is sorted as if it were this many tokens shorter."""


def wanted_checkpoints(request: Request, branch_tokens: int, block: int) -> list[PendingCheckpoint]:
    """Boundaries after the cache hit and up to the end of prefill where this request should leave a checkpoint,
    ascending."""
    wanted: dict[int, CheckpointKind] = {}
    start, end = request.computed, request.prefill_end
    last = (end - 1) // block * block

    def want(length: int, kind: CheckpointKind) -> None:
        if start < length <= end:
            wanted[length] = max(kind, wanted.get(length, kind), key=BY_PROTECTION.index)

    for point in request.submit.breakpoints:
        want(point.offset // block * block, point.kind)
    if not request.submit.breakpoints:
        want((request.prompt_length - 1) // block * block, CheckpointKind.USER)
    if not request.turn_trusted:
        want(last, CheckpointKind.TURN)
    if branch_tokens - start >= BRANCH_GAP_BLOCKS * block:
        want(branch_tokens, CheckpointKind.BRANCH)
    previous = start
    for length in [*sorted(wanted), end]:
        spacing = (SYSTEM_GRID_BLOCKS if wanted.get(length) is CheckpointKind.SYSTEM else GRID_BLOCKS) * block
        while length - previous >= 2 * spacing:
            previous += spacing
            want(previous, CheckpointKind.GRID)
        previous = length
    return [PendingCheckpoint(length, wanted[length]) for length in sorted(wanted)]


def is_promised(request: Request, match: Match, running: Iterable[Request], block: int) -> bool:
    """Whether one of `running` will soon publish a checkpoint, or fetch one, that saves this request much over its
    `match`. Then waiting is better than computing the same again.

    So agents that start together compute their common prompt once."""
    limit = 0 if request.needs_scores else len(request.sequence) - 1
    for other in running:
        if other.submit.namespace != request.submit.namespace:
            continue
        for length in other.promised:
            comes = other.fetch is not None and other.fetch.num_tokens == length
            found = match.num_tokens if comes else match.num_reachable
            if (
                found + BRANCH_GAP_BLOCKS * block <= length <= limit
                and other.sequence[:length].tobytes() == request.sequence[:length].tobytes()
            ):
                return True
    return False


def shares(prefilling: list[Request], room: Room) -> list[tuple[Request, float]]:
    """The order in which prompts get room, and the share of the remaining room that each may take. `prefilling`: in
    order of admission, not empty.

    The shortest remainder goes first: a short append is done soon, and delays a long prompt little. A prompt that got
    nothing ages. The oldest prompt gets half of every pass, if it needs that, and what the others leave: so it always
    advances."""
    oldest = prefilling[0]
    order = sorted(prefilling, key=lambda request: _left(request) - _AGING_TOKENS * request.times_passed_over)
    if order[0] is oldest:
        return [(request, 1.0) for request in order]
    others = [request for request in order if request is not oldest]
    share = max(_OLDEST_SHARE, 1.0 - room.part((request.computed, _left(request)) for request in others))
    return [(oldest, share), *((request, 1.0) for request in others)]


def _left(request: Request) -> int:
    return request.prefill_end - request.computed


def plan_chunk(
    request: Request, budget: int, block: int, take_row: Callable[[Request], int | None]
) -> tuple[ChunkPlan | None, list[tuple[int, int, CheckpointKind]]]:
    """The next chunk of at most `budget` tokens, and the checkpoints that it leaves: (length, row, kind).

    A chunk that doesn't end the prompt ends on a block boundary, so that every chunk starts on one. None if the budget
    doesn't reach the next boundary. A checkpoint for which no row is free is left out."""
    assert request.lease is not None
    assert request.rows is not None
    start, end = request.computed, request.prefill_end
    stop = min(end, start + budget)
    if stop < end:
        stop = stop // block * block
    if stop <= start:
        return None, []
    checkpoints: list[tuple[int, int, CheckpointKind]] = []
    writes: list[tuple[int, int]] = []
    covered = 0
    while request.pending and request.pending[0].length <= stop:
        wanted = request.pending.pop(0)
        row = take_row(request)
        if row is None:
            request.promised.remove(wanted.length)
        else:
            checkpoints.append((wanted.length, row, wanted.kind))
            writes.append((wanted.length - start, row))
            covered = wanted.length
    last = (end - 1) // block * block
    if start < last <= stop and covered < last and request.decodes:
        writes.append((last - start, request.rows.newer))
        request.prompt_checkpoint = last
    writes.append((stop - start, request.rows.prompt))
    chunk = ChunkPlan(
        request_id=request.request_id,
        token_ids=request.sequence[start:stop],
        start=start,
        read_row=request.state_row,
        state_writes=tuple(writes),
        page_ids=list(request.lease.page_ids),
        next_token=request.sequence[stop] if stop < end else None,
        score_top=request.submit.prompt_logprobs if request.needs_scores else None,
    )
    return chunk, checkpoints
