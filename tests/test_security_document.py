"""The dated lists of dependencies and bundled files in docs/security.md must match the package."""

from __future__ import annotations

import argparse
import re
import tomllib
from datetime import date
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from agentspec.commands.cli import build_parser

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def rows(name: str) -> list[list[str]]:
    """The cells of a marked table, without its header."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", DOCUMENT, re.DOTALL)
    assert found is not None, f"docs/security.md has no table between `<!-- {name} -->` and `<!-- end of {name} -->`"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()[2:]]


def test_every_dependency_is_listed_with_its_range() -> None:
    asked = [(Requirement(text), "") for text in PROJECT["dependencies"]]
    asked += [(Requirement(text), " (extra `sdks`)") for text in PROJECT["optional-dependencies"]["sdks"]]
    expected = {requirement.name + extra: str(requirement.specifier) for requirement, extra in asked}
    listed = {cells[0]: cells[1].replace(" ", "") for cells in rows("dependencies")}
    assert {name: set(specifier.split(",")) for name, specifier in listed.items()} == {
        name: set(specifier.split(",")) for name, specifier in expected.items()
    }, "the list in docs/security.md differs from pyproject.toml: change it, and its date"


def test_every_dependency_has_a_tested_version_and_a_licence() -> None:
    for name, specifier, tested, licence, purpose in rows("dependencies"):
        assert Requirement(f"x{specifier}").specifier.contains(Version(tested)), (
            f"{name} {tested} is not within {specifier}"
        )
        assert licence, name
        assert purpose, name


def test_the_list_is_dated() -> None:
    found = re.search(r"^As of (\d{4}-\d{2}-\d{2})\.", DOCUMENT, re.MULTILINE)
    assert found is not None, "docs/security.md doesn't date its dependencies"
    date.fromisoformat(found[1])


def test_every_named_flag_is_a_flag_of_serve() -> None:
    (commands,) = (
        action.choices for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    known = {flag for action in commands["serve"]._actions for flag in action.option_strings}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", DOCUMENT))
    assert not named - known, f"docs/security.md names {sorted(named - known)}, which `agentspec serve` doesn't have"


def test_every_bundled_file_is_listed() -> None:
    """All files of a wheel besides Python files."""
    listed = [ROOT / cells[0].strip("`") for cells in rows("bundled")]
    for path in listed:
        assert path.exists(), path
    files = [
        path
        for path in (ROOT / "agentspec").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "py.typed"
    ]
    missing = [str(path.relative_to(ROOT)) for path in files if not any(path.is_relative_to(place) for place in listed)]
    assert not missing, f"docs/security.md doesn't list {missing}"
