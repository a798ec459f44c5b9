"""The model that the package carries: its name, its directory, and which checkpoints mean it. Knows nothing of what is
inside."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

NAME = "tiny-agent"

DIRECTORY = Path(str(resources.files("agentspec"))) / "assets" / NAME
"""A checkpoint directory like any other, the model card with it."""


def checkpoint_of(model: str | None) -> str:
    """The checkpoint directory or hub id behind an engine's `model`: the bundled one's for None and for its name, else
    `model` itself.

    A directory of that name in the working directory is meant before the bundled one; a hub id has an owner, so it
    can't be meant."""
    if model is None or (model == NAME and not Path(model).is_dir()):
        return str(DIRECTORY)
    return model
