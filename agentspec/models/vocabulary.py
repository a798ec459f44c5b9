"""Which token ids exist and which end a turn, from a checkpoint's JSON files alone.

Reads only names and ids; encoding and decoding belong to the text room.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentspec.errors import CheckpointError
from agentspec.models.hf_config import TextConfig, read_json, token_ids


def num_real_tokens(directory: Path, config: TextConfig) -> int:
    """Ids below this one have a token behind them; `vocab_size` when there is no tokenizer.json.

    Published checkpoints pad the embedding: rows above the last token are never sampled.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return config.vocab_size
    tokenizer = read_json(path)
    ids = list(_added_tokens(tokenizer).values())
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids.extend(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
    real = max(ids, default=-1) + 1
    if not 0 < real <= config.vocab_size:
        raise CheckpointError(f"{path}: {real} token ids do not fit the model's vocab_size={config.vocab_size}")
    return real


def stop_token_ids(directory: Path, config: TextConfig) -> tuple[int, ...]:
    """Union of the end ids of generation_config.json, config.json and tokenizer_config.json, in that order.

    The union matters: config.json alone names `<|endoftext|>`, which never ends a chat turn. Files that are absent add nothing.
    """
    ids: list[int] = []
    generation_path = directory / "generation_config.json"
    if generation_path.is_file():
        ids += token_ids(read_json(generation_path), "eos_token_id", str(generation_path))
    ids += config.eos_token_ids
    tokenizer_path = directory / "tokenizer_config.json"
    if tokenizer_path.is_file():
        ids += _tokenizer_end(directory, read_json(tokenizer_path))
    for token in ids:
        if token >= config.vocab_size:
            raise CheckpointError(f"{directory}: end id {token} is outside the vocabulary of {config.vocab_size}")
    return tuple(dict.fromkeys(ids))


def _tokenizer_end(directory: Path, tokenizer_config: dict[str, Any]) -> list[int]:
    token = tokenizer_config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return []
    path = directory / "tokenizer.json"
    tokenizer = read_json(path) if path.is_file() else {}
    known = _added_tokens(tokenizer)
    for token_id, entry in tokenizer_config.get("added_tokens_decoder", {}).items():
        known.setdefault(entry["content"], int(token_id))
    vocab = tokenizer.get("model", {}).get("vocab", {})
    found = known.get(token, vocab.get(token) if isinstance(vocab, dict) else None)
    if found is None:
        raise CheckpointError(f"{directory}: eos_token {token!r} of tokenizer_config.json is no known token")
    return [found]


def _added_tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    return {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", [])}
