"""The copy rule: which tokens of a sequence are drafted again behind the MTP drafts, for one slot in plain Python.

Owns the definition. Steps run `Backend.draft_copies`, the same rule on tensors; tests compare each implementation with
this one. Knows nothing about tensors, slots or when copies are worth their columns.

Agents repeat what their session already contains: file text, paths, ids, call syntax. So what followed the last tokens
where they occurred before is a good guess at what follows them now.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentspec.types import MAX_COPY_MATCH


def draft_copies(
    text: Sequence[int], drafts: Sequence[int], *, num_copies: int, min_match: int
) -> tuple[list[int], int]:
    """Return (the copies, the length of their match): `num_copies` tokens, or none and 0 if there is no match.

    text: all tokens of the sequence, prompt and output, including the last emitted one. drafts: the MTP drafts behind
    it.
    A match: the last m tokens of text and drafts occur at an earlier place too, min_match <= m <= MAX_COPY_MATCH; the
    two places may overlap. The longest match counts, and of equally long ones the most recent. The copies are the
    tokens behind it. Where these reach the end of text and drafts they go on into the copies themselves, so they repeat
    with the distance of the two places as their period."""
    known = [*text, *drafts]
    length, end = max(
        ((_match_length(known, end), end) for end in range(len(known) - 1)),
        default=(0, 0),
    )
    if length < min_match:
        return [], 0
    for place in range(end + 1, end + 1 + num_copies):
        known.append(known[place])
    return known[len(known) - num_copies :], length


def _match_length(known: Sequence[int], end: int) -> int:
    """How many tokens up to position `end` equal the last ones, at most MAX_COPY_MATCH."""
    length = 0
    while length < min(end + 1, MAX_COPY_MATCH) and known[end - length] == known[-1 - length]:
        length += 1
    return length
