"""A grammar builder: named rules in xgrammar's EBNF, and the basic expressions.

Uses the forms that xgrammar compiles and masks fast: `Regex` for expressions, `TagDispatch` for free text, `max_chars`
for length limits. A counted repetition of characters takes seconds to compile and tens of milliseconds per mask. Knows
nothing of schemas or dialects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

from agentspec.errors import RequestError

MAX_RULES = 5000
MAX_SOURCE_BYTES = 1024 * 1024
MAX_WORK = 5_000_000
"""Limit on the steps of building one grammar; takes less than a second."""

Tree: TypeAlias = "dict[str, Tree]"
"""A trie: next letter -> subtree. An empty tree marks the end of a word."""


class Rules:
    """The rules of a grammar by name. Rules with equal bodies are shared."""

    def __init__(self, field: str) -> None:
        """`field` names the source of the grammar in errors."""
        self._field = field
        self._bodies: dict[str, str] = {}
        self._names: dict[Hashable, str] = {}
        self._num_bytes = 0
        self._work = 0

    def spend(self, work: int) -> None:
        """Count steps of work. Raises RequestError beyond MAX_WORK."""
        self._work += work
        if self._work > MAX_WORK:
            raise RequestError(self._field, "...", "takes too much work to make a grammar of")

    def find_rule(self, key: Hashable) -> str | None:
        """Return the rule that was stored under a key; None without one."""
        return self._names.get(key)

    def store_rule(self, key: Hashable, rule: str) -> str:
        """Store a rule under a key and return it."""
        self._names[key] = rule
        return rule

    def add(self, body: str, *, options: str = "") -> str:
        """Return the name of a rule with this body, new or shared. Raises RequestError when the grammar gets too
        large."""
        if (known := self._names.get(options + body)) is not None:
            return known
        name = self.reserve()
        self._names[options + body] = name
        self.fill(name, body, options=options)
        return name

    def reserve(self) -> str:
        """Reserve the name of a recursive rule; `fill` sets its body."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = ""
        if len(self._bodies) > MAX_RULES:
            raise RequestError(self._field, "...", f"comes to more than {MAX_RULES} rules")
        return name

    def fill(self, name: str, body: str, *, options: str = "") -> None:
        self._num_bytes += len(body)
        if self._num_bytes > MAX_SOURCE_BYTES:
            raise RequestError(self._field, "...", f"comes to a grammar of more than {MAX_SOURCE_BYTES} bytes")
        self._bodies[name] = f"{name}{options} ::= {body}"

    def source(self, root: str) -> str:
        """Return the whole grammar in EBNF; `root` is the expression of its root rule."""
        return "\n".join([f"root ::= {root}", *self._bodies.values()]) + "\n"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(expression: str) -> str:
    return f"Regex({literal(expression)})"


def free_text(without: Sequence[str]) -> str:
    """Return the body of a rule for any text that contains none of these. Like unconstrained output, it may hold
    invalid UTF-8."""
    return "TagDispatch(excludes=(" + "".join(f"{literal(text)}, " for text in without) + "))"


def escaped(text: str) -> str:
    """Return a regular expression that matches exactly this text."""
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\u{{{ord(character):x}}}" for character in text
    )


def regex_class(ranges: Iterable[tuple[int, int]]) -> str:
    """Return a regular expression for one character in these code point ranges."""
    return (
        "["
        + "".join(escaped(chr(low)) + ("" if low == high else "-" + escaped(chr(high))) for low, high in ranges)
        + "]"
    )


def character_class(ranges: Iterable[tuple[int, int]]) -> str:
    """Return an EBNF expression for one character in these code point ranges."""
    return "[" + "".join(_code(low) + ("" if low == high else "-" + _code(high)) for low, high in ranges) + "]"


def _code(code: int) -> str:
    character = chr(code)
    return (
        character
        if character.isascii() and character.isalnum()
        else f"\\u{code:04x}"
        if code <= 0xFFFF
        else f"\\U{code:08x}"
    )


def any_of(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else "(" + " | ".join(parts) + ")"


def text_without(words: Sequence[str], character: Callable[[str], str]) -> str:
    """Return a regular expression for text that contains none of the words. Each word begins with its only `<`.
    `character(excluded)` returns an expression for one character that is not in `excluded`.

    Slightly narrower: after a proper prefix of a word longer than `<`, the next character can't be `<`."""
    tree: Tree = {}
    for word in words:
        node = tree
        for letter in word[1:]:
            node = node.setdefault(letter, {})
    return f"({character('<')}|<+{_leaving(tree, character)})*(<+({'|'.join(_beginnings(tree))})?)?"


def _leaving(node: Tree, character: Callable[[str], str]) -> str:
    """Return an expression for the text after a common prefix that leaves all words of the trie."""
    parts = [character("<" + "".join(sorted(node)))]
    parts += [escaped(letter) + _leaving(node[letter], character) for letter in sorted(node) if node[letter]]
    return "(" + "|".join(parts) + ")"


def _beginnings(node: Tree) -> list[str]:
    found = []
    for letter in sorted(node):
        if node[letter]:
            found += [escaped(letter), *(escaped(letter) + rest for rest in _beginnings(node[letter]))]
    return found
