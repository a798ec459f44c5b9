"""Write a trained state as a checkpoint that transformers and agentspec load:

python -m scripts.tiny_agent.export --state DIR --tokenizer DIR --out DIR
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from scripts.tiny_agent.checkpoint import write_checkpoint
from scripts.tiny_agent.data import load_tokenizer
from scripts.tiny_agent.tokenizer import END_OF_TEXT, END_OF_TURN, id_of
from scripts.tiny_agent.training_state import load_state

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def export(state: Path, tokenizer: Path, out: Path) -> None:
    """Write the checkpoint's files to `out`; other files there are kept."""
    weights, _, progress = load_state(state)
    loaded = load_tokenizer(tokenizer)
    end_of_text, end_of_turn = id_of(loaded, END_OF_TEXT), id_of(loaded, END_OF_TURN)
    out.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        if tokenizer.resolve() != out.resolve():
            shutil.copyfile(tokenizer / name, out / name)
    write_checkpoint(out, weights, progress.text_config, end_of_text_id=end_of_text, end_of_turn_id=end_of_turn)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a trained state as a checkpoint.")
    for name in ("state", "tokenizer", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    export(arguments.state, arguments.tokenizer, arguments.out)


if __name__ == "__main__":
    main()
