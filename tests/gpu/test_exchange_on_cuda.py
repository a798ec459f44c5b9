"""The exchange kernels on one CUDA device that two ranks share: two streams of one process for many exchanges, under
load and with delays; CUDA graphs replayed in any order; two processes, which take turns on the device, for few.

A launch must never make the host or the device wait while one rank spins for the other. So all tensors exist before a
sequence of exchanges begins, every kernel has run before, and the launches of the ranks alternate.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from agentspec.kernels.peer_memory import ExchangeLayout, PeerMemory
from agentspec.kernels.triton.exchange import ExchangeGroup
from tests.kernels.triton.exchange_rank import best_token, rank_order_sum

pytestmark = pytest.mark.gpu
RANKS = 2
HIDDEN = 2560
TOKENS = (1, 3, 4, 16, 32, 33, 64, 256, 1000)
"""One-shots up to 32 tokens, then two-shots; the last takes two rounds."""
PATIENCE = 300
"""Seconds until a hang is a failure."""
NUM_EXCHANGES = 100_000
NUM_PROCESS_EXCHANGES = 1_000


class TwoRanks:
    """Both ranks in this process, each on a stream of its own. A residual of every number of tokens is carried through
    all exchanges, so each of them leaves its mark on the bits compared at the end."""

    def __init__(self, device: torch.device, *, overlapped: bool, dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        layout = ExchangeLayout(ranks=RANKS)
        self.groups = [
            ExchangeGroup(memory, layout, overlapped=overlapped) for memory in PeerMemory.of_one_process(layout, device)
        ]
        self.streams = [torch.cuda.Stream(device) for _ in range(RANKS)]
        generator = torch.Generator(device).manual_seed(0)
        self.parts = {
            tokens: [torch.randn(tokens, HIDDEN, device=device, generator=generator).to(dtype) for _ in range(RANKS)]
            for tokens in TOKENS
        }
        self.residuals = [{tokens: self.empty(tokens) for tokens in TOKENS} for _ in range(RANKS)]
        self.expected = {tokens: self.empty(tokens) for tokens in TOKENS}
        torch.cuda.synchronize()
        for tokens in TOKENS:  # loads every kernel
            self.exchange(tokens)
        self.check()

    def empty(self, tokens: int) -> Tensor:
        return torch.zeros(tokens, HIDDEN, device=self.device)

    def launch(self, rank: int, tokens: int) -> None:
        with torch.cuda.stream(self.streams[rank]):
            self.groups[rank].add_partial(self.residuals[rank][tokens], self.parts[tokens][rank], None)

    def exchange(self, tokens: int, delays: tuple[int, int] = (0, 0)) -> None:
        for rank, delay in enumerate(delays):
            if delay:
                with torch.cuda.stream(self.streams[rank]):
                    torch.cuda._sleep(delay)
            self.launch(rank, tokens)
        self.expect(tokens)

    def expect(self, tokens: int) -> None:
        self.expected[tokens].copy_(rank_order_sum(self.expected[tokens], self.parts[tokens]))

    def check(self) -> None:
        for stream in self.streams:
            wait_for(stream)
        torch.cuda.synchronize()
        for rank in range(RANKS):
            assert int(self.groups[rank].aborted) == 0
            for tokens in TOKENS:
                assert torch.equal(self.residuals[rank][tokens], self.expected[tokens]), f"rank {rank}, {tokens} tokens"


def wait_for(stream: torch.cuda.Stream) -> None:
    """Wait for a stream, but not for ever: a rank that spins would hold the test."""
    end = torch.cuda.Event()
    end.record(stream)
    deadline = time.monotonic() + PATIENCE
    while not end.query():
        assert time.monotonic() < deadline, "a rank still waits for its peer"


def seeded() -> random.Random:
    seed = random.randrange(2**31)
    print(f"{seed=}")
    return random.Random(seed)


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain launches", "early launches"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_streams_under_load_equal_the_reference(overlapped: bool, dtype: torch.dtype, cuda: torch.device) -> None:
    choices = seeded()
    ranks = TwoRanks(cuda, overlapped=overlapped, dtype=dtype)
    load, load_stream = torch.randn(2048, 2048, device=cuda), torch.cuda.Stream(cuda)
    product = load @ load
    torch.cuda.synchronize()
    for index in range(NUM_EXCHANGES // 4):
        ranks.exchange(
            choices.choice(TOKENS[:-1] if choices.random() < 0.99 else TOKENS),
            (choices.choice([0, 0, 0, 2_000, 50_000]), choices.choice([0, 0, 0, 2_000, 50_000])),
        )
        if index % 8 == 0:
            with torch.cuda.stream(load_stream):
                torch.mm(load, load, out=product)
        if index % 1000 == 999:
            ranks.check()
    ranks.check()


@pytest.mark.parametrize("overlapped", [False, True], ids=["plain launches", "early launches"])
def test_replays_of_different_graphs_mix_with_eager_exchanges(overlapped: bool, cuda: torch.device) -> None:
    choices = seeded()
    ranks = TwoRanks(cuda, overlapped=overlapped)
    sequences = [choices.choices(TOKENS[:-1], k=length) for length in (1, 2, 3, 7, 20)]
    graphs: list[list[torch.cuda.CUDAGraph]] = []
    for sequence in sequences:
        graphs.append([])
        for rank in range(RANKS):
            graphs[-1].append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1][rank], stream=ranks.streams[rank]):
                for tokens in sequence:
                    ranks.groups[rank].add_partial(ranks.residuals[rank][tokens], ranks.parts[tokens][rank], None)
    for index in range(3000):
        which = choices.randrange(len(sequences) + 1)
        if which == len(sequences):
            ranks.exchange(choices.choice(TOKENS))
            continue
        for rank in range(RANKS):
            with torch.cuda.stream(ranks.streams[rank]):
                graphs[which][rank].replay()
        for tokens in sequences[which]:
            ranks.expect(tokens)
        if index % 100 == 99:
            ranks.check()
    ranks.check()


def on_both(ranks: TwoRanks, run: Callable[[int], Tensor]) -> list[Tensor]:
    results = []
    for rank in range(RANKS):
        with torch.cuda.stream(ranks.streams[rank]):
            results.append(run(rank))
    for stream in ranks.streams:
        wait_for(stream)
    return results


def test_winners_and_gathered_logits_equal_the_reference(cuda: torch.device) -> None:
    choices = seeded()
    ranks = TwoRanks(cuda, overlapped=False)
    generator = torch.Generator(cuda).manual_seed(choices.randrange(2**31))
    for num_rows, width, padding in [(1, 124_160, 150), (4, 1000, 3), (128, 16_000, 0), (300, 4097, 1)]:
        whole = torch.randn(num_rows, RANKS * width, device=cuda, generator=generator)
        whole = whole.round() if num_rows > 1 else whole  # ties
        whole[0, 0] = torch.nan
        vocab_size = RANKS * width - padding
        parts = [whole[:, rank * width : (rank + 1) * width].contiguous() for rank in range(RANKS)]
        bounds = torch.arange(RANKS + 1, device=cuda) * width
        torch.cuda.synchronize()
        tokens = on_both(ranks, lambda rank: ranks.groups[rank].winners(parts[rank], rank * width, vocab_size))  # noqa: B023
        expected = [best_token(row, list(range(RANKS * width)), vocab_size) for row in whole.tolist()]
        assert [found.tolist() for found in tokens] == [expected] * RANKS
        for found in on_both(ranks, lambda rank: ranks.groups[rank].gather(parts[rank], bounds, width, vocab_size)):  # noqa: B023
            assert torch.equal(found.nan_to_num(7.5), whole[:, :vocab_size].nan_to_num(7.5))


def test_abort_word_frees_a_rank_whose_peer_never_comes(cuda: torch.device) -> None:
    ranks = TwoRanks(cuda, overlapped=True)
    before = {tokens: residual.clone() for tokens, residual in ranks.residuals[0].items()}
    torch.cuda.synchronize()
    for tokens in (4, 256, 4):
        ranks.launch(0, tokens)
    end = torch.cuda.Event()
    end.record(ranks.streams[0])
    assert not end.query()
    ranks.groups[0].memory.abort.fill_(1)
    wait_for(ranks.streams[0])
    assert int(ranks.groups[0].aborted) == 1
    assert all(torch.equal(ranks.residuals[0][tokens], old) for tokens, old in before.items())


def start_processes(scene: str, memory: str, count: int, directory: Path) -> list[subprocess.Popen[bytes]]:
    seed = random.randrange(2**31)
    print(f"{seed=}")
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
    command = [sys.executable, "-m", "tests.gpu.exchange_process", scene, memory]
    return [
        subprocess.Popen([*command, *map(str, (rank, RANKS, seed, count, directory))], env=environment)
        for rank in range(RANKS)
    ]


@pytest.mark.parametrize("memory", ["of_processes", "of_symmetric_memory"])
@pytest.mark.parametrize(
    ("scene", "count", "codes"),
    [("equal", NUM_PROCESS_EXCHANGES, [0, 0]), ("killed", 20, [0, -signal.SIGKILL])],
)
def test_two_processes(
    scene: str, count: int, codes: list[int], memory: str, cuda: torch.device, tmp_path: Path
) -> None:
    processes = start_processes(scene, memory, count, tmp_path)
    try:
        assert [process.wait(PATIENCE) for process in processes] == codes
    finally:
        for process in processes:
            process.kill()
            process.wait()
