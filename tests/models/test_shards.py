"""Ranks hold equal parts of every parameter, read no more than these, and together hold the whole; what they can't
share is refused by name."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentspec import kernels
from agentspec.errors import ConfigError
from agentspec.kernels import BlockScaled, Weight, scales_shape
from agentspec.models import quantization, tensors
from agentspec.models.hf_config import TextConfig
from agentspec.models.outline import outline
from agentspec.models.quantization import is_convertible
from agentspec.models.qwen3_5 import state_forms
from agentspec.models.registry import resolved_config
from agentspec.models.shards import SINGLE_RANK, Rank, by_expert, rank_config, shard_shape
from agentspec.models.state import page_bytes, row_bytes
from agentspec.models.tensors import Parameter, parameter_dtype, parameter_forms, quantized_schemes, random_parameters
from agentspec.models.weights import Checkpoint
from benchmarks.published import CONFIGS, spec_of
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.int8_rows import Int8Checkpoint
from tests.models.test_weight_forms import int8_checkpoint

CPU = torch.device("cpu")
COUNTS = (2, 4, 8)
HEADS: dict[str, Any] = {"num_attention_heads": 8, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
BLOCKS: dict[str, Any] = HEADS | {"head_dim": 128, "linear_value_head_dim": 128}
"""Heads that begin at blocks of 128."""
NARROW: dict[str, Any] = BLOCKS | {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
"""Two blocks: more ranks than two hold whole experts, and some of them no shared one."""
MODELS: dict[str, tuple[Family, dict[str, Any]]] = {
    "dense": ("dense", HEADS),
    "dense, tied": ("dense", HEADS | {"tied": True}),
    "moe, fused, many files": ("moe", HEADS | {"experts": "fused", "mtp_experts": "fused", "sharded": True}),
    "moe, split": ("moe", HEADS | {"experts": "split"}),
    "moe by expert": ("moe", HEADS | {"moe_intermediate_size": 33, "experts": "fused"}),
    "next, packed projections": ("next", HEADS),
    "8 bits": ("dense", BLOCKS | {"fp8": "stored", "intermediate_size": 1024}),
    "8 bits, moe": ("moe", NARROW | {"fp8": "stored", "experts": "split"}),
    "8 bits, moe, fused": ("moe", NARROW | {"fp8": "stored", "experts": "fused", "mtp_experts": "fused"}),
    "8 bits, next": ("next", NARROW | {"fp8": "stored"}),
    "8 bits, inner blocks": (
        "dense",
        BLOCKS | {"fp8": "stored", "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 16},
    ),
    "int8 rows": ("dense", HEADS),
    "int8 rows, moe": ("moe", HEADS | {"experts": "split"}),
}


def write(directory: Path, model: str) -> TextConfig:
    family, options = MODELS[model]
    if model.startswith("int8"):
        return int8_checkpoint(directory, family, dtype=torch.bfloat16, **options)
    # Two layers: one of each kind.
    layers: dict[str, Any] = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    options = layers | options
    return resolved_config(write_checkpoint(directory, family, dtype=torch.bfloat16, **options), random_weights=False)


def load(directory: Path, config: TextConfig, rank: Rank = SINGLE_RANK) -> tuple[dict[str, Weight], int]:
    """A rank's parameters, and the bytes that it read."""
    with Checkpoint(directory) as checkpoint:
        parameters = checkpoint.load(config, device=CPU, dtype=torch.bfloat16, rank=rank)
        return parameters, checkpoint.bytes_read


def together(parameter: Parameter, parts: list[Weight], name: str) -> Tensor:
    """The ranks' parts, joined to the whole parameter; NaN where no rank has a value."""
    shard, joined = parameter.shard, torch.full(parameter.shape, torch.nan)
    for index, part in enumerate(parts):
        rank, values = Rank(index, len(parts)), part.dequantize()
        if shard is None:
            assert torch.equal(values, parts[0].dequantize()), name
            joined = values
        elif shard.is_zero(rank):
            assert not values.any(), name
        else:
            runs = shard.slices(name, rank)
            for run, share in zip(runs, values.split([run.stop - run.start for run in runs], shard.dim), strict=True):
                joined[(*[slice(None)] * shard.dim, run)] = share
    return joined


quantized_of = functools.cache(quantized_schemes)


def part_bytes(config: TextConfig, name: str, parameter: Parameter, rank: Rank, *, scales: bool = True) -> int:
    """Bytes that a bfloat16 checkpoint, or an 8-bit one, has of a rank's part. scales: also their multipliers."""
    if parameter.shard is not None and parameter.shard.is_zero(rank):
        return 0
    shape = shard_shape(name, parameter.shape, parameter.shard, rank)
    if name not in quantized_of(config):
        return 2 * math.prod(shape)
    if not scales:
        return math.prod(shape)
    if isinstance(config.quantization, Int8Checkpoint):
        return math.prod(shape) + 4 * math.prod(shape[:-1])
    return math.prod(shape) + 2 * math.prod(scales_shape(shape))


