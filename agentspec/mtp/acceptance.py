"""The acceptance rule: which drafts of a window are accepted, for one slot in plain Python.

Owns the definition. Steps run `Backend.commit_window`, the same rule on tensors (kernels/reference/verdict.py, and a
Triton kernel); tests compare each implementation with this one. Knows nothing about tensors or rows.

Drafts are point masses. So sampling the target's token, and accepting the draft if it is that token, is exactly
speculative sampling: draft d is accepted with probability p(d), and after a rejection the token is distributed as p
restricted to the other tokens. The stream depends only on the target's choices: drafts change how many tokens a step
emits, never which (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentspec.types import STOP_ID, STOP_LENGTH, STOP_RUNNING


def accept(
    chosen: Sequence[int], drafts: Sequence[int], *, num_valid: int, stop_ids: Collection[int], room: int
) -> tuple[int, int]:
    """Number of accepted drafts of a window, and how the request ends there: STOP_RUNNING, STOP_ID or STOP_LENGTH.

    chosen: the target's token after each of the k + 1 columns; the first `accepted + 1` of them are emitted.
    drafts: the k drafts. Only the first num_valid were made for this prefix; the others are never accepted.
    room: tokens that the request may still emit, at least 1. If a stop id is also the last token that fits, the result
    is STOP_ID."""
    for column, token in enumerate(chosen):
        if token in stop_ids:
            return column, STOP_ID
        if column + 1 == room:
            return column, STOP_LENGTH
        if column >= min(num_valid, len(drafts)) or drafts[column] != token:
            return column, STOP_RUNNING
    raise AssertionError("there is one choice more than there are drafts")
