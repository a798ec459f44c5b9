"""Measures how long requests queue, compute their prompt and decode, by the host's clock. The times are observed when a
request ends.

Knows ids, events and the loop's timestamps. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agentspec.runtime.metrics import EngineMetrics
from agentspec.types import FinishReason
from agentspec.wire import Event, FinishEvent, TokensEvent


@dataclass(slots=True)
class _Moments:
    arrived: float
    begun: float | None = None
    """When the first step that computes some of its prompt was launched. A preemption doesn't change it."""
    first: float | None = None
    """When the host had its first token."""
    last: float | None = None


class RequestTimes:
    """Timestamps of a loop's requests that have not ended."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._moments: dict[str, _Moments] = {}

    def add_request(self, request_id: str, now: float) -> None:
        self._moments[request_id] = _Moments(now)

    def begin_prompts(self, request_ids: Iterable[str], now: float) -> None:
        """Record that a step was launched that computes some of these requests' prompts."""
        for request_id in request_ids:
            moments = self._moments[request_id]
            if moments.begun is None:
                moments.begun = now

    def record_events(self, events: Iterable[Event], now: float) -> None:
        """Record events that are about to be sent. Events of unknown requests are skipped: a metric must not stop the
        engine."""
        for event in events:
            moments = self._moments.get(event.request_id)
            if moments is None:
                continue
            if isinstance(event, FinishEvent):
                del self._moments[event.request_id]
                self._end(moments, event.reason, now)
            elif isinstance(event, TokensEvent) and event.token_ids:
                moments.first = now if moments.first is None else moments.first
                moments.last = now

    def _end(self, moments: _Moments, reason: FinishReason, now: float) -> None:
        """Observe each time that the request got far enough for. A request that wants no token ends with its prompt."""
        if moments.begun is None:
            return
        metrics = self._metrics
        metrics.queue_seconds.observe(moments.begun - moments.arrived)
        if moments.first is None or moments.last is None:
            if reason is FinishReason.LENGTH:
                metrics.prompt_seconds.observe(now - moments.begun)
                metrics.inference_seconds.observe(now - moments.begun)
            return
        metrics.prompt_seconds.observe(moments.first - moments.begun)
        metrics.decode_seconds.observe(moments.last - moments.first)
        metrics.inference_seconds.observe(moments.last - moments.begun)
