"""A model directory for `agentspec serve --random-weights`: a published model's shapes, and the bundled model's tokens
in a vocabulary of full size.

The tokens beyond the bundled model's are artificial and never used in text; loading them takes as long as loading a
real tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from agentspec.engine import bundled
from benchmarks.published import CONFIG_FILES, NUM_REAL_TOKENS

_COPIED = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_directory(model: str, parent: Path) -> Path:
    """Create the directory `parent`/`model`. model: a name of published.CONFIG_FILES."""
    directory = parent / model
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG_FILES[model]))
    for name in _COPIED:
        shutil.copy(bundled.DIRECTORY / name, directory)
    tokenizer: dict[str, Any] = json.loads((bundled.DIRECTORY / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    first = 1 + max(*vocabulary.values(), *(added["id"] for added in tokenizer["added_tokens"]))
    vocabulary |= {f"~{token_id:06}": token_id for token_id in range(first, NUM_REAL_TOKENS)}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory
