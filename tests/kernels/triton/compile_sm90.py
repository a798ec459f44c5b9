"""Compile every compile case for Hopper (sm_90), which needs no GPU, and report the resources that each one uses.

    python -m tests.kernels.triton.compile_sm90 [words of the cases' names]

Prints one line per case. Exits with 1 if a case does not compile, uses more local memory (spilled registers, stack)
than it allows, or lacks a required instruction. Triton's cache makes a second run fast. Must not run with
TRITON_INTERPRET set: an interpreted kernel has no source to compile.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.triton.compile_case import CompileCase

DIRECTORY = Path(__file__).parent
NUM_PROCESSES = 2


def all_cases(words: list[str]) -> Iterator[CompileCase]:
    """Yield the cases whose names contain one of the words; without words, all."""
    for path in sorted(DIRECTORY.glob("compile_cases_*.py")):
        for case in importlib.import_module(f"tests.kernels.triton.{path.stem}").CASES:
            if not words or any(word in case.name for word in words):
                yield case


def source_of(case: CompileCase) -> ASTSource:
    names = list(case.kernel.arg_names)
    constexprs = {param.name: param.default for param in case.kernel.params if param.is_constexpr and param.has_default}
    constexprs |= ({"PDL": True} if "PDL" in names else {}) | dict(case.constexprs)
    if strange := (case.signature.keys() | constexprs.keys()) ^ set(names):
        raise ValueError(f"{case.name}: arguments that are missing or that the kernel does not have: {sorted(strange)}")
    is_aligned = {name: kind.startswith("*") or name in case.multiples_of_16 for name, kind in case.signature.items()}
    source = GluonASTSource if case.kernel.is_gluon() else ASTSource
    return source(
        case.kernel,
        signature={name: case.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, aligned in is_aligned.items() if aligned},
    )


def resources(cubin: bytes) -> dict[str, int]:
    """Return REG, STACK, SHARED and LOCAL of the one kernel in a cubin. Spills are on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}


def compile_one(case: CompileCase) -> tuple[str, list[str]]:
    """Compile a case. Return (its line of output, its failures)."""
    began = time.perf_counter()
    source = source_of(case)
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "launch_pdl": "PDL" in case.kernel.arg_names,
        "maxnreg": case.max_registers,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    used = resources(compiled.asm["cubin"])
    # Static shared memory is 0 in Triton's kernels: it is dynamic, and given at the launch.
    shared, seconds = compiled.metadata.shared / 1024, time.perf_counter() - began
    line = f"{used['REG']:4} registers {shared:6.1f} KB shared {seconds:6.1f} s  {case.name}"
    wrong = [
        f"{used[kind]} bytes of local memory a thread ({kind.lower()})"
        for kind in ("STACK", "LOCAL")
        if used[kind] > case.stack_bytes
    ]
    wrong += [f"no {text} in its PTX" for text in case.instructions if text not in compiled.asm["ptx"]]
    return line, wrong


def compile_named(name: str) -> tuple[str, list[str]]:
    """`compile_one` by name, for a worker process: kernels cannot be pickled."""
    (case,) = (case for case in all_cases([]) if case.name == name)
    try:
        return compile_one(case)
    except Exception as error:  # any compiler error fails only this case
        return f"{'':38} {name}", [f"{type(error).__name__}: {error}"]


def main(words: list[str]) -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET is set: kernels are interpreted and can't be compiled")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as in versions of Triton that do not warn about it yet
    names = [case.name for case in all_cases(words)]
    if len(names) != len(set(names)):
        raise SystemExit(
            f"two compile cases have one name: {sorted(name for name in set(names) if names.count(name) > 1)}"
        )
    num_wrong = 0
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        for line, wrong in pool.map(compile_named, names):
            num_wrong += bool(wrong)
            print(line, *(f"      WRONG: {what}" for what in wrong), sep="\n", flush=True)
    print(f"{len(names)} compile cases, {num_wrong} wrong")
    return int(num_wrong > 0 or not names)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
