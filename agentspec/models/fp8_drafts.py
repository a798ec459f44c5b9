"""Drafts in 8-bit floats: the MTP layer's linears and experts and the rows of the draft head, quantised at load.

Owns what of them is quantised, and in which pieces. Drafts decide how many tokens a step emits, never which: all that
rounding can cost is acceptance. Knows nothing of when that pays.
"""

from __future__ import annotations

from agentspec import kernels
from agentspec.models.quantization import empty_fp8, is_convertible

_PIECE = 2**26
"""Values quantised at once, by way of several copies in float32: a whole head or all experts of a layer would need
gigabytes beside the model."""


def quantize_mtp_layer(parameters: dict[str, kernels.Weight]) -> None:
    """Replace the linears and experts of the MTP layer, in place, by `in_fp8` of them.

    parameters: canonical names (tensors.py). Not the layer's norms, router and shared gate, nor mtp.fc, which
    checkpoints never quantise either."""
    for name, parameter in parameters.items():
        if name.startswith("mtp.") and is_convertible(name):
            parameters[name] = in_fp8(parameter)


def in_fp8(weight: kernels.Weight) -> kernels.Weight:
    """`quantize_blocks` of a matrix [O, K] or a stack of them [X, O, K], in the form that the device has for it
    (quantization.empty_fp8).

    What has few bits already stays as it is."""
    if weight.is_quantized:
        return weight
    values = weight.tensor
    size = max(1, _PIECE // values[0].numel())
    if values.ndim == 2:  # pieces of a stack are whole matrices, those of a matrix whole blocks
        size = max(1, size // kernels.SCALE_BLOCK) * kernels.SCALE_BLOCK
    quantized = empty_fp8(tuple(values.shape), device=values.device, dtype=values.dtype)
    for first in range(0, len(values), size):
        part = slice(first, min(first + size, len(values)))
        quantized.fill((part,), kernels.quantize_blocks(values[part]))
    return quantized
