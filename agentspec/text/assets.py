"""Reading a checkpoint directory's text files: JSON objects, and the names that tokenizer_config.json gives to tokens.

Knows nothing of tokenization or templates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentspec import files

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty when there is no such file. Raises CheckpointError naming the file otherwise."""
    return files.read_object(path) if files.is_there(path) else {}


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