@pytest.fixture(params=[False, True], ids=["expanded", "kept"])
def keeps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether 8-bit weights stay in 8 bits, as on a GPU."""
    monkeypatch.setattr(quantization, "keeps_blocks", lambda device: request.param)
    return bool(request.param)


@pytest.mark.parametrize("model", MODELS)
def test_ranks_hold_and_read_their_parts(model: str, keeps: bool, tmp_path: Path) -> None:
    if keeps and not model.startswith("8 bits"):
        pytest.skip("has no blocks")
    config = write(tmp_path, model)
    whole, total = load(tmp_path, config)
    forms = parameter_forms(config)
    assert total == sum(part_bytes(config, name, form, SINGLE_RANK) for name, form in forms.items())
    for count in COUNTS:
        forms, ranks = parameter_forms(config, count), [Rank(index, count) for index in range(count)]
        loaded = [load(tmp_path, config, rank) for rank in ranks]
        for name, weight in whole.items():
            parts = [parameters[name] for parameters, _ in loaded]
            assert torch.equal(together(forms[name], parts, name), weight.dequantize()), (count, name)
            assert {part.shape for part in parts} == {shard_shape(name, weight.shape, forms[name].shard, ranks[0])}
            assert {type(part) for part in parts} == {type(weight)}, name
        replicated = sum(part_bytes(config, name, form, ranks[0]) for name, form in forms.items() if not form.shard)
        for rank, (_, num_read) in zip(ranks, loaded, strict=True):
            held = sum(part_bytes(config, name, form, rank, scales=False) for name, form in forms.items())
            scale_bytes = total - sum(
                part_bytes(config, name, form, SINGLE_RANK, scales=False) for name, form in forms.items()
            )
            assert held <= num_read <= held + scale_bytes, (count, rank)
            # Two KV heads, repeated, and a shared expert of two blocks, which only some hold, are the slack.
            assert num_read <= total / count + replicated + 0.1 * total, (count, rank)


@pytest.mark.parametrize("model", ["8 bits", "8 bits, moe"])
def test_ranks_keep_blocks(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "keeps_blocks", lambda device: True)
    config = write(tmp_path, model)
    for name, weight in load(tmp_path, config, Rank(1, 2))[0].items():
        assert isinstance(weight, BlockScaled) == is_convertible(name), name
        if isinstance(weight, BlockScaled):
            # Key heads of 16 rows begin inside a block of 128: four of them are a rank's.
            assert weight.block_rows == (64 if name.endswith("in_proj_qkv.weight") else 128), name


def test_kv_heads_repeat_with_more_ranks_than_heads(tmp_path: Path) -> None:
    config = write(tmp_path, "dense")
    name = "model.layers.1.self_attn.k_proj.weight"
    shard, dim = parameter_forms(config, 8)[name].shard, config.head_dim
    assert shard is not None
    assert [shard.slices(name, Rank(index, 8))[0] for index in range(8)] == [
        slice(first, first + dim) for first in (0, 0, 0, 0, dim, dim, dim, dim)
    ]
    assert rank_config(config, Rank(5, 8)).num_kv_heads == 1


@pytest.mark.parametrize("model", ["dense", "moe by expert", "8 bits, moe"])
def test_random_parameters_of_ranks_are_parts_of_the_whole(model: str, tmp_path: Path) -> None:
    config = write(tmp_path, model)
    whole, *parts = (
        random_parameters(config, device=CPU, dtype=torch.bfloat16, seed=1, rank=rank)
        for rank in (SINGLE_RANK, *(Rank(index, 4) for index in range(4)))
    )
    for name, parameter in parameter_forms(config, 4).items():
        joined = together(parameter, [part[name] for part in parts], name)
        assert torch.equal(joined, whole[name].dequantize()), name
        assert parts[0][name].values.dtype == parameter_dtype(name, torch.bfloat16)


@pytest.mark.parametrize("model", ["8 bits, moe", "8 bits, moe, fused"])
def test_random_experts_may_repeat_a_few(
    model: str, keeps: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = write(tmp_path, model)
    assert config.moe is not None
    num_experts, width = config.moe.num_experts, config.moe.intermediate_size
    monkeypatch.setattr(tensors, "_RANDOM_SLICE", 3 * 2 * width * config.hidden_size)  # of gate and up, three experts
    assert num_experts % 3
    make = functools.partial(random_parameters, config, device=CPU, dtype=torch.bfloat16, seed=1)
    default, whole = make(), make(repeated=True)
    parts = [make(repeated=True, rank=Rank(index, 4)) for index in range(4)]
    for name, parameter in parameter_forms(config, 4).items():
        assert (type(whole[name]), whole[name].shape) == (type(default[name]), default[name].shape), name
        values, drawn = whole[name].dequantize(), default[name].dequantize()
        assert torch.equal(together(parameter, [part[name] for part in parts], name), values), name
        if "experts." not in name or name not in quantized_of(config):
            assert len(values.unique(dim=0)) == len(drawn.unique(dim=0)), name
            continue
        size = 3 if name.endswith("gate_up_proj") else 6
        assert torch.equal(values, values[:size].repeat(3, 1, 1)[:num_experts]), name
        assert len(values.unique(dim=0)) == min(size, num_experts), name
        assert len(drawn.unique(dim=0)) == num_experts, name
        assert 0.5 < values.std() * values.shape[-1] ** 0.5 < 2


@pytest.mark.parametrize(
    ("count", "change", "message"),
    [
        (3, {}, r"tensor_parallel=3: num_attention_heads=8 can't be divided by it"),
        (8, {"num_key_heads": 4}, r"tensor_parallel=8: linear_num_key_heads=4 can't be divided by it"),
        (8, {"num_value_heads": 4}, r"tensor_parallel=8: linear_num_value_heads=4 can't"),
        (4, {"num_kv_heads": 3}, r"tensor_parallel=4: num_key_value_heads=3 can be neither divided by it nor repeated"),
        (8, {"vocab_size": 161}, r"tensor_parallel=8: vocab_size=161 can't be divided by it"),
        (8, {"intermediate_size": 100}, r"tensor_parallel=8: 100 columns of intermediate_size can't be shared"),
    ],
)
def test_what_ranks_cannot_share_is_named(count: int, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = dataclasses.replace(write(tmp_path, "dense"), **change)
    with pytest.raises(ConfigError, match=message):
        rank_config(config, Rank(0, count))
    with pytest.raises(ConfigError, match="tensor_parallel"), Checkpoint(tmp_path) as checkpoint:
        checkpoint.load(config, device=CPU, dtype=torch.bfloat16, rank=Rank(0, count))


def test_blocks_that_ranks_cannot_share_are_named(tmp_path: Path) -> None:
    dense, moe = write(tmp_path / "dense", "8 bits"), write(tmp_path / "moe", "8 bits, moe")
    assert moe.moe is not None
    refused = {
        "12 blocks of 128 of intermediate_size": dataclasses.replace(dense, intermediate_size=12 * 128),
        r"num_attention_heads x head_dim = 512 columns .* blocks of 128": dataclasses.replace(dense, head_dim=64),
        r"3 blocks of 128 of shared_expert_intermediate_size": dataclasses.replace(
            moe, moe=dataclasses.replace(moe.moe, shared_intermediate_size=384)
        ),
        r"12 experts \(whose width 256 can't be divided in blocks of 128\) of": dataclasses.replace(
            moe, moe=dataclasses.replace(moe.moe, num_experts=12)
        ),
    }
    for message, config in refused.items():
        with pytest.raises(ConfigError, match=f"tensor_parallel=8: {message}"):
            rank_config(config, Rank(3, 8))


# Published sizes


class Silent:
    """A Group for models that compute nothing."""

    def __init__(self, rank: Rank) -> None:
        self.rank, self.size = rank.index, rank.count

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name}: nothing is computed")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_published_sizes_are_shared(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank holds 1/N of what isn't replicated, and the same in state."""
    config, rank = CONFIGS[name], Rank(count - 1, count)
    forms = parameter_forms(config, count)
    held = sum(part_bytes(config, name, form, rank) for name, form in forms.items())
    total = sum(part_bytes(config, name, form, SINGLE_RANK) for name, form in forms.items())
    replicated = sum(part_bytes(config, name, form, rank) for name, form in forms.items() if form.shard is None)
    print(f"{name} N={count}: {held / 1e9:.2f} GB of {total / 1e9:.2f}, {replicated / 1e9:.2f} replicated")
    # Repeated KV heads are the slack.
    assert held <= (total - replicated) / count + replicated + 0.01 * total
    in_blocks_of_128 = ("35B-A3B-FP8", "35B-A3B-mixed4", "35B-A3B-mixed4-head4", "35B-A3B-int4")
    assert by_expert(config, count) == (name in in_blocks_of_128 and count == 8)
    whole, part = (state_forms(config, torch.bfloat16) for config in (config, rank_config(config, rank)))
    hidden = 2 * config.hidden_size
    assert (row_bytes(part) - hidden) * count == row_bytes(whole) - hidden
    assert page_bytes(part) * min(count, config.num_kv_heads) == page_bytes(whole)
    # Nothing is computed, so any backend will do; Triton may be missing.
    monkeypatch.setattr(kernels, "backend", lambda device: kernels.reference)
    group: Any = Silent(rank)
    spec = spec_of(name, config, torch.bfloat16)
    model = outline(config, spec, dtype=torch.bfloat16, fp8_drafts=False, rank=rank, group=group)
    assert model._head_VH.shape == (248_320 // count, config.hidden_size)
    padding = config.vocab_size - spec.num_real_tokens
    if not model._head_VH.can_draft:  # a copy of its rows is made late
        model.limit_drafts(range(spec.num_real_tokens))
    assert model._draft_ids_O is not None
    assert len(model._draft_ids_O) == 248_320 // count - padding, "all padding is on the last rank"


@pytest.mark.parametrize("count", [3, 6, 16])
def test_published_sizes_that_ranks_cannot_share_are_refused(count: int) -> None:
    for config in CONFIGS.values():
        if count == 16 and config.num_heads % 16 == 0:
            continue
        with pytest.raises(ConfigError, match=rf"tensor_parallel={count}: \w+=\d+ can't be divided by it"):
            rank_config(config, Rank(0, count))
