"""Read traces that describe requests by lengths and block hashes, and convert them to token-run turns. Knows no trace's
own fields."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from agentspec.errors import ReplayFileError
from agentspec.replay.schema import Expect, Turn, decoded, errors_at, read_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockRequest:
    """One request of a trace."""

    at_ms: float
    """Arrival on the trace's clock, in milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]

    def check(self, path: str, line: int, block_size: int) -> None:
        """Raise ReplayFileError for an invalid length or arrival, or a number of blocks that doesn't match the input
        length."""
        for field, value, least in (
            ("timestamp", self.at_ms, 0),
            ("input_length", self.input_length, 1),
            ("output_length", self.output_length, 0),
        ):
            if not value >= least:
                raise ReplayFileError(path, line, f"{field}: {value} is too small")
        num_blocks = -(-self.input_length // block_size)
        if len(self.hash_ids) != num_blocks:
            reason = (
                f"hash_ids: has {len(self.hash_ids)} ids; "
                f"input_length {self.input_length} makes {num_blocks} blocks of {block_size}"
            )
            raise ReplayFileError(path, line, reason)

    def turn(self, block_size: int, *, delay_ms: float, delay_kind: Literal["start", "tool", "user", "none"]) -> Turn:
        num_tokens = max(1, self.output_length)
        return Turn(
            input_length=self.input_length,
            block_size=block_size,
            hash_ids=self.hash_ids,
            delay_ms=delay_ms,
            delay_kind=delay_kind,
            max_tokens=num_tokens,
            expect=Expect(output_tokens=num_tokens),
        )


class TraceLine(Protocol):
    """A line of a trace, with the trace's own fields."""

    @property
    def block(self) -> BlockRequest: ...


L = TypeVar("L", bound=TraceLine)


def read_trace(path: str | Path, line_type: type[L], block_size: int) -> list[L]:
    """Read the lines of a trace, at least one. Raises ReplayFileError for the first invalid line."""
    requests: list[L] = []
    for number, line in read_lines(path):
        with errors_at(path, number):
            request = msgspec.convert(decoded(line), line_type)
        request.block.check(str(path), number, block_size)
        requests.append(request)
    if not requests:
        raise ReplayFileError(str(path), 1, "the trace has no requests")
    return requests


def chain(requests: Sequence[BlockRequest], block_size: int) -> list[Turn]:
    """Convert consecutive requests to the turns of a session. Waits are gaps between arrivals and include the time of
    the answer, since such traces don't record when an answer ended."""
    first = requests[0].turn(block_size, delay_ms=0.0, delay_kind="start")
    rest = itertools.pairwise(requests)
    return [
        first,
        *(
            after.turn(block_size, delay_ms=max(0.0, after.at_ms - before.at_ms), delay_kind="user")
            for before, after in rest
        ),
    ]
