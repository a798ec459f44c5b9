"""The cost part of every answer: OpenAI's usage, and the speculative decoding metrics.

Knows wire.Usage and nothing of chat, text or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import compress, zip_longest
from typing import Any

import msgspec

from agentspec.server.token_room import usage_part
from agentspec.types import DraftSource
from agentspec.wire import ModelInfo, SpecStats, Usage


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The fields at the start of every object of one answer, whole or chunk."""

    id: str
    object: str
    model: str
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    def body(self, **fields: Any) -> dict[str, Any]:
        own = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        return {**own, "service_tier": None, "system_fingerprint": None, **fields}


def usage_body(usage: Usage, reasoning_tokens: int = 0, clamped: int | None = None) -> dict[str, Any]:
    """OpenAI's usage object. Completion tokens include reasoning tokens. clamped: see token_room.py."""
    spec = usage.spec
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "accepted_prediction_tokens": spec.num_accepted,
            "rejected_prediction_tokens": spec.num_drafted - spec.num_accepted,
        },
        **usage_part(clamped),
    }


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Usage of one choice that still runs. The remaining fields are known only at its end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def metrics_body(spec: SpecStats, info: ModelInfo) -> dict[str, Any]:
    """`metrics.speculative_decoding`, in vLLM's shape. A rate with no measurements is null.

    mean_acceptance_length counts the bonus token: 1 + accepted drafts / steps. acceptance_by_position[i] is the share
    of the drafts at position i that were accepted. Its numerator and denominator are in by_source, so that readers can
    aggregate over requests."""
    accepted_by_position = zip_longest(spec.accepted_by_position, spec.drafted_by_position, fillvalue=0)
    body: dict[str, Any] = {
        "mean_acceptance_length": 1 + spec.num_accepted / spec.num_steps if spec.num_steps else None,
        "draft_acceptance_rate": _share(spec.num_accepted, spec.num_drafted),
        "acceptance_histogram": spec.histogram,
        "num_accepted_draft_tokens": spec.num_accepted,
        "num_draft_tokens": spec.num_drafted,
        "num_spec_steps": spec.num_steps,
        "num_spec_tokens": info.max_draft_tokens,
        "acceptance_by_position": [_share(accepted, drafted) for accepted, drafted in accepted_by_position],
        "by_source": {source.value: _of_source(spec, info, source) for source in dict.fromkeys(info.draft_sources)},
    }
    if info.forced_acceptance is not None:
        body["forced"] = True
    return {"speculative_decoding": body}


def _of_source(spec: SpecStats, info: ModelInfo, source: DraftSource) -> dict[str, Any]:
    """Counts of the drafts from one source, at the positions that this source fills."""
    is_its_own = [one is source for one in info.draft_sources]
    drafted, accepted = (
        list(compress(spec.drafted_by_position, is_its_own)),
        list(compress(spec.accepted_by_position, is_its_own)),
    )
    return {
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "drafted_by_position": drafted,
        "accepted_by_position": accepted,
    }


def total(usages: Iterable[Usage]) -> Usage:
    """The sum over the requests of one answer."""
    whole = Usage()
    for usage in usages:
        whole.prompt_tokens += usage.prompt_tokens
        whole.completion_tokens += usage.completion_tokens
        whole.cached_tokens += usage.cached_tokens
        one, spec = usage.spec, whole.spec
        spec.num_steps += one.num_steps
        spec.num_drafted += one.num_drafted
        spec.num_accepted += one.num_accepted
        spec.drafted_by_position = _add(spec.drafted_by_position, one.drafted_by_position)
        spec.accepted_by_position = _add(spec.accepted_by_position, one.accepted_by_position)
        spec.histogram = _add(spec.histogram, one.histogram)
    return whole


def of_choices(usages: Sequence[Usage]) -> Usage:
    """The sum over the choices of one prompt. The prompt counts once; cached tokens are those that no choice had to
    compute."""
    whole = total(usages)
    whole.prompt_tokens = usages[0].prompt_tokens
    whole.cached_tokens = min(usage.cached_tokens for usage in usages)
    return whole


def _add(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
