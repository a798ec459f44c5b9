"""A token limit beyond the room that the prompt leaves in the context: what is used instead, and how an answer says so.

Knows sampling and lengths; nothing of endpoints.
"""

from __future__ import annotations

import msgspec

from agentspec.types import SamplingParams

HEADER = "x-agentspec-max-tokens"


def within_room(
    sampling: SamplingParams, num_prompt_tokens: int, max_context: int, *, num_forced: int = 0
) -> SamplingParams:
    """The same sampling, its max_tokens clamped to what the context leaves. num_forced: tokens of an output that is
    forced.

    Where there is no room for the least that must be generated it stays as it is, and the engine refuses it."""
    room = max_context - num_prompt_tokens
    if sampling.max_tokens is None or sampling.max_tokens <= room or room < max(1, num_forced, sampling.min_tokens):
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room)


def clamped_to(asked: SamplingParams, used: SamplingParams) -> int | None:
    """The limit that is used instead of the one that was asked for; None: they are the same."""
    return None if used.max_tokens == asked.max_tokens else used.max_tokens


def headers(clamped: int | None) -> dict[str, str]:
    """Of the answer; none when nothing was clamped."""
    return {} if clamped is None else {HEADER: str(clamped)}


def usage_part(clamped: int | None) -> dict[str, int]:
    """What a usage has beside its counts; nothing when nothing was clamped."""
    return {} if clamped is None else {"max_tokens_clamped_to": clamped}
