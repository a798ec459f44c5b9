"""The sample checkpoint, made once per test run as a user makes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentspec.text.chat_template import ChatTemplate
from agentspec.text.tokenizer import Tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_sample_checkpoint.py"


def make_checkpoint(directory: Path, *arguments: str) -> Path:
    subprocess.run([sys.executable, str(SCRIPT), str(directory), *arguments], check=True, capture_output=True)
    return directory


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of the tests' own, so that no tokenisation here depends on the workload."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    file.write_text('{"content": "Is the flight from Zürich to 東京 on time?\\nYes."}\n')
    return file


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sample") / "checkpoint", "--corpus", str(corpus))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(checkpoint)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="session")
def template(checkpoint: Path) -> ChatTemplate:
    template = ChatTemplate.from_directory(checkpoint)
    assert template is not None
    return template
