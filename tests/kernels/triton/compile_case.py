"""The entry of a file `compile_cases_*.py`: a kernel at a served shape, for a compile check on a machine without a
GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """One kernel as one launch would compile it. `PDL` is always True here and may be left out.

    Pointers count as 16-byte aligned, as those of torch's tensors are."""

    name: str
    """Unique. Kernel, model and case, e.g. `norm_linear 4B M=4`."""
    kernel: Any
    """The function under `@triton.jit`."""
    signature: Mapping[str, str]
    """Triton type of every argument that is not a constexpr: `{"x": "*bf16", "num_tokens": "i32"}`."""
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None
    """Limit per thread that a launch gives as `maxnreg`."""
    multiples_of_16: tuple[str, ...] = ()
    """Integer arguments that a launch would specialize as multiples of 16, which lets strides keep wide loads."""
    stack_bytes: int = 0
    """Bytes of local memory allowed per thread: above 0 only where a measurement has shown that it does not matter."""
    instructions: tuple[str, ...] = ()
    """Required text in its PTX, e.g. `wgmma.mma_async`, `cp.async.cg`, `ld.global.v4`."""
