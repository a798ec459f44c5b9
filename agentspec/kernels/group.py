"""The ranks that share a sum: each holds columns of the matrices whose products go to the residual, so its product is a
partial sum.

Owns the order of such sums, and what becomes of the norm behind them. Which part of what a rank holds is the models'
business (models/shards.py). Shape letters: N tokens, H hidden size, O features, E outputs that stay in full precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, distributed

from agentspec.kernels import reference
from agentspec.kernels.backend import Backend, MixtureWeights, Norm
from agentspec.kernels.weights import Plain, Weight


class Group(Protocol):
    @property
    def size(self) -> int: ...

    def add_partial(
        self, residual_NH: Tensor, partial_NH: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        """residual + the sum of all ranks' partial sums, in float32 in the order of ranks and rounded once: the same
        bits on every rank. Beside it the result's `next_norm`, where the group computes that in the same launch.

        The residual, which all ranks have alike, is overwritten. Every rank must call this as often, with as many
        tokens."""


class GatheredGroup:
    """A Group that gathers all partial sums, through torch's process group: torch's own sums have an order that depends
    on their size."""

    def __init__(self, process_group: distributed.ProcessGroup) -> None:
        self._process_group = process_group
        self.size = process_group.size()

    def add_partial(
        self, residual_NH: Tensor, partial_NH: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        mine = partial_NH.float().contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine, group=self._process_group)
        residual_NH.copy_(residual_NH.float() + sum(parts[1:], parts[0]))
        return residual_NH, None if next_norm is None else reference.rms_norm(residual_NH, next_norm)


def within(group: Group | None, ops: Backend) -> Backend:
    """The operations of a rank: those that end in the residual add up the whole group's sums. A group of one rank gets
    `ops` itself."""
    return ops if group is None or group.size == 1 else cast(Backend, _Grouped(group, ops))


class _Normed(NamedTuple):
    x_NH: Tensor
    norm: Norm
    normed_NH: Tensor


class _Grouped:
    def __init__(self, group: Group, ops: Backend) -> None:
        self._group, self._ops = group, ops
        self._normed: _Normed | None = None
        """What came with the last sum. Objects are compared by identity: a residual changes in the sums alone."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def norm_linear(self, x_NH: Tensor, norm: Norm, weight_OH: Weight, extra_EH: Tensor | None = None) -> Tensor:
        normed = self._normed
        if normed is None or normed.x_NH is not x_NH or normed.norm is not norm:
            return self._ops.norm_linear(x_NH, norm, weight_OH, extra_EH)
        out_NO = self._ops.linear(normed.normed_NH, weight_OH)
        return (
            out_NO if extra_EH is None else torch.cat([out_NO, self._ops.linear(normed.normed_NH, Plain(extra_EH))], -1)
        )

    def add_linear(self, residual_NH: Tensor, x_NO: Tensor, weight_HO: Weight, next_norm: Norm | None = None) -> Tensor:
        return self._add_partial(residual_NH, self._ops.linear(x_NO, weight_HO), next_norm)

    def add_experts(
        self, residual_NH: Tensor, norm: Norm, weights: MixtureWeights, next_norm: Norm | None = None
    ) -> Tensor:
        return self._add_partial(residual_NH, self._ops.expert_sum(residual_NH, norm, weights), next_norm)

    def _add_partial(self, residual_NH: Tensor, partial_NH: Tensor, next_norm: Norm | None) -> Tensor:
        x_NH, normed_NH = self._group.add_partial(residual_NH, partial_NH, next_norm)
        self._normed = None if normed_NH is None or next_norm is None else _Normed(x_NH, next_norm, normed_NH)
        return x_NH
