"""Call arguments that are not a JSON object: the prompt shows their raw text in place of the parameters.

Chat templates accept only an object. They are given an object with one entry made of placeholders, and what a template
writes for it is replaced in the rendered prompt. Owns the placeholders and the forms in which templates write an
object. Knows nothing of messages or tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

_MARK = "[0-9a-f]{32}"
_FORMS = re.compile(
    rf'\{{\s*"raw_name_({_MARK})"\s*:\s*"raw_value_\1"\s*\}}'  # an object as JSON
    rf"|<parameter=raw_name_({_MARK})>\s*\"?raw_value_\2\"?\s*</parameter>"  # a parameter in tags: Qwen3-Coder, Qwen3.5
    rf"|raw_(?:(name)|value)_({_MARK})"  # any other form: a parameter named `arguments`
)


class RawArguments(dict[str, Any]):
    """An object with one placeholder entry for templates, and the raw `text` for the prompt. Equal to another with the
    same text, never to real arguments."""

    def __init__(self, text: str) -> None:
        self.mark = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        self.text = text
        super().__init__({f"raw_name_{self.mark}": f"raw_value_{self.mark}"})


def show_raw(rendered: str, arguments: Iterable[RawArguments]) -> str:
    """Replace the placeholders in a rendered prompt with the raw texts of `arguments`."""
    texts = {raw.mark: raw.text for raw in arguments}

    def text_of(found: re.Match[str]) -> str:
        mark = found[1] or found[2] or found[4]
        return found[0] if mark not in texts else "arguments" if found[3] else texts[mark]

    return _FORMS.sub(text_of, rendered) if texts else rendered
