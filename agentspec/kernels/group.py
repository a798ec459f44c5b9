"""The ranks that share a sum: each holds columns of the matrices whose products go to the residual, so its product is a
partial sum.

Owns the order of such sums. Which part of what a rank holds is the models' business (models/shards.py).
Shape letters: N tokens, H hidden size, O features.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, distributed

from agentspec.kernels.backend import Backend, MixtureWeights, Norm
from agentspec.kernels.weights import Weight


class Group(Protocol):
    @property
    def size(self) -> int: ...

    def add(self, residual_NH: Tensor, partial_NH: Tensor) -> Tensor:
        """residual + the sum of all ranks' partial sums, in float32 in the order of ranks and rounded once: the same
        bits on every rank.

        The residual, which all ranks have alike, is given away. Every rank must come here as often, with as many
        tokens."""
        ...


class GatheredGroup:
    """A Group that gathers all partial sums, through torch's process group: torch's own sums have an order that depends
    on their size."""

    def __init__(self, process_group: distributed.ProcessGroup) -> None:
        self._process_group = process_group
        self.size = process_group.size()

    def add(self, residual_NH: Tensor, partial_NH: Tensor) -> Tensor:
        mine = partial_NH.float().contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine, group=self._process_group)
        total = parts[0]
        for part in parts[1:]:
            total += part
        return residual_NH.copy_(residual_NH.float() + total)


def within(group: Group | None, ops: Backend) -> Backend:
    """The operations of a rank: those that end in the residual add up the whole group's sums. Of one alone they are
    `ops` as they are."""
    return ops if group is None or group.size == 1 else cast(Backend, _Grouped(group, ops))


class _Grouped:
    def __init__(self, group: Group, ops: Backend) -> None:
        self._group, self._ops = group, ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def add_linear(self, residual_NH: Tensor, x_NO: Tensor, weight_HO: Weight) -> Tensor:
        return self._group.add(residual_NH, self._ops.linear(x_NO, weight_HO))

    def add_experts(self, residual_NH: Tensor, norm: Norm, weights: MixtureWeights) -> Tensor:
        return self._group.add(residual_NH, self._ops.expert_sum(residual_NH, norm, weights))
