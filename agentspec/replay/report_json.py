"""The JSON objects of a replay report. Times are in milliseconds; None means unknown.

Scripts read these keys: an existing key keeps its meaning.
"""

from __future__ import annotations

from typing import Any

from agentspec.replay.measure import Distribution, Summary, TurnColumn, TurnRecord
from agentspec.replay.slo import Goodput, Slo


def summary_json(summary: Summary) -> dict[str, Any]:
    speculation = summary.speculation
    return {
        "sessions": summary.num_sessions,
        "subagent_sessions": summary.num_subagents,
        "failed_sessions": summary.num_failed_sessions,
        "planned_turns": summary.num_planned_turns,
        "turns": summary.num_turns,
        "failed_turns": summary.num_failed_turns,
        "diverged_turns": summary.num_diverged,
        "errors": [{"message": message, "sessions": number} for message, number in summary.errors],
        "wall_s": round(summary.wall, 6),
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
        "output_tokens_per_s": summary.output_rate,
        "gpus": summary.num_gpus,
        "output_tokens_per_s_per_gpu": summary.output_rate_per_gpu,
        "total_tokens_per_s_per_gpu": summary.total_rate_per_gpu,
        "e2e_normalized_interactivity_p90": summary.interactivity,
        "ttft_ms": _distribution_json(summary.time_to_first_token),
        "ttft_first_turns_ms": _distribution_json(summary.first_token_of_first_turns),
        "ttft_later_turns_ms": _distribution_json(summary.first_token_of_later_turns),
        "tpot_ms": _distribution_json(summary.time_per_token),
        "itl_ms": _distribution_json(summary.gaps),
        "e2el_ms": _distribution_json(summary.latency),
        "normalized_latency_ms": _distribution_json(summary.normalized_latency),
        "sched_lag_ms": _distribution_json(summary.lag),
        "cached_tokens": summary.hits.cached_tokens if summary.hits.num_turns else None,
        "hit_share": summary.hits.share,
        "turns_reporting_hits": summary.hits.num_turns,
        "emitted_per_step": summary.emitted_per_step,
        "draft_acceptance": summary.draft_acceptance,
        "drafted_by_position": speculation.drafted_by_position if speculation is not None else None,
        "accepted_by_position": speculation.accepted_by_position if speculation is not None else None,
        "acceptance_by_position": summary.acceptance_by_position if speculation is not None else None,
        "by_source": {
            name: {
                "emitted_per_step": summary.emitted_by_source.get(name),
                "drafted_by_position": counts.drafted,
                "accepted_by_position": counts.accepted,
            }
            for name, counts in speculation.by_source.items()
        }
        if speculation is not None
        else None,
        "decode_steps": speculation.num_steps if speculation is not None else None,
        "drafted_tokens": speculation.num_drafted if speculation is not None else None,
        "accepted_tokens": speculation.num_accepted if speculation is not None else None,
    }


def column_json(column: TurnColumn) -> dict[str, Any]:
    return {
        "turn": column.turn,
        "ttft_ms": _distribution_json(column.time_to_first_token),
        "e2el_ms": _distribution_json(column.latency),
        "prompt_tokens": column.hits.prompt_tokens if column.hits.num_turns else None,
        "cached_tokens": column.hits.cached_tokens if column.hits.num_turns else None,
        "hit_share": column.hits.share,
    }


def request_json(turn: TurnRecord, slo: Slo | None) -> dict[str, Any]:
    return {
        "session_id": turn.session_id,
        "turn": turn.turn,
        "user_turn": turn.user_turn,
        **({"warmup": True} if turn.is_warmup else {}),
        "delay_kind": turn.delay_kind,
        "due_ms": _ms(turn.due),
        "sent_ms": _ms(turn.sent),
        "sched_lag_ms": _ms(turn.lag),
        "ttft_ms": _ms(turn.time_to_first_token),
        "tpot_ms": _ms(turn.time_per_token),
        "itl_ms": [_ms(gap) for gap in turn.gaps],
        "e2el_ms": _ms(turn.latency),
        "normalized_latency_ms": _ms(turn.normalized_latency),
        "finish_reason": turn.finish_reason,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "cached_tokens": turn.cached_tokens,
        "decode_steps": turn.speculation.num_steps if turn.speculation is not None else None,
        "drafted_tokens": turn.speculation.num_drafted if turn.speculation is not None else None,
        "accepted_tokens": turn.speculation.num_accepted if turn.speculation is not None else None,
        "forced_acceptance": turn.forced_acceptance,
        "diverged": turn.diverged,
        "slo_missed": None if slo is None else slo.missed(turn),
        "error": turn.error,
    }


def goodput_json(slo: Slo, goodput: Goodput) -> dict[str, Any]:
    return {
        "bounds_ms": {name: _ms(seconds) for name, seconds in slo.bounds.items()},
        "turns": goodput.num_turns,
        "turns_met": goodput.num_met,
        "share_met": goodput.share,
        "missed": dict(goodput.missed),
        "goodput_turns_per_s": goodput.rate,
    }


def _distribution_json(distribution: Distribution) -> dict[str, Any]:
    return {
        "count": distribution.count,
        "mean": _ms(distribution.mean),
        "p50": _ms(distribution.p50),
        "p90": _ms(distribution.p90),
        "p99": _ms(distribution.p99),
        "max": _ms(distribution.largest),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
