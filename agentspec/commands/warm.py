"""`agentspec warm`: compile the kernels that `agentspec serve` with the same flags would compile at its start, without
weights and without serving.

For container images: the compiled kernels stay in the compiler's cache for the image's servers. With `--target` no GPU
is needed.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace

import torch

from agentspec import kernels
from agentspec.commands.start_progress import TICK_SECONDS, ProgressLines, StartProgress
from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.assembly import machine_of, rehearsal
from agentspec.errors import AgentspecError, ConfigError
from agentspec.models.weights import resolve_checkpoint
from agentspec.runtime.kernels_ahead import KernelJob, KernelsAhead

MULTIPROCESSORS = 132
"""Number of multiprocessors assumed for `--target`: that of a full H100 or H200. Few kernels depend on it, and on other
GPUs these are compiled again at their first launch."""


def run(config: EngineConfig, target: str | None) -> int:
    """Compile and print a summary; return the exit code.

    Raises ConfigError for an invalid target, AgentspecError when a kernel doesn't compile."""
    machine = _machine(config, target)
    if machine is None:
        reason = (
            "the CPU needs no kernels"
            if config.device == "cpu"
            else "this machine has no GPU; --target 9.0 compiles for one"
        )
        print(f"agentspec: nothing to compile: {reason}")
        return 0
    model_dir = resolve_checkpoint(bundled.checkpoint_of(config.model), weights=False)
    if not any(model_dir.glob("*.safetensors")):
        config = replace(config, random_weights=True)
    rehearsal(config, model_dir)  # raises for invalid settings before the compiler's processes start
    began = time.perf_counter()
    progress = StartProgress()
    lines = ProgressLines(progress, sys.stderr)
    job = KernelJob(config=config, model_dir=str(model_dir), machine=machine)
    with KernelsAhead(job, progress, believe_note=False) as ahead:
        while not ahead.wait(TICK_SECONDS):
            lines.tick()
    lines.clear()
    report = ahead.report
    if report is None or report.failures:
        raise AgentspecError(
            "the kernels could not be compiled"
            if report is None
            else f"{len(report.failures)} of {report.num_kernels} kernels failed"
        )
    found, seconds = report.num_kernels - report.num_compiled, time.perf_counter() - began
    capability = ".".join(map(str, machine.capability))
    print(
        f"agentspec: {model_dir.resolve().name} on GPUs of compute capability {capability}: "
        f"{report.num_kernels} kernels, {found} found and {report.num_compiled} compiled in {seconds:.1f} s, "
        f"in {kernels.compiler().cache_directory()}"
    )
    return 0


def _machine(config: EngineConfig, target: str | None) -> kernels.Machine | None:
    """The GPU to compile for; None: there is none."""
    if config.device == "cpu":
        if target is not None:
            raise ConfigError("target", target, "is a GPU, and --device says cpu")
        return None
    if target is not None:
        if not re.fullmatch(r"\d+\.\d", target):
            raise ConfigError("target", target, "must be a compute capability, such as 9.0 for an H100")
        major, minor = map(int, target.split("."))
        return kernels.Machine(capability=(major, minor), num_multiprocessors=MULTIPROCESSORS)
    if not torch.cuda.is_available():
        if config.device == "cuda":
            raise ConfigError("device", "cuda", "no CUDA device is available")
        return None
    return machine_of(torch.device("cuda"))
