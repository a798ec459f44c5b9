"""The draft vocabulary: the most frequent tokens. Reading the whole head for every draft would cost more than the rest
of the MTP layer.

Owns its size and its tokens. Verification always uses the whole vocabulary, so the draft vocabulary affects acceptance
but never the output tokens. Knows nothing about tensors or files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentspec.errors import ConfigError

DEFAULT_SIZE = 32_768
"""An eighth of the head of the published models, which have 248,077 tokens."""

LARGE_VOCABULARY = 65_536
"""Vocabularies of up to this many real tokens are used whole by default."""


def draft_vocab_size(asked: int | None, *, num_real_tokens: int) -> int:
    """Size of the draft vocabulary. asked: `EngineConfig.draft_vocab_size`; 0: all tokens, None: the default for the
    vocabulary's size.

    Raises ConfigError if it is larger than the vocabulary."""
    if asked is None:
        return DEFAULT_SIZE if num_real_tokens > LARGE_VOCABULARY else num_real_tokens
    if asked > num_real_tokens:
        raise ConfigError("draft_vocab", asked, f"the model has {num_real_tokens} tokens; 0 means all of them")
    return asked or num_real_tokens


def choose_draft_ids(
    counts: Mapping[int, int], *, size: int, num_real_tokens: int, always: Collection[int]
) -> list[int]:
    """`size` token ids below `num_real_tokens`, ascending: those of `always`, then those with the highest counts.

    Ids with equal counts are taken in ascending order. Without counts this is the order of frequency: byte-level BPE
    numbers its tokens as it merges them, the most frequent pair first.

    always: ids that drafting needs: those that end a turn, and the control tokens, which byte-level BPEs number last.
    Raises ConfigError if `size` is too small for them."""
    chosen = {token for token in always if token < num_real_tokens}
    if size < len(chosen):
        raise ConfigError(
            "draft_vocab",
            size,
            f"must be at least {len(chosen)}: stop ids and control tokens are always among the drafts",
        )
    ranked = sorted(
        (token for token in range(num_real_tokens) if token not in chosen), key=lambda token: -counts.get(token, 0)
    )
    return sorted([*chosen, *ranked[: size - len(chosen)]])
