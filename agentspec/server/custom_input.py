"""Extracts the input of a custom tool's call, while it streams, from the JSON arguments of the function that stands for
the tool.

Knows nothing of events or items.
"""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGINNING = '{"input": "'
_WHOLE = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
"""The complete characters at the start of a JSON string. No dialect writes a character as two escapes (a surrogate
pair)."""


class CustomInput:
    """The input of one call."""

    def __init__(self) -> None:
        self.text = ""
        """The input so far."""
        self._arguments = ""
        """The arguments up to the start of the text."""
        self._rest: str | None = None
        """Unread rest of the string `input`; None before the string begins."""

    def push(self, arguments: str) -> str:
        """Add a piece of the arguments; return what it adds to the input."""
        if self._rest is None:
            self._arguments += arguments
            head = _HEAD.match(self._arguments)
            if head is None:
                return ""
            self._rest = self._arguments[head.end() :]
        else:
            self._rest += arguments
        return self._read()

    def close(self) -> str:
        """End of the arguments; return what is still missing. A single text under another name than `input` is
        accepted."""
        if self._rest is not None:
            return ""
        try:
            values = json.loads(self._arguments)
        except ValueError:
            values = None
        texts = [value for value in values.values() if isinstance(value, str)] if isinstance(values, dict) else []
        if isinstance(values, dict) and isinstance(values.get("input"), str):
            self.text = values["input"]
        elif isinstance(values, dict) and len(values) == len(texts) == 1:
            self.text = texts[0]
        else:
            self.text = "" if values == {} or _BEGINNING.startswith(self._arguments.strip()) else self._arguments
        return self.text

    def _read(self) -> str:
        assert self._rest is not None
        found = _WHOLE.match(self._rest)
        assert found is not None
        self._rest = self._rest[found.end() :]
        added: str = json.loads(f'"{found[0]}"', strict=False)
        self.text += added
        return added
