"""Usage and metrics of an answer."""

from __future__ import annotations

import enum

import msgspec

from agentspec.server.answers import metrics_body, of_choices, total, usage_body
from agentspec.wire import SpecStats, Usage
from tests.fakes.engine_client import INFO, SPEC


def test_metrics_have_vllms_shape() -> None:
    body = metrics_body(SPEC, INFO)["speculative_decoding"]
    assert body == {
        "mean_acceptance_length": 1 + 5 / 4,
        "draft_acceptance_rate": 5 / 9,
        "acceptance_histogram": [1, 1, 2],
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 9,
        "num_spec_steps": 4,
        "num_spec_tokens": 3,
        "acceptance_by_position": [3 / 4, 2 / 3, 0.0],
        "by_source": {
            "mtp": {
                "num_draft_tokens": 9,
                "num_accepted_draft_tokens": 5,
                "drafted_by_position": [4, 3, 2],
                "accepted_by_position": [3, 2, 0],
            }
        },
    }


def test_forced_acceptance_is_labelled_in_metrics() -> None:
    forced = msgspec.structs.replace(INFO, forced_acceptance=(0.5,))
    assert metrics_body(SPEC, forced)["speculative_decoding"]["forced"] is True
    assert "forced" not in metrics_body(SPEC, INFO)["speculative_decoding"]


def test_model_without_drafts_has_no_draft_sources() -> None:
    plain = msgspec.structs.replace(INFO, draft_sources=())
    body = metrics_body(SpecStats(num_steps=2, histogram=[2]), plain)["speculative_decoding"]
    assert (body["by_source"], body["mean_acceptance_length"], body["draft_acceptance_rate"]) == ({}, 1.0, None)


def test_each_draft_source_counts_its_own_positions() -> None:
    class Sources(enum.StrEnum):
        OURS = "ours"
        THEIRS = "theirs"

    info = msgspec.structs.replace(INFO, draft_sources=(Sources.OURS, Sources.OURS, Sources.THEIRS))
    assert metrics_body(SPEC, info)["speculative_decoding"]["by_source"] == {
        "ours": {
            "num_draft_tokens": 7,
            "num_accepted_draft_tokens": 5,
            "drafted_by_position": [4, 3],
            "accepted_by_position": [3, 2],
        },
        "theirs": {
            "num_draft_tokens": 2,
            "num_accepted_draft_tokens": 0,
            "drafted_by_position": [2],
            "accepted_by_position": [0],
        },
    }


def test_positions_without_accepted_drafts_are_counted() -> None:
    body = metrics_body(SpecStats(num_steps=1, num_drafted=2, drafted_by_position=[1, 1]), INFO)["speculative_decoding"]
    assert body["acceptance_by_position"] == [0.0, 0.0]


def test_totals_add_lists_of_different_lengths() -> None:
    one = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=3, spec=SPEC)
    two = Usage(prompt_tokens=10, spec=SpecStats(num_steps=1, histogram=[0, 0, 0, 5]))
    whole = total([one, two])
    assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens, whole.spec.histogram) == (
        11,
        2,
        3,
        [1, 1, 2, 5],
    )
    assert usage_body(whole)["total_tokens"] == 13
    assert SPEC.histogram == [1, 1, 2]


def test_usage_counts_the_prompt_of_several_choices_once() -> None:
    first, second = (
        Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=0),
        Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=8),
    )
    whole = of_choices([second, first])
    assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens) == (9, 5, 0)
    body = usage_body(whole, reasoning_tokens=4)
    assert (body["total_tokens"], body["completion_tokens_details"]["reasoning_tokens"]) == (14, 4)
