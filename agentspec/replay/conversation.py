"""The client side of one recorded session: the messages of each request.

With recorded history every prompt is known in advance. With live history the model's own answers are sent back: the
recorded tool results get the ids of the model's calls. When these calls don't match the results, the recorded answer is
used instead and the turn counts as diverged. Pure: knows nothing of HTTP or time.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from agentspec.errors import AgentspecError
from agentspec.replay.schema import AssistantMessage, InputMessage, Session, Turn

Message = dict[str, Any]


class ConversationError(AgentspecError):
    """The live answer doesn't match the recorded tool results, and no recorded answer can replace it."""


class Conversation:
    """The messages of one session so far. Call `prompt(turn)` before each request, and `add_answer(turn, message)`
    after it."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._pending: tuple[Turn, Message, bool] | None = None
        """(last turn, the model's answer, whether history is live). The next turn decides which answer is sent back."""

    def fork(self) -> Conversation:
        """Return a copy that continues independently."""
        other = Conversation()
        other._messages, other._pending = list(self._messages), self._pending
        return other

    def prompt(self, turn: Turn) -> tuple[list[Message], bool]:
        """Return all messages of this turn's request, and whether the previous answer had to be replaced by the
        recorded one.

        Raises ConversationError when neither answer matches the tool results."""
        assert turn.messages is not None
        diverged = False
        new = turn.messages
        ids: dict[int, str] = {}
        if self._pending is not None:
            before, answer, live = self._pending
            recorded = before.recorded_message
            if not live:
                assert recorded is not None
                answer = recorded_message(recorded)
            elif (fit := _live_ids(answer, new, recorded)) is not None:
                ids = fit
            elif recorded is not None:
                answer, diverged = recorded_message(recorded), True
            else:
                num_results = sum(message.role == "tool" for message in new)
                raise ConversationError(
                    f"the model made {len(answer.get('tool_calls', []))} usable tool calls where {num_results} results "
                    "follow, and the turn has no recorded answer to fall back on"
                )
            self._messages.append(answer)
        self._messages += [input_message(message, ids.get(index)) for index, message in enumerate(new)]
        return list(self._messages), diverged

    def add_answer(self, turn: Turn, message: Message, *, live: bool) -> None:
        """Add the model's answer to the last prompt, as an assistant message. `live`: send it back in place of the
        recorded one."""
        self._pending = (turn, message, live)


def keeps_live_history(session: Session, history: str, num_answers: int) -> bool:
    """Whether a session is replayed with live history. Later prompts contain the answers to its first `num_answers`
    turns.

    Raises ValueError when `history` is "recorded" and one of these answers was not recorded."""
    if history == "live":
        return True
    for index, turn in enumerate(session.turns[:num_answers]):
        if turn.messages is not None and turn.recorded_message is None:
            if history == "auto":
                return True
            raise ValueError(
                f"session {session.session_id!r}: turns[{index}].expect.message is missing, "
                "and history is to be recorded"
            )
    return False


def recorded_message(message: AssistantMessage) -> Message:
    """Convert a recorded answer to a request message."""
    body: Message = {"role": "assistant", "content": message.content}
    if message.reasoning_content is not None:
        body["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    return body


def input_message(message: InputMessage, call_id: str | None) -> Message:
    """Convert a client's message to a request message; `call_id` replaces the recorded id."""
    body: Message = msgspec.to_builtins(message)
    if call_id is not None:
        body["tool_call_id"] = call_id
    return body


def _live_ids(answer: Message, new: list[InputMessage], recorded: AssistantMessage | None) -> dict[int, str] | None:
    """Return the live call ids for the tool messages among `new`, by index; None when they don't match.

    The n-th live call replaces the n-th recorded one. Results without recorded calls are matched by position."""
    calls = answer.get("tool_calls", [])
    results = [index for index, message in enumerate(new) if message.role == "tool"]
    if len(calls) != len(results) or not all(is_object(call["function"]["arguments"]) for call in calls):
        return None
    recorded_ids = [call.id for call in recorded.tool_calls] if recorded is not None else []
    result_ids = [new[index].tool_call_id for index in results]
    if sorted(recorded_ids) == sorted(str(result_id) for result_id in result_ids):
        places = [recorded_ids.index(str(result_id)) for result_id in result_ids]
    else:
        places = list(range(len(results)))
    return {index: calls[place]["id"] for index, place in zip(results, places, strict=True)}


def is_object(arguments: str) -> bool:
    """Whether a call's arguments are a JSON object."""
    return read_object(arguments) is not None


def read_object(arguments: str) -> dict[str, Any] | None:
    """Parse call arguments; None when they are not a JSON object, or contain a lone surrogate."""
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()  # fails for lone surrogates
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
