"""Render recorded sessions to token ids, for dry runs and forced outputs.

Follows Qwen3.5's chat template (framing, XML tool calls, think blocks and which of them stay in history), with our own
wording for fixed prose. Each message is encoded once, and a prompt is the concatenation. This equals encoding the whole
text when `<|im_start|>` and `<|im_end|>` are tokens of the BPE. Knows no cache and no engine.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentspec.errors import ConfigError
from agentspec.replay.conversation import read_object
from agentspec.replay.encoders import Encoder
from agentspec.replay.options import TemplateMode
from agentspec.replay.schema import AssistantMessage, InputMessage, ReplayFile, Session, Turn
from agentspec.replay.token_runs import TokenRuns
from agentspec.types import Breakpoint, CheckpointKind

_OUTPUT_SEED = 1_000_003
"""Seed offset of outputs without hash ids in token-run traces, so that their blocks differ from those of prompts."""

_USER_OPENINGS = ("<|im_start|>user\na", "<|im_start|>user\n(")
_PLAIN_ANSWER = "<|im_start|>assistant\na"

_TOOLS_HEAD = "# Tools\n\nThese functions can be called, one JSON object a line:\n\n<tools>"
_TOOLS_TAIL = """
</tools>

To call a function, end the answer with a block of exactly this shape and nothing after it:

<tool_call>
<function=name_of_the_function>
<parameter=name_of_the_first_parameter>
its value
</parameter>
<parameter=name_of_the_second_parameter>
a value may
take several lines
</parameter>
</function>
</tool_call>

Rules:
- The function block stands inside <tool_call></tool_call> tags, each parameter inside its own tags.
- Required parameters must be given.
- Reasons for a call may come before it, in plain words, never after it.
- Where no function fits, answer from what is known, and do not mention functions to the user."""


@dataclass(frozen=True, slots=True)
class RenderedTurn:
    prompt_ids: array[int]
    output_ids: array[int]
    """The recorded answer as the model would have generated it, including its end token; empty when none was
    recorded."""
    breakpoints: list[Breakpoint]
    """Ascending offsets in the prompt: SYSTEM at the end of system prompt and tools, USER at the end of the last user
    message."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A recorded answer, encoded in both forms that history may contain."""

    generated: array[int]
    """Generation prompt, output and the newline after it."""
    without_think: array[int]


class TraceRenderer:
    """Renders the sessions of a file, in any order. Caches encoded system prompts only, which sessions share."""

    def __init__(self, encoder: Encoder, template_mode: TemplateMode, *, token_runs: TokenRuns | None = None) -> None:
        self._encoder = encoder
        self._drops_think = template_mode == "qwen35"
        self._token_runs = token_runs or TokenRuns(0, 100, 150_000)
        self._systems: dict[str, array[int]] = {}

    def turns(self, file: ReplayFile, session: Session) -> Iterator[RenderedTurn]:
        """Yield the session's turns in order. Raises ConfigError when an answer that a later prompt needs was not
        recorded."""
        if session.turns[0].messages is None:
            yield from self._token_run_turns(session)
            return
        thinks = any(
            turn.recorded_message is not None and turn.recorded_message.reasoning_content is not None
            for turn in session.turns
        )
        opening = self._encoder.encode("<|im_start|>assistant\n<think>\n" + ("" if thinks else "\n</think>\n\n"))
        history = _History(
            self._system(file.tools(session), session.turns[0]),
            drops_think=self._drops_think,
            shared_openings=(
                _common_length(*map(self._encoder.encode, _USER_OPENINGS)),
                _common_length(opening, self._encoder.encode(_PLAIN_ANSWER)),
            ),
        )
        for index, turn in enumerate(session.turns):
            for text, is_query in _message_blocks(turn.messages or []):
                history.add_message(self._encoder.encode(text), is_query=is_query)
            recorded = turn.recorded_message
            if recorded is None:
                if index + 1 < len(session.turns):
                    raise ConfigError(
                        "file", file.path, f"session {session.session_id!r}: turns[{index}].expect.message is missing"
                    )
                yield RenderedTurn(history.ids + opening, array("i"), history.breakpoints())
                return
            output = self._encoder.encode(_answer_text(recorded, thinks=thinks) + "<|im_end|>")
            yield RenderedTurn(history.ids + opening, output, history.breakpoints())
            history.add_answer(self._answer(recorded, opening, output))

    def _system(self, tools: list[dict[str, Any]], first: Turn) -> array[int]:
        text = _system_text(tools, first)
        if text not in self._systems:
            self._systems[text] = self._encoder.encode(text)
        return self._systems[text]

    def _answer(self, recorded: AssistantMessage, opening: array[int], output: array[int]) -> _Answer:
        generated = opening + output + self._encoder.encode("\n")
        if not self._drops_think:
            return _Answer(generated, generated)
        plain = "<|im_start|>assistant\n" + _body_text(recorded) + "<|im_end|>\n"
        return _Answer(generated, self._encoder.encode(plain))

    def _token_run_turns(self, session: Session) -> Iterator[RenderedTurn]:
        outputs = TokenRuns(self._token_runs.seed + _OUTPUT_SEED, self._token_runs.low, self._token_runs.high)
        for index, turn in enumerate(session.turns):
            if turn.expect is not None and turn.expect.hash_ids is not None:
                output = self._token_runs.answer(turn)
            else:
                unique = int.from_bytes(f"{session.session_id}/{index}".encode(), "little") % (2**61 - 1)
                output = outputs.block(unique, turn.recorded_output_tokens or 0)
            yield RenderedTurn(self._token_runs.prompt(turn), output, [])


