"""One rank of the exchange tests, in Triton's interpreter: the main function of a process with TRITON_INTERPRET=1.

The directory has the files of the ranks' buffers. Every rank draws the same exchanges from the seed and checks its own
results. Between the steps of a kernel it hands its core over a random number of times, and behind an exchange it
poisons the slots that the protocol calls free: a peer that pushes too early, or a read of anything stale, shows.
"""

from __future__ import annotations

import os
import random
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor, distributed
from triton.runtime import interpreter

from agentspec.kernels import GatheredGroup, Norm
from agentspec.kernels.peer_memory import NUM_HALVES, Channel, ExchangeLayout, PeerMemory
from agentspec.kernels.reference import rms_norm
from agentspec.kernels.triton.exchange import ExchangeGroup
from agentspec.kernels.triton.exchange_one_shot import EPOCHS_A_RENEWAL
from tests.kernels.triton.poison import poison
from tests.kernels.triton.quick_interpreter import make_quick

DTYPES = (torch.float32, torch.bfloat16)


def small_layout(ranks: int) -> ExchangeLayout:
    """Shares of more than one block, and several rows or rounds of a program at a few hundred elements."""
    return ExchangeLayout(
        ranks=ranks,
        programs=3,
        paired_programs=3,
        paired_elements=600,
        one_shot_programs=3,
        one_shot_elements=400,
        widest=80,
        two_shot_elements=600,
        gather_elements=1200,
        winner_programs=2,
        winners_a_program=2,
        block=32,
    )


