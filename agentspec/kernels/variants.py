"""Kernel variants: what a compiler makes one binary of, and what must be known of a compiler to make many of them at
once.

A launch needs a binary for its arguments' types, for what is known of their values (a pointer's alignment, a constant)
and for the launch's options. Compiled at their first launch, one after the other, the binaries of a start take minutes;
known ahead they are compiled side by side.

Knows nothing of models, and imports no compiler: `kernels.compiler` has Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """One binary to be, as it travels to the process that compiles it."""

    module: str
    function: str
    arch: int
    """Of the device: 10 times the major compute capability plus the minor one."""
    data: str
    """All the rest: the compiler's own words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What kernels, and the choice among them, depend on of a device."""

    capability: tuple[int, int]
    """Compute capability: (9, 0) is Hopper."""
    num_multiprocessors: int


class KernelCompiler(Protocol):
    """A module that compiles a backend's kernels."""

    def use_machine(self, machine: Machine) -> None:
        """From now on this process compiles for `machine`, which it need not have: for processes that launch
        nothing."""
        ...

    def variants_of(self, work: Callable[[], None]) -> list[Variant]:
        """What `work` launches, each variant once, in the order of their first launches.

        work: on tensors of the device type "meta", which have no memory. Nothing is launched; what other threads launch
        meanwhile is."""
        ...

    def missing(self, variants: Sequence[Variant]) -> list[Variant]:
        """Those that are not in the compiler's cache."""
        ...

    def compile_variant(self, variant: Variant) -> None:
        """Put it into the compiler's cache. Needs no device. Raises what the compiler raises."""
        ...

    def cache_directory(self) -> str: ...

    def has_note(self, name: str) -> bool:
        """Whether `put_note` has left a note of this name in the cache, under this version of the compiler."""
        ...

    def put_note(self, name: str) -> None: ...
