"""A recorder without CUDA graphs: a replay runs the step again.

Like graphs that share their memory, a replay spoils the results of all others, so that whoever reads a result too late reads nonsense.
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

    def record(self, step: Callable[[], StepResult]) -> tuple[Callable[[], None], StepResult]:
        result = step()
        self.results.append(result)

        def replay() -> None:
            self.num_replays += 1
            for other in self.results:
                other.happened_BF.fill_(-1)
                other.logits_BTV.fill_(torch.nan)
            again = step()
            result.happened_BF.copy_(again.happened_BF)
            result.logits_BTV.copy_(again.logits_BTV)

        return replay, result

    def bytes_used(self) -> int:
        return 3 << 28
