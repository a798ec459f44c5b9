"""A parsed chat template, changed so that its own added tokens are sentinels in what it renders.

Sentinels replace added tokens in constants that reach the output and in the named tokens (`eos_token`). What a template
compares with messages, or cuts them at, stays text, as messages are. Tokens that a template puts together by itself are
not found: template_proof.py sees that. Knows nothing of messages.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jinja2 import nodes

from agentspec.text.sentinels import Sentinels

NAMED = "sentinels_of_"
"""What the named tokens are called where they reach the output."""
_WRITING_FILTERS = frozenset({"default", "d", "join"})
"""Filters whose arguments are written; those of the others are looked for."""


def write_sentinels(tree: nodes.Template, sentinels: Sentinels, named: Collection[str]) -> None:
    """Change a parsed template. `named`: variables that are tokens; where they reach the output they are called NAMED +
    name from now on."""
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
