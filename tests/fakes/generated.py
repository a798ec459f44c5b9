"""The events of an engine that generates given ids: their decoded text, in steps of any size, with scores."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentspec.text.detokenizer import Detokenizer
from agentspec.text.tokenizer import Tokenizer
from agentspec.types import TokenScore
from agentspec.wire import TokensEvent


def generated(tokenizer: Tokenizer, ids: Sequence[int], rng: random.Random) -> list[TokensEvent]:
    detokenizer, scores, events = Detokenizer(tokenizer.token_bytes), scores_of(ids), []
    start = 0
    while start < len(ids):
        end = start + rng.randint(1, 4)
        events.append(
            TokensEvent(
                request_id="",
                token_ids=list(ids[start:end]),
                text=detokenizer.push(ids[start:end]).text,
                scores=scores[start:end],
            )
        )
        start = end
    return events


def scores_of(ids: Sequence[int]) -> list[TokenScore]:
    """One score per token: its position gives the log-probability, and another token is always more likely."""
    return [TokenScore(token_id=token, logprob=-0.5 - index, top=[(64, -0.1)]) for index, token in enumerate(ids)]
