"""Renders sessions as the model reads them: token ids and a mask of the tokens that the model generates. Reimplements
chat_template.jinja in plain Python, because training needs millions of tokens per second.

Knows nothing of how sessions are made or packed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from scripts.tiny_agent.domain import Example

READ, REPEATED, WRITTEN = 0, 1, 2
"""Values of the mask. WRITTEN: the model generates this token. REPEATED: an answer of an earlier turn in a session with
thinking, shown without its reasoning. READ: everything else, including the tokens that open an answer (`<think>`, or an
empty think block)."""

_CALL_FORMAT = "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
_ANSWER = "<|im_start|>assistant\n"
_OPEN_THINK = "<think>\n"
_EMPTY_THINK = "<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Rendered:
    ids: npt.NDArray[np.uint16]
    """[tokens]"""
    mask: npt.NDArray[np.uint8]
    """[tokens]: READ, REPEATED or WRITTEN."""


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of the template's text. Results of tools that follow one another are one message there."""

    text: str
    opening: str = ""
    """What the message begins with before the first token that the mask counts."""
    value: int = READ
    """Of the mask, for the rest of an answer."""


def conversation_text(example: Example, num_turns: int) -> str:
    """The chat template's output for the first turns, including gold answers, without a generation prompt.

    Raises ValueError when `num_turns` is not one of 1 to the number of turns, or when an answer has no reasoning in a
    session that thinks, or some in one that doesn't."""
    return _text(_messages(example, num_turns))


def render(example: Example, tokenizer: Tokenizer, num_turns: int) -> Rendered:
    """The first `num_turns` turns of one session; see `render_all`."""
    return render_all([(example, num_turns)], tokenizer)[0]


def render_all(cuts: Iterable[tuple[Example, int]], tokenizer: Tokenizer) -> list[Rendered]:
    """Render each session, cut after its number of turns. The ids equal those of encoding the whole text at once.

    Raises ValueError as `conversation_text` does, and for a session whose text holds a token that only the template may
    write."""
    prepared = [(example.session_id, _messages(example, num_turns)) for example, num_turns in cuts]
    encoded = tokenizer.encode_batch_fast([_text(messages) for _, messages in prepared], add_special_tokens=False)
    marks = _Marks(tokenizer)
    return [
        marks.rendered(name, messages, encoding.ids)
        for (name, messages), encoding in zip(prepared, encoded, strict=True)
    ]


class _Marks:
    """Finds the answers among the ids. Every message begins with the one token and ends with the other, and the newline
    that ends an opening ends its piece of the text (see tokenizer.py), so that openings are the same tokens
    everywhere."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._start = tokenizer.token_to_id("<|im_start|>")
        self._end = tokenizer.token_to_id("<|im_end|>")
        openings = ["", _ANSWER, _ANSWER + _OPEN_THINK, _ANSWER + _EMPTY_THINK]
        self._lengths = {text: len(tokenizer.encode(text, add_special_tokens=False).ids) for text in openings}

    def rendered(self, session_id: str, messages: Sequence[_Message], token_ids: list[int]) -> Rendered:
        ids = np.array(token_ids, dtype=np.uint16)
        starts, ends = np.flatnonzero(ids == self._start).tolist(), np.flatnonzero(ids == self._end).tolist()
        if not len(starts) == len(ends) == len(messages):
            raise ValueError(f"session {session_id!r}: its text holds tokens that begin or end a message")
        mask = np.full(len(ids), READ, dtype=np.uint8)
        for start, end, message in zip(starts, ends, messages, strict=True):
            mask[start + self._lengths[message.opening] : end + 1] = message.value
        return Rendered(ids, mask)


def _text(messages: Sequence[_Message]) -> str:
    return "".join([message.text for message in messages])


def _messages(example: Example, num_turns: int) -> list[_Message]:
    if not 1 <= num_turns <= len(example.turns):
        raise ValueError(
            f"num_turns: {num_turns} is not one of 1 to {len(example.turns)}, the turns of session "
            f"{example.session_id!r}"
        )
    messages = [_system(example)] if example.tools or example.system else []
    for index, turn in enumerate(example.turns[:num_turns]):
        messages.append(_Message(f"<|im_start|>user\n{turn.user.strip()}<|im_end|>\n"))
        for is_result, group in groupby(turn.messages, key=_is_result):
            if is_result:
                messages.append(_results(group))
            else:
                messages += [_answer(message, example, is_last_turn=index == num_turns - 1) for message in group]
    return messages


def _is_result(message: dict[str, Any]) -> bool:
    return bool(message["role"] == "tool")


def _answer(message: dict[str, Any], example: Example, *, is_last_turn: bool) -> _Message:
    reasoning = (message.get("reasoning_content") or "").strip()
    if bool(reasoning) != example.thinking:
        raise ValueError(
            f"session {example.session_id!r}: thinking is {example.thinking}, but an answer's reasoning is "
            f"{reasoning!r}"
        )
    text = f"{_answer_text(message)}<|im_end|>\n"
    if not is_last_turn:
        return _Message(_ANSWER + text, _ANSWER, REPEATED if example.thinking else WRITTEN)
    if example.thinking:
        opening = _ANSWER + _OPEN_THINK
        return _Message(f"{opening}{reasoning}\n</think>\n\n{text}", opening, WRITTEN)
    opening = _ANSWER + _EMPTY_THINK
    return _Message(opening + text, opening, WRITTEN)


def _system(example: Example) -> _Message:
    system = (example.system or "").strip()
    if example.tools:
        lines = "".join([f"{_json(tool['function'])}\n" for tool in example.tools])
        tools = (
            f"# Tools\n\n<tools>\n{lines}</tools>\n\nTo call tools, write one block for each call:\n\n{_CALL_FORMAT}"
        )
        system = f"{tools}\n\n{system}" if system else tools
    return _Message(f"<|im_start|>system\n{system}<|im_end|>\n")


def _results(messages: Iterable[dict[str, Any]]) -> _Message:
    results = "".join([f"\n<tool_response>\n{message['content'].strip()}\n</tool_response>" for message in messages])
    return _Message(f"<|im_start|>user{results}<|im_end|>\n")


def _answer_text(message: dict[str, Any]) -> str:
    content: str = (message.get("content") or "").strip()
    calls = "\n".join([_call(call["function"]) for call in message.get("tool_calls") or ()])
    return f"{content}\n\n{calls}" if content and calls else content or calls


def _call(function: dict[str, str]) -> str:
    arguments: dict[str, Any] = json.loads(function["arguments"])
    values = "".join(
        [
            f"<parameter={key}>\n{value if isinstance(value, str) else _json(value)}\n</parameter>\n"
            for key, value in arguments.items()
        ]
    )
    return f"<tool_call>\n<function={function['name']}>\n{values}</function>\n</tool_call>"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
