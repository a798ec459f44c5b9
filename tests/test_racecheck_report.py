"""Which reports of compute-sanitizer's racecheck count as clean (tests/gpu/racecheck_report.py)."""

from __future__ import annotations

import ast

import pytest

from tests.gpu.racecheck_report import KERNELS, unexplained


def line_in(function: str, file: str = "swiglu_hopper.py") -> int:
    """The last line of a function."""
    (found,) = [
        node
        for node in ast.parse((KERNELS / file).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    assert found.end_lineno is not None
    return found.end_lineno


def access(kind: str, function: str, kernel: str = "prompt_swiglu_kernel", file: str = "swiglu_hopper.py") -> str:
    return f"{kind} access at {kernel}+0xf0 in {file}:{line_in(function, file)}"


READ = access("Read", "prompt_swiglu_kernel")
WRITE = access("Write", "prompt_swiglu_kernel")


def report(*races: tuple[str, str], displayed: int | None = None, extra: str = "") -> str:
    """As compute-sanitizer 2025.3.1 writes it, between the program's own lines."""
    lines = ["========= COMPUTE-SANITIZER"]
    for first, second in races:
        lines += [f"========= Error: Race reported between {first}", f"=========     and {second} [3 hazards]"]
        lines += [f"=========     and {second} [17 hazards]", "========= "]
    count = len(races) if displayed is None else displayed
    lines += [*extra.splitlines(), "gated-prompts: 0 tokens in float32, as on the CPU; 0 in bfloat16"]
    return "\n".join([*lines, f"========= RACECHECK SUMMARY: {count} hazards displayed ({count} errors, 0 warnings)"])


def test_only_words_for_groups_of_warps_are_explained() -> None:
    assert unexplained(report()) == []
    assert unexplained(report((READ, WRITE), (READ, WRITE))) == []


@pytest.mark.parametrize(
    "other",
    [
        access("Write", "_multiply"),
        access("Write", "_fetch"),
        access("Write", "prompt_swiglu_kernel", "other_kernel"),
        access("Write", "_quantize_kernel", "_quantize_kernel", "fp8_activations.py"),
        "Write access at prompt_swiglu_kernel+0xf0 in nowhere.py:166",
        "Write access at ",
    ],
)
def test_all_else_is_a_race(other: str) -> None:
    """In a group's code, in a kernel without groups, or at a place that isn't known, as the first access or another."""
    assert unexplained(report((READ, WRITE), (READ, other)))
    assert unexplained(report((READ, WRITE), (other, WRITE)))


def test_reports_that_are_not_whole_are_not_clean() -> None:
    assert unexplained(report((READ, WRITE), displayed=2))
    assert unexplained("")
    assert unexplained("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors")
    assert unexplained(report(extra="========= Invalid __shared__ write of size 4 bytes"))
    assert unexplained(report() + "\n" + report())
