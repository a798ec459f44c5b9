"""Tools of Anthropic's requests: the client's own, those with a schema defined by Anthropic, and those that Anthropic
runs.

Owns the structs of tools and tool_choice, and the handling of tools without a schema in the request. Knows nothing of
the rest of a body.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from agentspec.errors import RequestError
from agentspec.server.fields import Notes
from agentspec.server.messages_input import CacheControl
from agentspec.text.constraints import ToolDemand

_ANTHROPICS = re.compile(r"[a-z0-9_]{1,40}_\d{8}|mcp_toolset")
"""Types of tools that Anthropic defines: a name and the date of its version."""

_PATH = {"type": "string", "description": "Of a file or a directory, below /memories."}
_BASH = {
    "description": "Run a command in a bash session that stays open between calls.",
    "input_schema": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command; needed unless the session is restarted."},
            "restart": {"type": "boolean", "description": "True: start the session anew."},
        },
    },
}
_MEMORY = {
    "description": "Read and write the files of a memory that outlives the conversation, in the directory /memories.",
    "input_schema": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert", "delete", "rename"]},
            "path": _PATH,
            "view_range": {
                "type": "array",
                "items": {"type": "integer"},
                "description": "For view: the first line and the last one.",
            },
            "file_text": {"type": "string", "description": "For create: all of the file."},
            "old_str": {"type": "string", "description": "For str_replace: the text to replace."},
            "new_str": {"type": "string", "description": "For str_replace: the text in its place."},
            "insert_line": {
                "type": "integer",
                "description": "For insert: the line behind which the text goes, 0 for the beginning.",
            },
            "insert_text": {"type": "string", "description": "For insert: the text."},
            "old_path": {**_PATH, "description": "For rename."},
            "new_path": {**_PATH, "description": "For rename."},
        },
        "required": ["command"],
    },
}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "bash_20241022": {"name": "bash", **_BASH},
    "bash_20250124": {"name": "bash", **_BASH},
    "memory_20250818": {"name": "memory", **_MEMORY},
}
"""Client-side tools whose type implies a schema. The text editor is missing, because its parameters' names differ
between versions and clients; so is the computer, because its results are images."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """Other fields of a tool have no effect: `allowed_callers` (every tool is called directly), `input_examples`,
    `eager_input_streaming` (arguments always stream)."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    """Shown where a result names it: messages_deferred.py."""
    cache_control: CacheControl | None = None

    @property
    def is_own(self) -> bool:
        """The client runs it, and it has a schema. Any other tool stays in the list only to keep the indices in field
        names."""
        return self.type in (None, "custom")

    def function(self) -> dict[str, Any]:
        """OpenAI's function tool."""
        described = {} if self.description is None else {"description": self.description}
        strict = {"strict": True} if self.strict else {}
        return {
            "type": "function",
            "function": {"name": self.name, **described, "parameters": self.input_schema, **strict},
        }


class _Choice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    disable_parallel_tool_use: bool = False


class AutoChoice(_Choice, frozen=True, kw_only=True, tag="auto"):
    pass


class AnyChoice(_Choice, frozen=True, kw_only=True, tag="any"):
    pass


class NamedChoice(_Choice, frozen=True, kw_only=True, tag="tool"):
    name: str


class NoChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    pass


Choice = AutoChoice | AnyChoice | NamedChoice | NoChoice


def known_tools(tools: Any, notes: Notes) -> Any:
    """The `tools` of a decoded body: client-side tools of Anthropic get their schemas, other tools of Anthropic become
    stubs and are noted.

    Raises RequestError for a type that Anthropic doesn't have. Other errors are left to the struct."""
    if not isinstance(tools, list):
        return tools
    return [
        _known(tool, f"tools[{index}].type", notes) if isinstance(tool, dict) else tool
        for index, tool in enumerate(tools)
    ]


def _known(tool: dict[str, Any], field: str, notes: Notes) -> dict[str, Any]:
    kind = tool.get("type")
    if kind in (None, "custom"):
        return tool
    if not isinstance(kind, str) or not _ANTHROPICS.fullmatch(kind):
        raise RequestError(
            field,
            kind,
            "is not a kind of tool that this API has; tools of your own have an input_schema, and no type or 'custom'",
        )
    kept = {name: tool[name] for name in ("name", "strict", "cache_control") if tool.get(name) is not None}
    if kind in _SCHEMAS:
        return {**_SCHEMAS[kind], **kept}
    if notes.strict:
        raise RequestError(field, kind, "is a tool of Anthropic's own, which this server doesn't have")
    notes.leave_out(f"tools[{kind}]", tool)
    return {"name": kind, **kept, "type": kind, "input_schema": {}}


def own_names(tools: Any) -> frozenset[str]:
    """Names of the tools in a decoded body's `tools` that are not left out."""
    dicts = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return frozenset(
        tool["name"]
        for tool in dicts
        if tool.get("type") in (None, "custom", *_SCHEMAS) and isinstance(tool.get("name"), str)
    )


def demand(choice: Choice, tools: Sequence[Tool]) -> ToolDemand:
    """The demand for calls. Raises RequestError for a choice that names tools which are not in the request."""
    if isinstance(choice, NoChoice):
        return ToolDemand(choice="none")
    parallel = not choice.disable_parallel_tool_use
    if isinstance(choice, AutoChoice):
        return ToolDemand(choice="auto", parallel=parallel)
    own = [tool.name for tool in tools if tool.is_own]
    if isinstance(choice, AnyChoice):
        if not own:
            raise RequestError("tool_choice.type", "any", "needs tools of your own")
        return ToolDemand(choice="required", parallel=parallel)
    if choice.name not in own:
        others = [tool.type for tool in tools if not tool.is_own and tool.name == choice.name]
        told = (
            f"is {others[0]}, a tool of Anthropic's own, which this server doesn't have"
            if others
            else "is not the name of one of the request's tools"
        )
        raise RequestError("tool_choice.name", choice.name, told)
    return ToolDemand(choice="required", name=choice.name, parallel=parallel)
