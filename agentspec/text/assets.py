"""Reading a checkpoint directory's text files: JSON objects, and the names that tokenizer_config.json gives to tokens.

Knows nothing of tokenization or templates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentspec.errors import CheckpointError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_text(path: Path) -> str:
    """The file's text. Raises CheckpointError naming the file when it isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is no such file. Raises CheckpointError naming the file otherwise."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def named_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """`eos_token` and its like, as text: the variables that a chat template may use."""
    names: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        token = tokenizer_config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            names[name] = token
    return names
