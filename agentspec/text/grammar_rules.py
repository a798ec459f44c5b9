"""A grammar in the making: named rules in xgrammar's EBNF, and the pieces that all of them are built from.

Forms are chosen for what xgrammar compiles and masks fast: expressions as `Regex`, free text as `TagDispatch`, length
limits as `max_chars` (a counted repetition of characters takes seconds to compile and tens of milliseconds a mask).
Knows nothing of schemas or dialects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

from agentspec.errors import RequestError

MAX_RULES = 5000
MAX_SOURCE_BYTES = 1024 * 1024
MAX_WORK = 5_000_000
"""Steps of building a grammar, below a second altogether."""

Tree: TypeAlias = "dict[str, Tree]"
"""Words by their letters: what may come next, behind each letter; empty where a word ends."""


class Rules:
    """Rules by name, each body once."""

    def __init__(self, field: str) -> None:
        """`field` names what the grammar comes from, in errors."""
        self._field = field
        self._bodies: dict[str, str] = {}
        self._names: dict[Hashable, str] = {}
        self._num_bytes = 0
        self._work = 0

    def spend(self, work: int) -> None:
        """Count steps of work. Raises RequestError when they were too many."""
        self._work += work
        if self._work > MAX_WORK:
            raise RequestError(self._field, "...", "takes too much work to make a grammar of")

    def named(self, key: Hashable) -> str | None:
        """The rule that was named for this."""
        return self._names.get(key)

    def name(self, key: Hashable, rule: str) -> str:
        """Remember a rule for what it stands for."""
        self._names[key] = rule
        return rule

    def add(self, body: str, *, options: str = "") -> str:
        """The name of a rule with this body. Raises RequestError when the grammar gets too large."""
        if (known := self._names.get(options + body)) is not None:
            return known
        name = self.reserve()
        self._names[options + body] = name
        self.fill(name, body, options=options)
        return name

    def reserve(self) -> str:
        """A name for a rule that refers to itself; `fill` gives its body."""
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
        """The whole grammar, for which `root` is an expression."""
        return "\n".join([f"root ::= {root}", *self._bodies.values()]) + "\n"


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(expression: str) -> str:
    return f"Regex({literal(expression)})"


def free_text(without: Sequence[str]) -> str:
    """Any text in which none of these occurs; it may hold bytes that are no UTF-8, as unconstrained output may. A
    rule's whole body."""
    return "TagDispatch(excludes=(" + "".join(f"{literal(text)}, " for text in without) + "))"


def escaped(text: str) -> str:
    """A regular expression for this text."""
    return "".join(
        character if character.isascii() and character.isalnum() else f"\\u{{{ord(character):x}}}" for character in text
    )


def regex_class(ranges: Iterable[tuple[int, int]]) -> str:
    """A regular expression for one character of these code points."""
    return (
        "["
        + "".join(escaped(chr(low)) + ("" if low == high else "-" + escaped(chr(high))) for low, high in ranges)
        + "]"
    )


def character_class(ranges: Iterable[tuple[int, int]]) -> str:
    """The same as an expression of EBNF."""
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
    """A regular expression for text in which no word occurs. Each word begins with the one `<` in it; `character`: an
    expression for one character that is none of those given.

    Narrower than that by a rare case: the beginning of a word isn't followed by `<` at once, unless it is `<`
    itself."""
    tree: Tree = {}
    for word in words:
        node = tree
        for letter in word[1:]:
            node = node.setdefault(letter, {})
    return f"({character('<')}|<+{_leaving(tree, character)})*(<+({'|'.join(_beginnings(tree))})?)?"


def _leaving(node: Tree, character: Callable[[str], str]) -> str:
    """Text behind the beginning of a word that leads out of all words."""
    parts = [character("<" + "".join(sorted(node)))]
    parts += [escaped(letter) + _leaving(node[letter], character) for letter in sorted(node) if node[letter]]
    return "(" + "|".join(parts) + ")"


def _beginnings(node: Tree) -> list[str]:
    found = []
    for letter in sorted(node):
        if node[letter]:
            found += [escaped(letter), *(escaped(letter) + rest for rest in _beginnings(node[letter]))]
    return found
