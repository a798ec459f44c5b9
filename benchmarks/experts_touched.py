"""Count the distinct experts that the layers of a mixture read in the engine's decode steps.

The steps run eagerly, because a graph runs no Python. They share prompts and seeds with the timed engine, so windows,
drafts and experts are the same. The reference computes each layer's choice of experts a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from agentspec import kernels
from agentspec.kernels import reference
from agentspec.models.hybrid import DecoderLayer
from agentspec.models.moe import MixtureOfExperts
from benchmarks.published import PrefilledModel
from benchmarks.running_engine import Case, RunningEngine
from benchmarks.step_bytes import Experts

WARM_UP_STEPS = 4
"""Steps after the one in which every slot starts."""
NUM_STEPS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Statistics of counts of distinct experts."""

    mean: float
    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.mean:.1f} ({self.least} to {self.most})"


@dataclass(frozen=True, kw_only=True, slots=True)
class TouchedExperts:
    trunk: Spread
    """Over all layers of the trunk and all steps."""
    draft: Spread | None
    """Over all forward passes of the MTP layer; None: there were none."""

    @property
    def means(self) -> Experts:
        return Experts(trunk=self.trunk.mean, draft=0.0 if self.draft is None else self.draft.mean)


class CountingMixture(MixtureOfExperts):
    """A mixture that also counts the distinct experts of each call."""

    def __init__(self, mixture: MixtureOfExperts) -> None:
        self._ops, self.weights = mixture._ops, mixture.weights
        self.counts: list[Tensor] = []
        """int64 scalars on the device, so that counting doesn't synchronize."""

    def add_to(
        self, x_NH: Tensor | kernels.OpenSum, norm: kernels.Norm, next_norm: kernels.Norm | None = None
    ) -> Tensor:
        x_NH = x_NH if isinstance(x_NH, Tensor) else x_NH.closed()
        self.counts.append(count_chosen(x_NH, norm, self.weights))
        return super().add_to(x_NH, norm, next_norm)


def count_chosen(x_NH: Tensor, norm: kernels.Norm, weights: kernels.MixtureWeights) -> Tensor:
    """Number of distinct experts that these tokens visit: an int64 scalar."""
    scores_NX = linear(reference.rms_norm(x_NH, norm), weights.router_XH)
    _, expert_ids_NJ = kernels.route_top_k(scores_NX, weights.top_k, weights.normalize)
    is_chosen_X = torch.zeros(scores_NX.shape[1], dtype=torch.int64, device=x_NH.device)
    return is_chosen_X.index_fill_(0, expert_ids_NJ.flatten(), 1).sum()


@contextmanager
def counting(layers: Sequence[DecoderLayer]) -> Iterator[list[CountingMixture]]:
    """Within the context, these layers' mixtures count."""
    mixtures = [layer.ffn for layer in layers]
    counters = [CountingMixture(mixture) for mixture in mixtures if isinstance(mixture, MixtureOfExperts)]
    assert len(counters) == len(layers), "a layer without a mixture has no experts to count"
    for layer, counter in zip(layers, counters, strict=True):
        layer.ffn = counter
    try:
        yield counters
    finally:
        for layer, mixture in zip(layers, mixtures, strict=True):
            layer.ffn = mixture


def touched_experts(
    case: Case, model: PrefilledModel, device: torch.device, *, num_steps: int = NUM_STEPS
) -> TouchedExperts:
    """Count experts in a case's first steps. The model has a mixture in every layer; its pools are released."""
    engine = RunningEngine(case, model, device, num_steps=WARM_UP_STEPS + num_steps + 1, graphs=False)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    trunk, mtp = model.mixtures
    with counting(trunk) as of_trunk, counting(mtp) as of_mtp:
        for _ in range(num_steps):
            engine.step()
    in_trunk, in_drafts = (
        [int(count) for counter in counters for count in counter.counts] for counters in (of_trunk, of_mtp)
    )
    assert len(in_trunk) == num_steps * len(trunk), f"{len(in_trunk)} calls of {len(trunk)} layers in {num_steps} steps"
    return TouchedExperts(trunk=spread(in_trunk), draft=spread(in_drafts) if in_drafts else None)


def spread(counts: Sequence[int]) -> Spread:
    return Spread(mean=sum(counts) / len(counts), least=min(counts), most=max(counts))
