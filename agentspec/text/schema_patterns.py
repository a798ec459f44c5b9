"""Parse the patterns of JSON schemas (ECMA-262) into expressions over the text that a model writes.

A pattern is resolved to explicit character sets, so that the grammar compiler and any validator agree on it: shorthands
are ASCII, a negated set excludes whatever a Unicode validator may add to it, and a pattern without anchors may match
anywhere. Also owns the patterns of `format`. Knows nothing of schemas.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agentspec.text.automata import Chain, Chars, Choice, Expression, Ranges, Repeat, text
from agentspec.text.grammar_rules import regex_class

_MAX_COUNT = 2000
_MAX_DEPTH = 32

_ALL: Ranges = ((0x01, 0x07FE), (0x0800, 0xD7FF), (0xE000, 0xFFFE), (0x10000, 0x10FFFF))
_EXCLUDED: Ranges = ((0x00, 0x00), (0x07FF, 0x07FF), (0xD800, 0xDFFF), (0xFFFF, 0xFFFF))
"""NUL, surrogates, and the last character of each UTF-8 length: for a range across lengths, xgrammar would admit
invalid UTF-8."""
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_BEYOND_ASCII: Ranges = ((0x80, 0x10FFFF),)
_OTHER_SPACE: Ranges = tuple(
    (code, code)
    for code in (0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF)
)
_CONTROL_ESCAPES = {"n": 0x0A, "r": 0x0D, "t": 0x09, "f": 0x0C, "v": 0x0B}
_SHORTHANDS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_UNICODE_EXTRA = {"d": _BEYOND_ASCII, "w": _BEYOND_ASCII, "s": ((0x1C, 0x1F), *_OTHER_SPACE)}
"""Characters that a validator may include in a shorthand beyond our ASCII set. Its negation excludes them."""

_DAYS = r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = rf"((19|2[0-9])[0-9]{{2}}-{_DAYS}|(19|2[0-9])(0[48]|[2468][048]|[13579][26])-02-29|2[048]00-02-29)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"

FORMATS = {
    "date": rf"^{_DATE}$",
    "time": rf"^{_TIME}$",
    "date-time": rf"^{_DATE}T{_TIME}$",
    "duration": r"^P([0-9]{1,4}W|([0-9]{1,4}D|[0-9]{1,4}M([0-9]{1,4}D)?|[0-9]{1,4}Y([0-9]{1,4}M([0-9]{1,4}D)?)?)"
    r"(T([0-9]{1,4}S|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}H([0-9]{1,4}M([0-9]{1,4}S)?)?))?"
    r"|T([0-9]{1,4}S|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}H([0-9]{1,4}M([0-9]{1,4}S)?)?))$",
    "email": rf"^[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+$",
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "ipv6": r"^([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}$",
    "uri": r"^[a-z][a-z0-9+.-]*://[a-zA-Z0-9._~:/?#\[\]@!$&()*+,;=%-]+$",
    "uuid": r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
}
"""Supported formats. Each pattern admits a subset of the format."""


class PatternError(ValueError):
    """The pattern is invalid, or can't be enforced."""


@dataclass(frozen=True, slots=True)
class Writing:
    """How a text is written in its context: characters that must not occur, and escapes for some of them."""

    barred: Ranges
    escapes: tuple[tuple[int, str], ...] = ()
    """(code point, escape)."""

    def one_of(self, characters: Ranges) -> Expression:
        """Return an expression for one of these characters as written. Raises PatternError when none can be written."""
        plain = _subtract(characters, (*self.barred, *_EXCLUDED))
        parts: list[Expression] = [
            text(escape) for code, escape in self.escapes if any(low <= code <= high for low, high in characters)
        ]
        if plain:
            parts.append(Chars(plain))
        if not parts:
            raise PatternError(f"asks for {''.join(chr(low) for low, _ in characters[:1])!r}, which can't stand here")
        return Choice(tuple(parts))

    @property
    def anything(self) -> Expression:
        return Repeat(self.one_of(_ALL), 0, None)


