"""Flags from a TOML file: the command line takes precedence, and invalid entries are errors that name file, key and
value."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentspec.commands import cli
from agentspec.config import EngineConfig, ServerConfig


class Ran:
    """A fake for the commands' modules that records its arguments."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.EngineProcess = lambda options: nullcontext()
        self.engine_options = lambda config: ()
        self.text_process = lambda seconds: nullcontext()

    def run(self, *arguments: Any) -> int:
        self.arguments = arguments
        return 0


Run = Callable[..., tuple[Any, ...]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command with a config file of the given content; return the arguments of its module."""
    monkeypatch.delenv("AGENTSPEC_API_KEY", raising=False)

    def run_with(content: str, command: str, *flags: str) -> tuple[Any, ...]:
        ran = Ran()
        monkeypatch.setattr(cli, "_load", lambda name: ran)
        file = tmp_path / "settings.toml"
        file.write_text(content)
        assert cli.main([command, *flags, "--config", str(file)]) == 0
        return ran.arguments

    return run_with


def serve(run: Run, content: str, *flags: str) -> tuple[EngineConfig, ServerConfig]:
    config, server, *_ = run(content, "serve", *flags)
    return config, server


FILE = """
# All types of values: strings, numbers, booleans, lists.
model = "org/name"
max-running = 8
prefill_budget = "auto"
draft-tokens = 3
memory = 2
host-memory = 0.5
no-graphs = true
no_overlap = false
dtype = "bfloat16"
port = 9000
api-key = ["k1", "k2"]
cors-origin = "*"
served-model-name = ["a", "b"]
"""


def test_a_file_sets_flags(run: Run) -> None:
    config, server = serve(run, FILE)
    assert config == EngineConfig(
        model="org/name",
        max_running=8,
        draft_tokens=3,
        memory_gib=2.0,
        host_memory_gib=0.5,
        graphs=False,
        dtype="bfloat16",
    )
    assert isinstance(config.memory_gib, float)
    assert server == ServerConfig(port=9000, api_keys=("k1", "k2"), cors_origins=("*",), model_names=("a", "b"))


def test_the_command_line_takes_precedence(run: Run) -> None:
    flags = (
        "--max-running",
        "auto",
        "--port",
        "8000",
        "--api-key",
        "k3",
        "--served-model-name",
        "c",
        "--dtype",
        "auto",
    )
    config, server = serve(run, FILE, "other", *flags)
    assert config == EngineConfig(model="other", draft_tokens=3, memory_gib=2.0, host_memory_gib=0.5, graphs=False)
    assert server == ServerConfig(api_keys=("k3",), cors_origins=("*",), model_names=("c",)), (
        "a list on the command line replaces the file's list"
    )


def test_an_empty_file_changes_nothing(run: Run) -> None:
    assert serve(run, "") == (EngineConfig(), ServerConfig())


def test_a_file_sets_flags_of_replay(run: Run) -> None:
    args, _ = run(
        'concurrency = 3\nslo = "turn=10s"\nspeed = 2\narrival = "trace"\nquiet = true\nseed = 5',
        "replay",
        "f",
        "--concurrency",
        "4",
    )
    assert (args.file, args.concurrency, args.slo, args.speed, args.arrival, args.quiet, args.seed) == (
        "f",
        4,
        ["turn=10s"],
        2.0,
        "trace",
        True,
        5,
    )


def test_warm_accepts_and_ignores_server_flags(run: Run) -> None:
    config, target = run(FILE + 'target = "9.0"', "warm")
    assert (config.model, config.max_running, target) == ("org/name", 8, "9.0")


@pytest.mark.parametrize(
    ("command", "content", "words"),
    [
        ("serve", "max-runing = 8", "settings.toml: max-runing=8: is not a flag of agentspec serve"),
        ("serve", "checkpoint = 'm'", "checkpoint='m': is not a flag"),
        ("serve", "config = 'm'", "config='m': is not a flag"),
        ("serve", "concurrency = 4", "concurrency=4: is not a flag of agentspec serve"),
        ("serve", "[serve]\nport = 1", "serve={'port': 1}: is not a flag"),
        ("replay", "port = 1", "port=1: is not a flag of agentspec replay"),
        ("warm", "concurrency = 4", "concurrency=4: is not a flag of agentspec warm"),
        ("warm", "port = 'x'", "port='x': must be a whole number"),
        ("serve", "max-running = 8\nmax_running = 9", "max_running=9: is given twice"),
        ("serve", "port = '8000'", "settings.toml: port='8000': must be a whole number"),
        ("serve", "port = 80.5", "port=80.5: must be a whole number"),
        ("serve", "port = true", "port=True: must be a whole number"),
        ("serve", "max-running = '8'", "max-running='8': must be a number, or a word in quotes"),
        ("serve", "max-running = 'many'", "max-running='many': 'many' is neither auto nor a number"),
        ("serve", "memory = '2'", "memory='2': must be a number"),
        ("serve", "memory = [2]", "memory=[2]: must be a number"),
        ("serve", "model = 27", "model=27: must be a text, in quotes"),
        ("serve", "no-graphs = 1", "no-graphs=1: must be true or false"),
        ("serve", "device = 'tpu'", "device='tpu': must be one of auto, cpu, cuda"),
        ("serve", "cors-origin = ['*', 1]", "cors-origin=['*', 1]: must be a text, in quotes"),
        ("serve", "model = 2024-01-01", "must be a text, in quotes"),
        ("serve", "port = ", "is not valid TOML"),
    ],
)
def test_invalid_entries_are_refused_by_name(
    command: str, content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(content)
    assert cli.main([command, *(["f"] if command == "replay" else []), "--config", str(file)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("agentspec: error: ")
    assert shown.count("\n") == 1
    assert words in shown


def test_an_invalid_api_key_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("api-key = [4711]")
    assert cli.main(["serve", "--config", str(file)]) == 2
    assert "4711" not in capsys.readouterr().err


def test_an_unreadable_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--config", str(tmp_path / "none.toml")]) == 2
    assert "none.toml': can't be read: No such file" in capsys.readouterr().err
    (tmp_path / "latin.toml").write_bytes(b'model = "caf\xe9"')
    assert cli.main(["serve", "--config", str(tmp_path / "latin.toml")]) == 2
    assert "is not valid TOML" in capsys.readouterr().err
