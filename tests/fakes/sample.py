"""The sample checkpoint, made as a user makes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_sample_checkpoint.py"


def make_sample_checkpoint(directory: Path) -> Path:
    """A small dense Qwen3.5 checkpoint with random weights, a tokenizer and a chat template. Takes about two seconds."""
    subprocess.run([sys.executable, str(SCRIPT), str(directory)], check=True, capture_output=True)
    return directory
