"""What a file `specimens_*.py` lists: kernels at shapes that are really served, for a compile check on a machine
without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Specimen:
    """One kernel as one launch would compile it. `PDL` is always True here and needn't be named.

    Pointers count as 16-byte aligned, as those of torch's tensors are."""

    name: str
    """Unique. Says kernel, model and case, e.g. `norm_linear 4B M=4`."""
    kernel: Any
    """The function under `@triton.jit`."""
    signature: Mapping[str, str]
    """Triton type of every argument that is no constexpr: `{"x": "*bf16", "num_tokens": "i32"}`."""
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    multiples_of_16: tuple[str, ...] = ()
    """Integer arguments that a launch would find to be multiples of 16, which is what lets strides keep wide loads."""
    stack_bytes: int = 0
    """What a thread may keep in local memory: more than nothing only where a measurement has shown that it doesn't
    matter."""
    instructions: tuple[str, ...] = ()
    """What its PTX must hold, e.g. `wgmma.mma_async`, `cp.async.cg`, `ld.global.v4`."""
