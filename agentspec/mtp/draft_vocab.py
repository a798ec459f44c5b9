"""Which tokens drafts are chosen from: the ones that come up most, because reading the whole head for every draft costs
more than the rest of the MTP layer.

Owns size and choice. Verification always uses the whole vocabulary, so a choice can cost acceptance and never changes
what is said. Knows no tensors and no files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentspec.errors import ConfigError

DEFAULT_SIZE = 32_768
"""An eighth of the head of the published models, which know 248,077 tokens."""

LARGE_VOCABULARY = 65_536
"""Real tokens up to which drafts are chosen from all of them by default."""


def draft_vocab_size(asked: int | None, *, num_real_tokens: int) -> int:
    """How many tokens drafts are chosen from. asked: `EngineConfig.draft_vocab_size`; 0 means all, None what suits the
    vocabulary.

    Raises ConfigError when there are not so many."""
    if asked is None:
        return DEFAULT_SIZE if num_real_tokens > LARGE_VOCABULARY else num_real_tokens
    if asked > num_real_tokens:
        raise ConfigError("draft_vocab", asked, f"the model has {num_real_tokens} tokens; 0 means all of them")
    return asked or num_real_tokens


def choose_draft_ids(
    counts: Mapping[int, int], *, size: int, num_real_tokens: int, always: Collection[int]
) -> list[int]:
    """`size` token ids below `num_real_tokens`, ascending: those of `always`, then the most counted ones.

    Equally counted ones come in the order of their ids, which is that of frequency where nothing was counted:
    byte-level BPE numbers its tokens as it merges them, the most frequent pair first.

    always: the ids without which drafting is not worth much: what ends a turn, and the control tokens, which byte-level
    BPEs number last. Raises ConfigError when `size` is too small for them."""
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
