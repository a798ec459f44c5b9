"""Rewrite a parsed chat template so that it renders its own added tokens as sentinels.

Sentinels replace added tokens in constants that reach the output, and the named tokens (`eos_token`). Constants that a
template compares with messages or splits them at stay text, as messages do. Tokens that a template assembles at run
time are not found; template_proof.py detects that. Knows nothing of messages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jinja2 import nodes

from agentspec.text.sentinels import Sentinels

NAMED = "sentinels_of_"
"""Prefix of the variables that replace named tokens in output positions."""
_WRITING_FILTERS = frozenset({"default", "d", "join"})
"""Filters whose arguments reach the output; other filters search for theirs."""


def write_sentinels(tree: nodes.Template, sentinels: Sentinels, named: Collection[str]) -> None:
    """Rewrite a parsed template in place. `named`: variables that are tokens; in output positions they are renamed to
    NAMED + name."""
    macros = frozenset(macro.name for macro in tree.find_all(nodes.Macro))
    own = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx != "load")

    def write(node: nodes.Node | None) -> None:
        match node:
            case nodes.TemplateData():
                node.data = sentinels.write(node.data)
            case nodes.Const(value=str(text)):
                node.value = sentinels.write(text)
            case nodes.Name() if node.name in named and node.name not in own:
                node.name = NAMED + node.name
            case nodes.Concat() | nodes.Output():
                write_all(node.nodes)
            case nodes.List() | nodes.Tuple():
                write_all(node.items)
            case nodes.Dict():
                write_all([pair.value for pair in node.items])
            case nodes.Add() | nodes.Mul() | nodes.Mod() | nodes.And() | nodes.Or():
                write_all([node.left, node.right])
            case nodes.CondExpr():
                write_all([node.expr1, node.expr2])
            case nodes.Filter():
                write_all([node.node, *(node.args if node.name in _WRITING_FILTERS else ())])
            case nodes.Getattr() | nodes.Getitem():
                write(node.node)
            case nodes.Call():
                is_macro = isinstance(node.node, nodes.Name) and node.node.name in macros
                write_all(
                    [
                        node.node,
                        *(node.args if is_macro else ()),
                        *(keyword.value for keyword in (node.kwargs if is_macro else ())),
                    ]
                )

    def write_all(found: Any) -> None:
        for node in found:
            write(node)

    write_all(tree.find_all(nodes.Output))
    write_all(assignment.node for assignment in tree.find_all(nodes.Assign))
    write_all(default for macro in tree.find_all(nodes.Macro) for default in macro.defaults)
