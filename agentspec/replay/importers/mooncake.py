"""Mooncake's request traces (FAST'25 release): one request a line with its arrival, its lengths and the hashes of its
512-token blocks.

The trace names no sessions. With `link`, a request whose whole blocks extend those of an earlier one, and which is at
least as long as that one's prompt and answer together, is taken for its next turn: a heuristic, so the file says that
its sessions are inferred. A single shared block proves nothing (in the conversation trace nearly every request begins
with the same one), so links need two.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentspec.replay.importers.runs import BlockRequest, chain, read_trace
from agentspec.replay.schema import Meta, ReplayFile, Session

BLOCK_SIZE = 512
MIN_LINK_BLOCKS = 2


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the trace."""

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: list[int]

    @property
    def block(self) -> BlockRequest:
        return BlockRequest(
            at_ms=self.timestamp,
            input_length=self.input_length,
            output_length=self.output_length,
            hash_ids=self.hash_ids,
        )


def read(path: str | Path, *, link: bool) -> ReplayFile:
    """The trace as sessions, in order of arrival. Raises ReplayFileError for the first line that isn't a request of
    it."""
    requests = sorted(read_trace(path, Request, BLOCK_SIZE), key=lambda request: request.timestamp)
    chains = _link(requests) if link else [[index] for index in range(len(requests))]
    source = {
        "importer": "mooncake",
        "file": Path(path).name,
        "sessions": "inferred by prefix" if link else "one request each",
    }
    sessions = [_session(numbers, requests) for numbers in chains]
    return ReplayFile(path=str(path), meta=Meta(source=source), sessions=sessions)


def _session(numbers: list[int], requests: list[Request]) -> Session:
    turns = chain([requests[number].block for number in numbers], BLOCK_SIZE)
    return Session(session_id=f"request-{numbers[0]}", start_ms=requests[numbers[0]].timestamp, turns=turns)


def _link(requests: list[Request]) -> list[list[int]]:
    """Chains of request numbers. A request continues the deepest, then latest, earlier one that fits and is not
    continued yet."""
    steps: dict[tuple[int, int], int] = {}
    """(prefix, block id) -> the prefix with that block; 0 is the empty prefix."""
    ending: dict[int, list[int]] = {}
    """prefix -> requests whose whole blocks are exactly it, not continued yet."""
    chain_of: dict[int, list[int]] = {}
    chains: list[list[int]] = []
    for number, request in enumerate(requests):
        prefix, path = 0, []
        for block_id in request.hash_ids[: request.input_length // BLOCK_SIZE]:
            prefix = steps.setdefault((prefix, block_id), len(steps) + 1)
            path.append(prefix)
        earlier = _continued(request, path, ending, requests)
        numbers = chain_of.pop(earlier) if earlier is not None else []
        if not numbers:
            chains.append(numbers)
        numbers.append(number)
        chain_of[number] = numbers
        if path:
            ending.setdefault(prefix, []).append(number)
    return chains


def _continued(request: Request, path: list[int], ending: dict[int, list[int]], requests: list[Request]) -> int | None:
    """Takes the request that `request` continues out of `ending`."""
    for prefix in reversed(path[MIN_LINK_BLOCKS - 1 :]):
        waiting = ending.get(prefix, [])
        for place in reversed(range(len(waiting))):
            earlier = requests[waiting[place]]
            if (
                request.input_length >= earlier.input_length + earlier.output_length
                and request.timestamp > earlier.timestamp
            ):
                return waiting.pop(place)
    return None
