"""Room for the parameters that are in 8 bits, and copies into parts of it.

Owns in which form such a parameter lies on which device. Knows neither names nor files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentspec import kernels

Region = tuple[int | slice, ...]
"""A part of a parameter, as an index of its first dimensions; () is all of it."""


def keeps_blocks(device: torch.device) -> bool:
    """Whether weights stay in 8 bits on the device. Not on the CPU: each product would expand them again."""
    return device.type != "cpu"


def empty_weight(shape: tuple[int, ...], *, device: torch.device, dtype: torch.dtype, block_rows: int = kernels.SCALE_BLOCK) -> kernels.Weight:
    """Room for a parameter [O, K] or [X, O, K] in 8 bits: block-scaled, or plain in `dtype` where the device doesn't keep blocks."""
    if not keeps_blocks(device):
        return torch.empty(shape, dtype=dtype, device=device)
    *stack, num_rows, depth = shape
    blocks = (*stack, -(-num_rows // block_rows), -(-depth // kernels.SCALE_BLOCK))
    return kernels.BlockScaled(
        values=torch.empty(shape, dtype=kernels.FP8, device=device),
        scales=torch.empty(blocks, dtype=torch.float32, device=device),
        block_rows=block_rows,
    )


def fill(parameter: kernels.Weight, region: Region, part: kernels.Weight) -> None:
    """Copy into a region of a parameter. A block-scaled parameter takes block-scaled parts, whose rows begin whole blocks of it."""
    if isinstance(parameter, Tensor):
        parameter[region].copy_(kernels.dequantize(part) if isinstance(part, kernels.BlockScaled) else part)
        return
    assert isinstance(part, kernels.BlockScaled), "plain rows in a block-scaled parameter"
    block_rows = parameter.block_rows
    row_index = parameter.values.dim() - 2
    blocks = tuple(_in_blocks(index, block_rows) if i == row_index else index for i, index in enumerate(region))
    parameter.values[region].copy_(part.values)
    parameter.scales[blocks].copy_(kernels.with_block_rows(part, block_rows).scales)


def _in_blocks(index: int | slice, block_rows: int) -> slice:
    assert isinstance(index, slice), f"{index} is a row"
    assert index.start % block_rows == 0, f"row {index.start} is inside a block of {block_rows}"
    return slice(index.start // block_rows, -(-index.stop // block_rows))
