"""The model in the package: its name, its directory, and which model names mean it. Knows nothing of its contents."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

NAME = "tiny-agent"

DIRECTORY = Path(str(resources.files("agentspec"))) / "assets" / NAME
"""A normal checkpoint directory, with the model card."""


def checkpoint_of(model: str | None) -> str:
    """The checkpoint directory or hub id for an engine's `model`: the bundled model's directory for None or its name,
    otherwise `model` itself.

    A directory of that name in the working directory takes precedence over the bundled model. A hub id contains an
    owner, so it can't be confused with the name."""
    if model is None or (model == NAME and not Path(model).is_dir()):
        return str(DIRECTORY)
    return model
