"""Converts the tools of /v1/responses to functions, and a function's name back to its tool.

A custom tool becomes a function with one text parameter, `input`. Tools of a namespace get the namespace as a prefix.
Hosted tools, which OpenAI would run, are left out. Knows nothing of items, events or the rest of a body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from agentspec.errors import RequestError
from agentspec.server.demands import AllowedTools, AllowedToolsChoice, FunctionName, NamedTool, ToolChoice, tool_demand
from agentspec.server.fields import Notes, check
from agentspec.server.openai import FunctionSpec
from agentspec.text.constraints import ToolDemand
from agentspec.text.schema_patterns import TEXT_IN_TAGS, PatternError, read_pattern

INPUT = "input"
"""The only parameter of a custom tool's function."""

_NO_SERVICE = (
    "is a tool that its service runs, and none is run here; tools of type function, custom and namespace are served"
)


class TextInput(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    pass


class GrammarInput(msgspec.Struct, frozen=True, tag_field="type", tag="grammar"):
    syntax: Literal["lark", "regex"]
    definition: str


class FunctionTool(FunctionSpec, frozen=True, tag_field="type", tag="function"):
    """As in chat, but without the nested object."""


class CustomTool(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    name: str
    description: str | None = None
    format: TextInput | GrammarInput | None = None


class NamespaceTool(msgspec.Struct, frozen=True, tag_field="type", tag="namespace"):
    name: str
    tools: list[FunctionTool | CustomTool]
    description: str | None = None


HostedKind = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]


class HostedTool(msgspec.Struct, frozen=True):
    type: HostedKind


_HOSTED = frozenset(HostedKind.__args__)  # type: ignore[attr-defined]
_KINDS: dict[str, type[msgspec.Struct]] = {"function": FunctionTool, "custom": CustomTool, "namespace": NamespaceTool}

TOOL_KINDS = (*_KINDS.values(), HostedTool)


class FunctionChoice(FunctionName, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """As in chat, but without the nested object. CustomChoice likewise."""


class CustomChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    name: str


class AllowedTool(msgspec.Struct, frozen=True):
    type: Literal["function", "custom", "namespace"] | HostedKind
    name: str | None = None


class SomeTools(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], msgspec.Meta(min_length=1)]


Choice = Literal["auto", "none", "required"] | FunctionChoice | CustomChoice | SomeTools


@dataclass(frozen=True, kw_only=True, slots=True)
class Called:
    """A tool as its client knows it."""

    kind: Literal["function", "custom"] = "function"
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Toolset:
    """The callable tools of one request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """In the shape of /v1/chat/completions, so that both APIs make the same prompt."""
    places: list[str] = field(default_factory=list)
    """For each function, its tool's field name in the request."""
    called: dict[str, Called] = field(default_factory=dict)
    """By function name: the tool that the function stands for."""
    known_as: dict[tuple[str, str] | str, list[str]] = field(default_factory=dict)
    """Names of functions by (kind, name) of their tools, and by namespace."""

    @classmethod
    def of(cls, tools: list[dict[str, Any]], notes: Notes) -> Toolset:
        """Convert tools. Raises RequestError for the first field that is refused or wrong. notes: collects hosted
        tools, and formats that can't be enforced."""
        toolset = cls()
        for index, tool in enumerate(tools):
            toolset._add_tool(tool, f"tools[{index}]", notes)
        return toolset

    @property
    def names(self) -> list[str]:
        """Names of the functions."""
        return [function["function"]["name"] for function in self.functions]

    def tool(self, function_name: str) -> Called:
        """The tool that a call of this function refers to. Models may call functions that don't exist."""
        return self.called.get(function_name) or Called(name=function_name)

    def demand(self, choice: Choice, *, parallel: bool) -> tuple[ToolDemand, frozenset[str] | None]:
        """As demands.tool_demand. Raises RequestError for a choice of missing tools."""
        asked: ToolChoice
        if isinstance(choice, FunctionChoice | CustomChoice):
            kind: Any = "function" if isinstance(choice, FunctionChoice) else "custom"
            asked = _named(self._function(kind, choice.name, "tool_choice.name"))
        elif isinstance(choice, SomeTools):
            places: dict[AllowedTool, str] = {}
            for index, tool in enumerate(choice.tools):
                places.setdefault(tool, f"tool_choice.tools[{index}]")
            names = [name for tool, place in places.items() for name in self._allowed(tool, place)]
            if not names:
                raise RequestError("tool_choice.tools[0].type", choice.tools[0].type, _NO_SERVICE)
            asked = AllowedToolsChoice(AllowedTools(choice.mode, [_named(name) for name in names]))
        else:
            asked = choice
        return tool_demand(asked, self.names, parallel=parallel)

    def _allowed(self, tool: AllowedTool, field: str) -> list[str]:
        """The functions that an entry of allowed_tools names. Empty for a hosted tool, which was left out before."""
        if tool.type in _HOSTED:
            return []
        if tool.name is None:
            raise RequestError(f"{field}.name", None, "is required")
        if tool.type == "namespace":
            if tool.name not in self.known_as:
                raise RequestError(f"{field}.name", tool.name, "is not the name of one of the request's namespaces")
            return self.known_as[tool.name]
        kind: Any = tool.type
        return [self._function(kind, tool.name, f"{field}.name")]

    def _function(self, kind: Literal["function", "custom"], name: str, field: str) -> str:
        """The function of the tool that a choice names, with or without its namespace."""
        if (exact := self.called.get(name)) is not None and exact.kind == kind:
            return name
        found = self.known_as.get((kind, name), ())
        if not found:
            raise RequestError(field, name, f"is not the name of one of the request's tools of type {kind}")
        if len(found) > 1:
            raise RequestError(field, name, f"is the name of several tools: say which ({', '.join(found)})")
        return found[0]

    def _add_tool(self, tool: dict[str, Any], place: str, notes: Notes) -> None:
        kind = tool.get("type")
        if isinstance(kind, str) and kind in _HOSTED:
            notes.leave_out(f"tools.{kind}", tool, _NO_SERVICE)
            return
        struct = _KINDS.get(kind) if isinstance(kind, str) else None
        if struct is None:
            raise RequestError(f"{place}.type", kind, f"is not a kind of tool that is known (only {', '.join(_KINDS)})")
        check(tool, struct, place)
        if kind != "namespace":
            self._add_function(tool, place, None, notes)
            return
        for index, inner in enumerate(tool["tools"]):
            # The model doesn't see namespaces, so a namespace's description is put before its first tool.
            of_all = f"Of all tools whose names begin with {function_name(tool['name'], '')}: {tool.get('description')}"
            lead = of_all if index == 0 and tool.get("description") else ""
            self._add_function(inner, f"{place}.tools[{index}]", tool["name"], notes, lead)

    def _add_function(
        self, tool: dict[str, Any], place: str, namespace: str | None, notes: Notes, lead: str = ""
    ) -> None:
        called = Called(kind=tool["type"], name=tool["name"], namespace=namespace)
        name = function_name(namespace, tool["name"])
        if name not in self.called:
            self.called[name] = called
            for key in ((called.kind, called.name), *(() if namespace is None else (namespace,))):
                self.known_as.setdefault(key, []).append(name)
        elif self.called[name] != called:
            raise RequestError(
                f"{place}.name", tool["name"], f"makes the same name for the model as an earlier tool: {name}"
            )
        if lead:
            described = f"{lead}\n\n{tool['description']}" if tool.get("description") else lead
            tool = {**tool, "description": described}
        function = _of_function(tool) if called.kind == "function" else _of_custom(tool, notes)
        self.functions.append({"type": "function", "function": {**function, "name": name}})
        self.places.append(place)


def function_name(namespace: str | None, name: str) -> str:
    """The model's name for a tool."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def is_hosted(tool: dict[str, Any]) -> bool:
    return tool.get("type") in _HOSTED


def refuse_hosted_choice(choice: Any) -> None:
    """Raise RequestError if a body's tool_choice requires a hosted tool."""
    if isinstance(choice, dict) and isinstance(kind := choice.get("type"), str) and kind in _HOSTED:
        raise RequestError("tool_choice.type", kind, _NO_SERVICE)


def _named(name: str) -> NamedTool:
    return NamedTool(FunctionName(name))


def _of_function(tool: dict[str, Any]) -> dict[str, Any]:
    shown = ("name", "description", "parameters", *(("strict",) if tool.get("strict") else ()))
    return {name: value for name, value in tool.items() if name in shown and value is not None}


def _of_custom(tool: dict[str, Any], notes: Notes) -> dict[str, Any]:
    """A custom tool's function. Strict only if the format can be enforced: a grammar slows down the whole turn."""
    given = tool.get("format") or {}
    described = _FORMATS[given.get("syntax", "text")](given.get("definition", ""))
    parameter = {"type": "string", "description": described}
    strict = {}
    if given.get("type") == "grammar":
        pattern = _pattern(given["definition"]) if given["syntax"] == "regex" else None
        if pattern is None:
            notes.leave_out(f"tools.format.{given['syntax']}", given["definition"], "can't be enforced")
        else:
            parameter["pattern"] = pattern
            strict = {"strict": True}
    schema = {"type": "object", "properties": {INPUT: parameter}, "required": [INPUT], "additionalProperties": False}
    description = {} if tool.get("description") is None else {"description": tool["description"]}
    return {"name": tool["name"], **description, "parameters": schema, **strict}


_FORMATS: dict[str, Callable[[str], str]] = {
    "text": lambda _: "Free text.",
    "regex": lambda definition: f"Text that matches the regular expression {definition}",
    "lark": lambda definition: f"Text that follows this Lark grammar:\n{definition}",
}


def _pattern(definition: str) -> str | None:
    """A JSON schema's `pattern` for a whole input; None for a regular expression that can't be enforced."""
    if "|" not in definition:  # without alternatives, outer anchors are redundant, and a group can't contain them
        definition = definition.removeprefix("^")
        definition = definition if definition.endswith("\\$") else definition.removesuffix("$")
    pattern = f"^(?:{definition})$"
    try:
        read_pattern(pattern, TEXT_IN_TAGS)
    except PatternError:
        return None
    return pattern
