"""How long requests waited, computed their prompt and decoded, as the host sees it: observed when they end.

Knows ids, events and the moments of a loop. Decides nothing.
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
    """The first step that computes some of its prompt was launched. A preemption doesn't change it."""
    first: float | None = None
    """The host had its first token."""
    last: float | None = None


class RequestTimes:
    """Of the requests of one loop that have not ended."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._moments: dict[str, _Moments] = {}

    def arrive(self, request_id: str, now: float) -> None:
        self._moments[request_id] = _Moments(now)

    def begin(self, request_ids: Iterable[str], now: float) -> None:
        """A step was launched that computes some of these requests' prompts."""
        for request_id in request_ids:
            moments = self._moments[request_id]
            if moments.begun is None:
                moments.begun = now

    def note(self, events: Iterable[Event], now: float) -> None:
        """What is about to be handed out. Events of nobody are passed over: a figure is no reason to stop the
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
        """Each time of a request that came so far. One that wants no token is through when its prompt is."""
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
