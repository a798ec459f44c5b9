"""`agentspec warm` and its list of kernels, with Triton's compiler for a GPU that this machine doesn't have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agentspec.commands import cli

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU to compile for")

LISTED = """
import json, sys
from agentspec.engine import bundled
from agentspec import kernels
from agentspec.engine.assembly import rehearsal
from agentspec.config import EngineConfig
compiler = kernels.compiler()
compiler.use_machine(kernels.Machine(capability=(9, 0), num_multiprocessors=132))
variants = rehearsal(EngineConfig(max_running=2, draft_tokens=1), bundled.DIRECTORY).variants(compiler)
before = compiler.missing(variants[:: int(sys.argv[1])])
small = next(variant for variant in variants if variant.function == "_publish_drafts")
compiler.compile_variant(small)
after = compiler.missing(variants[:: int(sys.argv[1])])
compiler.put_note("all of them")
print(json.dumps({
    "listed": len(variants), "distinct": len(set(variants)), "before": len(before),
    "compiled": [v.function for v in before if v not in after],
    "functions": sorted({v.function for v in variants}),
    "notes": [compiler.has_note("all of them"), compiler.has_note("others")],
}))
"""

ROWS_LISTED = """
from agentspec.engine import bundled
from agentspec import kernels
from agentspec.engine.assembly import rehearsal
from agentspec.config import EngineConfig
compiler = kernels.compiler()
compiler.use_machine(kernels.Machine(capability=(9, 0), num_multiprocessors=132))
config = EngineConfig(max_running=2, draft_tokens=1, state_form="rows")
print(*{variant.function for variant in rehearsal(config, bundled.DIRECTORY).variants(compiler)})
"""

RANKS_LISTED = """
from agentspec.engine import bundled
from agentspec import kernels
from agentspec.engine.assembly import rehearsal
from agentspec.config import EngineConfig
compiler = kernels.compiler()
compiler.use_machine(kernels.Machine(capability=(9, 0), num_multiprocessors=132))
config = EngineConfig(max_running=2, draft_tokens=1, draft_vocab_size=700, tensor_parallel=2)
for rank in range(2):
    listed = rehearsal(config, bundled.DIRECTORY, index=rank).variants(compiler)
    print(*sorted({v.function for v in listed if ".exchange" in v.module}))
"""


@NO_GPU
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "this machine has no GPU; --target 9.0 compiles for one"),
        (["tiny-agent", "--device", "cpu"], "the CPU needs no kernels"),
    ],
)
def test_without_a_gpu_there_is_nothing_to_compile(
    flags: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["warm", *flags]) == 0
    assert capsys.readouterr() == (f"agentspec: nothing to compile: {reason}\n", "")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--target", "h100"], "target='h100': must be a compute capability, such as 9.0 for an H100"),
        (["--target", "9.0", "--device", "cpu"], "target='9.0': is a GPU, and --device says cpu"),
        (["a", "--model", "b"], "model='b': and 'a' are two models"),
        (["./nowhere", "--target", "9.0"], "model='./nowhere': no such directory"),
        (
            ["--target", "9.0", "--max-context", "99999999"],
            "max_context=99999999: tiny-agent has a context of 16384 tokens",
        ),
    ],
)
def test_invalid_settings_are_refused(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warm", *flags]) == 2
    assert complaint in capsys.readouterr().err


def test_triton_finds_every_kernel_that_a_rehearsal_lists(tmp_path: Path) -> None:
    """Two processes in different orders: the second one finds what the first one compiled."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
        "TRITON_CACHE_DIR": str(tmp_path)
    }
    forwards, backwards = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", LISTED, step], env=environment, capture_output=True, text=True, check=True
            ).stdout
        )
        for step in ("1", "-1")
    )
    assert forwards["listed"] == forwards["distinct"] == forwards["before"] == backwards["listed"]
    assert backwards["before"] == forwards["listed"] - 1, "the second process finds what the first one compiled"
    assert (forwards["compiled"], backwards["compiled"]) == (["_publish_drafts"], [])
    functions = set(forwards["functions"])
    assert {"_gated_delta_ring_step", "_fold_hidden", "_attend", "convolve_blocks", "linear_kernel"} <= functions
    assert {"_draw", "_open_window", "_commit_window"} <= functions
    assert "_gated_delta_step" not in functions
    assert forwards["notes"] == [True, False]


def test_rehearsal_with_rows_lists_their_kernels() -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", ROWS_LISTED]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert {"_gated_delta_step", "_open_window", "_commit_window"} <= set(listed)
    assert not {"_gated_delta_ring_step", "_fold_hidden"} & set(listed)


def test_exchanges_of_ranks_are_listed() -> None:
    """Also the one that shows the rows of a draft vocabulary."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", RANKS_LISTED]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert listed.splitlines() == ["_gather _paired _winners one_shot_kernel"] * 2
