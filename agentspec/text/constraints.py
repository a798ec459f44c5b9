"""What a client may demand of an answer's form, and the grammar that this makes for one turn.

Builds descriptions only (wire.Grammar): JSON schemas, expressions, and structural tags with the calls of a dialect. Compiling them is
the runtime's business. Knows nothing of HTTP or tokens beyond the id that ends reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from agentspec.text.chat_template import Tools
from agentspec.text.tool_calls import Dialect
from agentspec.wire import Grammar


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputForm:
    """The form of the content. `source`: a JSON schema (json_schema), None (json_object), the expression (regex), the grammar (ebnf), or the
    texts to choose from (choice). `field` names it in errors."""

    kind: Literal["json_schema", "json_object", "regex", "ebnf", "choice"]
    source: Any
    field: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolDemand:
    """Which calls a turn may or must make."""

    choice: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    """The one tool that must be called; then choice is "required"."""
    parallel: bool = True
    """More than one call is allowed."""


def turn_grammar(
    tools: Tools | None, demand: ToolDemand, output: OutputForm | None, *, dialect: Dialect | None, reasoning_end: int | None
) -> Grammar | None:
    """The grammar of one turn; None when nothing constrains it.

    `reasoning_end`: the id that ends reasoning, when the turn begins inside it. Raises RequestError naming what can't be served."""
    return None
