"""Kernel variants: one variant is one binary. Also the interface of a compiler that builds many of them in parallel.

A launch needs a binary for its arguments' types, for the specialization of their values (a pointer's alignment, a
constant) and for the launch's options. Compiling the binaries of a start one by one, each at its first launch, takes
minutes; with the list known in advance they are compiled in parallel.

Knows nothing of models, and imports no compiler: `kernels.compiler` has Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One binary to compile, as sent to the process that compiles it."""

    module: str
    function: str
    arch: int
    """The device's architecture: 10 times the major compute capability plus the minor one."""
    data: str
    """The rest of the specialization, in the compiler's own format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Device properties that kernels, and the choice among them, depend on."""

    capability: tuple[int, int]
    """Compute capability: (9, 0) is Hopper."""
    num_multiprocessors: int


class KernelCompiler(Protocol):
    """A module that compiles a backend's kernels."""

    def use_machine(self, machine: Machine) -> None:
        """Compile for `machine` from now on, which this process need not have: for processes that launch nothing."""

    def variants_of(self, work: Callable[[], None]) -> list[Variant]:
        """Return the variants that `work` launches, without duplicates, in the order of their first launches.

        work: runs on tensors of the device type "meta", which have no memory. Its kernels are not launched; kernels of
        other threads are."""

    def missing(self, variants: Sequence[Variant]) -> list[Variant]:
        """Return the variants that are not in the compiler's cache."""

    def compile_variant(self, variant: Variant) -> None:
        """Compile into the compiler's cache. Needs no device. Raises the compiler's errors."""

    def read_sources(self) -> None:
        """Read what every look-up in the cache needs of the compiler itself, hundreds of megabytes, once for this
        process. Holds Python's lock for a small part of the time."""

    def cache_directory(self) -> str: ...

    def has_note(self, name: str) -> bool:
        """Whether `put_note` has stored a note of this name in the cache under this compiler version."""

    def put_note(self, name: str) -> None: ...
