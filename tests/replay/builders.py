"""Small replay files for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentspec.replay.schema import (
    AssistantMessage,
    Expect,
    FunctionCall,
    InputMessage,
    Meta,
    ReplayFile,
    Session,
    ToolCall,
    Turn,
)


def user(text: str = "hello") -> InputMessage:
    return InputMessage(role="user", content=text)


def system(text: str = "be brief") -> InputMessage:
    return InputMessage(role="system", content=text)


def result(text: str = "42", call_id: str | None = None) -> InputMessage:
    return InputMessage(role="tool", content=text, tool_call_id=call_id)


def said(text: str = "recorded", reasoning: str | None = None) -> Expect:
    return Expect(message=AssistantMessage(role="assistant", content=text, reasoning_content=reasoning))


def called(*calls: tuple[str, str, dict[str, Any] | str], text: str | None = None) -> Expect:
    """Return an answer with calls: (id, name, arguments or raw text)."""
    texts = [arguments if isinstance(arguments, str) else json.dumps(arguments) for _, _, arguments in calls]
    made = [
        ToolCall(id=call[0], function=FunctionCall(name=call[1], arguments=text))
        for call, text in zip(calls, texts, strict=True)
    ]
    return Expect(message=AssistantMessage(role="assistant", content=text, tool_calls=made))


def turn(*messages: InputMessage, expect: Expect | None = None, delay_ms: float = 0.0, **fields: Any) -> Turn:
    return Turn(messages=list(messages), expect=expect, delay_ms=delay_ms, **fields)


def runs(input_length: int, hash_ids: list[int], *, block_size: int = 8, output_tokens: int = 3, **fields: Any) -> Turn:
    return Turn(
        input_length=input_length,
        block_size=block_size,
        hash_ids=hash_ids,
        expect=Expect(output_tokens=output_tokens),
        **fields,
    )


def replay_file(*sessions: Session, **meta: Any) -> ReplayFile:
    return ReplayFile(path="test.jsonl", meta=Meta(**meta), sessions=list(sessions))


def chats(num_sessions: int, num_turns: int, *, delay_ms: float = 0.0) -> ReplayFile:
    """Return sessions of plain user turns with recorded answers."""
    return replay_file(
        *(
            Session(
                session_id=f"s{index}",
                turns=[
                    turn(user(f"{index}/{place}"), expect=said(), delay_ms=delay_ms if place else 0)
                    for place in range(num_turns)
                ],
            )
            for index in range(num_sessions)
        )
    )


def write_lines(path: Path, lines: Sequence[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


TOOL = {
    "type": "function",
    "function": {"name": "lookup", "description": "Look up.", "parameters": {"type": "object", "properties": {}}},
}