_CONTROLS: Ranges = ((0, 0x1F),)
_JSON_ESCAPES = ((0x22, r"\""), (0x5C, r"\\"), (0x0A, r"\n"), (0x0D, r"\r"), (0x09, r"\t"))
JSON_STRING = Writing((*_CONTROLS, (0x22, 0x22), (0x5C, 0x5C)), _JSON_ESCAPES)
"""Between the quotes of a JSON string."""
JSON_STRING_IN_TAGS = Writing(
    (*_CONTROLS, (0x22, 0x22), (0x3C, 0x3C), (0x5C, 0x5C)), (*_JSON_ESCAPES, (0x3C, r"\u003c"))
)
"""Like JSON_STRING, without `<`: for texts in which tags are parsed."""
TEXT_IN_TAGS = Writing(((0x3C, 0x3C),))
"""Plain text without `<`."""


ANY_TEXT = Writing(())


def read_pattern(pattern: str, writing: Writing, *, is_whole: bool = False) -> Expression:
    """Return an expression for the texts that contain a match, or that match as a whole (`is_whole`). Raises
    PatternError."""
    return _Reader(pattern, writing, is_whole).read()


def all_but(characters: str) -> str:
    """Return a regular expression for one character that is not in `characters`."""
    return regex_class(_subtract(_ALL, tuple((ord(character), ord(character)) for character in characters)))


def none_of(words: Sequence[str], writing: Writing) -> Expression:
    """Return an expression for texts that equal none of the words, written without escapes."""
    following = sorted({word[0] for word in words if word})
    plain = _subtract(_ALL, writing.barred)
    other = Chars(_subtract(plain, tuple((ord(letter), ord(letter)) for letter in following)))
    parts: list[Expression] = [Chain((other, Repeat(Chars(plain), 0, None)))]
    for letter in following:
        if not _subtract(((ord(letter), ord(letter)),), writing.barred):
            continue  # the word can't be written without escapes
        rest = none_of([word[1:] for word in words if word[:1] == letter], writing)
        parts.append(Chain((text(letter), rest)))
    return Choice(tuple(parts if "" in words else [Chain(), *parts]))


