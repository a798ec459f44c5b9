"""The public names of agentspec: those of __all__, each imported on first use."""

from __future__ import annotations

import subprocess
import sys

import pytest

import agentspec


def test_every_public_name_can_be_imported() -> None:
    found = {name: getattr(agentspec, name) for name in agentspec.__all__}
    assert sorted(found) == agentspec.__all__ == dir(agentspec)
    homes = [name for names in agentspec._HOMES.values() for name in names]
    assert sorted([*homes, "version"]) == agentspec.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Motor'"):
        _ = agentspec.Motor


def test_the_import_loads_neither_torch_nor_a_server() -> None:
    code = (
        "import sys; from agentspec import EngineConfig, Submit; "
        "print([name for name in ('torch', 'fastapi') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
