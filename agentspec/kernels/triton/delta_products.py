"""The product before a prompt's recurrent mixer, of which the columns of the gate z may be left for later.

Only the norm behind the recurrence reads them, and the recurrence's third launch may leave multiprocessors idle
(chunked_delta.py): the product of these columns runs there, beside it. Owns the rule when it does. Every bit is that of
one product. Products in 16 bits are not measured so. Shape letters: N tokens, H input features, O outputs, E outputs in
full precision, P both together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec.kernels.backend import Norm, OpenProduct
from agentspec.kernels.triton import chunked_delta_hopper
from agentspec.kernels.triton.fp8_prefill import multiply_scaled
from agentspec.kernels.triton.fp8_sums import normed_tokens
from agentspec.kernels.triton.linear_layers import is_scaled, multiply_with_extra, norm_linear
from agentspec.kernels.triton.machine import machine_of
from agentspec.kernels.weights import SCALE_BLOCK, Weight

LEAST_TOKENS = 2048
"""With fewer, two products take longer than one by as much as the second gains."""


def norm_linear_before_delta(
    x_NH: Tensor, norm: Norm | None, weight_OH: Weight, extra_EH: Tensor | None, gates: slice
) -> Tensor | OpenProduct:
    if norm is None or not is_scaled(weight_OH, x_NH) or extra_EH is None or not leaves_room(x_NH, gates):
        return norm_linear(x_NH, norm, weight_OH, extra_EH)
    assert gates.stop == len(weight_OH.values), "z's rows are the last ones in 8 bits"
    scaled, normed_NH = normed_tokens(x_NH, norm, in_full=True)
    assert normed_NH is not None
    out_NP = torch.empty(len(x_NH), gates.stop + len(extra_EH), dtype=x_NH.dtype, device=x_NH.device)
    first, last = weight_OH.cut((slice(0, gates.start),)), weight_OH.cut((gates,))
    multiply_with_extra(scaled, first, out_NP[:, : gates.start], normed_NH, extra_EH, out_NP[:, gates.stop :])
    return OpenProduct(out_NP, lambda: multiply_scaled(scaled, last, out_NP[:, gates]))


def leaves_room(x_NH: Tensor, gates: slice) -> bool:
    """Whether the recurrence of so many tokens, if they are one prompt's, leaves about half of the multiprocessors
    idle: with less room (27B) two products took 1 % longer than one. Several prompts leave none, and lose nothing.
    gates: the columns of z."""
    num_values: int = gates.stop - gates.start
    if len(x_NH) < LEAST_TOKENS or gates.start % SCALE_BLOCK or num_values % SCALE_BLOCK:
        return False
    head_dim, num_programs = chunked_delta_hopper.HEAD_DIM, num_values // chunked_delta_hopper.BLOCK_D
    if not chunked_delta_hopper.is_supported(x_NH.dtype, head_dim, head_dim, x_NH.device):
        return False
    return 2 * num_programs <= machine_of(x_NH.device).num_multiprocessors