class _History:
    """The prompt so far, without the generation prompt. Everything before the last user message is final."""

    def __init__(self, system: array[int], *, drops_think: bool, shared_openings: tuple[int, int]) -> None:
        """`shared_openings`: number of leading tokens that all user messages share, and that all answers share."""
        self.ids = array("i", system)
        self._user_opening, self._answer_opening = shared_openings
        self._drops_think = drops_think
        self._system_end = len(system)
        self._query_end = 0
        """Token offset of the end of the last user message."""
        self._since_query: list[array[int] | _Answer] = []

    def add_message(self, ids: array[int], *, is_query: bool) -> None:
        """Add a message. `is_query`: it is the user's own, not a tool result, so all earlier answers become history."""
        if is_query:
            if self._drops_think:
                del self.ids[max(self._query_end, self._system_end) :]
                for part in self._since_query:
                    self.ids += part.without_think if isinstance(part, _Answer) else part
            self._since_query = []
            self.ids += ids
            self._query_end = len(self.ids)
        else:
            self.ids += ids
            self._since_query.append(ids)

    def add_answer(self, answer: _Answer) -> None:
        self.ids += answer.generated
        self._since_query.append(answer)

    def breakpoints(self) -> list[Breakpoint]:
        """Return the breakpoints of the prompt with the generation prompt."""
        points = [Breakpoint(self._system_end + self._user_opening, CheckpointKind.SYSTEM)] if self._system_end else []
        if self._query_end:
            points.append(Breakpoint(self._query_end + self._answer_opening, CheckpointKind.USER))
        return points


def _common_length(first: array[int], second: array[int]) -> int:
    """Return the length of the common prefix of two encodings."""
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _system_text(tools: list[dict[str, Any]], first: Turn) -> str:
    message = (first.messages or [])[0]
    system = _content(message).strip() if message.role in ("system", "developer") else ""
    if not tools:
        return f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"<|im_start|>system\n{_TOOLS_HEAD}{listed}{_TOOLS_TAIL}" + (f"\n\n{system}" if system else "") + "<|im_end|>\n"
    )


def _message_blocks(messages: list[InputMessage]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is the user's own message) of each block. Consecutive tool results share one block."""
    results: list[str] = []
    for message in messages:
        text = _content(message).strip()
        if message.role == "tool":
            results.append(f"\n<tool_response>\n{text}\n</tool_response>")
            continue
        if results:
            yield f"<|im_start|>user{''.join(results)}<|im_end|>\n", False
            results = []
        if message.role == "user":
            is_result = text.startswith("<tool_response>") and text.endswith("</tool_response>")
            yield f"<|im_start|>user\n{text}<|im_end|>\n", not is_result
    if results:
        yield f"<|im_start|>user{''.join(results)}<|im_end|>\n", False


def _content(message: InputMessage) -> str:
    return message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)


def _answer_text(message: AssistantMessage, *, thinks: bool) -> str:
    """Return the text that the model generates after the generation prompt, without its end token."""
    think = f"{(message.reasoning_content or '').strip()}\n</think>\n\n" if thinks else ""
    return think + _body_text(message)


def _body_text(message: AssistantMessage) -> str:
    content = (message.content or "").strip()
    calls = "\n".join(_call_text(call.function.name, call.function.arguments) for call in message.tool_calls)
    return content + ("\n\n" if content and calls else "") + calls


def _call_text(name: str, arguments: str) -> str:
    """Return the text of a call. Arguments that are not a JSON object replace the parameters, as in agentspec's
    server."""
    values = read_object(arguments if arguments.strip() else "{}")
    if values is None:
        parameters = f"{arguments}\n"
    else:
        parameters = "".join(
            f"<parameter={key}>\n{_value_text(value)}\n</parameter>\n" for key, value in values.items()
        )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _value_text(value: Any) -> str:
    """Return the text of a value as in Qwen3.5's template: lists and objects as JSON, everything else by `str`, so that
    true becomes `True`."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