class _Reader:
    """A recursive-descent parser for one pattern."""

    def __init__(self, pattern: str, writing: Writing, is_whole: bool) -> None:
        self._pattern = pattern
        self._is_whole = is_whole
        self._at = 0
        self._writing = writing

    def read(self) -> Expression:
        found = self._alternatives(0)
        if self._at < len(self._pattern):
            raise PatternError(f"has an unmatched ')' at {self._at}")
        return found

    def _peek(self, text: str) -> bool:
        return self._pattern.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        found = self._peek(text)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._at == len(self._pattern):
            raise PatternError("ends too early")
        self._at += 1
        return self._pattern[self._at - 1]

    def _alternatives(self, depth: int) -> Expression:
        if depth > _MAX_DEPTH:
            raise PatternError(f"nests deeper than {_MAX_DEPTH} groups")
        found = [self._sequence(depth)]
        while self._take("|"):
            found.append(self._sequence(depth))
        return Choice(tuple(found))

    def _sequence(self, depth: int) -> Expression:
        is_anchored = self._take("^")
        if depth and is_anchored:
            raise PatternError("has '^' inside a group, which can't be enforced")
        parts: list[Expression] = []
        is_closed = False
        while self._at < len(self._pattern) and not self._peek("|") and not self._peek(")"):
            if is_closed or self._peek("^"):
                raise PatternError("has an anchor amid a text, which nothing can match")
            if self._take("$"):
                if depth:
                    raise PatternError("has '$' inside a group, which can't be enforced")
                is_closed = True
                continue
            parts.append(self._quantified(depth))
        if depth == 0 and not self._is_whole:
            if not is_anchored:
                parts.insert(0, self._writing.anything)
            if not is_closed:
                parts.append(self._writing.anything)
        return Chain(tuple(parts))

    def _quantified(self, depth: int) -> Expression:
        part = self._atom(depth)
        if count := re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}").match(self._pattern, self._at):
            self._at = count.end()
            low = int(count[1])
            high = low if count[2] is None else int(count[3]) if count[3] else None
            if (high is not None and high < low) or max(low, high or 0) > _MAX_COUNT:
                raise PatternError(
                    f"has a repetition {count[0]} that ends before it begins, or counts beyond {_MAX_COUNT}"
                )
        elif self._at < len(self._pattern) and self._pattern[self._at] in "*+?":
            low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self._next()]
        else:
            return part
        self._take("?")  # a lazy repetition matches the same texts
        if self._at < len(self._pattern) and self._pattern[self._at] in "*+?{":
            raise PatternError(f"has a repetition of a repetition at {self._at}")
        return Repeat(part, low, high)

    def _atom(self, depth: int) -> Expression:
        if self._take("("):
            if self._peek("?") and not self._take("?:"):
                raise PatternError(
                    f"has a group {self._pattern[self._at - 1 : self._at + 3]!r}, which can't be enforced"
                )
            found = self._alternatives(depth + 1)
            if not self._take(")"):
                raise PatternError("has a group without an end")
            return found
        return self._writing.one_of(self._characters())

    def _characters(self) -> Ranges:
        character = self._next()
        if character == "[":
            return self._set()
        if character == ".":
            return _subtract(_ALL, _LINE_ENDS)
        if character == "\\":
            return self._escape()
        if character in "*+?{":
            raise PatternError(f"repeats nothing at {self._at - 1}")
        return ((ord(character), ord(character)),)

    def _escape(self) -> Ranges:
        character = self._next()
        if character.lower() in _SHORTHANDS:
            return _shorthand(character)
        if character in _CONTROL_ESCAPES:
            code = _CONTROL_ESCAPES[character]
        elif character in "xu":
            digits = re.compile(r"[0-9a-fA-F]{2}" if character == "x" else r"[0-9a-fA-F]{4}").match(
                self._pattern, self._at
            )
            if digits is None:
                raise PatternError(f"has an escape \\{character} that can't be read")
            self._at, code = digits.end(), int(digits[0], 16)
        elif character.isalnum():
            raise PatternError(f"has \\{character}, which can't be enforced")
        else:
            code = ord(character)
        return ((code, code),)

    def _set(self) -> Ranges:
        is_negated = self._take("^")
        found: list[tuple[int, int]] = []
        while not self._take("]"):
            if shorthand := re.compile(r"\\([dwsDWS])").match(self._pattern, self._at):
                if is_negated and shorthand[1].isupper():
                    raise PatternError(f"has {shorthand[0]} in a negated set, which can't be enforced")
                self._at = shorthand.end()
                found += _shorthand(shorthand[1])
                found += _UNICODE_EXTRA[shorthand[1]] if is_negated else ()
                continue
            low = high = self._member()
            if self._peek("-") and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._next()
                high = self._member()
            if high < low:
                raise PatternError("has a range in a set that ends before it begins")
            found.append((low, high))
        return _subtract(_ALL, tuple(found)) if is_negated else tuple(found)

    def _member(self) -> int:
        """Parse one character of a set."""
        character = self._next()
        if character == "[" and self._pattern[self._at : self._at + 1] in (":", ".", "=", "["):
            raise PatternError("has a set inside a set, which can't be enforced")
        if character != "\\":
            return ord(character)
        if re.match("[dwsDWS]", self._pattern[self._at :]):
            raise PatternError("has a range in a set that begins or ends with a shorthand")
        return self._escape()[0][0]


def _shorthand(letter: str) -> Ranges:
    kind = letter.lower()
    return _SHORTHANDS[kind] if letter == kind else _subtract(_ALL, (*_SHORTHANDS[kind], *_UNICODE_EXTRA[kind]))


def _subtract(ranges: Ranges, taken: Ranges) -> Ranges:
    found = list(ranges)
    for low, high in taken:
        left = [(start, min(end, low - 1)) for start, end in found if start < low]
        found = left + [(max(start, high + 1), end) for start, end in found if end > high]
    return tuple(sorted(set(found)))
