"""What a training run leaves on disk: float32 weights, the optimiser's moments, and where in the plan it stands.

Without `moments.safetensors` the directory is small enough to carry elsewhere; training then goes on with fresh
moments.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.tiny_agent.shards import read_shards, write_shards

_MOMENTS = "moments.safetensors"
_PROGRESS = "progress.json"


@dataclass(slots=True)
class Progress:
    seed: int
    text_config: dict[str, Any]
    """As in config.json: architecture.py."""
    step: int = 0
    tokens: int = 0
    """Seen so far, padding included."""
    next_example: int = 0
    """Where the data goes on."""
    steps_since_fresh_moments: int = 0


def save_state(
    directory: Path, weights: dict[str, Tensor], moments: dict[str, Tensor] | None, progress: Progress
) -> None:
    """Replace the directory's content in one move."""
    new = directory.with_name(directory.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    write_shards(new, weights)
    if moments is not None:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in moments.items()}, new / _MOMENTS)
    (new / _PROGRESS).write_text(json.dumps(asdict(progress), indent=2) + "\n")
    shutil.rmtree(directory, ignore_errors=True)
    new.rename(directory)


def load_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor] | None, Progress]:
    """(weights, moments where they are, progress), all on the CPU; without moments the warm-up begins again."""
    progress = Progress(**json.loads((directory / _PROGRESS).read_text()))
    moments = load_file(directory / _MOMENTS) if (directory / _MOMENTS).is_file() else None
    if moments is None:
        progress.steps_since_fresh_moments = 0
    return read_shards(directory), moments, progress
