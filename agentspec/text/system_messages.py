"""Place system messages where the template accepts them: leading ones together, later ones in place or as marked text.

The placement never depends on messages after the next answer, and never changes for earlier messages, so each turn's
prompt is a prefix of the next one's. Knows nothing of tokens, and of a template only the result of a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentspec.errors import RequestError
from agentspec.text.messages import RESULT_CLOSE, RESULT_OPEN, Message, is_question
from agentspec.text.sentinels import OWN_TAG

MARK_OPEN, MARK_CLOSE = "<system-reminder>\n", "\n</system-reminder>"
_GAP = "\n\n"

_RULE, _QUESTION, _THOUGHT, _CALLED, _RESULT, _LATER, _NEXT = map(chr, range(0xE001, 0xE008))
"""Texts of the probes: private-use characters, which no template writes by itself."""


@dataclass(frozen=True, slots=True)
class SystemPlaces:
    """How a template treats system messages after the first message."""

    in_place: bool
    """It renders them in place and does not change anything else."""
    as_result: bool
    """A plain user message counts as a new question, so that earlier thinking is dropped; one that looks like a tool
    result does not."""


def probe(render: Callable[[list[Message]], str]) -> SystemPlaces:
    """Probe a template by rendering. `render` raises RequestError for messages that the template rejects."""
    asked = [_message("system", _RULE), _message("user", _QUESTION)]
    call = {"id": _CALLED, "type": "function", "function": {"name": "f", "arguments": {"a": _CALLED}}}
    called = _message("assistant", "") | {"reasoning_content": _THOUGHT, "tool_calls": [call]}
    looped = [*asked, called, _message("tool", _RESULT) | {"tool_call_id": _CALLED}]
    answered = [*asked, _message("assistant", _CALLED) | {"reasoning_content": _THOUGHT}]

    def shown(messages: list[Message]) -> str:
        try:
            text = render(messages)
        except RequestError:
            return ""
        return "".join(character for character in text if _RULE <= character <= _NEXT)

    def keeps(before: list[Message], *behind: Message) -> bool:
        """Whether a later system message is rendered in place and changes nothing else. True for conversations that the
        template rejects with or without it."""
        plain, found = shown([*before, *behind]), shown([*before, _message("system", _LATER), *behind])
        return plain == found.replace(_LATER, "") and (
            not plain or found.endswith(_LATER + "".join(message["content"] for message in behind))
        )

    in_place = (
        keeps(asked)
        and keeps(asked[1:])
        and keeps(looped)
        and keeps(answered, _message("user", _NEXT))
        and shown(asked) != ""
    )
    alone, wrapped = (shown([*answered, _message("user", text)]) for text in (_LATER, _wrapped(_LATER)))
    return SystemPlaces(in_place, as_result=_THOUGHT in wrapped and _THOUGHT not in alone)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a message's own text is now: message index, and start and end in its content."""

    index: int
    start: int
    end: int


@dataclass(slots=True)
class Arranged:
    """Messages as they will be rendered, and where the text of each incoming message is in them."""

    places: SystemPlaces
    messages: list[Message] = field(default_factory=list)
    _place_of: list[_Place] = field(default_factory=list)
    _held: list[int] = field(default_factory=list)
    """System messages after an answer, held until the next message: indices into `_place_of`, where their message index
    is still unknown."""
    _held_text: str = ""

    @classmethod
    def of(cls, messages: Sequence[Message], places: SystemPlaces) -> Arranged:
        """Arrange normalised messages, with each system message where the template accepts it.

        The text of a later one is appended to the user message or tool result before it. After an answer it is
        prepended to the next user message. Without one it becomes a user message of its own, in the form of a tool
        result if a plain one would count as a new question."""
        arranged = cls(places)
        for message in messages:
            if message["role"] == "system":
                arranged._place_system(message)
            else:
                arranged._place_message(message)
        arranged._release()
        return arranged

    def move_mark(self, index: int, characters: int | None) -> tuple[int, int | None]:
        """Return the new (message index, characters) of a mark in the incoming messages."""
        place = self._place_of[index]
        if characters is not None:
            return place.index, min(place.start + characters, place.end)
        return place.index, None if place.end == len(_content(self.messages[place.index])) else place.end

    def _place_system(self, message: Message) -> None:
        text = _content(message)
        last = self.messages[-1] if self.messages else None
        if last is None or (self.places.in_place and self._has_begun):
            self._add(message)
        elif not text.strip():
            end = len(_content(last))
            self._place_of.append(_Place(len(self.messages) - 1, end, end))
        elif not self._has_begun:
            self._append(text, text)
        elif last["role"] == "assistant":
            self._hold(text)
        else:
            self._append(MARK_OPEN + text + MARK_CLOSE, text)

    @property
    def _has_begun(self) -> bool:
        return any(message["role"] != "system" for message in self.messages[:2])

    def _place_message(self, message: Message) -> None:
        if self._held and is_question(message):
            front = len(self._held_text) + len(_GAP)
            message = {**message, "content": self._held_text + _GAP + _content(message)}
            self._settle(0)
        else:
            self._release()
            front = 0
        self._add(message, front)

    def _add(self, message: Message, front: int = 0) -> None:
        self._place_of.append(_Place(len(self.messages), front, len(_content(message))))
        self.messages.append(message)

    def _append(self, shown: str, text: str) -> None:
        """Append `shown`, which contains the system message's `text`, to the last message. A closing result tag stays
        at the end."""
        last = self.messages[-1]
        before, close = _content(last), ""
        if last["role"] == "user" and not is_question(last):
            before, close = before.rstrip().removesuffix(RESULT_CLOSE).rstrip(), "\n" + RESULT_CLOSE
        head = before + _GAP if before.strip() else ""
        start = len(head) + shown.index(text)
        self._place_of.append(_Place(len(self.messages) - 1, start, start + len(text)))
        self.messages[-1] = {**last, "content": head + shown + close}

    def _hold(self, text: str) -> None:
        head = self._held_text + _GAP if self._held else ""
        start = len(head) + len(MARK_OPEN)
        self._held.append(len(self._place_of))
        self._place_of.append(_Place(-1, start, start + len(text)))
        self._held_text = head + MARK_OPEN + text + MARK_CLOSE

    def _release(self) -> None:
        """Turn the held system messages into a message of their own."""
        if not self._held:
            return
        has_question = any(is_question(message) for message in self.messages)
        message = _message(
            "user", _wrapped(self._held_text) if self.places.as_result and has_question else self._held_text
        )
        self._settle(message["content"].index(self._held_text))
        self.messages.append(message)

    def _settle(self, front: int) -> None:
        """Set the places of the held messages: in the message that is added next, `front` characters after its
        start."""
        for number in self._held:
            place = self._place_of[number]
            self._place_of[number] = _Place(len(self.messages), front + place.start, front + place.end)
        self._held, self._held_text = [], ""


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _content(message: Message) -> str:
    content: str = message.get("content", "")
    return content


def _wrapped(text: str) -> str:
    return f"{RESULT_OPEN}{OWN_TAG}\n{text}\n{OWN_TAG}{RESULT_CLOSE}"
