"""What is installed. The distribution has a name of its own: `agentspec` on PyPI is somebody else's."""

from __future__ import annotations

from importlib import metadata

DISTRIBUTION = "agentspec-engine"


def version() -> str:
    return metadata.version(DISTRIBUTION)
