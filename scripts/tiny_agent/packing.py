"""Boundaries of the sequences in one packed row of tokens, in the formats of layers and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK = 64


@dataclass(frozen=True, slots=True)
class Packed:
    """S sequences in one row of T tokens."""

    lengths: list[int]
    cu_seqlens: Tensor
    """int32 [S + 1], on the device: where each begins, then T."""
    cu_seqlens_long: Tensor
    """The same as int64."""
    cu_seqlens_cpu: Tensor
    """The same as int64, on the CPU."""
    chunks: Tensor
    """int64 [N, 2], on the device: (sequence, which of its chunks of CHUNK tokens), in order."""
    positions: Tensor
    """int64 [T]: of each token in its sequence."""
    remaining: Tensor
    """int64 [T]: how many tokens of its sequence follow each token."""

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    def has_next(self, shift: int) -> Tensor:
        """bool [T]: whether the token `shift` further on belongs to the same sequence."""
        return self.remaining >= shift


def pack(cu_seqlens: npt.NDArray[np.int32], device: torch.device) -> Packed:
    lengths = np.diff(cu_seqlens).tolist()
    assert min(lengths) > 0, "an empty sequence"
    positions = np.concatenate([np.arange(length) for length in lengths])
    remaining = np.concatenate([np.arange(length)[::-1] for length in lengths])
    chunks = np.concatenate(
        [[(sequence, chunk) for chunk in range(-(-length // CHUNK))] for sequence, length in enumerate(lengths)]
    )
    cu_seqlens_long = cu_seqlens.astype(np.int64)
    return Packed(
        lengths=lengths,
        cu_seqlens=to_device(cu_seqlens.astype(np.int32), device),
        cu_seqlens_long=to_device(cu_seqlens_long, device),
        cu_seqlens_cpu=torch.from_numpy(cu_seqlens_long),
        chunks=to_device(chunks.astype(np.int64), device),
        positions=to_device(positions.astype(np.int64), device),
        remaining=to_device(remaining.astype(np.int64), device),
    )


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, for which the host doesn't wait."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.clone()
