"""A recorder without CUDA graphs: a replay runs the step again.

Like graphs that share their memory, a replay overwrites the results of all others with garbage, so that a late read is
detected.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from agentspec.runtime.decode_step import StepResult


class Replayer:
    """graphs.Recorder on any device."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        """Of every recording, in order."""
        self.num_replays = 0
        """Of steps."""
        self.num_write_replays = 0

    def record(self, step: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
        result = step()
        self.results.append(result)

        def replay() -> None:
            self.num_replays += 1
            self._spoil()
            again = step()
            result.outcome_BF.copy_(again.outcome_BF)
            result.logits_BTV.copy_(again.logits_BTV)

        return replay, result

    def record_writes(self, work: Callable[[], None]) -> Callable[[], None]:
        work()

        def replay() -> None:
            self.num_write_replays += 1
            self._spoil()
            work()

        return replay

    def bytes_used(self) -> int:
        return 3 << 28

    def _spoil(self) -> None:
        for result in self.results:
            result.outcome_BF.fill_(-1)
            result.logits_BTV.fill_(torch.nan)
