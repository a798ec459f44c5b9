"""The input of a custom tool's call, out of the JSON arguments of the function that stands for it, as they come.

Knows nothing of events or items.
"""

from __future__ import annotations

import json
import re

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_BEGINNING = '{"input": "'
_WHOLE = re.compile(r'(?:[^"\\]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
"""Characters of a JSON string as far as they are complete. No dialect writes a character as two escapes (a pair of
surrogates)."""


class CustomInput:
    """One call's."""

    def __init__(self) -> None:
        self.text = ""
        """The input so far."""
        self._arguments = ""
        """Up to where the text begins."""
        self._rest: str | None = None
        """What comes next inside of the string `input`; None before it."""

    def push(self, arguments: str) -> str:
        """What a piece of the arguments adds to the input."""
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
        """What is left at the end. A model that didn't name its text `input` meant it all the same."""
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
