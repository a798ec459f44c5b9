"""Paths in the Makefile exist: pytest silently accepts a missing path in --ignore."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def dry_run(target: str) -> str:
    """The commands of a target. -o: treat its prerequisites as up to date, so that nothing is installed."""
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    command = ["make", "--dry-run", "-o", ".venv/.dev-installed", "-o", ".venv/.installed", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["quick", "test", "test-sdks", "test-gpu", "check"])
def test_test_paths_in_the_makefile_exist(target: str) -> None:
    paths = re.findall(r"\btests/[\w./-]+", dry_run(target))
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"make {target} names {missing}"


def test_ignored_files_of_quick_are_in_its_folders() -> None:
    (line,) = [line for line in dry_run("quick").splitlines() if "pytest" in line]
    ignored = set(re.findall(r"--ignore=(\S+)", line))
    named = set(re.findall(r"(?<!=)\btests/\S+", line))
    assert ignored
    assert not ignored & named
    assert all(any(path.startswith(f"{folder}/") for folder in named) for path in ignored), (
        "ignored, but in none of its folders"
    )
