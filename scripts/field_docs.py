"""Writes the tables of fields into docs/api.md, between its markers: `python -m scripts.field_docs`.

agentspec/server/tables is the only source of these tables; a test compares the page with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from agentspec.server.fields import FieldTable, Treatment, named
from agentspec.server.tables.chat import CHAT
from agentspec.server.tables.completions import COMPLETIONS
from agentspec.server.tables.messages import MESSAGES
from agentspec.server.tables.responses import RESPONSES
from agentspec.server.tables.tokenize import DETOKENIZE, TOKENIZE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"

TABLES = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}


def printed(page: str) -> str:
    """Replace the text between the page's markers. Raises ValueError when a table has no markers, or more than one
    pair."""
    for name, table in TABLES.items():
        begin, end = f"<!-- fields of {name} -->", f"<!-- end of fields of {name} -->"
        pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
        text = f"{begin}\n{markdown(table)}{end}"
        page, count = pattern.subn(lambda _, text=text: text, page)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{count} places for the fields of {name}")
    return page


def markdown(table: FieldTable) -> str:
    return "".join(f"{line}\n" for line in _lines(table))


def _lines(table: FieldTable) -> Iterator[str]:
    yield "| field | what it does |\n|---|---|"
    for name in named(Treatment.WORKS, table):
        yield f"| `{name}` | {table[name].words} |"
    if refused := named(Treatment.REFUSED, table):
        yield "\n| refused | but for | why |\n|---|---|---|"
        for name in refused:
            idle = ", ".join(f"`{json.dumps(value)}`" for value in table[name].idle)
            yield f"| `{name}` | {idle} | {table[name].words} |"
    if accepted := named(Treatment.ACCEPTED, table):
        yield "\nAccepted, without effect: " + ", ".join(_accepted(name, table) for name in accepted) + "."


def _accepted(name: str, table: FieldTable) -> str:
    words = table[name].words
    return f"`{name}` ({words})" if words else f"`{name}`"


if __name__ == "__main__":
    PAGE.write_text(printed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
