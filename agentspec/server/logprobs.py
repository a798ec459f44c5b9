"""Token scores in OpenAI's two shapes: parallel lists (completions), and one object per token (chat).

Knows scores and a tokenizer's bytes; nothing of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from agentspec.types import TokenScore

LEAST = -9999.0
"""OpenAI's value for an impossible token: JSON has no minus infinity."""


class CompletionLogprobs:
    """tokens, token_logprobs, top_logprobs and text_offset of one choice, built incrementally.

    top_logprobs holds the most likely tokens and the token itself. text_offset counts characters of the decoded text; a
    token that completes a character begun by an earlier token has that character's offset."""

    def __init__(self, token_bytes: Sequence[bytes] | None) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def body(self, ids: Sequence[int], scores: Sequence[TokenScore | None]) -> dict[str, Any]:
        """The next tokens. A score is None for a token without a predecessor: its entries are null."""
        return {
            "tokens": [token_name(token, self._token_bytes) for token in ids],
            "token_logprobs": [None if score is None else _finite(score.logprob) for score in scores],
            "top_logprobs": [None if score is None else self._top(score) for score in scores],
            "text_offset": [self._offset(token) for token in ids],
        }

    def _top(self, score: TokenScore) -> dict[str, float]:
        top = {token_name(token, self._token_bytes): _finite(logprob) for token, logprob in score.top}
        top.setdefault(token_name(score.token_id, self._token_bytes), _finite(score.logprob))
        return top

    def _offset(self, token: int) -> int:
        start = self._length
        self._length += len(self._decoder.decode(_bytes_of(token, self._token_bytes)))
        return start


def content_logprobs(scores: Iterable[TokenScore], token_bytes: Sequence[bytes]) -> dict[str, Any]:
    """A chat choice's `logprobs`."""
    content = [
        {
            **_token(score.token_id, score.logprob, token_bytes),
            "top_logprobs": [_token(token, logprob, token_bytes) for token, logprob in score.top],
        }
        for score in scores
    ]
    return {"content": content, "refusal": None}


def token_name(token: int, token_bytes: Sequence[bytes] | None) -> str:
    """The token's text; `bytes:\\x..` when it is no text by itself; `token_id:n` for a token that stands for no text at
    all."""
    data = _bytes_of(token, token_bytes)
    if not data:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _token(token: int, logprob: float, token_bytes: Sequence[bytes]) -> dict[str, Any]:
    data = _bytes_of(token, token_bytes)
    return {"token": token_name(token, token_bytes), "logprob": _finite(logprob), "bytes": list(data) if data else None}


def _bytes_of(token: int, token_bytes: Sequence[bytes] | None) -> bytes:
    return b"" if token_bytes is None or token >= len(token_bytes) else token_bytes[token]


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
