"""The version, the changelog and the documents about releases are consistent."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def headings() -> list[str]:
    return re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_newest_changelog_entry_is_this_version() -> None:
    released = [heading for heading in headings() if heading != "Unreleased"]
    assert headings().count("Unreleased") <= 1
    assert "Unreleased" not in headings()[1:], "unreleased changes come first"
    found = [re.fullmatch(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d)\)", heading) for heading in released]
    assert None not in found, f"a heading is `X.Y.Z (YYYY-MM-DD)`: {released}"
    versions = [Version(match[1]) for match in found if match]
    assert str(versions[0]) == VERSION, (
        "pyproject.toml and CHANGELOG.md name different versions: docs/release.md says how they change"
    )
    assert versions == sorted(versions, reverse=True)
    for match in found:
        assert match is not None
        date.fromisoformat(match[2])


def test_the_security_policy_links_the_release_document() -> None:
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "(docs/security.md)" in policy
    assert "(docs/release.md)" in policy
