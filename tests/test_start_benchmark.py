"""The benchmark of a start also runs on a CPU, and its models have published sizes."""

from __future__ import annotations

from pathlib import Path

from agentspec.models.registry import resolved_config
from agentspec.models.vocabulary import num_real_tokens
from agentspec.text.tokenizer import Tokenizer
from benchmarks import start
from benchmarks.published import CONFIGS, NUM_REAL_TOKENS
from benchmarks.served_directory import write_directory


def test_a_start_is_measured_up_to_the_first_answer() -> None:
    measured = start.start("tiny-agent", ["--device", "cpu", "--memory", "0.2"], {})
    assert 0 < measured.listening < measured.ready < measured.answered
    assert "none: steps run eagerly on the CPU" in measured.page
    assert start.row("second", measured).startswith("| second | ")


def test_parallel_stages_are_separated() -> None:
    measured = start.Start()
    measured.see("starting", 0.5)
    measured.see("loading weights (12 of 426), compiling kernels (3 of 134)", 1.0)
    measured.see("compiling kernels (9 of 134)", 2.0)
    assert measured.stages == {"starting": (0.5, 0.5), "loading weights": (1.0, 1.0), "compiling kernels": (1.0, 2.0)}


def test_a_served_directory_has_the_sizes_of_its_model(tmp_path: Path) -> None:
    directory = write_directory("0.8B", tmp_path)
    config = resolved_config(directory, random_weights=True)
    assert config == CONFIGS["0.8B"]
    assert num_real_tokens(directory, config) == NUM_REAL_TOKENS
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    assert tokenizer.vocab_size == NUM_REAL_TOKENS
    assert tokenizer.decode(tokenizer.encode("Where is order 7?")) == "Where is order 7?"
