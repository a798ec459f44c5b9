"""Which part of a parameter each rank of a group holds.

Owns the arithmetic of sharding, not the computation of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from agentspec.errors import ConfigError
from agentspec.kernels import Region


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of the group that holds a model."""

    index: int = 0
    count: int = 1


SINGLE_RANK = Rank()
"""The only rank: it holds everything."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The one dimension of a parameter that is split between ranks. It has one or more consecutive parts; of each part
    every rank holds an equal run of units."""

    dim: int
    parts: tuple[tuple[int, int], ...]
    """(number of units, entries per unit) of each part. A unit is never split: a head, or a block of multipliers."""
    may_repeat: bool = False
    """With more ranks than units, neighbouring ranks hold the same unit."""

    def slices(self, name: str, rank: Rank) -> list[slice]:
        """A rank's slices of the dimension, one for each part. Raises ConfigError that names the parameter if the units
        can't be shared equally."""
        runs, begin = [], 0
        for num_units, size in self.parts:
            if num_units % rank.count == 0:
                each = num_units // rank.count
                first = begin + rank.index * each * size
            elif self.may_repeat and rank.count % num_units == 0:
                each, first = 1, begin + rank.index * num_units // rank.count * size
            else:
                raise ConfigError("ranks", rank.count, f"{num_units} units of {name} can't be shared equally")
            runs.append(slice(first, first + each * size))
            begin += num_units * size
        return runs


def shard_shape(name: str, shape: tuple[int, ...], shard: Shard | None, rank: Rank) -> tuple[int, ...]:
    """The shape of a rank's part of the parameter."""
    if shard is None or rank.count == 1:
        return shape
    size = sum(run.stop - run.start for run in shard.slices(name, rank))
    return (*shape[: shard.dim], size, *shape[shard.dim + 1 :])


def row_alignment(name: str, shape: tuple[int, ...], shard: Shard | None, rank: Rank) -> int:
    """A divisor of the first row of each run that a rank holds, both in the whole parameter [..., O, K] and in the
    rank's part; 0 if rows aren't split."""
    if shard is None or rank.count == 1 or shard.dim != len(shape) - 2:
        return 0
    grain = begin = 0
    for run in shard.slices(name, rank):
        grain = math.gcd(grain, run.start, begin)
        begin += run.stop - run.start
    return grain


def split_region(name: str, region: Region, shard: Shard | None, rank: Rank) -> list[tuple[Region, Region]]:
    """Where a rank stores values for `region` of the whole parameter: a list of (region of the rank's part, part of the
    values for it)."""
    if shard is None or rank.count == 1:
        return [(region, ())]
    index = region[shard.dim] if len(region) > shard.dim else slice(None)
    assert isinstance(index, slice), f"{name}: {index} is an entry of the shared dimension"
    first = index.start or 0
    before = (*region[: shard.dim], *[slice(None)] * (shard.dim - len(region)))
    skipped = (slice(None),) * sum(isinstance(at, slice) for at in before)
    found: list[tuple[Region, Region]] = []
    begin = 0
    for run in shard.slices(name, rank):
        start = max(run.start, first)
        stop = run.stop if index.stop is None else min(run.stop, index.stop)
        if start < stop:
            there = slice(begin + start - run.start, begin + stop - run.start)
            found.append(((*before, there, *region[shard.dim + 1 :]), (*skipped, slice(start - first, stop - first))))
        begin += run.stop - run.start
    return found
