"""The recurrence against a float64 token-by-token loop: windows and spans, poisoned and permuted rows, odd sizes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from agentspec.kernels.reference.gated_delta import gated_delta, gated_delta_blocks
from agentspec.kernels.traffic import state_traffic
from agentspec.types import BLOCK_TOKENS, SCRATCH_ROW, ZERO_ROW
from tests.fakes.compare import relative_error
from tests.fakes.prompt_run import Run, batch_of

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 12, 8
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
NUM_ROWS = 40
TOLERANCE = 1e-5


@dataclass
class Inputs:
    qkv: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor

    def tokens(self, chosen: slice) -> Inputs:
        return Inputs(self.qkv[chosen], self.a[chosen], self.b[chosen], self.a_log, self.dt_bias)


def make(num_tokens: int, seed: int, *, slow: bool = False) -> Inputs:
    """slow: decays near 1, so that a state depends on the whole span."""
    rng = torch.Generator().manual_seed(seed)
    a_log = torch.empty(VALUE_HEADS).uniform_(0.05, 4.0, generator=rng).log() - (6 if slow else 0)
    return Inputs(
        torch.randn(num_tokens, CHANNELS, generator=rng),
        torch.randn(num_tokens, VALUE_HEADS, generator=rng),
        torch.randn(num_tokens, VALUE_HEADS, generator=rng),
        a_log,
        torch.randn(VALUE_HEADS, generator=rng),
    )


def loop(x: Inputs, state_VDK: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return outputs [N, V, D] and the state after every token, one head and one token at a time in float64."""
    state = state_VDK.double().clone()
    out, states = torch.zeros(len(x.qkv), VALUE_HEADS, VALUE_DIM, dtype=torch.float64), []
    num_keys = KEY_HEADS * KEY_DIM
    for t in range(len(x.qkv)):
        row = x.qkv[t].double()
        q, k, v = (
            row[:num_keys].view(KEY_HEADS, -1),
            row[num_keys : 2 * num_keys].view(KEY_HEADS, -1),
            row[2 * num_keys :].view(VALUE_HEADS, -1),
        )
        for h in range(VALUE_HEADS):
            qh, kh = (y[h // (VALUE_HEADS // KEY_HEADS)] for y in (q, k))
            qh, kh = (y / (y.dot(y) + 1e-6).sqrt() for y in (qh, kh))
            step = torch.log1p(torch.exp(x.a[t, h].double() + x.dt_bias[h].double()))
            state[h] *= torch.exp(-torch.exp(x.a_log[h].double()) * step)
            state[h] += torch.outer((v[h] - state[h] @ kh) * torch.sigmoid(x.b[t, h].double()), kh)
            out[t, h] = state[h] @ qh / KEY_DIM**0.5
        states.append(state.clone())
    return out, states


def pool(seed: int = 0) -> Tensor:
    """Rows of NaN, except the zero row and rows 10 to 13."""
    ssm = torch.full((NUM_ROWS, VALUE_HEADS, VALUE_DIM, KEY_DIM), torch.nan)
    ssm[ZERO_ROW] = 0
    ssm[10:14] = torch.randn(4, *ssm.shape[1:], generator=torch.Generator().manual_seed(seed))
    return ssm


def span(count: int, read_row: int, writes: list[tuple[int, int]], *, start: int = 0) -> Run:
    pages = range(1, 2 + (start + count) // BLOCK_TOKENS)
    return Run(token_ids=range(count), start=start, read_row=read_row, state_writes=tuple(writes), page_ids=pages)


def run_prefill(x: Inputs, ssm: Tensor, spans: list[Run]) -> Tensor:
    return gated_delta_blocks(x.qkv, x.a, x.b, x.a_log, x.dt_bias, ssm, batch_of(spans))


@pytest.mark.parametrize("slow", [False, True], ids=["fast decay", "slow decay"])
@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 127, 200])
def test_prefill_matches_token_loop(num_tokens: int, slow: bool) -> None:
    x, ssm = make(num_tokens, seed=num_tokens, slow=slow), pool()
    expected, states = loop(x, ssm[11])
    out = run_prefill(x, ssm, [span(num_tokens, 11, [(num_tokens, 30)], start=37)])
    assert relative_error(out, expected) < TOLERANCE
    assert relative_error(ssm[30], states[-1]) < TOLERANCE


def test_prefill_stays_finite_with_extreme_decays() -> None:
    """Decays of e^-100 and less per token underflow to zero, never to NaN."""
    x, ssm = make(130, seed=5), pool()
    x.a_log += 6
    expected, states = loop(x, ssm[10])
    out = run_prefill(x, ssm, [span(130, 10, [(130, 30)])])
    assert relative_error(out, expected) < TOLERANCE
    assert relative_error(ssm[30], states[-1]) < TOLERANCE


def test_prefill_writes_save_rows_of_several_spans() -> None:
    counts, starts, reads = (70, 1, 129), (64, 3, 0), (12, 10, ZERO_ROW)
    writes = [[(1, 20), (64, 21), (70, 22)], [(1, 23)], [(63, 24), (100, 25), (128, 26), (129, 12)]]
    x, ssm = make(sum(counts), seed=9), pool()
    before = ssm.clone()
    spans = [
        span(count, read, wanted, start=start)
        for start, count, read, wanted in zip(starts, counts, reads, writes, strict=True)
    ]
    state_traffic.reset()
    out = run_prefill(x, ssm, spans)
    assert (state_traffic.rows_read, state_traffic.rows_written) == (3, 8)
    offset = 0
    for one, wanted in zip(spans, writes, strict=True):
        tokens = slice(offset, offset + len(one.token_ids))
        offset = tokens.stop
        expected, states = loop(x.tokens(tokens), before[one.read_row])
        assert relative_error(out[tokens], expected) < TOLERANCE
        for count, row in wanted:
            assert relative_error(ssm[row], states[count - 1]) < TOLERANCE, (count, row)
    untouched = sorted(set(range(NUM_ROWS)) - {row for wanted in writes for _, row in wanted})
    assert torch.equal(ssm[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


@pytest.mark.parametrize("cut", [64, 128, 192])
def test_prefill_split_at_block_boundary_is_bitwise_equal(cut: int) -> None:
    x, ssm = make(200, seed=2), pool()
    whole = run_prefill(x, ssm, [span(200, ZERO_ROW, [(200, 20)])])
    first = run_prefill(x.tokens(slice(0, cut)), ssm, [span(cut, ZERO_ROW, [(cut, 21)])])
    rest = run_prefill(x.tokens(slice(cut, None)), ssm, [span(200 - cut, 21, [(200 - cut, 21)], start=cut)])
    assert torch.equal(torch.cat([first, rest]), whole)
    assert torch.equal(ssm[20], ssm[21])


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8])
def test_window_matches_token_loop(num_tokens: int) -> None:
    """Four slots with scattered rows: one starts from zero, one overwrites the row it reads, two are inert."""
    x = make(5 * num_tokens, seed=num_tokens)
    ssm = pool()
    before = ssm.clone()
    read_rows = [ZERO_ROW, 12, 11, ZERO_ROW, ZERO_ROW]
    scattered = torch.randperm(20, generator=torch.Generator().manual_seed(1)) + 15
    write_rows = scattered[: 2 * num_tokens].view(2, -1).tolist()
    write_rows.append([11, *range(2, 2 + num_tokens - 1)])
    write_rows += [[SCRATCH_ROW] * num_tokens] * 2
    shape = (5, num_tokens)
    state_traffic.reset()
    out = gated_delta(
        x.qkv.view(*shape, -1),
        x.a.view(*shape, -1),
        x.b.view(*shape, -1),
        x.a_log,
        x.dt_bias,
        ssm,
        torch.tensor(read_rows),
        torch.tensor(write_rows),
    )
    assert (state_traffic.rows_read, state_traffic.rows_written) == (5, 5 * num_tokens)
    for slot in range(3):
        expected, states = loop(x.tokens(slice(slot * num_tokens, (slot + 1) * num_tokens)), before[read_rows[slot]])
        assert relative_error(out[slot], expected) < TOLERANCE, slot
        for t, row in enumerate(write_rows[slot]):
            assert relative_error(ssm[row], states[t]) < TOLERANCE, (slot, t)
    written = {row for rows in write_rows for row in rows}
    untouched = sorted(set(range(NUM_ROWS)) - written)
    assert torch.equal(ssm[untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


def test_window_continues_prefill_with_bfloat16_inputs() -> None:
    """Inputs are bfloat16; state and outputs stay float32."""
    x, ssm = make(70, seed=3), pool()
    x = Inputs(x.qkv.bfloat16(), x.a.bfloat16(), x.b.bfloat16(), x.a_log, x.dt_bias)
    expected, states = loop(x, ssm[ZERO_ROW])
    first = run_prefill(x.tokens(slice(0, 66)), ssm, [span(66, ZERO_ROW, [(66, 5)])])
    rest = x.tokens(slice(66, None))
    out = gated_delta(
        rest.qkv[None],
        rest.a[None],
        rest.b[None],
        x.a_log,
        x.dt_bias,
        ssm,
        torch.tensor([5]),
        torch.tensor([[6, 7, 8, 9]]),
    )
    assert out.dtype == torch.float32
    assert relative_error(torch.cat([first, out[0]]), expected) < TOLERANCE
    assert relative_error(ssm[9], states[-1]) < TOLERANCE
