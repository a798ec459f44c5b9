"""What Gluon's kernels call of Triton by names that differ between its versions, and of launch.py.

Each has the name and the arguments of Triton 3.9.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from agentspec.kernels.triton import launch

_descriptor = gl.shared_memory_descriptor
copy_block = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""From memory to shared memory, by TMA."""
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""From shared memory to memory, by TMA."""
copy_values = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
"""From memory to shared memory, by threads."""
reinterpret = _descriptor.reinterpret if hasattr(_descriptor, "reinterpret") else _descriptor._reinterpret
"""Shared memory as of another shape or type."""
warp_barrier = tl.debug_barrier
"""Of the warps of a program, or in a warp-specialized one of a group's."""
release_next = gluon.jit(launch.release_next.fn)
await_previous = gluon.jit(launch.await_previous.fn)
