"""Render messages and tools with a checkpoint's chat template, and find where later prompts may diverge.

Owns template files and breakpoints as character offsets. Knows nothing of tokens, turns or the meaning of the
template's markup: breakpoints are found by rendering variants and comparing them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Template, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentspec import files
from agentspec.errors import CheckpointError, RequestError
from agentspec.text.assets import named_tokens, read_object
from agentspec.text.common_length import common_length
from agentspec.text.messages import RESULT_CLOSE, RESULT_OPEN, Message, is_question, raw_arguments
from agentspec.text.raw_arguments import show_raw
from agentspec.text.sentinels import Sentinels
from agentspec.text.sized_cache import SizedCache, held_bytes
from agentspec.text.system_messages import SystemPlaces, probe
from agentspec.text.template_environment import template_environment
from agentspec.text.template_sentinels import NAMED, write_sentinels
from agentspec.types import CheckpointKind

Tools = Sequence[Mapping[str, Any]]

_TEMPLATE_FILE = "chat_template.jinja"
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
_PROBES = ("a", "b")
_DIVERGENCE = "\ue000"
"""A private-use character, so that a probe text differs from any real text at this place."""
_SYSTEM_BLOCKS_BYTES = 16 << 20


class ToolsMark(msgspec.Struct, frozen=True, tag="tools"):
    """A mark after the first `count` tools."""

    count: int


class MessageMark(msgspec.Struct, frozen=True, tag="message"):
    """A mark after a message, or after the first `characters` of its content."""

    message: int
    """Index of the message, once tool results are in the order of their calls."""
    characters: int | None = None


CacheMark = ToolsMark | MessageMark
"""A place at which, according to the client, later prompts may diverge from this one."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    text: str
    """Added tokens that the template itself writes are sentinels, if it has any (text/sentinels.py)."""
    marks: list[tuple[int, CheckpointKind]]
    """(character offset, kind), ascending. The text before an offset is a prefix that other requests share. SYSTEM: all
    conversations with the same system text and tools. USER: later turns of this conversation. BRANCH and GRID: prompts
    that diverge after the client's own marks."""
    marked_end: int
    """Offset of the client's last mark; 0 when it set none."""
    system: tuple[bytes, str]
    """(key, text) of the system block of these messages, for `cache_system_block`."""


