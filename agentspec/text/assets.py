"""Read the text files of a checkpoint directory: JSON objects, and the named tokens of tokenizer_config.json.

Knows nothing of tokenization or templates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentspec import files

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; {} when the file does not exist.

    Raises CheckpointError naming the file when it can't be read."""
    return files.read_object(path) if files.is_there(path) else {}


def named_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the text of `eos_token` and the other named tokens. Chat templates may use them as variables."""
    names: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            names[name] = token
    return names
