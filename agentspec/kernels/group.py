"""The ranks that share a sum: each holds columns of the matrices whose products go to the residual, so its product is a
partial sum; and rows of the heads, so it has some tokens' scores.

Owns the order of such sums, what becomes of the norm behind them, and the exchange of scores and winners. Which part of
what a rank holds is the models' business (models/shards.py, models/heads.py). Shape letters: N tokens, H hidden size, O
features, E outputs that stay in full precision, C columns of a rank, V vocabulary or a rank's part of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, distributed

from agentspec.kernels import reference
from agentspec.kernels.backend import Backend, MixtureWeights, Norm, OpenProduct, OpenSum, ProductInput
from agentspec.kernels.reference.ranking import token_of
from agentspec.kernels.weights import Weight


class Group(Protocol):
    """Every rank must make the same calls in the same order, with the same numbers of tokens and columns. What they
    return has the same bits on every rank."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int: ...

    def add_partial(
        self, residual_NH: Tensor | None, partial_NH: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        """residual + the sum of all ranks' partial sums, in float32 in the order of ranks and rounded once: the same
        bits on every rank. Beside it the result's `next_norm`, where the group computes that in the same launch.

        The residual, which all ranks have alike, is overwritten. None: zeros of the partial sums' dtype."""

    def gather_columns(self, part_NC: Tensor) -> Tensor:
        """All ranks' columns side by side in the order of ranks: [N, size * C]. part_NC: float32 (here any dtype).

        A step gathers scores: N window columns, C rows of a rank's target head. `limit_drafts`, which comes before any
        capture, gathers rows of weights: up to models/heads.py's GATHERED values a rank and call."""

    def best(self, best_NC: Tensor) -> Tensor:
        """The winner: the token of the greatest score over all columns of all ranks, the lowest one on ties: int64 [N].

        best_NC: int64, as of Backend.draft_best. Drafts are chosen so; a greedy step could be, with its logits only
        where scores are wanted."""


class RankGroup(Group, Protocol):
    """The group of a rank that is a process."""

    def abort(self) -> None:
        """Free every exchange of this rank that waits for another, now and later. Results from then on are wrong."""

    def close(self) -> None:
        """`abort`, and give memory back. Call when all other ranks have ended."""


class GatheredGroup:
    """A Group that gathers everything through torch's process group, and defines what a Group computes. torch's own
    sums have an order that depends on their size."""

    def __init__(self, process_group: distributed.ProcessGroup) -> None:
        self._process_group = process_group
        self.rank, self.size = process_group.rank(), process_group.size()

    def add_partial(
        self, residual_NH: Tensor | None, partial_NH: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        parts = self._gather(partial_NH.float())
        if residual_NH is None:
            residual_NH = torch.zeros_like(partial_NH)
        residual_NH.copy_(residual_NH.float() + sum(parts[1:], parts[0]))
        return residual_NH, None if next_norm is None else reference.rms_norm(residual_NH, next_norm)

    def gather_columns(self, part_NC: Tensor) -> Tensor:
        return torch.cat(self._gather(part_NC), 1)

    def best(self, best_NC: Tensor) -> Tensor:
        return token_of(self.gather_columns(best_NC).amax(1))

    def abort(self) -> None:
        """Nothing: a rank that waits gets an error when another ends."""

    def close(self) -> None:
        """Nothing."""

    def _gather(self, mine: Tensor) -> list[Tensor]:
        mine = mine.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(parts, mine, group=self._process_group)
        return parts


def within(group: Group | None, ops: Backend) -> Backend:
    """The operations of a rank: those that end in the residual add up the whole group's sums, and those of the heads
    take the rank's rows and return the whole group's scores or tokens. A group of one rank gets `ops` itself."""
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

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        x, still = self._normed_of(x, norm)
        return x if still is None else self._ops.rms_norm(x, still)

    def norm_linear(self, x_NH: Tensor, norm: Norm | None, weight_OH: Weight, extra_EH: Tensor | None = None) -> Tensor:
        return self._ops.norm_linear(*self._normed_of(x_NH, norm), weight_OH, extra_EH)

    def norm_linear_before_delta(
        self, x_NH: Tensor, norm: Norm | None, weight_OH: Weight, extra_EH: Tensor | None, gates: slice
    ) -> Tensor | OpenProduct:
        return self._ops.norm_linear_before_delta(*self._normed_of(x_NH, norm), weight_OH, extra_EH, gates)

    def norm_swiglu(self, x_NH: Tensor, norm: Norm | None, gate_up_2IH: Weight) -> Tensor:
        return self._ops.norm_swiglu(*self._normed_of(x_NH, norm), gate_up_2IH)

    def add_linear(
        self, residual_NH: Tensor | None, x_NO: Tensor | ProductInput, weight_HO: Weight, next_norm: Norm | None = None
    ) -> Tensor:
        return self._add_partial(residual_NH, self._ops.add_linear(None, x_NO, weight_HO), next_norm)

    def add_linear_before_experts(
        self,
        residual_NH: Tensor,
        x_NO: Tensor | ProductInput,
        weight_HO: Weight,
        norm: Norm,
        weights: MixtureWeights,
    ) -> Tensor:
        """Closed: the group's sum is that of all ranks' products."""
        return self.add_linear(residual_NH, x_NO, weight_HO)

    def add_ffn(
        self, residual_NH: Tensor, norm: Norm, gate_up_2IH: Weight, down_HI: Weight, next_norm: Norm | None = None
    ) -> Tensor:
        return self.add_linear(residual_NH, self.norm_swiglu(residual_NH, norm, gate_up_2IH), down_HI, next_norm)

    def add_experts(
        self, residual_NH: Tensor | OpenSum, norm: Norm, weights: MixtureWeights, next_norm: Norm | None = None
    ) -> Tensor:
        assert isinstance(residual_NH, Tensor), "a rank's product is not the group's"
        return self._add_partial(residual_NH, self._ops.expert_sum(residual_NH, norm, weights), next_norm)

    def logits(self, x_NH: Tensor, weight_VH: Weight, num_real: int) -> Tensor:
        """weight_VH: this rank's rows, as many as every other's. num_real: of the whole vocabulary."""
        num_rows = weight_VH.shape[0]
        num_mine = min(max(num_real - self._group.rank * num_rows, 0), num_rows)
        return self._group.gather_columns(self._ops.logits(x_NH, weight_VH, num_mine))

    def draft_argmax(self, x_NH: Tensor, head_OH: Weight, ids_O: Tensor | None) -> Tensor:
        """head_OH, ids_O: this rank's."""
        assert ids_O is not None, "a rank's rows have ids of their own"
        return self._group.best(self._ops.draft_best(x_NH, head_OH, ids_O))

    def _normed_of(self, x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """(x, the norm that it still needs): the normed x if that came with the sum."""
        normed = self._normed
        if normed is None or normed.x_NH is not x or normed.norm is not norm:
            return x, norm
        return normed.normed_NH, None

    def _add_partial(self, residual_NH: Tensor | None, partial_NH: Tensor, next_norm: Norm | None) -> Tensor:
        x_NH, normed_NH = self._group.add_partial(residual_NH, partial_NH, next_norm)
        self._normed = None if normed_NH is None or next_norm is None else _Normed(x_NH, next_norm, normed_NH)
        return x_NH
