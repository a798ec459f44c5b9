"""Write a small Qwen3.5 checkpoint with random weights, in the published layout: enough to run every part of agentspec.

    python scripts/make_sample_checkpoint.py DIR [--seed 0] [--corpus FILE...]

The same seed and corpus give the same files. Takes a few seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from sample_checkpoint import corpus, tokenizer, weights

_SOURCES = Path(__file__).parent / "sample_checkpoint"
_WORKLOAD = Path(__file__).parent.parent / "workloads" / "agentic.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a small Qwen3.5 checkpoint with random weights.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; made if it doesn't exist")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the made-up training text")
    parser.add_argument("--corpus", type=Path, nargs="+", metavar="FILE", help="text or JSONL for the tokenizer, beside the made-up text")
    arguments = parser.parse_args()
    files = arguments.corpus if arguments.corpus is not None else [_WORKLOAD] if _WORKLOAD.is_file() else []
    for file in files:
        if not file.is_file():
            parser.error(f"--corpus: no such file: {file}")
    write_checkpoint(arguments.directory, arguments.seed, files)


def write_checkpoint(directory: Path, seed: int, corpus_files: list[Path]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    trained = tokenizer.train(_texts(seed, corpus_files))
    tokenizer.write(trained, directory)
    shutil.copyfile(_SOURCES / "chat_template.jinja", directory / "chat_template.jinja")

    end_of_text, end_of_turn = tokenizer.id_of(trained, tokenizer.END_OF_TEXT), tokenizer.id_of(trained, tokenizer.END_OF_TURN)
    text = weights.text_config(trained.get_vocab_size(with_added_tokens=True))
    _write_json(directory / "config.json", weights.config(text, end_of_text_id=end_of_text))
    _write_json(directory / "generation_config.json", weights.generation_config(end_of_turn_id=end_of_turn, end_of_text_id=end_of_text))
    save_file(weights.random_tensors(text, seed), directory / "model.safetensors", metadata={"format": "pt"})


def _texts(seed: int, files: list[Path]) -> Iterator[str]:
    yield from corpus.built_in_text(seed)
    for file in files:
        yield from corpus.file_text(file)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