class ChatTemplate:
    """A compiled chat template and its variables."""

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, str] | None = None,
        origin: str = "chat template",
        sentinels: Sentinels | None = None,
    ) -> None:
        """`tool_source` replaces `source` when the request has tools. `variables`: special tokens by name. `sentinels`:
        written for the template's own added tokens; None: the tokens' text is written.

        Raises CheckpointError naming `origin` when a source is no valid template."""
        self._variables = dict(variables or {})
        self._sentinels = sentinels or Sentinels()
        self._sources = (source, tool_source)
        environment = template_environment()
        try:
            self._template = self._compiled(environment, source)
            self._tool_template = self._template if tool_source is None else self._compiled(environment, tool_source)
            sources = (source, tool_source or "")
            self.reads = frozenset(
                name for text in sources for name in meta.find_undeclared_variables(environment.parse(text))
            )
            """Undeclared variables of the template, which the request may set."""
        except Exception as error:  # jinja and Python's compiler fail in many ways, e.g. on deep nesting
            raise CheckpointError(f"{origin}: not a valid chat template: {error}") from error
        self.source = source if tool_source is None else tool_source
        """The source that is used with tools; it shows the tool-call dialect."""
        self.origin = origin
        """Name of the template in errors."""
        self._system_blocks: SizedCache[bytes, str] = SizedCache(_SYSTEM_BLOCKS_BYTES)

    def _compiled(self, environment: ImmutableSandboxedEnvironment, source: str) -> Template:
        tree = environment.parse(source)
        write_sentinels(tree, self._sentinels, self._variables)
        return environment.from_string(tree)

    def with_sentinels(self, sentinels: Sentinels) -> ChatTemplate:
        """Return the same template, writing sentinels for its own added tokens."""
        source, tool_source = self._sources
        return ChatTemplate(
            source, tool_source=tool_source, variables=self._variables, origin=self.origin, sentinels=sentinels
        )

    @classmethod
    def from_file(cls, file: Path, variables: Mapping[str, str] | None = None) -> ChatTemplate:
        """Load the template in a file. Raises CheckpointError when it can't be read or used."""
        return cls(files.read_text(file), variables=variables, origin=str(file))

    @classmethod
    def from_directory(cls, path: Path | str, *, instead: Path | None = None) -> ChatTemplate | None:
        """Load the template of a checkpoint directory: chat_template.jinja, else the one in tokenizer_config.json (a
        string, or a list by name). None when the directory has no template.

        `instead`: a template file to use in its place. Raises CheckpointError when the template can't be used."""
        directory = Path(path)
        config = read_object(directory / "tokenizer_config.json")
        variables = named_tokens(config)
        file = directory / _TEMPLATE_FILE if instead is None else instead
        if instead is not None or files.is_there(file):
            return cls.from_file(file, variables)
        declared = config.get("chat_template")
        if declared is None:
            return None
        origin = f"{directory / 'tokenizer_config.json'}: chat_template"
        if isinstance(declared, str):
            return cls(declared, variables=variables, origin=origin)
        try:
            by_name = {entry["name"]: entry["template"] for entry in declared}
            default = by_name["default"]
        except (TypeError, KeyError) as error:
            raise CheckpointError(
                f"{origin}: must be a string, or a list of {{name, template}} with one named 'default'"
            ) from error
        return cls(default, tool_source=by_name.get("tool_use"), variables=variables, origin=origin)

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        marked: Sequence[CacheMark] = (),
        continues: bool = False,
    ) -> RenderedPrompt:
        """Render normalised messages (text/messages.py). `marked`: client's marks, added to the template's own.
        `continues`: the prompt ends with the content of the last message, and the answer continues it.

        Raises RequestError with the template's own message when the template rejects the messages."""
        kwargs = dict(template_kwargs or {})
        for name in _OWN_VARIABLES:
            if name in kwargs:
                raise RequestError(f"chat_template_kwargs.{name}", kwargs[name], "is set by the request itself")
        text = (
            self._continued_text(messages, tools, kwargs)
            if continues
            else self.text(messages, tools, add_generation_prompt, kwargs)
        )
        system = self._system_block(text, messages, tools, kwargs)
        offsets = (
            (common_length(text, system[1]), CheckpointKind.SYSTEM),
            (self._user_end(text, messages, tools, kwargs), CheckpointKind.USER),
        )
        asked = [(self._mark_end(text, messages, tools, kwargs, mark), _kind(mark, messages)) for mark in marked]
        marks = sorted(mark for mark in (*offsets, *asked) if mark[0] > 0)
        return RenderedPrompt(text, marks, max((offset for offset, _ in asked), default=0), system)

    def cache_system_block(self, rendered: RenderedPrompt) -> None:
        """Cache the system block of a prompt that is served, for later prompts with the same system messages and
        tools."""
        key, block = rendered.system
        self._system_blocks.put(key, block, held_bytes(key) + held_bytes(block))

    @cached_property
    def system_places(self) -> SystemPlaces:
        """How the template treats system messages after the first message."""
        tools = [
            {
                "type": "function",
                "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
            }
        ]
        with_tools = probe(lambda messages: self.text(messages, tools, False, {}))
        without = probe(lambda messages: self.text(messages, None, False, {}))
        return SystemPlaces(with_tools.in_place and without.in_place, with_tools.as_result and without.as_result)

    def text(
        self, messages: Sequence[Message], tools: Tools | None, add_generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        """Render to text only, without marks. Raises RequestError like `render`."""
        template: Template = self._template if tools is None else self._tool_template
        written = {
            NAMED + name: kwargs.get(name, self._sentinels.write(text)) for name, text in self._variables.items()
        }
        variables = {**self._variables, **kwargs, **written, "messages": messages, "tools": tools, "documents": None}
        try:
            text = template.render(variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # the checkpoint's code may raise anything; it rejects these messages
            roles = [message["role"] for message in messages]
            raise RequestError(
                "messages", roles, f"the chat template refuses them: {self._sentinels.spell(str(error))}"
            ) from error
        return self._sentinels.write_own(show_raw(text, raw_arguments(messages)), RESULT_OPEN, RESULT_CLOSE)

    def _continued_text(self, messages: Sequence[Message], tools: Tools | None, kwargs: Mapping[str, Any]) -> str:
        """Render up to the end of the last message's content. Trailing spaces are kept, although templates trim
        them."""
        last = messages[-1]
        text = self.text(
            [*messages[:-1], {**last, "content": last.get("content", "") + _DIVERGENCE}], tools, False, kwargs
        )
        if _DIVERGENCE not in text:
            raise RequestError(
                "messages",
                last["role"],
                "the chat template doesn't show the content of the last message, so it can't be continued",
            )
        return text[: text.rindex(_DIVERGENCE)]

    def _system_block(
        self, text: str, messages: Sequence[Message], tools: Tools | None, kwargs: dict[str, Any]
    ) -> tuple[bytes, str]:
        """Return (key, text) of the common prefix of all conversations with this system text and these tools."""
        leading = list(itertools.takewhile(lambda message: message["role"] == "system", messages))
        key = hashlib.blake2b(json.dumps([leading, tools, kwargs], default=repr).encode()).digest()
        block = self._system_blocks.get(key)
        if block is None or not text.startswith(block):
            block = self._probe_system_block(leading, tools, kwargs)
        return key, block

    def _probe_system_block(self, leading: list[Message], tools: Tools | None, kwargs: dict[str, Any]) -> str:
        try:
            first, second = (
                self.text([*leading, {"role": "user", "content": probe}], tools, False, kwargs) for probe in _PROBES
            )
        except RequestError:
            return ""  # the template rejects a conversation this short, so the block is unknown
        return first[: common_length(first, second)]

    def _user_end(self, text: str, messages: Sequence[Message], tools: Tools | None, kwargs: dict[str, Any]) -> int:
        """Return the length of the prefix that this prompt shares with the next question's prompt; 0 without a user
        question.

        The prefix ends after the last question and the words that open any answer to it. A template may render
        everything after that differently once another question follows."""
        size = next((size for size in range(len(messages), 0, -1) if is_question(messages[size - 1])), 0)
        if not size:
            return 0
        answer, question = _PROBES
        later = [*messages[:size], {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        return self._shared_length(text, later, tools, kwargs)

    def _mark_end(
        self, text: str, messages: Sequence[Message], tools: Tools | None, kwargs: dict[str, Any], mark: CacheMark
    ) -> int:
        """Return the length of the prefix that this prompt shares with prompts that are equal up to the mark and then
        differ.

        Templates may render turns before the last question differently from turns after it, so continuations with and
        without a question are tried."""
        question: Message = {"role": "user", "content": _DIVERGENCE}
        others: list[list[Message]]
        if isinstance(mark, ToolsMark):
            tools = None if tools is None else tools[: mark.count]
            others = [[{"role": "system", "content": _DIVERGENCE}, question]]
        else:
            kept = list(messages[: mark.message + 1])
            if mark.characters is not None:
                kept[-1] = {**kept[-1], "content": kept[-1].get("content", "")[: mark.characters] + _DIVERGENCE}
            others = [kept, [*kept, question]]
        return max(self._shared_length(text, other, tools, kwargs) for other in others)

    def _shared_length(self, text: str, other: Sequence[Message], tools: Tools | None, kwargs: dict[str, Any]) -> int:
        try:
            return common_length(text, self.text(other, tools, False, kwargs))
        except RequestError:
            return 0  # the template rejects the variant, so nothing is known


def _kind(mark: CacheMark, messages: Sequence[Message]) -> CheckpointKind:
    """Return the checkpoint kind for a client's mark: SYSTEM within tools and system messages, else BRANCH.

    A mark after the last tool results of a prompt moves on with each turn of the loop. The checkpoint that it leaves
    behind is GRID, which is evicted first."""
    if isinstance(mark, ToolsMark) or all(message["role"] == "system" for message in messages[: mark.message + 1]):
        return CheckpointKind.SYSTEM
    moves_on = mark.characters is None and mark.message == len(messages) - 1 and not is_question(messages[-1])
    return CheckpointKind.GRID if moves_on else CheckpointKind.BRANCH
