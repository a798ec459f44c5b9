"""Import Alibaba's Bailian usage traces: one request per line with its chat id, parent chat id, lengths and the hashes
of 16-token blocks.

A chat with a parent is the next turn of the parent's session. Of several chats with the same parent, the earliest is;
the others open sessions of their own, whose prompts begin with the same blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from agentspec.replay.importers.runs import BlockRequest, chain, read_trace
from agentspec.replay.schema import Meta, ReplayFile, Session

BLOCK_SIZE = 16


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of the trace."""

    chat_id: int
    timestamp: float
    """Seconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: list[int]
    parent_chat_id: int = -1
    """-1: no parent."""
    turn: int = 1
    type: Literal["text", "search", "image", "file"] = "text"

    @property
    def block(self) -> BlockRequest:
        return BlockRequest(
            at_ms=self.timestamp * 1000,
            input_length=self.input_length,
            output_length=self.output_length,
            hash_ids=self.hash_ids,
        )


def read(path: str | Path) -> ReplayFile:
    """Read the trace as sessions, in order of arrival. Raises ReplayFileError for the first invalid line."""
    chains: list[list[Request]] = []
    ending: dict[int, list[Request]] = {}
    """Chat id -> the session whose last turn it is."""
    for asked in sorted(read_trace(path, Request, BLOCK_SIZE), key=lambda request: request.timestamp):
        session = ending.pop(asked.parent_chat_id, None)
        if session is None:
            session = []
            chains.append(session)
        session.append(asked)
        ending[asked.chat_id] = session
    sessions = []
    for requests in chains:
        turns = chain([request.block for request in requests], BLOCK_SIZE)
        sessions.append(
            Session(session_id=f"chat-{requests[0].chat_id}", start_ms=requests[0].timestamp * 1000, turns=turns)
        )
    return ReplayFile(
        path=str(path), meta=Meta(source={"importer": "bailian", "file": Path(path).name}), sessions=sessions
    )
