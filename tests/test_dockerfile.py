"""The Dockerfile is consistent: its files exist and reach the build, and it starts the console script, not as root.

tests/sdks/test_docker.py builds and runs it where docker is installed.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from agentspec.commands.cli import build_parser
from agentspec.config import ServerConfig

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) without comments, with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines if line.strip())]


def all_of(name: str) -> list[str]:
    return [arguments for instruction, arguments in instructions() if instruction == name]


def test_copied_files_exist_and_reach_the_build() -> None:
    copied = [source for arguments in all_of("COPY") if "--from=" not in arguments for source in arguments.split()[:-1]]
    assert copied
    ignore = [
        line
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    assert ignore[0] == "*", (
        "a checkout may contain environments, checkpoints and keys: list what goes in, not what stays out"
    )
    for source in copied:
        assert (ROOT / source).exists(), source
        verdicts = [not line.startswith("!") for line in ignore if fnmatch(source, line.removeprefix("!"))]
        assert not verdicts[-1], f".dockerignore keeps {source} out"


def test_files_that_the_wheel_needs_are_copied() -> None:
    copied = {source for arguments in all_of("COPY") if "--from=" not in arguments for source in arguments.split()[:-1]}
    assert {"pyproject.toml", PROJECT["readme"], "LICENSE", "agentspec"} <= copied


def test_it_starts_the_console_script_and_serves() -> None:
    (entry,), (command,) = all_of("ENTRYPOINT"), all_of("CMD")
    assert json.loads(entry) == list(PROJECT["scripts"])
    arguments = build_parser().parse_args(json.loads(command))
    assert arguments.host == "0.0.0.0", "a container's loopback address can't be reached from outside"
    assert all_of("EXPOSE") == [str(ServerConfig().port)]


def test_it_does_not_run_as_root() -> None:
    names = [name for name, _ in instructions()]
    (user,) = all_of("USER")
    assert user not in ("root", "0")
    assert any(re.search(rf"useradd\b.*\s{re.escape(user)}$", made) for made in all_of("RUN"))
    assert all(names.index("USER") > place for place, name in enumerate(names) if name in ("RUN", "COPY"))


def test_versions_match_the_project() -> None:
    for image in all_of("FROM"):
        found = re.match(r"python:([\d.]+)-slim\b", image)
        assert found is not None, image
        assert SpecifierSet(PROJECT["requires-python"]).contains(Version(found[1]))
    (argument,) = all_of("ARG")
    (torch,) = [Requirement(text) for text in PROJECT["dependencies"] if Requirement(text).name == "torch"]
    asked = Requirement(shlex.split(argument.partition("=")[2])[0])
    assert asked.name == "torch"
    assert all(torch.specifier.contains(pin.version) for pin in asked.specifier)
