"""Mooncake's request traces (FAST'25 release): one request a line with its arrival, its lengths and the hashes of its 512-token blocks.

The trace names no sessions. With `link`, a request whose whole blocks extend those of an earlier one, and which is at least as long as that one's
prompt and answer together, is taken for its next turn: a heuristic, so the file says that its sessions are inferred. A single shared block
proves nothing (in the conversation trace nearly every request begins with the same one), so links need two.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.schema import Expect, Meta, ReplayFile, Session, Turn, read_lines

BLOCK_SIZE = 512
MIN_LINK_BLOCKS = 2


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the trace."""

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: str | Path, *, link: bool) -> ReplayFile:
    """The trace as sessions, in order of arrival. Raises ReplayFileError for the first line that isn't a request of it."""
    requests = [_parse(str(path), number, line) for number, line in read_lines(path)]
    if not requests:
        raise ReplayFileError(str(path), 1, "the trace has no requests")
    requests.sort(key=lambda request: request.timestamp)
    chains = _link(requests) if link else [[index] for index in range(len(requests))]
    source = {"importer": "mooncake", "file": Path(path).name, "sessions": "inferred by prefix" if link else "one request each"}
    sessions = [_session(chain, requests) for chain in chains]
    return ReplayFile(path=str(path), meta=Meta(source=source), sessions=sessions)


def _parse(path: str, number: int, line: bytes) -> Request:
    try:
        request = msgspec.json.decode(line, type=Request)
    except msgspec.DecodeError as error:
        raise ReplayFileError(path, number, str(error)) from None
    num_blocks = -(-request.input_length // BLOCK_SIZE)
    for field, value in (("timestamp", request.timestamp), ("input_length", request.input_length - 1), ("output_length", request.output_length)):
        if value < 0:
            raise ReplayFileError(path, number, f"{field}: {getattr(request, field)} is too small")
    if len(request.hash_ids) != num_blocks:
        reason = f"hash_ids: has {len(request.hash_ids)} ids; input_length {request.input_length} makes {num_blocks} blocks of {BLOCK_SIZE}"
        raise ReplayFileError(path, number, reason)
    return request


def _session(chain: list[int], requests: list[Request]) -> Session:
    """Waits are gaps between arrivals, which include the answer's own time: the trace does not say when an answer ended."""
    turns = []
    before: float | None = None
    for index in chain:
        request = requests[index]
        turns.append(
            Turn(
                input_length=request.input_length,
                block_size=BLOCK_SIZE,
                hash_ids=request.hash_ids,
                delay_ms=0.0 if before is None else request.timestamp - before,
                delay_kind="start" if before is None else "user",
                max_tokens=max(1, request.output_length),
                expect=Expect(output_tokens=max(1, request.output_length)),
            )
        )
        before = request.timestamp
    return Session(session_id=f"request-{chain[0]}", start_ms=requests[chain[0]].timestamp, turns=turns)


def _link(requests: list[Request]) -> list[list[int]]:
    """Chains of request numbers. A request continues the deepest, then latest, earlier one that fits and is not continued yet."""
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
        chain = chain_of.pop(earlier) if earlier is not None else []
        if not chain:
            chains.append(chain)
        chain.append(number)
        chain_of[number] = chain
        if path:
            ending.setdefault(prefix, []).append(number)
    return chains


def _continued(request: Request, path: list[int], ending: dict[int, list[int]], requests: list[Request]) -> int | None:
    """Takes the request that `request` continues out of `ending`."""
    for prefix in reversed(path[MIN_LINK_BLOCKS - 1 :]):
        waiting = ending.get(prefix, [])
        for place in reversed(range(len(waiting))):
            earlier = requests[waiting[place]]
            if request.input_length >= earlier.input_length + earlier.output_length and request.timestamp > earlier.timestamp:
                return waiting.pop(place)
    return None
