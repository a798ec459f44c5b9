"""Compiles kernel variants in parallel, in child processes.

The calling process must not have used a device and must run one thread: it forks, so that the children share what it
has loaded. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from agentspec import kernels
from agentspec.kernels.variants import KernelCompiler, Variant

BYTES_A_PROCESS = 2**30
"""Upper bound of the memory that one compilation takes."""

_PR_SET_PDEATHSIG = 1


def compile_all(variants: Sequence[Variant], compiler: KernelCompiler | None = None) -> Iterator[str | None]:
    """Compile all variants into the compiler's cache, in about this order. Yields once per variant, in the order of
    completion: an error message, or None.

    compiler: defaults to `kernels.compiler()`."""
    compiler = kernels.compiler() if compiler is None else compiler
    compiler.read_sources()  # once here, instead of in each child
    with ProcessPoolExecutor(
        num_processes(len(variants)), mp_context=get_context("fork"), initializer=_die_with_parent
    ) as pool:
        futures = [pool.submit(_compile, compiler.compile_variant, variant) for variant in variants]
        for future in as_completed(futures):
            yield future.result()


def num_processes(num_variants: int) -> int:
    """Number of processes: limited by cores and by free memory."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(num_variants, len(os.sched_getaffinity(0)), available // BYTES_A_PROCESS))


def _compile(compile_variant: Callable[[Variant], None], variant: Variant) -> str | None:
    try:
        compile_variant(variant)
    except Exception as error:  # any compiler error fails only this variant
        return f"{variant.function}: {type(error).__name__}: {error}"
    return None


def _die_with_parent() -> None:
    """Kill this child when its parent dies: a child of a killed pool would wait for work forever."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
