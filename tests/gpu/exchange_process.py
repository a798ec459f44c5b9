"""One rank of the exchange tests on CUDA devices: `python -m tests.gpu.exchange_process SCENE MEMORY RANK RANKS SEED
COUNT DIRECTORY`. Each rank has a device of its own where there are enough; else they share the first. MEMORY: a class
method of PeerMemory.

Ends by os._exit: freeing symmetric memory synchronises the device, which hangs beside a peer that is gone.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from agentspec.kernels.peer_memory import ExchangeLayout, PeerMemory
from agentspec.kernels.triton.exchange import ExchangeGroup
from tests.kernels.triton.exchange_rank import rank_order_sum

HIDDEN = 2560
TOKENS = (1, 4, 16, 33, 256)
PATIENCE = 60


def main(scene: str, memory: str, rank: int, ranks: int, seed: int, count: int, directory: Path) -> None:
    device = torch.device("cuda", rank if torch.cuda.device_count() >= ranks else 0)
    torch.cuda.set_device(device)
    store = distributed.FileStore(str(directory / "meeting"), ranks)  # type: ignore[attr-defined]
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE)
    )
    process_group = distributed.group.WORLD
    assert process_group is not None
    layout = ExchangeLayout(ranks=ranks)
    group = ExchangeGroup(getattr(PeerMemory, memory)(layout, process_group, device), layout)
    choices = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    parts = {n: [torch.randn(n, HIDDEN, device=device, generator=generator) for _ in range(ranks)] for n in TOKENS}
    # The sums of 16 tokens have another dtype than their parts, so they take two shots.
    residuals = {
        n: torch.zeros(n, HIDDEN, device=device, dtype=torch.bfloat16 if n == 16 else torch.float32) for n in TOKENS
    }
    expected = {n: residual.clone() for n, residual in residuals.items()}
    for _ in range(count):
        n = choices.choice(TOKENS)
        group.add_partial(residuals[n], parts[n][rank], None)
        expected[n] = rank_order_sum(expected[n], parts[n])
    torch.cuda.synchronize()
    assert all(torch.equal(residuals[n], expected[n]) for n in TOKENS)
    assert int(group.aborted) == 0
    distributed.barrier(process_group)
    if scene == "killed":
        if rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group.add_partial(residuals[4], parts[4][rank], None)
        end = torch.cuda.Event()
        end.record()
        assert not end.query()
        group.memory.abort.fill_(1)
        deadline = time.monotonic() + PATIENCE
        while not end.query():
            assert time.monotonic() < deadline, "the abort word didn't free the rank"
        assert int(group.aborted) == 1
        assert torch.equal(residuals[4], expected[4])


if __name__ == "__main__":
    faulthandler.dump_traceback_later(2 * PATIENCE, exit=True)
    scene, memory, *numbers, path = sys.argv[1:]
    rank, ranks, seed, count = map(int, numbers)
    status = 0
    try:
        main(scene, memory, rank, ranks, seed, count, Path(path))
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
