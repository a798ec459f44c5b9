"""The command line: its flags are frozen, engine flags map to EngineConfig field by field, and errors are one line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.commands import cli
from agentspec.commands.flags import (
    acceptance_rates,
    add_engine_arguments,
    engine_config,
    served_model,
    server_config,
)
from agentspec.config import EngineConfig, ServerConfig
from agentspec.errors import CheckpointError, ConfigError

ENGINE_FLAGS = {
    "--model", "--device", "--dtype", "--tensor-parallel", "--draft-tokens", "--copy-drafts", "--state-form",
    "--draft-vocab", "--draft-precision", "--kv-dtype",
    "--token-counts",
    "--no-prefix-cache", "--no-overlap", "--no-graphs", "--max-running", "--prefill-budget", "--max-gap",
    "--fair-cost", "--max-context", "--memory", "--host-memory", "--seed", "--random-weights", "--force-acceptance",
    "--allow-forced-output",
}  # fmt: skip
FLAGS = {
    "serve": ENGINE_FLAGS | {
        "checkpoint", "--config", "--host", "--port", "--api-key", "--max-body-mib", "--max-queue", "--cors-origin",
        "--served-model-name", "--chat-template", "--log-level", "--strict-fields", "--images", "--allowed-host",
        "--drain", "--text-timeout", "--api-key-file", "--keys", "--trust-client-text", "--heartbeat", "--restart",
        "--queue-timeout", "--request-timeout", "--root-path",
    },
    "warm": ENGINE_FLAGS | {"checkpoint", "--config", "--target"},
    "memory": ENGINE_FLAGS | {"checkpoint", "--config", "--card-gib", "--tokens"},
    "replay": ENGINE_FLAGS | {
        "file", "--sessions", "--max-turns", "--history", "--output", "--token-ids", "--concurrency", "--arrival",
        "--speed", "--tool-delay", "--timeout", "--base-url", "--api-key", "--served-model", "--json", "--html",
        "--quiet", "--dry-run", "--template", "--tokenizer", "--max-idle", "--warmup", "--slo", "--gpus", "--salt",
        "--config",
    },
    "import": {"format", "input", "output", "--link"},
    "quantize": {"--to", "source", "destination"},
    "keys": {"action", "name"},
}  # fmt: skip
"""Flags are a stable interface: this list changes with every flag."""


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in cli.build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def config(*flags: str) -> EngineConfig:
    return engine_config(cli.build_parser().parse_args(["serve", *flags]))


def test_the_flags_are_frozen() -> None:
    found = {
        name: {
            text
            for action in parser._actions
            if action.dest != "help"
            for text in action.option_strings or [action.dest]
        }
        for name, parser in subparsers().items()
    }
    assert found == FLAGS


def test_settings_without_flags_are_the_defaults() -> None:
    assert config() == EngineConfig()


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--model", "dir"], "model", "dir"),
        (["--device", "cpu"], "device", "cpu"),
        (["--dtype", "bfloat16"], "dtype", "bfloat16"),
        (["--draft-tokens", "3"], "draft_tokens", 3),
        (["--draft-tokens", "0"], "draft_tokens", 0),
        (["--draft-vocab", "64"], "draft_vocab_size", 64),
        (["--draft-vocab", "0"], "draft_vocab_size", 0),
        (["--draft-precision", "fp8"], "draft_precision", "fp8"),
        (["--kv-dtype", "fp8"], "kv_dtype", "fp8"),
        (["--token-counts", "counts.json"], "token_counts", "counts.json"),
        (["--no-prefix-cache"], "prefix_cache", False),
        (["--no-overlap"], "overlap", False),
        (["--no-graphs"], "graphs", False),
        (["--max-running", "2"], "max_running", 2),
        (["--prefill-budget", "64"], "prefill_budget", 64),
        (["--prefill-budget", "auto"], "prefill_budget", "auto"),
        (["--max-gap", "0.2"], "max_gap_seconds", 0.2),
        (["--fair-cost", "1"], "fair_cost", 1.0),
        (["--max-context", "4096"], "max_context", 4096),
        (["--memory", "0.5"], "memory_gib", 0.5),
        (["--host-memory", "2"], "host_memory_gib", 2.0),
        (["--host-memory", "0"], "host_memory_gib", 0.0),
        (["--seed", "7"], "seed", 7),
        (["--random-weights"], "random_weights", True),
        (["--allow-forced-output"], "allow_forced_output", True),
        (["--force-acceptance", "0.9,0.5"], "force_acceptance", (0.9, 0.5)),
        (["--force-acceptance", "0.5"], "force_acceptance", (0.5,)),
    ],
)
def test_each_flag_sets_only_its_field(flags: list[str], field: str, value: Any) -> None:
    assert config(*flags) == dataclasses.replace(EngineConfig(), **{field: value})


def test_every_setting_except_the_session_hold_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert len(vars(parser.parse_args([]))) == len(dataclasses.fields(EngineConfig)) - 1


def server(*flags: str, **environment: str) -> ServerConfig:
    return server_config(cli.build_parser().parse_args(["serve", *flags]), environment)


def test_server_flags_set_their_fields() -> None:
    assert server() == ServerConfig()
    assert server("--host", "::1", "--port", "0") == ServerConfig(host="::1", port=0)
    assert server("--max-body-mib", "0.5", "--max-queue", "0") == ServerConfig(max_body_mib=0.5, max_queue=0)
    timed = ServerConfig(queue_timeout_seconds=30, request_timeout_seconds=0.5, root_path="/models")
    assert server("--queue-timeout", "30", "--request-timeout", "0.5", "--root-path", "/models") == timed
    assert server("m", "--served-model-name", "a", "b/c", "*").model_names == ("a", "b/c", "*")
    assert server("--log-level", "info").log_level == "info"
    assert server("--chat-template", "t.jinja").chat_template == "t.jinja"
    assert (server().images, server("--images", "drop").images) == ("refuse", "drop")
    assert server("--cors-origin", "*", "--cors-origin", "app://notes").cors_origins == ("*", "app://notes")
    assert server("--api-key", "a", "--api-key", "b").api_keys == ("a", "b")
    assert server("--api-key", "a", AGENTSPEC_API_KEY="c").api_keys == ("a", "c")
    assert server(AGENTSPEC_API_KEY="c", API_KEY="d").api_keys == ("c",)
    assert "secret" not in repr(server("--api-key", "secret"))
    assert server("--keys", "keys.toml").keys == "keys.toml"
    assert ServerConfig(max_body_mib=0.5).max_body_bytes == 2**19


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("first\n\n  second \r\n")
    assert server("--api-key-file", str(file)).api_keys == ("first", "second")
    assert server("--api-key", "a", "--api-key-file", str(file), AGENTSPEC_API_KEY="c").api_keys == (
        "a",
        "first",
        "second",
        "c",
    )
    for content, words in (
        (b"\n \n", "holds no line"),
        (b"\xff", "is not text in UTF-8"),
        (b"two words", "must be printable ASCII"),
    ):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as refused:
            server("--api-key-file", str(file))
        assert "two words" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        (["--api-key", ""], {}, "must be printable ASCII"),
        (["--api-key", "two words"], {}, "must be printable ASCII"),
        (["--api-key", "clé"], {}, "must be printable ASCII"),
        ([], {"AGENTSPEC_API_KEY": ""}, "must be printable ASCII"),
        (["--api-key-file", "none.txt"], {}, "api_key_file='none.txt': can't be read"),
        (["--keys", ""], {}, "keys=''"),
        (["--max-body-mib", "0"], {}, "max_body_mib=0.0"),
        (["--max-body-mib", "nan"], {}, "max_body_mib=nan"),
        (["--max-queue", "-1"], {}, "max_queue=-1"),
        (["--port", "-1"], {}, "port=-1"),
        (["--queue-timeout", "0"], {}, "queue_timeout=0.0: must be above 0 seconds"),
        (["--request-timeout", "nan"], {}, "request_timeout=nan"),
        (["--root-path", "models/"], {}, "root_path='models/'"),
        (["--served-model-name", "a", ""], {}, "served_model_name=''"),
        (["--chat-template", ""], {}, "chat_template=''"),
        (["--cors-origin", "localhost:3000"], {}, "cors_origin='localhost:3000'"),
        (["--cors-origin", "http://localhost:3000/"], {}, "without a path"),
        (["--allowed-host", "https://models.example"], {}, "allowed_host='https://models.example'"),
        (["--drain", "-1"], {}, "drain=-1.0: must be between 0 and 86400 seconds"),
        (["--drain", "nan"], {}, "drain=nan"),
        (["--heartbeat", "1"], {}, "heartbeat=1.0: must be between 2 and 86400 seconds"),
        (["--heartbeat", "nan"], {}, "heartbeat=nan"),
        (["--allowed-host", "models.example:8000"], {}, "without scheme, port and path"),
    ],
)
def test_invalid_server_settings_are_refused(flags: list[str], environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        server(*flags, **environment)
    assert "two words" not in str(refused.value)
    assert "clé" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "model"),
    [([], None), (["m"], "m"), (["--model", "m"], "m"), (["m", "--model", "m"], "m"), (["--port", "9", "m"], "m")],
)
def test_the_model_is_a_positional_argument_or_a_flag(flags: list[str], model: str | None) -> None:
    assert served_model(cli.build_parser().parse_args(["serve", *flags])) == model


@pytest.mark.parametrize(("emitted", "drafts"), [("3.39", 3), ("2", 1), ("1.5", 7), ("1.001", 2), ("8", 7)])
def test_emitted_tokens_per_step_become_rates(emitted: str, drafts: int) -> None:
    rates = acceptance_rates(emitted, drafts)
    assert len(rates) == drafts
    assert sum(rates[0] ** position for position in range(drafts + 1)) == pytest.approx(float(emitted))
    assert all(0 <= rate <= 1 for rate in rates)


@pytest.mark.parametrize(
    ("text", "drafts", "words"),
    [
        ("3.39", "auto", "fixed --draft-tokens"),
        ("3.39", 2, "at most 3"),
        ("a,b", 2, "must be rates"),
        ("", 2, "must be rates"),
    ],
)
def test_invalid_forced_acceptance_is_refused(text: str, drafts: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        acceptance_rates(text, drafts)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["bake"], "bake"),
        (["serve", "--modell", "x"], "--modell"),
        (["serve", "--mod", "x"], "--mod"),
        (["serve", "--max-running", "many"], "many"),
        (["serve", "--draft-tokens", "some"], "some"),
        (["serve", "--max-running", "0"], "max_running=0"),
        (["serve", "--draft-tokens", "16"], "draft_tokens=16"),
        (["serve", "--force-acceptance", "0.5,1.5"], "force_acceptance"),
        (["serve", "--memory", "nan"], "memory=nan"),
        (["serve", "--max-context", "63"], "max_context=63"),
        (["serve", ""], "model=''"),
        (["serve", "a", "--model", "b"], "model='b': and 'a' are two models"),
        (["serve", "a", "b"], "b"),
        (["serve", "--log-level", "loud"], "loud"),
        (["serve", "--max-queue", "-2"], "max_queue=-2"),
        (["replay", "f", "--dry-run", "27b", "--max-context", "4096"], "max_context=4096"),
        (["serve", "--port", "70000"], "port=70000"),
        (["serve", "--host", "256.0.0.1", "--port", "0"], "256.0.0.1"),
        (["replay", "no-such-file.jsonl"], "no-such-file.jsonl"),
        (["replay", "f", "--base-url", "http://localhost", "--max-running", "2"], "max_running=2"),
        (["replay", "f", "--speed", "0"], "speed=0"),
        (["replay", "f", "--json", "no/such/directory/out.json"], "no/such/directory/out.json"),
        (["import", "mooncake", "no-such-file", "out"], "no-such-file"),
    ],
)
def test_user_errors_are_one_line_and_exit_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = cli.main(argv)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else -1
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert shown.err.startswith("agentspec: error: ")
    assert shown.err.count("\n") == 1
    assert words in shown.err


class Loaded:
    """A fake for a module that the command line loads late."""

    def __init__(self, result: Any) -> None:
        self.result = result
        self.arguments: tuple[Any, ...] = ()

    def run(self, *arguments: Any) -> Any:
        self.arguments = arguments
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "code"),
    [
        (None, 0),
        (signal.SIGTERM, 0),
        (signal.SIGINT, 130),
        (KeyboardInterrupt(), 130),
        (CheckpointError("config.json: no such file"), 2),
    ],
)
def test_exit_codes_of_serve(result: Any, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command = Loaded(result)
    remote = SimpleNamespace(EngineProcess=lambda options: nullcontext("its process"), engine_options=lambda config: ())
    text = SimpleNamespace(text_process=lambda seconds: nullcontext(f"{seconds:g} seconds for texts"))
    modules = {
        "agentspec.commands.serve": command,
        "agentspec.engine.remote": remote,
        "agentspec.engine.remote_text": text,
    }
    monkeypatch.setattr(cli, "_load", modules.__getitem__)
    monkeypatch.delenv("AGENTSPEC_API_KEY", raising=False)
    assert cli.main(["serve", "m", "--port", "9"]) == code
    assert command.arguments == (
        EngineConfig(model="m"),
        ServerConfig(port=9),
        "its process",
        "30 seconds for texts",
        [],
    )


def test_replay_with_a_base_url_loads_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Loaded(1)
    loaded: list[str] = []

    def load(name: str) -> Any:
        loaded.append(name)
        return command

    monkeypatch.setattr(cli, "_load", load)
    assert cli.main(["replay", "f", "--base-url", "http://localhost", "--seed", "3"]) == 1
    assert loaded == ["agentspec.commands.replay"]
    args, _ = command.arguments
    assert (args.file, args.seed) == ("f", 3)


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: agentspec")
    assert all(command in shown.out for command in FLAGS)
    assert shown.err == ""


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [(["--version"], 0, "agentspec "), ([], 0, "usage: agentspec "), (["bake"], 2, "error: ")],
)
def test_python_m_agentspec_runs_the_command(argv: list[str], code: int, words: str) -> None:
    shown = subprocess.run([sys.executable, "-m", "agentspec", *argv], capture_output=True, text=True)
    assert shown.returncode == code
    assert words in shown.stdout + shown.stderr


def test_help_and_errors_do_not_import_torch() -> None:
    code = (
        "import sys; from agentspec.commands import cli, replay, serve\n"
        "cli.build_parser()\nprint('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_flags_and_the_server_do_not_import_numpy() -> None:
    """Importing numpy would delay every command and cost a server 10 MiB."""
    code = "import sys; from agentspec.commands import cli, serve\ncli.build_parser()\nprint('numpy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("agentspec ")


def test_import_writes_a_replay_file(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}) + "\n")
    assert cli.main(["import", "mooncake", str(trace), str(tmp_path / "out.jsonl")]) == 0
    assert (tmp_path / "out.jsonl").exists()
