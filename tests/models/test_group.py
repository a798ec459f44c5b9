"""Ranks compute the outputs of a single process, with bit-identical results on all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from agentspec.kernels import GatheredGroup, Norm, Plain, reference, within
from agentspec.kernels.reference.ranking import pack_best, token_of
from tests.fakes.checkpoints import Family, write_checkpoint
from tests.fakes.compare import relative_error
from tests.fakes.forks import FORKS
from tests.fakes.four_bit_layouts import LAYOUTS
from tests.models import rank_process
from tests.models.rank_process import FP8_DRAFTS, KEPT_HEAD, outputs

BLOCKS: dict[str, Any] = {"head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4}
"""Heads that begin at blocks of 128."""
WIDE: dict[str, Any] = BLOCKS | {"intermediate_size": 512, "linear_num_key_heads": 4, "linear_key_head_dim": 128}
NARROW: dict[str, Any] = BLOCKS | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
"""Widths of one block: ranks hold whole experts, and one of them the shared one."""
HEAD_BY_ROW = "compressed-tensors, int4, 8-bit blocks and a head in 8 bits by row"
HEAD_BY_TENSOR = "modelopt, 8 bits by tensor, the head too"
MODELS: dict[str, tuple[int, Family, dict[str, Any]]] = {
    "dense": (2, "dense", {}),
    "tied": (2, "dense", {"tied": True}),
    "mixture": (2, "moe", {}),
    "mixture, packed projections": (2, "next", {}),
    "mixture by expert": (2, "moe", {"moe_intermediate_size": 33}),
    "8 bits": (2, "dense", WIDE | {"fp8": "stored"}),
    "8 bits, mixture by expert": (2, "moe", NARROW | {"fp8": "stored", "experts": "split"}),
    "4 bits": (2, "dense", {"layout": "modelopt, mixed, both files"}),
    "4 bits, mixture by expert": (2, "moe", {"layout": "gptq, official, moe"}),
    "a head in 8 bits": (2, "dense", {"layout": HEAD_BY_ROW, "kept_head": True}),
    "a head in 8 bits by tensor": (2, "dense", {"layout": HEAD_BY_TENSOR, "kept_head": True}),
    "8-bit drafts": (2, "dense", WIDE | {"vocab_size": 512}),
    "one key head for both": (2, "dense", {"num_key_value_heads": 1}),
    "padding alone on the last rank": (2, "dense", {"tokens": 70}),
    "four ranks": (4, "dense", WIDE | {"fp8": "stored", "tokens": 130}),
    "four ranks, tied mixture": (4, "moe", {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "tied": True}),
}
"""Number of ranks, family, options; tokens: number of real ones, if the others are padding; layout: one with parts in
4 bits; kept_head: its head stays in 8 bits."""
TOLERANCE = 1e-5
"""float32: only the order of the sums differs."""


def write(directory: Path, name: str) -> Path:
    _, family, options = MODELS[name]
    if "layout" in options:
        stored, _ = LAYOUTS[options["layout"]].write(directory, num_attention_heads=8, linear_num_value_heads=16)
        if "kept_head" in options:
            (stored / KEPT_HEAD).touch()
        return stored
    layers: dict[str, Any] = {"layer_types": ["linear_attention"] * 2 + ["full_attention"], "num_hidden_layers": 3}
    options = layers | options
    num_real = options.pop("tokens", None)
    write_checkpoint(directory, family, **options)
    if num_real is not None:
        vocabulary = {f"token {token}": token for token in range(num_real)}
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    if name == "8-bit drafts":
        (directory / FP8_DRAFTS).touch()
    return directory


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints with the outputs of each of their ranks, which are processes."""
    found = {name: write(tmp_path_factory.mktemp("model"), name) for name in MODELS}
    for count in {count for count, _, _ in MODELS.values()}:
        paths = [path for name, path in found.items() if MODELS[name][0] == count]
        processes = [FORKS.Process(target=rank_process.main, args=(rank, count, paths)) for rank in range(count)]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(timeout=120)
            assert [process.exitcode for process in processes] == [0] * count
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_ranks_match_single_process(name: str, directories: dict[str, Path]) -> None:
    count = MODELS[name][0]
    first, *others = (torch.load(directories[name] / f"rank-{rank}.pt") for rank in range(count))
    with torch.inference_mode():
        alone = outputs(directories[name])
    assert first.keys() == alone.keys()
    for what, expected in alone.items():
        for other in others:
            assert torch.equal(first[what], other[what]), f"{what}: ranks differ"
        if expected.dtype == torch.int64:
            assert torch.equal(first[what], expected), what
        else:
            real = expected.isfinite()
            assert torch.equal(first[what].isfinite(), real), what
            assert relative_error(first[what][real], expected[real]) < TOLERANCE, what


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[GatheredGroup]:
    """A process group of this process."""
    store = distributed.FileStore(str(tmp_path / "meeting"), 1)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    process_group = distributed.group.WORLD
    assert process_group is not None
    yield GatheredGroup(process_group)
    distributed.destroy_process_group()


