"""Drafts in 8-bit floats: the MTP layer's linears and experts and the rows of the draft head, quantised at load.

Owns what of them is quantised, and in which pieces. Drafts decide how many tokens a step emits, never which: all that rounding can cost is
acceptance. Knows nothing of when that pays.
"""

from __future__ import annotations

from torch import Tensor

from agentspec import kernels
from agentspec.models.quantization import is_convertible
from agentspec.models.weight_regions import empty_weight, fill

_PIECE = 2**26
"""Values quantised at once, by way of several copies in float32: a whole head or all experts of a layer would need gigabytes beside the model."""


def quantize_mtp_layer(parameters: dict[str, kernels.Weight]) -> None:
    """Replace the linears and experts of the MTP layer, in place, by `in_fp8` of them; what the checkpoint has in 8-bit floats stays as it is.

    parameters: canonical names (tensors.py). Not the layer's norms, router and shared gate, nor mtp.fc, which checkpoints never quantise either."""
    for name, parameter in parameters.items():
        if name.startswith("mtp.") and is_convertible(name) and isinstance(parameter, Tensor):
            parameters[name] = in_fp8(parameter)


def in_fp8(weight: Tensor) -> kernels.Weight:
    """`quantize_blocks` of a matrix [O, K] or a stack of them [X, O, K], in the form that the device has for it (weight_regions.empty_weight)."""
    size = max(1, _PIECE // weight[0].numel())
    if weight.ndim == 2:  # pieces of a stack are whole matrices, those of a matrix whole blocks
        size = max(1, size // kernels.SCALE_BLOCK) * kernels.SCALE_BLOCK
    quantized = empty_weight(tuple(weight.shape), device=weight.device, dtype=weight.dtype)
    for first in range(0, weight.shape[0], size):
        part = slice(first, min(first + size, weight.shape[0]))
        fill(quantized, (part,), kernels.quantize_blocks(weight[part]))
    return quantized
