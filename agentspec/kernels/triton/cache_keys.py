"""Makes Triton's cache keys the same in every process.

Up to Triton 3.6 a kernel's key depends on which of the functions that it calls already had their keys computed:
constants of the others are left out. Processes that launch in different orders would not find each other's binaries,
and would miss a changed constant. So all keys are computed at once, in one order, before anything is launched.
"""

from __future__ import annotations

import sys

from triton.runtime.jit import JITFunction


def compute_keys(package: str) -> None:
    """Compute the key of every function in the loaded modules of `package`."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(package + ".")]
    for module in modules:
        for function in list(vars(module).values()):
            if isinstance(function, JITFunction):
                _ = function.cache_key
