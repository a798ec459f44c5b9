"""Triton's compiler as a variants.KernelCompiler: which variants a start launches, which of them are in Triton's
cache, and how to add one.

Triton's cache is a directory of the user's (TRITON_CACHE_DIR, else ~/.triton/cache). A binary's key is a hash of the
sources of Triton and of the kernel, its variant and its target: a change of any of them is a cache miss, never a stale
hit.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key
from triton.runtime.jit import get_cache_invalidating_env_vars

from agentspec.kernels.triton.machine import WARP_SIZE, use_machine
from agentspec.kernels.variants import Variant

__all__ = [
    "cache_directory",
    "compile_variant",
    "has_note",
    "missing",
    "put_note",
    "read_sources",
    "use_machine",
    "variants_of",
]

_NOTE = "agentspec.txt"
_BUILDS_LAUNCHERS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
"""Older versions compile a launcher in C for each signature, which takes about as long as the kernel."""


def variants_of(work: Callable[[], None]) -> list[Variant]:
    found: dict[Variant, None] = {}
    arch = int(driver.active.get_current_target().arch)
    thread = threading.get_ident()

    def take(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """Record the variant. Returns True: neither compile nor launch it."""
        if threading.get_ident() != thread:
            return False
        found[Variant(module=fn.module, function=fn.name, arch=arch, data=compile["specialization_data"])] = None
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = take
    try:
        with torch.inference_mode():
            work()
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found)


def missing(variants: Sequence[Variant]) -> list[Variant]:
    env_vars = get_cache_invalidating_env_vars()
    return [variant for variant in variants if not _is_cached(variant, env_vars)]


def compile_variant(variant: Variant) -> None:
    source, target, options = _source(variant)
    compiled = triton.compile(source, target=target, options=options)
    if _builds_launchers():
        nvidia.CudaLauncher(compiled.src, compiled.metadata)
        put_note(_launcher_of(variant))


def read_sources() -> None:
    triton_key()  # Triton keeps the result


def cache_directory() -> str:
    return str(knobs.cache.dir)


def has_note(name: str) -> bool:
    return _notes(name).get_file(_NOTE) is not None


def put_note(name: str) -> None:
    _notes(name).put(name, _NOTE, binary=False)


def _notes(name: str) -> Any:
    """The cache entry of a note. Its key has the parts of a binary's key, except Triton's own sources, which take long
    to read."""
    key = (
        name,
        triton.__version__,
        torch.__version__,
        sys.version,
        _builds_launchers(),
        sorted(get_cache_invalidating_env_vars().items()),
    )
    return get_cache_manager(hashlib.sha256(repr(key).encode("utf-8")).hexdigest())


def _is_cached(variant: Variant, env_vars: dict[str, str]) -> bool:
    """Whether triton.compile would find the variant, and its launcher where launchers are built."""
    if _builds_launchers() and not has_note(_launcher_of(variant)):
        return False
    source, target, options = _source(variant)
    backend = make_backend(target)
    key = get_cache_key(
        source, backend, backend.parse_options(dict(options, **source.parse_options())), env_vars=env_vars
    )
    group = get_cache_manager(hashlib.sha256(key.encode("utf-8")).hexdigest()).get_group(f"{source.name[:150]}.json")
    return bool(group)


def _source(variant: Variant) -> tuple[Any, GPUTarget, dict[str, Any]]:
    """Return (source, target, options), the arguments of triton.compile. Reads data as JITFunction.preload does."""
    function = vars(sys.modules[variant.module])[variant.function]
    data = json.loads(variant.data)
    constants = {
        tuple(path): _constant(value) for path, value in zip(data["constant_keys"], data["constant_vals"], strict=True)
    }
    attributes = {tuple(path): value for path, value in zip(data["attrs_keys"], data["attrs_vals"], strict=True)}
    options = {name: _tuples(value) for name, value in data["options"].items()}
    signature = {name: _tuples(value) for name, value in data["signature"].items()}
    source = (GluonASTSource if function.is_gluon() else ASTSource)(function, signature, constants, attributes)
    return source, GPUTarget("cuda", variant.arch, WARP_SIZE), options


def _constant(value: Any) -> Any:
    if triton.language.dtype.is_dtype(value):
        return triton.language.dtype(value)
    if isinstance(value, dict):
        return triton.language.constexpr(_tuples(value["constexpr"]))
    return _tuples(value)


def _tuples(value: Any) -> Any:
    """Convert lists, JSON's only sequence, to Triton's tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@functools.cache
def _builds_launchers() -> bool:
    """Whether launchers are built ahead. A launcher is linked with the driver's library, which machines without a GPU
    lack; there the first start with a GPU builds it."""
    try:
        return _BUILDS_LAUNCHERS and bool(nvidia.libcuda_dirs())
    except AssertionError:
        return False


def _launcher_of(variant: Variant) -> str:
    """Name of the note that says that a variant's launcher is in the cache."""
    return f"launcher {variant.module} {variant.function} {variant.arch} {variant.data}"