class RankUnderTest:
    def __init__(self, rank: int, ranks: int, seed: int, directory: Path) -> None:
        self.rank, self.ranks = rank, ranks
        self.layout = small_layout(ranks)
        self.memory = PeerMemory.of_files(rank, self.layout, directory)
        self.group = ExchangeGroup(self.memory, self.layout)
        self.choices = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        """Drawn from by all ranks alike."""
        self.num_one_shots = 0

    def normal(self, *shape: int) -> Tensor:
        """Values of very different sizes."""
        exponents = torch.randint(-6, 7, shape, generator=self.generator)
        return torch.randn(shape, generator=self.generator) * 2.0**exponents

    def check_sum(self, reference: GatheredGroup | None, num_elements: int, *, only_float32: bool = False) -> bool:
        """Return whether other bits would come of another order of additions. only_float32: no bfloat16, which hardly
        ever shows the order, and rows of 16."""
        width = 16 if only_float32 else self.choices.choice([1, 4, 5, 16, 20, 80, 100])
        shape = (-(-num_elements // width), width)
        dtype, other_dtype = (self.choices.choice(DTYPES[:1] if only_float32 else DTYPES) for _ in range(2))
        partial_dtype = self.choices.choice([dtype, dtype, other_dtype])
        is_fresh = self.choices.random() < 0.2
        if is_fresh:
            dtype = partial_dtype
        residual_NH = self.normal(*shape).to(dtype) * (0 if is_fresh else 1)
        parts = [self.normal(*shape).to(partial_dtype) for _ in range(self.ranks)]
        expected_NH = rank_order_sum(residual_NH, parts)
        order_matters = not torch.equal(expected_NH, rank_order_sum(residual_NH, parts[::-1]))
        if reference is not None:
            given_NH = None if is_fresh else residual_NH.clone()
            gathered_NH, _ = reference.add_partial(given_NH, parts[self.rank], None)
            assert torch.equal(gathered_NH, expected_NH)
        gain_H = self.normal(width).to(dtype)
        norm = Norm(weight=gain_H, eps=1e-6) if self.choices.random() < 0.5 else None
        one_shot = self.layout.in_one_shot(shape, dtype, partial_dtype)
        given_NH = None if is_fresh else residual_NH
        sum_NH, normed_NH = self.group.add_partial(given_NH, parts[self.rank].clone(), norm)
        assert is_fresh or sum_NH is residual_NH
        assert torch.equal(sum_NH, expected_NH), (shape, dtype, partial_dtype)
        assert (normed_NH is None) == (norm is None or not one_shot)
        if norm is not None and normed_NH is not None:
            # bfloat16: a sum in another order may round to the next value.
            relative = 1e-5 if dtype == torch.float32 else 0.008
            torch.testing.assert_close(normed_NH, rms_norm(expected_NH, norm), rtol=relative, atol=1e-6)
        self.num_one_shots += one_shot
        self.poison_free_slots(self.layout.one_shot if one_shot else self.layout.two_shot)
        return order_matters

    def check_winners(self) -> None:
        num_rows, width = self.choices.randint(1, 11), self.choices.choice([3, 40, 5000])
        logits = self.normal(num_rows, width * self.ranks).round()  # rounded: many ties
        logits[self.choices.randrange(num_rows), self.choices.randrange(width)] = -torch.inf
        if self.choices.random() < 0.3:
            logits[torch.rand(logits.shape, generator=self.generator) < 0.02] = torch.nan
        vocab_size = logits.shape[1] - self.choices.choice([0, 1, width])
        ids = torch.arange(logits.shape[1])
        if consecutive := self.choices.random() < 0.5:
            mine: Tensor | int = width * self.rank
        else:
            ids = ids[torch.randperm(len(ids), generator=self.generator)]
            mine = ids[width * self.rank :][:width].contiguous()
        part = logits[:, width * self.rank :][:, :width]
        tokens_N = self.group.winners(part if consecutive else part.contiguous(), mine, vocab_size)
        assert tokens_N.tolist() == [best_token(row, ids.tolist(), vocab_size) for row in logits.tolist()]
        self.poison_free_slots(self.layout.winners)

    def check_gather(self) -> None:
        num_rows, dtype = self.choices.randint(1, 5), self.choices.choice(DTYPES)
        widths = [self.choices.choice([1, 7, 128, 300]) for _ in range(self.ranks)]
        bounds = [sum(widths[:rank]) for rank in range(self.ranks + 1)]
        vocab_size = bounds[-1] - self.choices.choice([0, 1, 9, bounds[-1] // 2])
        logits = self.normal(num_rows, bounds[-1]).to(dtype)
        part = logits[:, bounds[self.rank] : bounds[self.rank + 1]]
        out = self.group.gather(part, torch.tensor(bounds), max(widths), max(vocab_size, 1))
        assert torch.equal(out, logits[:, : max(vocab_size, 1)]), (num_rows, widths, vocab_size)
        self.poison_free_slots(self.layout.gather)

    def poison_free_slots(self, channel: Channel) -> None:
        """Poison the half of the last epoch: peers write it again only once they have seen a flag, or a tag, of the
        next one. Of paired rounds the last two quarters: a peer is two pushes ahead at most."""
        epochs = self.memory.buffer[channel.begin :][: 8 * channel.programs].view(torch.int64).tolist()
        if channel is not self.layout.one_shot:
            assert min(epochs) == max(epochs), "all programs advance, idle ones too"
        slots = self.memory.buffer[channel.slots : channel.end].view(-1, self.ranks, channel.programs, channel.region)
        for program, epoch in enumerate(epochs):
            if channel is self.layout.two_shot and self.ranks == 2:
                slots[[epoch % 4, (epoch - 1) % 4], :, program] = 255
            else:
                slots[epoch % NUM_HALVES :: NUM_HALVES, :, program] = 255


def rank_order_sum(residual_NH: Tensor, parts: list[Tensor]) -> Tensor:
    total_NH = parts[0].float()
    for part_NH in parts[1:]:
        total_NH = total_NH + part_NH.float()
    return (residual_NH.float() + total_NH).to(residual_NH.dtype)


def best_token(row: list[float], ids: list[int], vocab_size: int) -> int:
    def order(index: int) -> tuple[bool, float, int]:
        is_nan = row[index] != row[index]
        return is_nan, 0.0 if is_nan else row[index], -ids[index]

    return ids[max((index for index, token in enumerate(ids) if token < vocab_size), key=order)]


def hand_over_at_random(patch: pytest.MonkeyPatch, generator: random.Random) -> None:
    """Give the core away before some of the interpreter's stores and atomics, and sometimes for long."""

    def disturbed(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if generator.random() < 0.1:
                for _ in range(generator.choice([1, 10, 300])):
                    os.sched_yield()
            return original(*args, **kwargs)

        return run

    for name in ("create_masked_store", "create_atomic_rmw"):
        patch.setattr(interpreter.InterpreterBuilder, name, disturbed(getattr(interpreter.InterpreterBuilder, name)))


def round_to_nearest(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter round float32 to bfloat16 as a GPU does: it truncates."""
    original = interpreter.InterpreterBuilder.create_fp_trunc

    def rounded(builder: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return original(builder, source, target)
        bits = torch.from_numpy(np.atleast_1d(source.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(bits.reshape(source.data.shape), target.scalar)

    patch.setattr(interpreter.InterpreterBuilder, "create_fp_trunc", rounded)


def meet(under_test: RankUnderTest, directory: Path) -> distributed.ProcessGroup:
    """Wait for all ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = distributed.FileStore(str(directory / "meeting"), under_test.ranks)  # type: ignore[attr-defined]
    distributed.init_process_group(
        "gloo", store=store, rank=under_test.rank, world_size=under_test.ranks, timeout=timedelta(seconds=60)
    )
    assert distributed.group.WORLD is not None
    distributed.barrier()
    return distributed.group.WORLD


def mixed(under_test: RankUnderTest, count: int, directory: Path) -> None:
    """A small and a large sum whose order of additions matters, then exchanges of all kinds, in a random order. The
    gathered sums are compared with gloo's as well."""
    reference = GatheredGroup(meet(under_test, directory))
    limit = under_test.layout.one_shot_limit
    for num_elements in (limit, 2 * limit):
        # The order shows in one element of five, so among hundreds it can't fail to. Two ranks add up the same in both.
        assert under_test.check_sum(None, num_elements, only_float32=True) == (under_test.ranks > 2)
    for index in range(count):
        kind = under_test.choices.choice(["small", "small", "large", "large", "winners", "gather"])
        if kind == "winners":
            under_test.check_winners()
        elif kind == "gather":
            under_test.check_gather()
        else:
            size = under_test.choices.randint(1, limit) if kind == "small" else under_test.choices.randint(limit, 1500)
            # A gathering also brings the ranks together, which hides mistakes: so not always.
            under_test.check_sum(reference if index % 8 == 0 else None, size)
    assert under_test.num_one_shots > 0
    assert int(under_test.group.aborted) == 0
    distributed.destroy_process_group()


def abort(under_test: RankUnderTest, count: int, directory: Path) -> None:
    """The last rank is killed after some exchanges. The others are freed by the abort word, and keep their
    residuals."""
    for _ in range(count):
        under_test.check_sum(None, under_test.choices.randint(1, 800))
    if under_test.rank == under_test.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group = under_test.group
    for num_elements in (64, 64, 900):
        residual_NH = under_test.normal(num_elements // 16, 16)
        before_NH = residual_NH.clone()
        group.add_partial(residual_NH, torch.ones_like(residual_NH), None)
        assert torch.equal(residual_NH, before_NH)
        assert int(group.aborted) == 1
    logits_NW = under_test.normal(3, 40)
    assert group.winners(logits_NW, 40 * under_test.rank, 1000).tolist() == [
        40 * under_test.rank + token for token in logits_NW.argmax(1).tolist()
    ]
    assert group.gather(logits_NW, torch.arange(under_test.ranks + 1) * 40, 40, 80).shape == (3, 80)


def tags_come_again(under_test: RankUnderTest, count: int, directory: Path) -> None:
    """Small sums up to the epoch whose tag is that of words which no rank has written yet, or 2^32 epochs before; then
    larger ones, which find such words. Nothing is poisoned here."""
    channel = under_test.layout.one_shot
    epochs = under_test.memory.buffer[channel.begin :][: 8 * channel.programs].view(torch.int64)
    epochs.fill_(2**32 - EPOCHS_A_RENEWAL - 2)
    meet(under_test, directory)
    for epoch in range(2**32 - EPOCHS_A_RENEWAL - 1, 2**32 + 4):
        shape = (3, 16) if epoch < 2**32 else (4, 80)
        residual_NH = under_test.normal(*shape)
        parts = [under_test.normal(*shape) for _ in range(under_test.ranks)]
        expected_NH = rank_order_sum(residual_NH, parts)
        under_test.group.add_partial(residual_NH, parts[under_test.rank], None)
        assert torch.equal(residual_NH, expected_NH), epoch
        assert int(epochs[0]) == epoch


def freed_rank_sets_no_flags(under_test: RankUnderTest, count: int, directory: Path) -> None:
    """One rank alone, aborted from the start: the first exchange pushes and sets flags, since all is well until it
    waits. The next ones must not."""
    layout = under_test.layout
    flags = [
        PeerMemory.of_files(peer, layout, directory).buffer[begin:end]
        for peer in range(under_test.ranks)
        if peer != under_test.rank
        for begin, end in ((layout.one_shot.slots, layout.one_shot.end), (layout.two_shot.flags, layout.two_shot.slots))
    ]
    under_test.memory.abort.fill_(1)
    residual_NH = torch.zeros(4, 16)
    under_test.group.add_partial(residual_NH, residual_NH.clone(), None)
    assert any(flag.any() for flag in flags)
    before = [flag.clone() for flag in flags]
    for num_elements in (64, 900, 64):
        residual_NH = torch.zeros(num_elements // 16, 16)
        under_test.group.add_partial(residual_NH, residual_NH.clone(), None)
    assert all(torch.equal(flag, old) for flag, old in zip(flags, before, strict=True))


SCENES = {scene.__name__: scene for scene in (mixed, abort, tags_come_again, freed_rank_sets_no_flags)}


def main(scene: str, rank: int, ranks: int, seed: int, count: int, directory: Path) -> None:
    torch.set_num_threads(1)
    under_test = RankUnderTest(rank, ranks, seed, directory)
    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        make_quick(patch)
        round_to_nearest(patch)
        hand_over_at_random(patch, random.Random(seed * ranks + rank))
        patch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
        try:
            SCENES[scene](under_test, count, directory)
        except BaseException:
            under_test.memory.abort.fill_(1)  # the other ranks would wait for this one
            raise
