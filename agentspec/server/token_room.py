"""Clamps a token limit to the room that the prompt leaves in the context, and reports the clamping in the answer.

Knows sampling and lengths; nothing of endpoints.
"""

from __future__ import annotations

import msgspec

from agentspec.types import SamplingParams

HEADER = "x-agentspec-max-tokens"


def within_room(
    sampling: SamplingParams, num_prompt_tokens: int, max_context: int, *, num_forced: int = 0
) -> SamplingParams:
    """The same sampling with max_tokens clamped to the rest of the context. num_forced: length of a forced output.

    If there is no room for the minimum output, it stays unchanged, and the engine refuses it."""
    room = max_context - num_prompt_tokens
    if sampling.max_tokens is None or sampling.max_tokens <= room or room < max(1, num_forced, sampling.min_tokens):
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=room)


def clamped_to(asked: SamplingParams, used: SamplingParams) -> int | None:
    """The limit used instead of the requested one; None: they are equal."""
    return None if used.max_tokens == asked.max_tokens else used.max_tokens


def headers(clamped: int | None) -> dict[str, str]:
    """Headers of the answer; empty without clamping."""
    return {} if clamped is None else {HEADER: str(clamped)}


def usage_part(clamped: int | None) -> dict[str, int]:
    """Extra fields of a usage object; empty without clamping."""
    return {} if clamped is None else {"max_tokens_clamped_to": clamped}
