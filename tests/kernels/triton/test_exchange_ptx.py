"""What the exchange kernels compile to for Hopper. The order of memory between GPUs rests on a few instructions, which
the interpreter can't check and which Triton changes between releases. Needs no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KINDS = ("paired", "two_shot", "gather", "winners")
"""Of exchanges with flags."""
RELEASE = re.compile(r"atom\.global\.sys\.release\.exch\.b64")
ACQUIRE = re.compile(r"ld\.global\.sys\.acquire\.b64|atom\.global\.sys\.acquire\.add\.u64")
BARRIER = re.compile(r"bar\.sync|barrier\.sync")
SLOT_READ = re.compile(r"ld\.volatile\.global\.(v\d\.)?b(32|64) \{ %rd?\d+,")
COMPILE = """
import sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from tests.kernels.triton.compile_cases_exchange import CASES
from tests.kernels.triton.compile_kernels import source_of

for case in CASES:
    options = {"num_warps": case.num_warps, "launch_pdl": True}
    compiled = triton.compile(source_of(case), target=GPUTarget("cuda", 90, 32), options=options)
    (Path(sys.argv[1]) / f"{case.name}.ptx").write_text(compiled.asm["ptx"])
"""

RECORD = """
import torch
from agentspec.kernels import Machine, compiler
from agentspec.kernels.peer_memory import ExchangeLayout, PeerMemory
from agentspec.kernels.triton.exchange import ExchangeGroup

def work(group, token_counts):
    def empty(*shape, dtype=torch.float32):
        return torch.empty(*shape, dtype=dtype, device="meta")

    for tokens in token_counts:
        residual_NH = empty(tokens, 2560)
        group.add_partial(residual_NH, torch.empty_like(residual_NH), None)
        columns = min(tokens, 512)
        group.winners(empty(columns, 124_160), group.rank * 124_160, 248_077)
        group.winners(empty(columns, 16_000), empty(16_000, dtype=torch.int64), 248_077)
        group.gather(empty(columns, 124_160), empty(3, dtype=torch.int64), 124_160, 248_320)

kernels, layout = compiler(), ExchangeLayout(ranks=2)
kernels.use_machine(Machine(capability=(9, 0), num_multiprocessors=132))
groups = [ExchangeGroup(memory, layout) for memory in PeerMemory.of_one_process(layout, torch.device("meta"))]
first = kernels.variants_of(lambda: work(groups[0], (1, 33)))
others = kernels.variants_of(lambda: work(groups[1], (1, 2, 3, 4, 16, 17, 32, 33, 64, 1000, 8192)))
assert first == others, (first, others)
assert len(first) == 7, first
"""


def compiling_environment(cache: Path) -> dict[str, str]:
    """For a process of its own: with an interpreter, kernels have no source."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Lines of PTX by compile case."""
    directory = tmp_path_factory.mktemp("ptx")
    environment = compiling_environment(directory / "cache")
    subprocess.run([sys.executable, "-c", COMPILE, str(directory)], env=environment, check=True, timeout=100)
    return {path.stem: path.read_text().splitlines() for path in directory.glob("*.ptx")}


def matching(lines: list[str], pattern: re.Pattern[str]) -> list[int]:
    return [number for number, line in enumerate(lines) if pattern.search(line)]


def exchanges(ptx: dict[str, list[str]]) -> dict[str, list[str]]:
    found = {name: lines for name, lines in ptx.items() if name.split()[0] in KINDS}
    assert {name.split()[0] for name in found} == set(KINDS)
    return found


def test_flags_have_release_and_acquire_order_between_gpus(ptx: dict[str, list[str]]) -> None:
    for name, lines in exchanges(ptx).items():
        phases = 2 if name.startswith("two_shot") else 1
        assert len(matching(lines, RELEASE)) == phases, name
        assert len(matching(lines, ACQUIRE)) >= 2 * phases, f"{name}: flags and the abort word"
        atomics = [line for line in lines if re.search(r"\batom\.|\bred\.", line)]
        assert all(RELEASE.search(line) or ACQUIRE.search(line) for line in atomics), f"{name}: {atomics}"


