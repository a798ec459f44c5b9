"""The device that kernels are planned and compiled for: the one that this process launches on, or one that it only
compiles for.

Without a GPU a process can still find out what a start would launch on one, and compile it: container images are built
on machines without a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from agentspec.kernels.variants import Machine

WARP_SIZE = 32
_described: list[Machine] = []
"""The last argument of `use_machine`, if any."""


class _NoDevice:
    """The part of a Triton driver that a launch uses before its kernel is compiled."""

    def __init__(self, machine: Machine) -> None:
        self._target = GPUTarget("cuda", arch_of(machine), WARP_SIZE)

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
    """Return the machine of a device. "meta" is the machine of `use_machine`, or else this process's GPU."""
    if device.type == "meta" and _described:
        return _described[0]
    properties: Any = torch.cuda.get_device_properties(device if device.type == "cuda" else torch.cuda.current_device())
    return Machine(
        capability=(properties.major, properties.minor), num_multiprocessors=properties.multi_processor_count
    )
