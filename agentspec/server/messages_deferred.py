"""Tools that a request of Anthropic's API defers (`defer_loading`): shown to the model where the result of a search
names them.

So a tool that is found changes nothing of the prompt before the result, and the cached prefix stays. Owns which tools
are shown at once, and how one is written into a result: as Claude Code's ToolSearch tells its model. Knows nothing of
messages or prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentspec.server.messages_tools import Tool

_ANTHROPICS_SEARCH = "tool_search_tool_"
"""What the types of Anthropic's own search begin with. This server doesn't have it."""


def deferred(tools: Sequence[Tool]) -> frozenset[str]:
    """Names of the tools that aren't shown at once; none where the request has no tool of its own that could find
    them."""
    own = [tool for tool in tools if tool.is_own]
    if any((tool.type or "").startswith(_ANTHROPICS_SEARCH) for tool in tools) or all(
        tool.defer_loading for tool in own
    ):
        return frozenset()
    return frozenset(tool.name for tool in own if tool.defer_loading)


def definitions(tools: Sequence[Tool]) -> dict[str, str]:
    """How each of the client's tools is written into a result, by its name."""
    return {tool.name: _definition(tool) for tool in tools if tool.is_own}


def _definition(tool: Tool) -> str:
    described = {} if tool.description is None else {"description": tool.description}
    written = json.dumps({**described, "name": tool.name, "parameters": tool.input_schema}, ensure_ascii=False)
    return f"<function>{written}</function>\n"
