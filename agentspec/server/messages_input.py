"""Converts Anthropic's messages and blocks to OpenAI's message objects, which chat templates expect, and collects the
places of cache_control.

Owns the structs of messages and blocks. Knows nothing of the rest of a body, of prompts or of HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec

from agentspec.errors import RequestError
from agentspec.text.chat_template import MessageMark


class CacheControl(msgspec.Struct, frozen=True):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    """Without effect: eviction is least recently used."""


class _Block(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class TextBlock(_Block, frozen=True, kw_only=True, tag="text"):
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(_Block, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str = ""
    """Not checked."""


class RedactedThinkingBlock(_Block, frozen=True, kw_only=True, tag="redacted_thinking"):
    data: str
    """Encrypted by another provider: it has no readable text."""


class ToolUseBlock(_Block, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any] | None = None
    """None: without arguments, as in histories of other clients."""
    cache_control: CacheControl | None = None


class ToolReferenceBlock(_Block, frozen=True, kw_only=True, tag="tool_reference"):
    """A tool of the request that a search has found."""

    tool_name: str
    cache_control: CacheControl | None = None


class ToolResultBlock(_Block, frozen=True, kw_only=True, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ToolReferenceBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def parts(self) -> list[TextBlock | ToolReferenceBlock]:
        return self.content if isinstance(self.content, list) else [TextBlock(text=self.content or "")]

    @property
    def found(self) -> list[str]:
        """Names of the tools that it refers to."""
        return [part.tool_name for part in self.parts if isinstance(part, ToolReferenceBlock)]

    def text(self, tools: Mapping[str, str]) -> str:
        """The text that the model reads. Errors get a prefix, since templates have no field for them. tools: see
        messages_deferred.definitions."""
        text = ""
        for kind, row in groupby(self.parts, type):
            inner = "".join(part.text if isinstance(part, TextBlock) else tools[part.tool_name] for part in row)
            text += f"<functions>\n{inner}</functions>" if kind is ToolReferenceBlock else inner
        return f"Error: {text}" if self.is_error else text

    @property
    def is_marked(self) -> bool:
        return self.cache_control is not None or any(part.cache_control is not None for part in self.parts)


UserBlock = TextBlock | ToolResultBlock
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock


class UserMessage(msgspec.Struct, frozen=True, tag_field="role", tag="user"):
    content: str | Annotated[list[UserBlock], msgspec.Meta(min_length=1)]


class AssistantMessage(msgspec.Struct, frozen=True, tag_field="role", tag="assistant"):
    content: str | list[AssistantBlock] | None = None


class SystemMessage(msgspec.Struct, frozen=True, tag_field="role", tag="system"):
    content: str | list[TextBlock]


class DeveloperMessage(SystemMessage, frozen=True, tag_field="role", tag="developer"):
    """OpenAI's newer name of the system role."""


InputMessage = UserMessage | AssistantMessage | SystemMessage | DeveloperMessage


def found_tools(messages: Sequence[InputMessage]) -> frozenset[str]:
    """Names of the tools that results refer to."""
    blocks = (
        block
        for message in messages
        if isinstance(message, UserMessage) and not isinstance(message.content, str)
        for block in message.content
    )
    return frozenset(name for block in blocks if isinstance(block, ToolResultBlock) for name in block.found)


def converted(
    system: str | Sequence[TextBlock], messages: Sequence[InputMessage], tools: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[MessageMark]]:
    """Convert to OpenAI's message objects and the places of cache_control in them. The texts of one message are
    concatenated. tools: by name, the text that a result shows for a reference to a tool.

    Raises RequestError for an order of messages or blocks that can't be rendered."""
    conversation = _Conversation(tools)
    if system:
        conversation.add_texts("system", system)
    for index, message in enumerate(messages):
        if isinstance(message, AssistantMessage):
            conversation.add_assistant(message)
        elif isinstance(message, SystemMessage):
            conversation.add_texts("system", message.content)
        else:
            conversation.add_user(message, f"messages[{index}]")
    return conversation.messages, conversation.marks


def begins_answer(conversation: Sequence[dict[str, Any]], messages: Sequence[InputMessage]) -> bool:
    """Whether the last of the `converted` messages is the start of the answer. Raises RequestError if it can't be
    continued."""
    if conversation[-1]["role"] != "assistant":
        return False
    if "tool_calls" in conversation[-1]:
        raise RequestError(
            f"messages[{len(messages) - 1}].role",
            "assistant",
            "can't be the last behind a tool_use: its results must follow",
        )
    return True


class _Conversation:
    """Builds the messages in OpenAI's form."""

    def __init__(self, tools: Mapping[str, str]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.marks: list[MessageMark] = []
        self._tools = tools

    def add_texts(self, role: str, content: str | Sequence[TextBlock]) -> None:
        blocks = [TextBlock(text=content)] if isinstance(content, str) else content
        text = ""
        for number, block in enumerate(blocks, 1):
            text += block.text
            if block.cache_control is not None:
                self.marks.append(MessageMark(len(self.messages), None if number == len(blocks) else len(text)))
        self.messages.append({"role": role, "content": text})

    def add_user(self, message: UserMessage, field: str) -> None:
        """Add a user message. Results become messages of their own, before the text: agents put reminders before or
        after them."""
        if isinstance(message.content, str):
            self.add_texts("user", message.content)
            return
        for number, block in enumerate(message.content):
            if isinstance(block, ToolResultBlock):
                self._add_result(block, f"{field}.content[{number}]")
        texts = [block for block in message.content if isinstance(block, TextBlock)]
        if len(texts) == len(message.content) or any(block.text for block in texts):
            self.add_texts("user", texts)

    def add_assistant(self, message: AssistantMessage) -> None:
        """Add an assistant message. Consecutive ones are one turn that the client has split: results follow its last
        part."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        turn = self.messages[-1]
        blocks: list[AssistantBlock] = (
            [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content or []
        )
        for block in blocks:
            if isinstance(block, TextBlock):
                turn["content"] += block.text
            elif isinstance(block, ThinkingBlock):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
            elif isinstance(block, ToolUseBlock):
                called = {
                    "id": block.id,
                    "type": "function",
                    "function": {"name": block.name, "arguments": block.input or {}},
                }
                turn.setdefault("tool_calls", []).append(called)
            if isinstance(block, TextBlock | ToolUseBlock) and block.cache_control is not None:
                self.marks.append(MessageMark(len(self.messages) - 1))

    def _add_result(self, block: ToolResultBlock, field: str) -> None:
        first = len(self.messages)
        while first and self.messages[first - 1]["role"] == "tool":
            first -= 1
        calls = self.messages[first - 1].get("tool_calls", ()) if first else ()
        if all(call["id"] != block.tool_use_id for call in calls):
            raise RequestError(
                f"{field}.tool_use_id",
                block.tool_use_id,
                "is not the id of a tool_use block in the assistant message before it",
            )
        if any(result["tool_call_id"] == block.tool_use_id for result in self.messages[first:]):
            raise RequestError(f"{field}.tool_use_id", block.tool_use_id, "has more than one result")
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text(self._tools)})
        if block.is_marked:
            self.marks.append(MessageMark(len(self.messages) - 1))
