"""Reads a report of compute-sanitizer's racecheck: `python -m tests.gpu.racecheck_report FILE` exits with 0 if it has
no race but those of Triton's own words for groups of warps.

A Gluon kernel with groups of warps (`warp_specialize`) tells each warp what to run through a byte of shared memory. It
is written and read between barriers of all warps, but racecheck reports these bytes where a group also has a barrier of
its own. The accesses are attributed to the kernel's own function, which only allocates, initialises barriers and starts
the groups: what groups do to their buffers has lines of other functions.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "agentspec" / "kernels" / "triton"
_RACE = re.compile(r"^========= (?:Error|Warning): Race reported between (.*)$")
_OTHER = re.compile(r"^=========     and (.*)$")
_ACCESS = re.compile(r"^(?:Read|Write) access at (\w+)\+0x[0-9a-f]+ in ([\w.]+):(\d+)(?: \[\d+ hazards\])?$")
_SUMMARY = re.compile(r"^========= RACECHECK SUMMARY: (\d+) hazards displayed \((\d+) errors, (\d+) warnings\)$")


def unexplained(report: str) -> list[str]:
    """What a report says besides races of Triton's own words; empty: nothing."""
    found: list[str] = []
    num_races, summaries = 0, []
    for line in report.splitlines():
        if summary := _SUMMARY.match(line):
            summaries.append(tuple(map(int, summary.groups())))
        elif race := _RACE.match(line):
            num_races += 1
            found += [] if _is_of_groups(race[1]) else [line]
        elif other := _OTHER.match(line):
            found += [] if _is_of_groups(other[1]) else [line]
        elif re.match(r"^========= \S", line) and line != "========= COMPUTE-SANITIZER":
            found.append(line)
    if summaries != [(num_races, num_races, 0)]:
        found.append(f"{num_races} races, but its summaries say {summaries}: it was cut, or is another tool's")
    return found


def _is_of_groups(access: str) -> bool:
    """Whether an access is one of a kernel that starts groups of warps, outside of what the groups run."""
    parts = _ACCESS.match(access)
    if parts is None or not (KERNELS / parts[2]).is_file():
        return False
    kernel, line = parts[1], int(parts[3])
    for node in ast.parse((KERNELS / parts[2]).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == kernel:
            starts_groups = any(isinstance(x, ast.Attribute) and x.attr == "warp_specialize" for x in ast.walk(node))
            return starts_groups and node.lineno <= line <= (node.end_lineno or 0)
    return False


def main() -> None:
    found = unexplained(Path(sys.argv[1]).read_text())
    for line in found:
        print(line)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
