"""The entry of a file `compile_cases_*.py`: a kernel at a served shape, for a compile check on a machine without a
GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agentspec.kernels.triton.machine import shared_bytes_of
from agentspec.kernels.variants import Machine

HOPPER = 90
ELSEWHERE = (80, 89, 120)
"""One architecture for each set of instructions and each amount of shared memory that the kernels meet off Hopper:
A100; L4, L40S and RTX 40; RTX 50 and RTX PRO."""
EVERYWHERE = (HOPPER, *ELSEWHERE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """One kernel as one launch would compile it. `PDL` is the target's and may be left out.

    Pointers count as 16-byte aligned, as those of torch's tensors are."""

    name: str
    """Unique for a target. Kernel, model and case, e.g. `norm_linear 4B M=4`."""
    kernel: Any
    """The function under `@triton.jit`."""
    targets: tuple[int, ...] = (HOPPER,)
    """Architectures to compile for: 10 times the major compute capability plus the minor one."""
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
    """Bytes of local memory allowed per thread on Hopper: above 0 only where a measurement has shown that it does
    not matter."""
    instructions: tuple[str, ...] = ()
    """Required text in its PTX for Hopper, e.g. `wgmma.mma_async`, `cp.async.cg`, `ld.global.v4`."""


def on_targets(targets: tuple[int, ...], cases: Iterable[CompileCase]) -> list[CompileCase]:
    """The cases, for these targets: where no device has a plan of its own."""
    return [replace(case, targets=targets) for case in cases]


def shared_bytes(target: int) -> int:
    """Most shared memory of one program on a target."""
    return shared_bytes_of(Machine(capability=(target // 10, target % 10), num_multiprocessors=1))
