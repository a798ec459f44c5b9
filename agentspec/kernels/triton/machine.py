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
LAUNCH_DEVICE = torch.device("meta")
"""`machine_of` takes it for the machine that launches are for, whatever their tensors."""
_SHARED_KB = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
HOPPER_SHARED_BYTES = 227 * 1024
_LEAST_SHARED_KB = 99
"""Of every other device, (12, 0) and (12, 1) among them."""
_OTHER_SHARED_BYTES = 4 * 1024
"""Most shared memory that a product uses beside its pipeline's stages."""
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


def launches_early() -> bool:
    """Whether a kernel may start before the previous one has ended (launch.py)."""
    return machine_of(LAUNCH_DEVICE).capability >= (9, 0)


def has_fp8_units(device: torch.device) -> bool:
    """Whether kernels can convert to 8-bit floats, and multiply them."""
    return machine_of(device).capability >= (8, 9)


def multiplies_scaled_blocks(device: torch.device) -> bool:
    """Whether the matrix library multiplies 8-bit floats that have a scale per block: on Hopper only."""
    return machine_of(device).capability[0] == 9


def shared_bytes(device: torch.device) -> int:
    """Most shared memory of one program. On a CPU (the interpreter) as on Hopper."""
    return HOPPER_SHARED_BYTES if device.type == "cpu" else shared_bytes_of(machine_of(device))


def fitting_stages(stages: int, stage_bytes: int, shared_bytes: int) -> int:
    """Pipeline stages of a product that fit: `stages`, or fewer where a program has less shared memory than on Hopper.
    There the matrix units read registers, so one stage is not in shared memory."""
    if shared_bytes >= HOPPER_SHARED_BYTES:
        return stages
    return min(stages, 1 + max(shared_bytes - _OTHER_SHARED_BYTES, 0) // stage_bytes)


def shared_bytes_of(machine: Machine) -> int:
    """`shared_bytes` of a machine. Source: CUDA programming guide, technical specifications per compute capability. A
    table, since kernels are also compiled for machines that are not there."""
    return _SHARED_KB.get(machine.capability, _LEAST_SHARED_KB) * 1024
