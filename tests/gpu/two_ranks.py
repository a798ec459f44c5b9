"""Two ranks of the exchange kernels that share one CUDA device, in one process: each on a stream of its own.

A launch must never make the host or the device wait while one rank spins for the other. So all tensors exist before a
sequence of exchanges begins, every kernel has run before, and the launches of the ranks alternate. With early launches
the programs of later exchanges start behind one that spins, and hold their place: if they filled the device, the peer's
could not start, and nothing would ever end. So few are launched at a time. Engines launch one by one where ranks share
a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from agentspec.kernels.peer_memory import ExchangeLayout, PeerMemory
from agentspec.kernels.triton.exchange import ExchangeGroup
from tests.kernels.triton.exchange_rank import best_token, rank_order_sum

RANKS = 2
HIDDEN = 2560
TOKENS = (1, 3, 4, 16, 32, 33, 64, 256, 1000)
"""Those up to 32 tokens take one shot where both tensors have one dtype, the others two, and the last two rounds."""
MOST_EARLY = 2
"""Exchanges of a rank that are launched early at a time: both ranks' programs must fit the device, 256 of 16 warps."""
PATIENCE = 60
"""Seconds until a hang is a failure."""


class TwoRanks:
    """Both ranks in this process, each on a stream of its own, with few enough programs for one device. A residual of
    every number of tokens is carried through all exchanges, so each of them leaves its mark on the bits compared at the
    end."""

    def __init__(self, device: torch.device, *, overlapped: bool, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = device, dtype
        self.overlapped = overlapped
        self.num_exchanges = 0
        layout = ExchangeLayout(ranks=RANKS, paired_programs=64, paired_elements=1 << 20)
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
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        for tokens in TOKENS:  # loads every kernel, as the sleep before does: a device that loads one waits for a spin
            self.exchange(tokens)
        self.check()

    def empty(self, tokens: int) -> Tensor:
        return torch.zeros(tokens, HIDDEN, dtype=self.dtype, device=self.device)

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
        self.num_exchanges += 1
        if self.overlapped and self.num_exchanges % MOST_EARLY == 0:
            for stream in self.streams:
                wait_for(stream)

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


def on_both(ranks: TwoRanks, run: Callable[[int], Tensor]) -> list[Tensor]:
    results = []
    for rank in range(RANKS):
        with torch.cuda.stream(ranks.streams[rank]):
            results.append(run(rank))
    for stream in ranks.streams:
        wait_for(stream)
    return results


def check_choices(ranks: TwoRanks, seed: int, sizes: Sequence[tuple[int, int, int]]) -> None:
    """Compare winners and gathered logits with the reference. sizes: rows, columns of a rank, columns of padding."""
    generator = torch.Generator(ranks.device).manual_seed(seed)
    for num_rows, width, padding in sizes:
        whole = torch.randn(num_rows, RANKS * width, device=ranks.device, generator=generator)
        whole = whole.round() if num_rows > 1 else whole  # ties
        whole[0, 0] = torch.nan
        vocab_size = RANKS * width - padding
        parts = [whole[:, rank * width : (rank + 1) * width].contiguous() for rank in range(RANKS)]
        bounds = torch.arange(RANKS + 1, device=ranks.device) * width
        torch.cuda.synchronize()
        tokens = on_both(ranks, lambda rank: ranks.groups[rank].winners(parts[rank], rank * width, vocab_size))  # noqa: B023
        expected = [best_token(row, list(range(RANKS * width)), vocab_size) for row in whole.tolist()]
        assert [found.tolist() for found in tokens] == [expected] * RANKS
        for found in on_both(ranks, lambda rank: ranks.groups[rank].gather(parts[rank], bounds, width, vocab_size)):  # noqa: B023
            assert torch.equal(found.nan_to_num(7.5), whole[:, :vocab_size].nan_to_num(7.5))
