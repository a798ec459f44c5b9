"""Which part of a model each rank of a group holds: of a config its heads, of a parameter a region.

Owns the arithmetic of sharding, not the computation of ranks. `tensors.py` declares the shard of each parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from agentspec.errors import ConfigError
from agentspec.kernels import Region
from agentspec.models.hf_config import TextConfig

FIELD = "tensor_parallel"
"""The setting that errors name."""


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
    what: str = "units"
    """What the units are, in the plural, for errors."""
    surplus: Literal["repeat", "zeros"] | None = None
    """With more ranks than units, neighbouring ranks share a unit: all of them hold it ("repeat"), or the first one
    holds it and the others zeros of its shape ("zeros", for terms of a sum). None: there must be a unit for each
    rank."""

    def slices(self, name: str, rank: Rank) -> list[slice]:
        """A rank's slices of the dimension, one for each part; where the rank `is_zero`, only their sizes count. Raises
        ConfigError that names the parameter if the units can't be shared equally."""
        runs, begin = [], 0
        for num_units, size in self.parts:
            if num_units % rank.count == 0:
                each = num_units // rank.count
                first = begin + rank.index * each * size
            elif self.surplus is not None and rank.count % num_units == 0:
                each, first = 1, begin + rank.index * num_units // rank.count * size
            else:
                raise ConfigError(FIELD, rank.count, f"{num_units} {self.what} of {name} can't be shared equally")
            runs.append(slice(first, first + each * size))
            begin += num_units * size
        return runs

    def is_zero(self, rank: Rank) -> bool:
        """Whether another rank holds this rank's unit, so that this one has zeros."""
        (num_units, _), *_ = self.parts
        return self.surplus == "zeros" and rank.count > num_units and rank.index % (rank.count // num_units) > 0


def rank_config(config: TextConfig, rank: Rank) -> TextConfig:
    """The config of a rank: the heads that it holds, and its first expert. Widths and vocabulary are those of the whole
    model.

    Raises ConfigError that names `tensor_parallel` and what can't be divided by it."""
    if rank.count == 1:
        return config
    heads = {"num_heads": "num_attention_heads", "num_key_heads": "linear_num_key_heads"}
    for field, name in (heads | {"num_value_heads": "linear_num_value_heads", "vocab_size": "vocab_size"}).items():
        if (num := getattr(config, field)) % rank.count:
            raise ConfigError(FIELD, rank.count, f"{name}={num} can't be divided by it")
    num_kv_heads = config.num_kv_heads
    if num_kv_heads % rank.count and rank.count % num_kv_heads:
        raise ConfigError(
            FIELD, rank.count, f"num_key_value_heads={num_kv_heads} can be neither divided by it nor repeated evenly"
        )
    columns = {
        "num_attention_heads x head_dim": config.num_heads * config.head_dim,
        "linear_num_value_heads x linear_value_head_dim": config.num_value_heads * config.value_dim,
    }
    for name, num in columns.items():
        if num // rank.count % (block := column_block(config)):
            raise ConfigError(FIELD, rank.count, f"{name} = {num} columns can't be divided by it in blocks of {block}")
    if (moe := config.moe) is None:
        assert config.intermediate_size is not None
        width_shard(config, 0, config.intermediate_size).slices("intermediate_size", rank)
    else:
        shared = width_shard(config, 0, moe.shared_intermediate_size, surplus="zeros")
        shared.slices("shared_expert_intermediate_size", rank)
        (held,) = expert_shard(config, 0, rank.count).slices("moe_intermediate_size", rank)
        moe = replace(moe, first_expert=held.start if by_expert(config, rank.count) else None)
    return replace(
        config,
        num_heads=config.num_heads // rank.count,
        num_kv_heads=max(num_kv_heads // rank.count, 1),
        num_key_heads=config.num_key_heads // rank.count,
        num_value_heads=config.num_value_heads // rank.count,
        moe=moe,
    )


def column_block(config: TextConfig) -> int:
    """Columns of a matrix that may share a multiplier: ranks never split them."""
    return 1 if config.quantization is None else config.quantization.column_block


def width_units(config: TextConfig, width: int) -> tuple[int, int]:
    """An FFN's width as (units, entries per unit). A width that isn't a multiple of the blocks is one unit."""
    block = column_block(config)
    return (width // block, block) if width % block == 0 else (1, width)


def by_expert(config: TextConfig, num_ranks: int) -> bool:
    """Whether ranks hold whole routed experts, as their width can't be cut between so many."""
    return config.moe is not None and width_units(config, config.moe.intermediate_size)[0] % num_ranks > 0


def width_shard(
    config: TextConfig, dim: int, width: int, *, num_parts: int = 1, surplus: Literal["zeros"] | None = None
) -> Shard:
    """The cut of an FFN's width, which dimension `dim` has num_parts times."""
    units = width_units(config, width)
    return Shard(dim, (units,) * num_parts, "columns" if units[1] == 1 else f"blocks of {units[1]}", surplus)


def expert_shard(config: TextConfig, dim: int, num_ranks: int, *, num_parts: int = 1) -> Shard:
    """The cut of routed experts [X, ...]: of their width, which dimension `dim` has num_parts times, or by expert."""
    assert config.moe is not None
    if by_expert(config, num_ranks):
        width = config.moe.intermediate_size
        what = f"experts (whose width {width} can't be divided in blocks of {column_block(config)})"
        return Shard(0, ((config.moe.num_experts, 1),), what)
    return width_shard(config, dim, config.moe.intermediate_size, num_parts=num_parts)


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
    if shard.is_zero(rank):
        return []
    index = region[shard.dim] if len(region) > shard.dim else slice(None)
    if isinstance(index, int):
        return _split_entry(name, region, index, shard, rank)
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


def _split_entry(name: str, region: Region, entry: int, shard: Shard, rank: Rank) -> list[tuple[Region, Region]]:
    """`split_region` for one entry of the shared dimension: all of it, or nothing."""
    begin = 0
    for run in shard.slices(name, rank):
        if run.start <= entry < run.stop:
            return [((*region[: shard.dim], begin + entry - run.start, *region[shard.dim + 1 :]), ())]
        begin += run.stop - run.start
    return []
