"""Variants compiled in parallel, with a compiler that writes files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from agentspec.kernels import Machine, Variant
from agentspec.kernels.compile_pool import compile_all, num_processes


class Files:
    """A variants.KernelCompiler whose cache is a directory. It fails for the function "bad"."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def compile_variant(self, variant: Variant) -> None:
        if variant.function == "bad":
            raise ValueError("no such layout")
        (self._directory / variant.data).write_text(str(os.getpid()))

    def missing(self, variants: Sequence[Variant]) -> list[Variant]:
        return [variant for variant in variants if not (self._directory / variant.data).exists()]

    def use_machine(self, machine: Machine) -> None:
        raise NotImplementedError

    def variants_of(self, work: Callable[[], None]) -> list[Variant]:
        raise NotImplementedError

    def read_sources(self) -> None:
        """There are none."""

    def cache_directory(self) -> str:
        return str(self._directory)

    def has_note(self, name: str) -> bool:
        return False

    def put_note(self, name: str) -> None:
        raise NotImplementedError


def test_variants_compile_in_child_processes_and_failures_are_reported(tmp_path: Path) -> None:
    compiler = Files(tmp_path)
    names = ["good", "bad", *["good"] * 5]
    variants = [Variant(module="m", function=name, arch=90, data=str(number)) for number, name in enumerate(names)]
    told = list(compile_all(variants, compiler))
    assert sorted(filter(None, told)) == ["bad: ValueError: no such layout"]
    assert len(told) == len(variants)
    assert compiler.missing(variants) == [variants[1]]
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}


def test_num_processes_is_bounded_by_variants_and_cores() -> None:
    assert num_processes(1) == 1
    assert 1 <= num_processes(1000) <= len(os.sched_getaffinity(0))
