"""Depthwise causal convolution over four taps with its three-row state, then SiLU.

The state is the INPUT of the convolution: the last three rows of [q | k | v] before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from agentspec.kernels.prefill_batch import PrefillBatch
from agentspec.kernels.reference.spans import read_spans
from agentspec.kernels.traffic import touches_pools


def convolve(window: Tensor, weight_C4: Tensor) -> Tensor:
    """SiLU of the convolution of window [..., T+3, C] (time before channels): [..., T, C], float32 inside."""
    num_tokens = window.shape[-2] - 3
    taps = weight_C4.float().t()
    window32 = window.float()
    y = window32.narrow(-2, 0, num_tokens) * taps[0]
    for tap in range(1, 4):
        y.addcmul_(window32.narrow(-2, tap, num_tokens), taps[tap])
    return silu(y).to(window.dtype)


@touches_pools
def causal_conv(
    x_BTC: Tensor, weight_C4: Tensor, conv_R3C: Tensor, read_row_B: Tensor, write_rows_BT: Tensor
) -> Tensor:
    """Convolve every slot's window after the state in its read row. The state after column t is stored to
    write_rows_BT[:, t].

    Args:
        x_BTC: [B, T, C], activation dtype; pre-conv [q | k | v].
        weight_C4: [C, 4]; tap 3 multiplies the current token.
        conv_R3C: pool of one layer [R, 3, C], oldest row first; modified. A row may be read and written in one call.
        read_row_B: int64 [B]. write_rows_BT: int64 [B, T].
    Returns: [B, T, C] in x's dtype, after SiLU.
    """
    window = torch.cat([conv_R3C[read_row_B], x_BTC], 1)
    states_BTC3 = window.unfold(1, 3, 1)[:, 1:]
    conv_R3C[write_rows_BT] = states_BTC3.transpose(2, 3)
    return convolve(window, weight_C4)


@touches_pools
def causal_conv_prefill(x_NC: Tensor, weight_C4: Tensor, conv_R3C: Tensor, batch: PrefillBatch) -> Tensor:
    """`causal_conv` over the spans of a prefill. The state is stored only to the save rows of their blocks.

    Args:
        x_NC: [N, C], in the order of the batch.
        weight_C4, conv_R3C: as in `causal_conv`; the pool is modified.
    Returns: [N, C] in x's dtype, after SiLU.
    """
    y_NC = torch.empty_like(x_NC)
    for span in read_spans(batch):
        window = torch.cat([conv_R3C[span.read_row], x_NC[span.tokens]])
        for block in span.blocks:
            count = block.end - span.begin
            for row in block.save_rows:
                conv_R3C[row] = window[count : count + 3]
        y_NC[span.tokens] = convolve(window, weight_C4)
    return y_NC
