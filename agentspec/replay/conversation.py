"""The client's side of one session: which messages the next request holds, and whose answers stand between them.

With recorded history every prompt is known beforehand. With live history the model's own answers go back, so the
recorded tool results must be given the ids of the calls that the model made; where it made none that fit, the recorded
answer takes its place and the turn counts as diverged. Pure: knows nothing of HTTP or time.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from agentspec.errors import AgentspecError
from agentspec.replay.schema import AssistantMessage, InputMessage, Session, Turn

Message = dict[str, Any]


class ConversationError(AgentspecError):
    """The session can't go on: the live answer doesn't fit what comes next, and no recorded answer can stand in."""


class Conversation:
    """Messages of one session so far. `prompt(turn)` before each request, `answer(turn, message)` after it."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._pending: tuple[Turn, Message, bool] | None = None
        """The last turn, the model's answer to it, and whether history is live: whether the answer goes back depends on
        the turn that follows."""

    def fork(self) -> Conversation:
        """Another one that goes on from here."""
        other = Conversation()
        other._messages, other._pending = list(self._messages), self._pending
        return other

    def prompt(self, turn: Turn) -> tuple[list[Message], bool]:
        """All messages of this turn's request, and whether the answer before it had to be replaced by the recorded one.

        Raises ConversationError when no answer fits."""
        assert turn.messages is not None
        diverged = False
        new = turn.messages
        if self._pending is not None:
            before, answer, live = self._pending
            recorded = before.recorded_message
            ids: dict[int, str] = {}
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
                    f"the model made {len(answer.get('tool_calls', []))} usable tool calls where {num_results} results follow, "
                    "and the turn has no recorded answer to fall back on"
                )
            self._messages.append(answer)
            self._messages += [input_message(message, ids.get(index)) for index, message in enumerate(new)]
        else:
            self._messages += [input_message(message, None) for message in new]
        return list(self._messages), diverged

    def answer(self, turn: Turn, message: Message, *, live: bool) -> None:
        """The model's answer to the last prompt, as an assistant message. `live`: it is what goes back, not the
        recorded one."""
        self._pending = (turn, message, live)


def keeps_live_history(session: Session, history: str, num_answers: int) -> bool:
    """Whether a session is replayed with live history, where later prompts hold the answers to its first `num_answers`
    turns.

    Raises ValueError when recorded history is asked for and an answer that a later turn needs wasn't recorded."""
    if history == "live":
        return True
    for index, turn in enumerate(session.turns[:num_answers]):
        if turn.messages is not None and turn.recorded_message is None:
            if history == "auto":
                return True
            raise ValueError(
                f"session {session.session_id!r}: turns[{index}].expect.message is missing, and history is to be recorded"
            )
    return False


def recorded_message(message: AssistantMessage) -> Message:
    """A recorded answer as a request holds it."""
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
    """A client's message as a request holds it; `call_id` takes the place of the recorded one."""
    body: Message = msgspec.to_builtins(message)
    if call_id is not None:
        body["tool_call_id"] = call_id
    return body


def _live_ids(answer: Message, new: list[InputMessage], recorded: AssistantMessage | None) -> dict[int, str] | None:
    """Call ids for the tool messages among `new`, by index; None when the live answer and the recorded results don't
    fit.

    The n-th live call takes the place of the n-th recorded one. Results without a recorded call belong to the calls in
    their order."""
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
    """A call's arguments; None when they are no JSON object, or one that no prompt can hold."""
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
