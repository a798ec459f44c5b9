"""Which drafts of a window stand: the rule, for one slot in plain Python.

Owns the definition. What steps run is `Backend.commit_window`, which says the same of tensors
(kernels/reference/verdict.py, and a Triton kernel); tests compare each implementation with this one. Knows no tensors
and no rows.

Drafts are point masses, so "sample the target's token, accept the draft if it is that token" is exactly speculative
sampling: the draft d is accepted with probability p(d), and a rejection leaves p restricted to the other tokens. So the
stream is a function of the target's choices alone: which drafts were offered changes how many tokens a step emits,
never which (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agentspec.types import STOP_ID, STOP_LENGTH, STOP_RUNNING


def accept(
    chosen: Sequence[int], drafts: Sequence[int], *, num_valid: int, stop_ids: Collection[int], room: int
) -> tuple[int, int]:
    """How many drafts of a window stand, and how the request ends there: STOP_RUNNING, STOP_ID or STOP_LENGTH.

    chosen: the target's token after each of the k + 1 columns; the first `accepted + 1` of them are emitted.
    drafts: the k drafts. Only the first num_valid were made for this prefix; the others are never accepted.
    room: tokens that the request may still emit, at least 1. A stop id that fills it is a stop id."""
    for column, token in enumerate(chosen):
        if token in stop_ids:
            return column, STOP_ID
        if column + 1 == room:
            return column, STOP_LENGTH
        if column >= min(num_valid, len(drafts)) or drafts[column] != token:
            return column, STOP_RUNNING
    raise AssertionError("there is one choice more than there are drafts")
