"""Scored tokens in the shape of OpenAI's completions: tokens, token_logprobs, top_logprobs, text_offset.

Knows scores and a tokenizer's bytes; nothing of requests. A log-probability of minus infinity is null in JSON.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from agentspec.types import TokenScore


def logprobs_body(ids: Sequence[int], scores: Sequence[TokenScore], token_bytes: Sequence[bytes] | None) -> dict[str, Any]:
    """`scores` holds one entry per token after the first, so the first token's are null, as in OpenAI's answers.

    top_logprobs holds the most likely tokens and the token itself. text_offset counts characters of the decoded text; a token
    that ends a character begun before it starts at that character."""
    return {
        "tokens": [token_name(token, token_bytes) for token in ids],
        "token_logprobs": [None, *(score.logprob for score in scores)],
        "top_logprobs": [None, *(_top(score, token_bytes) for score in scores)],
        "text_offset": _offsets(ids, token_bytes),
    }


def token_name(token: int, token_bytes: Sequence[bytes] | None) -> str:
    """The token's text; `bytes:\\x..` when it is no text by itself; `token_id:n` for a token that stands for no text at all."""
    data = b"" if token_bytes is None or token >= len(token_bytes) else token_bytes[token]
    if not data:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _top(score: TokenScore, token_bytes: Sequence[bytes] | None) -> dict[str, float]:
    top = {token_name(token, token_bytes): logprob for token, logprob in score.top}
    top.setdefault(token_name(score.token_id, token_bytes), score.logprob)
    return top


def _offsets(ids: Sequence[int], token_bytes: Sequence[bytes] | None) -> list[int]:
    if token_bytes is None:
        return [0] * len(ids)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], 0
    for token in ids:
        offsets.append(length)
        length += len(decoder.decode(token_bytes[token] if token < len(token_bytes) else b""))
    return offsets
