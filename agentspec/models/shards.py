"""Which part of a parameter each rank of a group holds.

Owns the arithmetic of shares. What a rank is for, and what it computes with its share, is others' business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from agentspec.errors import ConfigError
from agentspec.kernels import Region
from agentspec.models.hf_config import TextConfig


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of those that hold a model together."""

    index: int = 0
    count: int = 1


ALONE = Rank()
"""The only one: it holds everything."""


def heads_of(config: TextConfig, rank: Rank) -> TextConfig:
    """The config of what a rank computes: with as many heads as it holds. Key/value heads that are too few for all
    ranks are held by several."""
    return replace(
        config,
        num_heads=config.num_heads // rank.count,
        num_kv_heads=max(config.num_kv_heads // rank.count, 1),
        num_key_heads=config.num_key_heads // rank.count,
        num_value_heads=config.num_value_heads // rank.count,
    )


@dataclass(frozen=True, slots=True)
class Shard:
    """The one dimension of a parameter that ranks share: parts behind each other, of each of which every rank holds an
    equal run of units."""

    dim: int
    parts: tuple[tuple[int, int], ...]
    """(number of units, entries of a unit) of each part. Units are what must stay whole: a head, a block of
    multipliers."""
    may_repeat: bool = False
    """With more ranks than units, neighbouring ranks hold the same unit."""

    def held(self, name: str, rank: Rank) -> list[slice]:
        """What a rank holds, as entries of the dimension. Raises ConfigError, naming the parameter, where units can't
        be shared equally."""
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


def held_shape(name: str, shape: tuple[int, ...], shard: Shard | None, rank: Rank) -> tuple[int, ...]:
    """The shape of what a rank holds."""
    if shard is None or rank.count == 1:
        return shape
    size = sum(run.stop - run.start for run in shard.held(name, rank))
    return (*shape[: shard.dim], size, *shape[shard.dim + 1 :])


def row_grain(name: str, shape: tuple[int, ...], shard: Shard | None, rank: Rank) -> int:
    """What divides the first row of each run that a rank holds, in the whole parameter [..., O, K] and in the rank's; 0
    where rows aren't shared."""
    if shard is None or rank.count == 1 or shard.dim != len(shape) - 2:
        return 0
    grain = begin = 0
    for run in shard.held(name, rank):
        grain = math.gcd(grain, run.start, begin)
        begin += run.stop - run.start
    return grain


def pieces(name: str, region: Region, shard: Shard | None, rank: Rank) -> list[tuple[Region, Region]]:
    """Where a rank puts what would fill `region` of the whole parameter: (region of what it holds, the part of the
    filling that goes there)."""
    if shard is None or rank.count == 1:
        return [(region, ())]
    index = region[shard.dim] if len(region) > shard.dim else slice(None)
    assert isinstance(index, slice), f"{name}: {index} is an entry of the shared dimension"
    first = index.start or 0
    before = (*region[: shard.dim], *[slice(None)] * (shard.dim - len(region)))
    skipped = (slice(None),) * sum(isinstance(at, slice) for at in before)
    found: list[tuple[Region, Region]] = []
    begin = 0
    for run in shard.held(name, rank):
        start = max(run.start, first)
        stop = run.stop if index.stop is None else min(run.stop, index.stop)
        if start < stop:
            there = slice(begin + start - run.start, begin + stop - run.start)
            found.append(((*before, there, *region[shard.dim + 1 :]), (*skipped, slice(start - first, stop - first))))
        begin += run.stop - run.start
    return found
