"""A checkpoint's own chat template: messages and tools to prompt text, and where later prompts may diverge from it.

Owns template files and breakpoints as character offsets. Knows nothing of tokens, turns or what the template's markup
means: breakpoints are found by rendering variants and comparing them.
"""

from __future__ import annotations

import hashlib
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
_PARTING = "\ue000"
"""A character for private use, with which no real text goes on."""
_SYSTEM_BLOCKS_BYTES = 16 << 20


class ToolsMark(msgspec.Struct, frozen=True, tag="tools"):
    """Behind the first `count` tools."""

    count: int


class MessageMark(msgspec.Struct, frozen=True, tag="message"):
    """Behind a message, or behind the first `characters` of its content."""

    message: int
    """Its index, after tool results were brought into the order of their calls."""
    characters: int | None = None


CacheMark = ToolsMark | MessageMark
"""A place where a client says that its later prompts may part from this one."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    text: str
    """Its own added tokens are sentinels, where the template has any (text/sentinels.py)."""
    marks: list[tuple[int, CheckpointKind]]
    """(character offset, kind), ascending. The text before each offset is the beginning of what other requests render,
    too: SYSTEM, of every conversation with the same system text and tools; USER, of this conversation's later turns;
    BRANCH and GRID, of what parts from it behind the client's own marks."""
    marked_end: int
    """Offset of the client's last mark; 0 when it set none."""
    system: tuple[bytes, str]
    """The system block that was found for these messages, with its key: for `remember`."""