def test_one_lane_a_peer_releases_and_polls(ptx: dict[str, list[str]]) -> None:
    """With two ranks a poll is a load; with more, all flags are polled by one instruction."""
    for name, lines in exchanges(ptx).items():
        polled_by_atomics = bool(matching(lines, re.compile(r"atom\.global\.sys\.acquire\.add\.u64")))
        assert polled_by_atomics == (" 2 ranks" not in name), name


def test_barriers_stand_before_each_release_and_after_each_acquire(ptx: dict[str, list[str]]) -> None:
    """Between the last store to a peer and the release; and between the acquire and the first read of a slot."""
    for name, lines in exchanges(ptx).items():
        barriers = matching(lines, BARRIER)
        for release in matching(lines, RELEASE):
            stores = [number for number in matching(lines, re.compile(r"\bst\.global\.")) if number < release]
            assert any(stores[-1] < barrier < release for barrier in barriers), f"{name}: stores, then the release"
        reads = [number for number in matching(lines, SLOT_READ) if number > matching(lines, RELEASE)[0]]
        assert reads or name.startswith("winners"), name
        for read in reads[:1]:
            acquires = [number for number in matching(lines, ACQUIRE) if number < read]
            assert any(acquires[-1] < barrier < read for barrier in barriers), f"{name}: the acquire, then reads"


def one_shots(ptx: dict[str, list[str]]) -> dict[str, list[str]]:
    found = {name: lines for name, lines in ptx.items() if name.startswith("one_shot")}
    assert len(found) > 2
    return found


def test_tagged_words_move_as_wholes_of_8_bytes(ptx: dict[str, list[str]]) -> None:
    """Stores at system scope and volatile loads of 64 bits or pairs of them; and no fence or flag beside them."""
    for name, lines in one_shots(ptx).items():
        pushes = matching(lines, re.compile(r"st\.relaxed\.sys\.global\.b64 \["))
        reads = [
            lines[number] for number in matching(lines, re.compile(r"ld\.volatile\.global")) if number > pushes[-1]
        ]
        assert reads, name
        assert all(re.search(r"ld\.volatile\.global\.(v2\.)?b64", line) for line in reads), name
        assert not matching(lines, re.compile(r"\bfence|\bmembar|\.release")), name
        atomics = matching(lines, re.compile(r"\batom\.|\bred\."))
        assert not atomics, f"{name}: the abort word is polled by loads"


def test_nothing_is_pushed_before_the_wait_for_the_previous_kernel(ptx: dict[str, list[str]]) -> None:
    for name, lines in one_shots(ptx).items():
        (wait,) = matching(lines, re.compile(r"griddepcontrol\.wait"))
        assert matching(lines, re.compile(r"\bst\."))[0] > wait, name
        early = [lines[number] for number in matching(lines, re.compile(r"\bld\.")) if number < wait]
        early = [line for line in early if "ld.param" not in line]
        assert all(re.search(r"ld\.global\.(v\d\.)?b64", line) for line in early), f"{name}: addresses and gains"


def test_only_addresses_are_read_before_the_wait_for_the_previous_kernel(ptx: dict[str, list[str]]) -> None:
    for name, lines in ptx.items():
        if name.startswith("one_shot"):
            continue
        (wait,) = matching(lines, re.compile(r"griddepcontrol\.wait"))
        touched = matching(lines, re.compile(r"\b(ld|st|atom|red)\.(volatile\.)?global"))
        early = [lines[number] for number in touched if number < wait]
        ranks = int(name.split()[1]) if name.split()[0] in KINDS else 0
        assert len(early) <= ranks + (ranks > 2), name
        assert all("ld.global.b64" in line for line in early), name


def test_peers_are_read_with_volatile_loads(ptx: dict[str, list[str]]) -> None:
    """Other loads behind the flags are of this rank's own tensors and of the table of addresses."""
    for name, lines in exchanges(ptx).items():
        assert matching(lines, re.compile(r"ld\.volatile\.global")), name
        if not name.startswith("winners"):
            assert matching(lines, re.compile(r"ld\.volatile\.global\.v4")), f"{name}: 16 bytes at a time"
            assert matching(lines, re.compile(r"st\.global\.v4")), f"{name}: 16 bytes at a time"


def test_ranks_and_token_counts_share_their_kernels(tmp_path: Path) -> None:
    """So one rank can compile for all, and nothing is compiled after a start."""
    subprocess.run([sys.executable, "-c", RECORD], env=compiling_environment(tmp_path), check=True, timeout=100)
