"""Compile every compile case for its targets, which needs no GPU, and report the resources that each one uses.

    python -m tests.kernels.triton.compile_kernels [--target 80 ...] [--every-case] [words of the cases' names]

Prints one line per case and target. Exits with 1 if a case does not compile, or needs more shared memory than the
target has. For Hopper, which the kernels are tuned for, also if a case uses more local memory (spilled registers,
stack) than it allows, or lacks a required instruction. Triton's cache makes a second run fast. Must not run with
TRITON_INTERPRET set: an interpreted kernel has no source to compile.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.triton.compile_case import EVERYWHERE, HOPPER, CompileCase, shared_bytes

DIRECTORY = Path(__file__).parent
NUM_PROCESSES = 2


def all_cases() -> Iterator[CompileCase]:
    for path in sorted(DIRECTORY.glob("compile_cases_*.py")):
        yield from importlib.import_module(f"tests.kernels.triton.{path.stem}").CASES


def source_of(case: CompileCase, target: int = HOPPER) -> ASTSource:
    names = list(case.kernel.arg_names)
    constexprs = {param.name: param.default for param in case.kernel.params if param.is_constexpr and param.has_default}
    constexprs |= ({"PDL": launches_early(target)} if "PDL" in names else {}) | dict(case.constexprs)
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


def launches_early(target: int) -> bool:
    """Whether kernels are launched before the previous one has ended."""
    return target >= HOPPER


def compile_one(case: CompileCase, target: int) -> tuple[str, list[str]]:
    """Compile a case. Return (its line of output, its failures)."""
    began = time.perf_counter()
    source = source_of(case, target)
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "launch_pdl": "PDL" in case.kernel.arg_names and launches_early(target),
        "maxnreg": case.max_registers,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    used = resources(compiled.asm["cubin"])
    # Static shared memory is 0 in Triton's kernels: it is dynamic, and given at the launch.
    shared, seconds = compiled.metadata.shared, time.perf_counter() - began
    line = f"sm_{target:<4}{used['REG']:4} registers {shared / 1024:6.1f} KB shared {seconds:6.1f} s  {case.name}"
    most = shared_bytes(target)
    wrong = [f"more shared memory than the {most / 1024:g} KB of a program"] if shared > most else []
    if target == HOPPER:
        wrong += [
            f"{used[kind]} bytes of local memory a thread ({kind.lower()})"
            for kind in ("STACK", "LOCAL")
            if used[kind] > case.stack_bytes
        ]
        wrong += [f"no {text} in its PTX" for text in case.instructions if text not in compiled.asm["ptx"]]
    return line, wrong


def compile_named(name: str, target: int) -> tuple[str, list[str]]:
    """`compile_one` by name, for a worker process: kernels cannot be pickled."""
    named = [case for case in all_cases() if case.name == name]
    case = next((case for case in named if target in case.targets), named[0])
    try:
        return compile_one(case, target)
    except Exception as error:  # any compiler error fails only this case
        return f"sm_{target:<4}{'':38} {name}", [f"{type(error).__name__}: {error}"]


def chosen(targets: Sequence[int], words: Sequence[str], *, every_case: bool) -> list[tuple[str, int]]:
    """Return (name, target) of the cases to compile. every_case: for all targets that the kernel is for, not only for
    the case's own."""

    def is_chosen(case: CompileCase, target: int) -> bool:
        is_for = target in case.targets or (every_case and not case.kernel.__module__.endswith("_hopper"))
        return is_for and (not words or any(word in case.name for word in words))

    found = [(case.name, target) for target in targets for case in all_cases() if is_chosen(case, target)]
    return list(dict.fromkeys(found)) if every_case else found


def main(arguments: Sequence[str]) -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET is set: kernels are interpreted and can't be compiled")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as in versions of Triton that do not warn about it yet
    parser = argparse.ArgumentParser(description="Compile the compile cases.")
    parser.add_argument("words", nargs="*", help="compile only cases whose names contain one of them")
    parser.add_argument("--target", type=int, action="append", help="only for this architecture; may be repeated")
    parser.add_argument("--every-case", action="store_true", help="for all targets, not only for the case's own")
    args = parser.parse_args(arguments)
    cases = chosen(args.target or EVERYWHERE, args.words, every_case=args.every_case)
    if repeated := sorted({case for case in cases if cases.count(case) > 1}):
        raise SystemExit(f"two compile cases have one name and target: {repeated}")
    num_wrong = 0
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        for line, wrong in pool.map(compile_named, *zip(*cases, strict=True)) if cases else ():
            num_wrong += bool(wrong)
            print(line, *(f"      WRONG: {what}" for what in wrong), sep="\n", flush=True)
    print(f"{len(cases)} compile cases, {num_wrong} wrong")
    return int(num_wrong > 0 or not cases)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
