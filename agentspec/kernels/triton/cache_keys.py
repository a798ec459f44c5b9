"""The same keys in Triton's cache in every process.

Up to Triton 3.6 a kernel's key depends on which keys of the functions that it calls had been asked for before its own:
the constants of those that had not are left out. Processes that launch in different orders would not find each other's
binaries, nor notice a changed constant. So all keys are asked for at once, in one order, before anything is launched.
"""

from __future__ import annotations

import sys

from triton.runtime.jit import JITFunction


def settle_keys(package: str) -> None:
    """Ask for the key of every function in the modules of `package` that are loaded."""
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith(package + ".")]
    for module in modules:
        for function in list(vars(module).values()):
            if isinstance(function, JITFunction):
                _ = function.cache_key