class ChatTemplate:
    """A compiled template with its variables."""

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, str] | None = None,
        origin: str = "chat template",
        sentinels: Sentinels | None = None,
    ) -> None:
        """`tool_source` is used instead of `source` when the request has tools; `variables` are special tokens by name;
        `sentinels` are written for added tokens of the template's own, None: their text.

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
            """Variables that the template takes from outside."""
        except (
            Exception
        ) as error:  # what it nests too deep, or computes, fails in jinja and in Python's compiler in many ways
            raise CheckpointError(f"{origin}: not a valid chat template: {error}") from error
        self.source = source if tool_source is None else tool_source
        """The source that teaches the tool-call dialect."""
        self.origin = origin
        """What errors call the template."""
        self._system_blocks: SizedCache[bytes, str] = SizedCache(_SYSTEM_BLOCKS_BYTES)

    def _compiled(self, environment: ImmutableSandboxedEnvironment, source: str) -> Template:
        tree = environment.parse(source)
        write_sentinels(tree, self._sentinels, self._variables)
        return environment.from_string(tree)

    def with_sentinels(self, sentinels: Sentinels) -> ChatTemplate:
        """The same template, that writes sentinels for its own added tokens."""
        source, tool_source = self._sources
        return ChatTemplate(
            source, tool_source=tool_source, variables=self._variables, origin=self.origin, sentinels=sentinels
        )

    @classmethod
    def from_file(cls, file: Path, variables: Mapping[str, str] | None = None) -> ChatTemplate:
        """The template in a file. Raises CheckpointError when it can't be read or used."""
        return cls(files.read_text(file), variables=variables, origin=str(file))

    @classmethod
    def from_directory(cls, path: Path | str, *, instead: Path | None = None) -> ChatTemplate | None:
        """The template of a checkpoint directory: chat_template.jinja, else tokenizer_config.json's (one, or several by
        name).

        instead: a file whose template takes its place. None when there is none. Raises CheckpointError when it can't be
        used."""
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
        """Render normalised messages (text/messages.py). `marked`: places that become marks beside the template's own.
        `continues`: the text ends where the last message's content does, so that the answer goes on from there.

        Raises RequestError with the template's own words when it refuses the messages."""
        kwargs = dict(template_kwargs or {})
        for name in _OWN_VARIABLES:
            if name in kwargs:
                raise RequestError(f"chat_template_kwargs.{name}", kwargs[name], "is set by the request itself")
        text = (
            self._begun(messages, tools, kwargs)
            if continues
            else self.text(messages, tools, add_generation_prompt, kwargs)
        )
        system = self._system_block(text, messages, tools, kwargs)
        offsets = (
            (common_length(text, system[1]), CheckpointKind.SYSTEM),
            (self._user_end(text, messages, tools, kwargs), CheckpointKind.USER),
        )
        asked = [(self._parting_end(text, messages, tools, kwargs, mark), _kind(mark, messages)) for mark in marked]
        marks = sorted(mark for mark in (*offsets, *asked) if mark[0] > 0)
        return RenderedPrompt(text, marks, max((offset for offset, _ in asked), default=0), system)

    def remember(self, rendered: RenderedPrompt) -> None:
        """Keep what was found out for a prompt that is served: the next one that begins like it needs it again."""
        key, block = rendered.system
        self._system_blocks.put(key, block, held_bytes(key) + held_bytes(block))

    @cached_property
    def system_places(self) -> SystemPlaces:
        """What the template does with system messages behind the first message."""
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
        """What the template writes, and nothing about it. Raises RequestError like `render`."""
        template: Template = self._template if tools is None else self._tool_template
        written = {
            NAMED + name: kwargs.get(name, self._sentinels.write(text)) for name, text in self._variables.items()
        }
        variables = {**self._variables, **kwargs, **written, "messages": messages, "tools": tools, "documents": None}
        try:
            text = template.render(variables, add_generation_prompt=add_generation_prompt)
        except (
            Exception
        ) as error:  # template code is the checkpoint's: whatever it raises, it raises about these messages
            roles = [message["role"] for message in messages]
            raise RequestError(
                "messages", roles, f"the chat template refuses them: {self._sentinels.spell(str(error))}"
            ) from error
        return self._sentinels.write_own(show_raw(text, raw_arguments(messages)), RESULT_OPEN, RESULT_CLOSE)

    def _begun(self, messages: Sequence[Message], tools: Tools | None, kwargs: Mapping[str, Any]) -> str:
        """What the template writes up to the end of the last message's content, spaces at its end included, which
        templates trim."""
        last = messages[-1]
        text = self.text(
            [*messages[:-1], {**last, "content": last.get("content", "") + _PARTING}], tools, False, kwargs
        )
        if _PARTING not in text:
            raise RequestError(
                "messages",
                last["role"],
                "the chat template doesn't show the content of the last message, so it can't be continued",
            )
        return text[: text.rindex(_PARTING)]

    def _system_block(
        self, text: str, messages: Sequence[Message], tools: Tools | None, kwargs: dict[str, Any]
    ) -> tuple[bytes, str]:
        """What any conversation with this system text and these tools begins with, and its key."""
        size = 0
        while size < len(messages) and messages[size]["role"] == "system":
            size += 1
        leading = list(messages[:size])
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
            return ""  # a template that refuses so short a conversation has no block that we could know
        return first[: common_length(first, second)]

    def _user_end(self, text: str, messages: Sequence[Message], tools: Tools | None, kwargs: dict[str, Any]) -> int:
        """Length of what this prompt shares with a later one that asks again; 0 when there is no real user message.

        That is everything up to the last real user message, and the words that open any answer to it: a template may
        render the rest anew once another question follows."""
        size = len(messages)
        while size and not is_question(messages[size - 1]):
            size -= 1
        if not size:
            return 0
        answer, question = _PROBES
        later = [*messages[:size], {"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        return self._shared_length(text, later, tools, kwargs)

    def _parting_end(
        self, text: str, messages: Sequence[Message], tools: Tools | None, kwargs: dict[str, Any], mark: CacheMark
    ) -> int:
        """Length of what this prompt shares with ones that are the same up to the mark and then go on otherwise.

        Templates write turns before the last question otherwise than those after it, so what goes on is tried without a
        question and with one."""
        question: Message = {"role": "user", "content": _PARTING}
        others: list[list[Message]]
        if isinstance(mark, ToolsMark):
            tools = None if tools is None else tools[: mark.count]
            others = [[{"role": "system", "content": _PARTING}, question]]
        else:
            kept = list(messages[: mark.message + 1])
            if mark.characters is not None:
                kept[-1] = {**kept[-1], "content": kept[-1].get("content", "")[: mark.characters] + _PARTING}
            others = [kept, [*kept, question]]
        return max(self._shared_length(text, other, tools, kwargs) for other in others)

    def _shared_length(self, text: str, other: Sequence[Message], tools: Tools | None, kwargs: dict[str, Any]) -> int:
        try:
            return common_length(text, self.text(other, tools, False, kwargs))
        except RequestError:
            return 0  # a template that refuses such a conversation tells us nothing


def _kind(mark: CacheMark, messages: Sequence[Message]) -> CheckpointKind:
    """What stands at a client's mark is kept like the template's own block, or like an observed branching point.

    A mark behind a prompt's last tool results moves on with each turn of the loop: what it leaves behind is the first
    to go."""
    if isinstance(mark, ToolsMark) or all(message["role"] == "system" for message in messages[: mark.message + 1]):
        return CheckpointKind.SYSTEM
    moves_on = mark.characters is None and mark.message == len(messages) - 1 and not is_question(messages[-1])
    return CheckpointKind.GRID if moves_on else CheckpointKind.BRANCH
