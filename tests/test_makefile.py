"""What the Makefile names exists: pytest takes a file to ignore that isn't there without a word."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def dry_run(target: str) -> str:
    """The commands of a target. -o: what it needs is taken for made, so that nothing is installed."""
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    command = ["make", "--dry-run", "-o", ".venv/.dev-installed", "-o", ".venv/.installed", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["quick", "test", "test-sdks", "test-gpu", "check"])
def test_paths_of_tests_exist(target: str) -> None:
    paths = re.findall(r"\btests/[\w./-]+", dry_run(target))
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"make {target} names {missing}"


def test_quick_leaves_out_nothing_that_it_names() -> None:
    (line,) = [line for line in dry_run("quick").splitlines() if "pytest" in line]
    ignored = set(re.findall(r"--ignore=(\S+)", line))
    named = set(re.findall(r"(?<!=)\btests/\S+", line))
    assert ignored
    assert not ignored & named
    assert all(any(path.startswith(f"{folder}/") for folder in named) for path in ignored), (
        "ignored, though no folder has it"
    )
