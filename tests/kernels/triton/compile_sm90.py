"""Compile every specimen for Hopper (sm_90), which needs no GPU, and say what each one takes of the machine.

    python -m tests.kernels.triton.compile_sm90 [words of the specimens' names]

Prints a line a specimen. Exits with 1 if one does not compile, keeps more in local memory (spilled registers, a stack)
than its specimen allows, or lacks an instruction that it names. Triton's own cache makes a second run fast. Must not
run with TRITON_INTERPRET set: an interpreted kernel has no source to compile.
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

from tests.kernels.triton.specimen import Specimen

DIRECTORY = Path(__file__).parent
NUM_PROCESSES = 2


def all_specimens(words: list[str]) -> Iterator[Specimen]:
    """Those whose name holds one of the words; without words, all."""
    for path in sorted(DIRECTORY.glob("specimens_*.py")):
        for specimen in importlib.import_module(f"tests.kernels.triton.{path.stem}").SPECIMENS:
            if not words or any(word in specimen.name for word in words):
                yield specimen


def source_of(specimen: Specimen) -> ASTSource:
    names = list(specimen.kernel.arg_names)
    constexprs = {
        param.name: param.default for param in specimen.kernel.params if param.is_constexpr and param.has_default
    }
    constexprs |= ({"PDL": True} if "PDL" in names else {}) | dict(specimen.constexprs)
    if strange := (specimen.signature.keys() | constexprs.keys()) ^ set(names):
        raise ValueError(
            f"{specimen.name}: arguments that are missing or that the kernel does not have: {sorted(strange)}"
        )
    is_aligned = {
        name: kind.startswith("*") or name in specimen.multiples_of_16 for name, kind in specimen.signature.items()
    }
    source = GluonASTSource if specimen.kernel.is_gluon() else ASTSource
    return source(
        specimen.kernel,
        signature={name: specimen.signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name, aligned in is_aligned.items() if aligned},
    )


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED and LOCAL of the one kernel in a cubin. What spills lies on the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}


def compile_one(specimen: Specimen) -> tuple[str, list[str]]:
    """(one line about it, what is wrong with it)."""
    began = time.perf_counter()
    source = source_of(specimen)
    options = {
        "num_warps": specimen.num_warps,
        "num_stages": specimen.num_stages,
        "launch_pdl": "PDL" in specimen.kernel.arg_names,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    used = resources(compiled.asm["cubin"])
    # Static shared memory is 0 in Triton's kernels: what they take is given at the launch.
    line = f"{used['REG']:4} registers {compiled.metadata.shared / 1024:6.1f} KB shared {time.perf_counter() - began:6.1f} s  {specimen.name}"
    wrong = [
        f"{used[kind]} bytes of local memory a thread ({kind.lower()})"
        for kind in ("STACK", "LOCAL")
        if used[kind] > specimen.stack_bytes
    ]
    wrong += [f"no {text} in its PTX" for text in specimen.instructions if text not in compiled.asm["ptx"]]
    return line, wrong


def compile_named(name: str) -> tuple[str, list[str]]:
    """`compile_one` for a worker process, to which kernels can't be sent."""
    (specimen,) = (specimen for specimen in all_specimens([]) if specimen.name == name)
    try:
        return compile_one(specimen)
    except (
        Exception
    ) as error:  # whatever a compiler raises belongs to this specimen's line, and the others still get theirs
        return f"{'':38} {name}", [f"{type(error).__name__}: {error}"]


def main(words: list[str]) -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise SystemExit("TRITON_INTERPRET is set: kernels are interpreted and can't be compiled")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as in versions of Triton that don't ask, and warn, yet
    names = [specimen.name for specimen in all_specimens(words)]
    if len(names) != len(set(names)):
        raise SystemExit(f"two specimens have one name: {sorted(name for name in set(names) if names.count(name) > 1)}")
    num_wrong = 0
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=get_context("spawn")) as pool:
        for line, wrong in pool.map(compile_named, names):
            num_wrong += bool(wrong)
            print(line, *(f"      WRONG: {what}" for what in wrong), sep="\n", flush=True)
    print(f"{len(names)} specimens, {num_wrong} wrong")
    return int(num_wrong > 0 or not names)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
