"""The short convolution against torch's own, with its state in poisoned, permuted rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

from agentspec.kernels.reference.causal_conv import causal_conv, causal_conv_prefill
from agentspec.types import SCRATCH_ROW, ZERO_ROW
from tests.fakes.prompt_run import Run, batch_of

CHANNELS, NUM_ROWS = 10, 30


def expected(state_3C: Tensor, x_NC: Tensor, weight_C4: Tensor) -> tuple[Tensor, Tensor]:
    """Return (outputs, all input rows after the state's three)."""
    window = torch.cat([state_3C, x_NC])
    return silu(conv1d(window.T[None], weight_C4[:, None], groups=CHANNELS))[0].T, window


def setup(seed: int) -> tuple[torch.Generator, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    pool = torch.full((NUM_ROWS, 3, CHANNELS), torch.nan)
    pool[ZERO_ROW] = 0
    pool[10:14] = torch.randn(4, 3, CHANNELS, generator=rng)
    return rng, pool, torch.randn(CHANNELS, 4, generator=rng)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 8])
def test_window_matches_torch_convolution(num_tokens: int) -> None:
    rng, pool, weight = setup(num_tokens)
    before = pool.clone()
    read_rows = [ZERO_ROW, 12, 10, ZERO_ROW]
    write_rows = [
        list(range(20, 20 + num_tokens)),
        [12, *range(2, 1 + num_tokens)],
        [28] * num_tokens,
        [SCRATCH_ROW] * num_tokens,
    ]
    write_rows[2] = [13, *[29] * (num_tokens - 1)]
    x = torch.randn(4, num_tokens, CHANNELS, generator=rng)
    y = causal_conv(x, weight, pool, torch.tensor(read_rows), torch.tensor(write_rows))
    for slot in range(2):
        want, window = expected(before[read_rows[slot]], x[slot], weight)
        torch.testing.assert_close(y[slot], want)
        for t, row in enumerate(write_rows[slot]):
            assert torch.equal(pool[row], window[t + 1 : t + 4]), (slot, t)
    assert torch.equal(pool[ZERO_ROW], before[ZERO_ROW])
    assert torch.equal(pool[10], before[10])


def test_spans_match_torch_convolution() -> None:
    rng, pool, weight = setup(0)
    before = pool.clone()
    counts, reads = (1, 2, 65), (11, 10, 12)
    writes = (((1, 20),), ((1, 21), (2, 10)), ((1, 22), (2, 23), (64, 24), (65, 25)))
    x = torch.randn(sum(counts), CHANNELS, generator=rng)
    runs = [
        Run(token_ids=range(count), read_row=read_row, state_writes=wanted, page_ids=[1, 2])
        for count, read_row, wanted in zip(counts, reads, writes, strict=True)
    ]
    y = causal_conv_prefill(x, weight, pool, batch_of(runs))
    for outputs, inputs, run in zip(y.split(counts), x.split(counts), runs, strict=True):
        want, window = expected(before[run.read_row], inputs, weight)
        torch.testing.assert_close(outputs, want)
        for count, row in run.state_writes:
            assert torch.equal(pool[row], window[count : count + 3]), (count, row)


def test_outputs_keep_input_dtype() -> None:
    rng, pool, weight = setup(1)
    x = torch.randn(1, 4, CHANNELS, generator=rng).bfloat16()
    y = causal_conv(x, weight.bfloat16(), pool.bfloat16(), torch.tensor([11]), torch.tensor([[20, 21, 22, 23]]))
    want, _ = expected(pool[11].bfloat16().float(), x[0].float(), weight.bfloat16().float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y[0].float(), want, rtol=1e-2, atol=1e-2)
