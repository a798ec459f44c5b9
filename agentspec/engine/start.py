"""Entry of the engine's process: `python -m agentspec.engine.start FD [OPTIONS]`, started by engine/remote.py. Makes
the process's imports short, then runs engine/process.py.

A third of the time of `import torch` goes into Python implementations of operators for tensors without memory, which
no engine computes with; they are imported when something needs them. The garbage collector pauses meanwhile, since
imports leave little garbage and very many objects. With OPEN_DEVICE a thread opens the GPU beside the imports.

FD is one end of a socket pair. Imports neither torch nor the rest of the engine itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OPEN_DEVICE = "--open-device"
"""Argument: open the first GPU, if there is one, while the imports run."""
ALL_IMPORTS = "--all-imports"
"""Argument of a process that imports everything that torch asks for."""

DEFERRED = ("torch._meta_registrations", "torch.distributed._meta_registrations")
"""Modules that `import torch` loads only for their side effects: operators on the device type "meta"."""


class _Deferred(ModuleType):
    """Stands for a module during the import of torch."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)


def main() -> int:
    """Run the engine's process; returns its exit status."""
    if OPEN_DEVICE in sys.argv:
        threading.Thread(target=open_device, name="agentspec-device", daemon=True).start()
    gc.disable()
    if ALL_IMPORTS in sys.argv:
        process = import_module("agentspec.engine.process")
    else:
        try:
            process = import_with_deferred("agentspec.engine.process")
        except Exception:  # a version of torch that needs them at once: begin again, before anything was read
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], ALL_IMPORTS])
    gc.freeze()  # what was imported stays: no collection has to look at it
    gc.enable()
    return int(process.run())


def import_with_deferred(name: str) -> Any:
    """Import a module that imports torch, without DEFERRED; these are imported for whoever imports them afterwards.

    May raise anything where a version of torch needs more of them; then this process can't import torch any more."""
    stand_ins = {} if "torch" in sys.modules else {module: _Deferred(module) for module in DEFERRED}
    sys.modules.update(stand_ins)
    try:
        return import_module(name)
    finally:
        for module, stand_in in stand_ins.items():
            if sys.modules.get(module) is stand_in:
                del sys.modules[module]
            parent, _, last = module.rpartition(".")
            if vars(sys.modules.get(parent, stand_in)).get(last) is stand_in:
                delattr(sys.modules[parent], last)


def open_device() -> None:
    """Open the first GPU and keep it open: torch finds the driver initialised and the GPU's context there. No effect
    without a driver or a GPU; whoever uses the GPU next gets the error."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before it opens a GPU
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # Calls through ctypes don't hold Python's lock. Each returns 0 for success.
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


if __name__ == "__main__":
    sys.exit(main())
