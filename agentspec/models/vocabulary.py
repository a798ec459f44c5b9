"""Which token ids exist and which end a turn, from a checkpoint's JSON files alone.

Reads only names and ids; encoding and decoding are in agentspec/text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentspec.errors import CheckpointError
from agentspec.files import is_there, read_object
from agentspec.models.hf_config import TextConfig, token_ids


def num_real_tokens(directory: Path, config: TextConfig) -> int:
    """One more than the highest id of a real token; `vocab_size` when there is no tokenizer.json.

    Published checkpoints pad the embedding: ids above the last token are never sampled."""
    path = directory / "tokenizer.json"
    if not is_there(path):
        return config.vocab_size
    tokenizer = read_object(path)
    real = max([*_added_tokens(tokenizer, path).values(), *_vocabulary(tokenizer, path).values()], default=-1) + 1
    if not 0 < real <= config.vocab_size:
        raise CheckpointError(f"{path}: {real} token ids do not fit the model's vocab_size={config.vocab_size}")
    return real


def stop_token_ids(directory: Path, config: TextConfig) -> tuple[int, ...]:
    """Union of the end ids of generation_config.json, config.json and tokenizer_config.json, in that order.

    The union is needed: config.json alone names `<|endoftext|>`, which never ends a chat turn. Absent files add
    nothing."""
    ids: list[int] = []
    generation_path = directory / "generation_config.json"
    if is_there(generation_path):
        ids += token_ids(read_object(generation_path), "eos_token_id", str(generation_path))
    ids += config.eos_token_ids
    tokenizer_path = directory / "tokenizer_config.json"
    if is_there(tokenizer_path):
        ids += _tokenizer_end(directory, read_object(tokenizer_path))
    for token in ids:
        if token >= config.vocab_size:
            raise CheckpointError(f"{directory}: end id {token} is outside the vocabulary of {config.vocab_size}")
    return tuple(dict.fromkeys(ids))


def _tokenizer_end(directory: Path, tokenizer_config: dict[str, Any]) -> list[int]:
    config_path, path = directory / "tokenizer_config.json", directory / "tokenizer.json"
    token = tokenizer_config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return []
    tokenizer = read_object(path) if is_there(path) else {}
    known = _added_tokens(tokenizer, path)
    decoder = _object(tokenizer_config, "added_tokens_decoder", config_path)
    for token_id, entry in decoder.items():
        if not (
            isinstance(entry, dict)
            and isinstance(entry.get("content"), str)
            and token_id.isascii()
            and token_id.isdigit()
        ):
            raise CheckpointError(
                f"{config_path}: added_tokens_decoder[{token_id[:40]!r}] must be an id with a token's content"
            )
        known.setdefault(entry["content"], int(token_id[:20]))
    found = known.get(token, _vocabulary(tokenizer, path).get(token)) if isinstance(token, str) else None
    if found is None:
        raise CheckpointError(f"{directory}: eos_token {token!r} of tokenizer_config.json is no known token")
    return [found]


def _vocabulary(tokenizer: dict[str, Any], path: Path) -> Mapping[Any, int]:
    """Ids by token. Some models have a list: then the keys are the list's indices."""
    model = _object(tokenizer, "model", path)
    vocab = model.get("vocab") or {}
    if isinstance(vocab, list):
        return {place: place for place in range(len(vocab))}
    if not isinstance(vocab, dict) or not all(type(token_id) is int for token_id in vocab.values()):
        raise CheckpointError(f"{path}: model.vocab must give tokens their ids")
    return vocab


def _added_tokens(tokenizer: dict[str, Any], path: Path) -> dict[str, int]:
    added = tokenizer.get("added_tokens") or []
    entries = added if isinstance(added, list) else [added]
    if not all(
        isinstance(entry, dict) and isinstance(entry.get("content"), str) and type(entry.get("id")) is int
        for entry in entries
    ):
        raise CheckpointError(f"{path}: added_tokens must be a list of tokens with id and content")
    return {entry["content"]: entry["id"] for entry in entries}


def _object(holder: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = holder.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {name} must be an object")
    return value
