"""The device that kernels are cut and compiled for: the one that this process launches on, or one that it only compiles
for.

Without a GPU a process can still learn what a start would launch on one, and compile it: for container images, which
are built where there is none.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from agentspec.kernels.variants import Machine

_WARP_SIZE = 32
_described: list[Machine] = []
"""What `use_machine` was told last."""


class _NoDevice:
    """As much of a Triton driver as a launch asks for before its kernel is compiled."""

    def __init__(self, machine: Machine) -> None:
        self._target = GPUTarget("cuda", arch_of(machine), _WARP_SIZE)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def use_machine(machine: Machine) -> None:
    _described[:] = [machine]
    machine_of.cache_clear()
    driver.set_active(_NoDevice(machine))


def arch_of(machine: Machine) -> int:
    major, minor = machine.capability
    return 10 * major + minor


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """A tensor without memory ("meta") counts as one on the machine of `use_machine`, or else on this process's GPU."""
    if device.type == "meta" and _described:
        return _described[0]
    properties: Any = torch.cuda.get_device_properties(device if device.type == "cuda" else torch.cuda.current_device())
    return Machine(
        capability=(properties.major, properties.minor), num_multiprocessors=properties.multi_processor_count
    )
