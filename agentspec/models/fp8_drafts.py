"""8-bit drafting weights: the MTP layer's linears and experts, and the rows of the draft head, quantised at load.

Owns which weights are quantised, and in which pieces. Drafts never change the output tokens, so rounding can only lower
acceptance. Doesn't decide when quantisation is worth it.
"""

from __future__ import annotations

from agentspec import kernels
from agentspec.models.quantization import empty_fp8, is_convertible

_PIECE = 2**26
"""Values quantised at once. Quantising makes several float32 copies: for a whole head, or all experts of a layer, these
would take gigabytes besides the model."""


def quantize_mtp_layer(parameters: dict[str, kernels.Weight]) -> None:
    """Quantise the linears and experts of the MTP layer, in place, with `in_fp8`.

    parameters: by canonical name (tensors.py). The layer's norms, router, shared gate and mtp.fc stay as they are:
    checkpoints never quantise them either."""
    for name, parameter in parameters.items():
        if name.startswith("mtp.") and is_convertible(name):
            parameters[name] = in_fp8(parameter)


def in_fp8(weight: kernels.Weight) -> kernels.Weight:
    """`quantize_blocks` of a matrix [O, K] or of a stack of matrices [X, O, K], in the device's form
    (quantization.empty_fp8). An already quantised weight is returned unchanged."""
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
