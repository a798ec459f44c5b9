"""Deferred tools of Anthropic's API (`defer_loading`): shown to the model where a search result names them.

A tool that is found changes nothing of the prompt before the result, so the cached prefix stays valid. Owns which tools
are shown at once, and the format of a definition in a result: that of Claude Code's ToolSearch. Knows nothing of
messages or prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentspec.server.messages_tools import Tool

_ANTHROPICS_SEARCH = "tool_search_tool_"
"""Prefix of the types of Anthropic's own search tools, which this server doesn't have."""


def deferred(tools: Sequence[Tool]) -> frozenset[str]:
    """Names of the tools that aren't shown at once; empty if the request has no client tool that could find them."""
    own = [tool for tool in tools if tool.is_own]
    if any((tool.type or "").startswith(_ANTHROPICS_SEARCH) for tool in tools) or all(
        tool.defer_loading for tool in own
    ):
        return frozenset()
    return frozenset(tool.name for tool in own if tool.defer_loading)


def definitions(tools: Sequence[Tool]) -> dict[str, str]:
    """The text by which a result shows each of the client's tools, by name."""
    return {tool.name: _definition(tool) for tool in tools if tool.is_own}


def _definition(tool: Tool) -> str:
    described = {} if tool.description is None else {"description": tool.description}
    written = json.dumps({**described, "name": tool.name, "parameters": tool.input_schema}, ensure_ascii=False)
    return f"<function>{written}</function>\n"
