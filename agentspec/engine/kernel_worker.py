"""The process that lists and compiles an engine's kernels: `python -m agentspec.engine.kernel_worker`, started by
runtime/kernels_ahead.py.

Reads a KernelJob from standard input, and writes lines of JSON to standard output: stages, and a report at the end.
Uses no device, so that it can fork. Kernels that an optional package builds at first use belong here too, as a further
stage.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

from agentspec import kernels
from agentspec.engine.assembly import rehearsal
from agentspec.kernels.compile_pool import compile_all
from agentspec.runtime.kernels_ahead import KernelJob, KernelReport, Stage

LISTING = "listing kernels"
COMPILING = "compiling kernels"


_DYNAMO = "torch._dynamo"


class _Dynamo(ModuleType):
    """Stands for torch's compiler. The first operator on tensors without memory imports it, 1 to 7 s, only to mark
    functions as not for it; here nothing is for it. Whoever wants anything else gets the real one."""

    @staticmethod
    def disable(function: Callable[..., Any], _recursive: bool = True, **_: object) -> Callable[..., Any]:
        return function

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_DYNAMO) is self:
            del sys.modules[_DYNAMO], torch._dynamo
        from torch import _dynamo

        return getattr(_dynamo, name)


def stand_in_for_dynamo() -> None:
    if _DYNAMO not in sys.modules:
        torch._dynamo = sys.modules[_DYNAMO] = _Dynamo(_DYNAMO)


def run(job: KernelJob, tell: Callable[[Stage | KernelReport], object]) -> None:
    tell(Stage(LISTING, 0, 0))
    compiler = kernels.compiler()
    compiler.use_machine(job.machine)
    # Only the last rank's heads may have fewer rows than the others', which is another variant of their kernels.
    found: dict[kernels.Variant, None] = {}
    for rank in sorted({0, job.config.tensor_parallel - 1}):
        part = rehearsal(job.config, Path(job.model_dir), max_pages=job.max_pages, index=rank)
        found |= dict.fromkeys(part.variants(compiler))
    variants = list(found)
    missing, failures = compiler.missing(variants), []
    if missing:
        tell(Stage(COMPILING, 0, len(missing)))
        for num_done, failure in enumerate(compile_all(missing, compiler), 1):
            if failure is not None:
                failures.append(failure)
            tell(Stage(COMPILING, num_done, len(missing)))
    if not failures:
        compiler.put_note(job.note())
    tell(KernelReport(num_kernels=len(variants), num_compiled=len(missing), failures=tuple(failures)))


def main() -> None:
    # Compiler output must not mix with the lines.
    lines = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)  # nothing is computed, and a fork doesn't copy threads
    stand_in_for_dynamo()
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=KernelJob)
    run(job, lambda line: os.write(lines, msgspec.json.encode(line) + b"\n"))


if __name__ == "__main__":
    main()
