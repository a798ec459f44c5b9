"""The exchange kernels on one CUDA device that two ranks share: two streams of one process for many exchanges, under
load and with delays; CUDA graphs replayed in any order; two processes, which take turns on the device, for few."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.two_ranks import MOST_EARLY, RANKS, TOKENS, TwoRanks, check_choices, wait_for

pytestmark = pytest.mark.gpu
NUM_EXCHANGES = 100_000
NUM_PROCESS_EXCHANGES = 1_000
PATIENCE = 240
"""Seconds for two processes, which take turns on the device."""


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
    sequences = [
        choices.choices(TOKENS[:-1], k=length) for length in ((1, 2, 3, MOST_EARLY) if overlapped else (1, 2, 3, 7, 20))
    ]
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


def test_winners_and_gathered_logits_equal_the_reference(cuda: torch.device) -> None:
    sizes = [(1, 124_160, 150), (4, 1000, 3), (128, 16_000, 0), (300, 4097, 1)]
    check_choices(TwoRanks(cuda, overlapped=False), seeded().randrange(2**31), sizes)


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
