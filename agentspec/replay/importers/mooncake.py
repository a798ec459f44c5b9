"""Import Mooncake's request traces (FAST'25 release): one request per line with arrival, lengths and the hashes of
512-token blocks.

The trace has no session ids. With `link`, a request becomes the next turn of an earlier one if its whole blocks extend
the earlier one's and it is at least as long as the earlier prompt and answer. This is a heuristic, so the file's source
says that sessions are inferred. One shared block is not evidence, since nearly every request of the conversation trace
begins with the same block; links need two.
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
    """Read the trace as sessions, in order of arrival. Raises ReplayFileError for the first invalid line."""
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
    """Return chains of request indices. A request continues the earlier one with the longest common prefix, then the
    latest, that has no continuation yet."""
    steps: dict[tuple[int, int], int] = {}
    """(prefix id, block id) -> id of the longer prefix; 0 is the empty prefix."""
    ending: dict[int, list[int]] = {}
    """Prefix id -> requests with exactly these whole blocks and no continuation yet."""
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
    """Remove and return the request in `ending` that `request` continues; None without one."""
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