def test_winner_is_the_lowest_id_of_the_greatest_value(alone: GatheredGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    values_SN = torch.tensor([[1.0, 2.0, -torch.inf, -6.0, 0.0, 1e-40], [2.0, 2.0, -torch.inf, -5.0, -0.0, -1e-40]])
    ids_SN = torch.tensor([[1, 7, 3, 1, 9, 2**31 - 1], [160, 4, 100, 248_319, 8, 5]])
    packed_SN1 = pack_best(values_SN, ids_SN)[:, :, None]
    monkeypatch.setattr(GatheredGroup, "_gather", lambda self, mine: list(packed_SN1))
    assert alone.best(packed_SN1[0]).tolist() == [160, 4, 3, 248_319, 8, 2**31 - 1]


def test_best_rows_are_those_of_the_argmax() -> None:
    """Small integers: exact scores, and many ties."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x, rows = (torch.randint(-2, 3, size, generator=generator).float() for size in ((40, 3), (50, 3)))
        ids = torch.randperm(1000, generator=generator)[:50].sort().values
        expected = reference.draft_argmax(x, Plain(rows), ids)
        assert torch.equal(token_of(reference.draft_best(x, Plain(rows), ids)[:, 0]), expected), seed


def test_group_of_one_gathers_itself(alone: GatheredGroup) -> None:
    generator = torch.Generator().manual_seed(0)
    part_NC, ids_N = torch.randn(3, 5, generator=generator), torch.tensor([4, 0, 2])
    assert torch.equal(alone.gather_columns(part_NC), part_NC)
    assert torch.equal(alone.best(pack_best(part_NC.amax(1), ids_N)[:, None]), ids_N)
    assert (alone.rank, alone.size) == (0, 1)


class Pretended:
    """A group in which all other ranks have the same partial sums and scores."""

    def __init__(self, size: int, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def add_partial(
        self, residual_NH: Tensor | None, partial_NH: Tensor, next_norm: Norm | None
    ) -> tuple[Tensor, Tensor | None]:
        """The norm is that of another residual: it shows where it was used."""
        x_NH = self.size * partial_NH
        if residual_NH is not None:
            x_NH = residual_NH + x_NH
        return x_NH, None if next_norm is None else reference.rms_norm(-x_NH, next_norm)

    def gather_columns(self, part_NC: Tensor) -> Tensor:
        return part_NC.repeat(1, self.size)

    def best(self, best_NC: Tensor) -> Tensor:
        return token_of(best_NC.amax(1))


def test_group_of_one_uses_plain_backend() -> None:
    assert within(None, reference) is reference
    assert within(Pretended(1), reference) is reference


def test_group_reduces_only_residual_outputs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, values = (torch.randn(size, generator=generator) for size in ((3, 8), (3, 5), (5, 8)))
    ops = within(Pretended(4), reference)
    assert torch.equal(ops.linear(x, Plain(values)), x @ values.T)
    torch.testing.assert_close(ops.add_linear(residual, x, Plain(values)), residual + 4 * (x @ values.T))
    torch.testing.assert_close(ops.add_linear(None, x, Plain(values)), 4 * (x @ values.T))


def test_padding_of_each_rank_is_masked_before_scores_are_gathered() -> None:
    generator = torch.Generator().manual_seed(0)
    x, rows = torch.randn(3, 8, generator=generator), Plain(torch.randn(10, 8, generator=generator))
    for rank, num_mine in ((0, 10), (1, 10), (2, 3), (3, 0)):
        scores = within(Pretended(4, rank), reference).logits(x, rows, 23)
        assert torch.equal(scores, reference.logits(x, rows, num_mine).repeat(1, 4)), rank


def test_norm_that_came_with_the_sum_is_used_for_that_sum_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, out, following, extra = (
        torch.randn(size, generator=generator) for size in ((3, 8), (3, 5), (5, 8), (7, 5), (2, 5))
    )
    norm, other = (Norm(weight=torch.randn(5, generator=generator), eps=1e-6) for _ in range(2))
    ops = within(Pretended(4), reference)
    sum_NH = ops.add_linear(residual, x, Plain(out), norm)
    for same_NH in (sum_NH.clone(), sum_NH):
        expected = reference.norm_linear(same_NH, other, Plain(following), extra)
        torch.testing.assert_close(ops.norm_linear(same_NH, other, Plain(following), extra), expected)
    expected = reference.norm_linear(-sum_NH, norm, Plain(following), extra)
    torch.testing.assert_close(ops.norm_linear(sum_NH, norm, Plain(following), extra), expected)
    torch.testing.assert_close(ops.norm_linear(sum_NH.clone(), norm, Plain(following), extra), -expected)
    without_NH = ops.add_linear(residual, x, Plain(out))
    expected = reference.norm_linear(without_NH, norm, Plain(following))
    torch.testing.assert_close(ops.norm_linear(without_NH, norm, Plain(following)), expected)
