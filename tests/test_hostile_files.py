"""Malicious files: for any content, a command prints one line that names the file and ends soon."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from agentspec import files
from agentspec.commands.cli import main
from agentspec.commands.quantize import quantize
from agentspec.engine.link import Failed, error_data, frame
from agentspec.errors import CheckpointError, ConfigError, ReplayFileError, RequestError
from agentspec.models.hf_config import MAX_POSITIONS
from agentspec.replay.importers import FORMATS
from agentspec.replay.schema import load, read_lines, save
from agentspec.text.chat_template import ChatTemplate
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.mutations import DEEP, mutated_bytes, mutated_json
from tests.fakes.text import write_text_assets
from tests.replay.builders import chats
from tests.test_bad_input import SHAPE, edit_json, refused

SECONDS = 120
"""Time limit of a test: each one normally takes less than a second."""
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.fixture(autouse=True)
def ends() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise AssertionError("it doesn't end")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A valid checkpoint with every file that is read."""
    directory = write_checkpoint(tmp_path_factory.mktemp("hostile") / "sound", "dense", **SHAPE)
    write_text_assets(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    return directory


@pytest.fixture
def checkpoint(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "checkpoint")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    save(chats(1, 1), tmp_path / "trace.jsonl")
    return str(tmp_path / "trace.jsonl")


def engine_flags(directory: Path) -> list[str]:
    return ["--model", str(directory), "--memory", "0.05", "--device", "cpu", "--quiet"]


def replace_text(directory: Path, name: str, old: str, new: str) -> None:
    text = (directory / name).read_text()
    assert old in text
    (directory / name).write_text(text.replace(old, new, 1))


def sharded(directory: Path, file_name: str) -> None:
    """The same weights with an index; `file_name` is the JSON text of its first file name."""
    names = list(safetensors.torch.load_file(directory / "model.safetensors"))
    weight_map = json.dumps(dict.fromkeys(names, "model.safetensors")).replace('"model.safetensors"', file_name, 1)
    (directory / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}')


def reheaded(directory: Path, change: Callable[[dict[str, Any]], object], length: int | None = None) -> None:
    """The safetensors file with a changed header; `length`: its declared length in bytes."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    written = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(written) if length is None else length) + written + data[end:])


def overlapping(header: dict[str, Any]) -> None:
    first, second = [entry for name, entry in header.items() if name != "__metadata__"][:2]
    second["data_offsets"] = first["data_offsets"]


def enormous(header: dict[str, Any]) -> None:
    next(entry for name, entry in header.items() if name != "__metadata__")["shape"] = [2**62, 2**62]


def template(directory: Path, expression: str) -> None:
    (directory / "chat_template.jinja").write_text(f"{{{{ {expression} }}}}")


def template_of_a_number(directory: Path) -> None:
    (directory / "chat_template.jinja").unlink()
    edit_json(directory, "tokenizer_config.json", chat_template=7)


HOSTILE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "an infinite rope_theta": (
        lambda d: replace_text(d, "config.json", "10000000.0", "1e400"),
        ["config.json", "rope_theta=inf"],
    ),
    "a rope_theta that is no number": (
        lambda d: replace_text(d, "config.json", "10000000.0", "NaN"),
        ["rope_theta=nan"],
    ),
    "an epsilon of 10^400": (lambda d: replace_text(d, "config.json", "1e-06", "1e400"), ["rms_norm_eps=inf"]),
    "an epsilon that is 0 in float32": (
        lambda d: replace_text(d, "config.json", "1e-06", "1e-300"),
        ["rms_norm_eps=1e-300"],
    ),
    "an integer beyond every float": (
        lambda d: replace_text(d, "config.json", "10000000.0", "9" * 400),
        ["rope_theta=999"],
    ),
    "positions of 10^18": (
        lambda d: edit_json(d, "config.json", max_position_embeddings=10**18),
        ["max_position_embeddings=1000000000000000000"],
    ),
    "a stretched context of 10^9": (
        lambda d: edit_json(
            d, "config.json", rope_parameters=YARN | {"factor": 1e6, "original_max_position_embeddings": MAX_POSITIONS}
        ),
        ["rope_parameters: factor=1000000.0"],
    ),
    "a stretch of 10^300": (
        lambda d: edit_json(d, "config.json", rope_parameters=YARN | {"factor": 1e300}),
        ["factor=1e+300"],
    ),
    "10^18 layers": (
        lambda d: edit_json(d, "config.json", num_hidden_layers=10**18),
        ["num_hidden_layers=1000000000000000000"],
    ),
    "a vocabulary of 10^18": (
        lambda d: edit_json(d, "config.json", vocab_size=10**18),
        ["vocab_size=1000000000000000000"],
    ),
    "a width of 10^18": (
        lambda d: edit_json(d, "config.json", hidden_size=10**18),
        ["hidden_size=1000000000000000000"],
    ),
    "a value of 5,000 letters": (
        lambda d: edit_json(d, "config.json", hidden_act="x" * 5000),
        ["hidden_act='xxx", "..."],
    ),
    "a config of depth 10^5": (lambda d: (d / "config.json").write_text(DEEP), ["config.json: unreadable JSON"]),
    "a config with 10^5 digits": (
        lambda d: replace_text(d, "config.json", "10000000.0", "9" * 10**5),
        ["config.json: unreadable JSON"],
    ),
    "a config of 100 MB": (
        lambda d: os.truncate(d / "config.json", 10**8),
        ["config.json: can't be read: has more than"],
    ),
    "end ids of depth 10^5": (
        lambda d: (d / "generation_config.json").write_text(DEEP),
        ["generation_config.json: unreadable JSON"],
    ),
    "an end id of 10^18": (
        lambda d: edit_json(d, "generation_config.json", eos_token_id=10**18),
        ["end id 1000000000000000000"],
    ),
    "an end id that is a list": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": [[]]}'),
        ["eos_token_id=[[]]"],
    ),
    "numbers in the index": (lambda d: sharded(d, "7"), ["index.json: weight_map[", "=7 is not a plain file name"]),
    "a list in the index": (lambda d: sharded(d, '["a"]'), ["=['a'] is not a plain file name"]),
    "a file elsewhere in the index": (
        lambda d: sharded(d, '"../../etc/passwd"'),
        ["='../../etc/passwd' is not a plain file name"],
    ),
    "half a character in the index": (lambda d: sharded(d, '"\\ud800"'), ["shards of the index are missing"]),
    "an index of depth 10^5": (
        lambda d: (d / "model.safetensors.index.json").write_text(DEEP),
        ["index.json: unreadable JSON"],
    ),
    "a header beyond the file": (
        lambda d: reheaded(d, lambda _: None, 2**60),
        ["model.safetensors: not a readable safetensors file"],
    ),
    "a header of depth 10^5": (
        lambda d: (d / "model.safetensors").write_bytes(struct.pack("<Q", len(DEEP)) + DEEP.encode()),
        ["not a readable"],
    ),
    "tensors that overlap": (
        lambda d: reheaded(d, overlapping),
        ["model.safetensors: not a readable safetensors file"],
    ),
    "a tensor of 2^124 values": (
        lambda d: reheaded(d, enormous),
        ["model.safetensors: not a readable safetensors file"],
    ),
    "a tokenizer of depth 10^5": (lambda d: (d / "tokenizer.json").write_text(DEEP), ["tokenizer.json"]),
    "a tokenizer of lists": (
        lambda d: (d / "tokenizer.json").write_text('{"model": [], "added_tokens": {}}'),
        ["tokenizer.json"],
    ),
    "added tokens without ids": (
        lambda d: (d / "tokenizer.json").write_text('{"added_tokens": [{"content": "a"}]}'),
        ["tokenizer.json"],
    ),
    "an end token that is a list": (
        lambda d: edit_json(d, "tokenizer_config.json", eos_token=["a"]),
        ["eos_token ['a']"],
    ),
    "tokens by numbers": (
        lambda d: edit_json(d, "tokenizer_config.json", added_tokens_decoder={"1": 7}, eos_token="x"),
        ["tokenizer_config.json: added_tokens_decoder['1']"],
    ),
    "tokens by a list": (
        lambda d: edit_json(d, "tokenizer_config.json", added_tokens_decoder=[1], eos_token="x"),
        ["added_tokens_decoder must be"],
    ),
    "a template of depth 10^4": (lambda d: template(d, "(" * 10**4 + ")" * 10**4), ["chat_template.jinja"]),
    "a template of 10^4 sums": (lambda d: template(d, "1" + "+a" * 10**4), ["chat_template.jinja"]),
    "a template of 10^5 digits": (lambda d: template(d, "9" * 10**5), ["chat_template.jinja"]),
    "a template that is a number": (template_of_a_number, ["chat_template"]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_malicious_checkpoint_is_refused(
    case: str, checkpoint: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, words = HOSTILE[case]
    damage(checkpoint)
    line = refused(capsys, "replay", trace, *engine_flags(checkpoint))
    assert all(word in line for word in words), line


NAMES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "model.safetensors",
)


def no_file(path: Path, kind: str) -> None:
    """Replace the file at `path` by something that isn't a regular file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("nowhere")


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "dangling link"])
@pytest.mark.parametrize("name", [*NAMES, "model.safetensors.index.json"])
def test_special_files_in_a_checkpoint_are_refused(
    name: str, kind: str, checkpoint: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    no_file(checkpoint / name, kind)
    line = refused(capsys, "replay", trace, *engine_flags(checkpoint))
    assert name in line
    assert "a regular file" in line or "no such file" in line or "holds neither" in line


def test_links_to_regular_files_are_accepted(
    sound: Path, tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a hub's cache."""
    (tmp_path / "snapshot").mkdir()
    for name in NAMES:
        (tmp_path / "snapshot" / name).symlink_to(sound / name)
    assert main(["replay", trace, *engine_flags(tmp_path / "snapshot")]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("flag", ["--chat-template", "--config"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_flags_that_name_special_files_are_refused(
    flag: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_file(tmp_path / "given", kind)
    line = refused(capsys, "serve", "--port", "0", flag, str(tmp_path / "given"))
    assert "is not a regular file" in line
    assert str(tmp_path / "given") in line


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_token_counts_that_are_a_special_file_are_refused(
    kind: str, sound: Path, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_file(tmp_path / "given", kind)
    line = refused(capsys, "replay", trace, *engine_flags(sound), "--token-counts", str(tmp_path / "given"))
    assert line == f"token_counts='{tmp_path}/given': can't be read: is not a regular file"


def test_a_config_file_of_nesting_depth_100_000_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "flags.toml").write_text(f"memory = {DEEP}")
    assert "is not valid TOML" in refused(capsys, "serve", "--config", str(tmp_path / "flags.toml"))


def test_token_counts_of_nesting_depth_100_000_are_refused(
    sound: Path, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in (DEEP, f'{{"version": 1, "num_tokens": 1, "counts": {{}}, "more": {DEEP}}}'):
        (tmp_path / "counts.json").write_text(text)
        assert "token_counts=" in refused(
            capsys, "replay", trace, *engine_flags(sound), "--token-counts", str(tmp_path / "counts.json")
        )


@pytest.mark.parametrize("dry", [(), ("--dry-run", "27b")], ids=["engine", "dry run"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_a_replay_file_that_is_a_special_file_is_refused(
    kind: str, dry: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_file(tmp_path / "trace.jsonl", kind)
    assert "trace.jsonl:0: can't be read: is not a regular file" in refused(
        capsys, "replay", str(tmp_path / "trace.jsonl"), *dry
    )


@pytest.mark.parametrize("content", [b"x" * 5000, b'{"a":\n' * 5000], ids=["one line", "many lines"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_replay_file_beyond_the_unpacked_limit_is_refused(content: bytes, packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl"
    path.write_bytes(gzip.compress(content) if packed else content)
    with pytest.raises(ReplayFileError, match=r"bomb\.jsonl:\d+: the (line|file) has more than \d,\d{3} bytes"):
        list(read_lines(path, line_bytes=4000, file_bytes=8000))
    assert sum(len(line) for _, line in read_lines(path)) <= len(content)


def test_a_gzip_bomb_of_one_line_is_not_unpacked_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(300):
            file.write(b"\0" * 2**20)
    assert "bomb.jsonl.gz:1: the line has more than 268,435,456 bytes" in refused(capsys, "replay", str(path))


def toolset(parameters: str) -> str:
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {parameters}}}}}'
    return f'{{"type": "meta", "toolsets": {{"a": [{tool}]}}}}'


def session(turn: str, more: str = "") -> str:
    return f'{{"type": "session", "session_id": "a", {more} "turns": [{{{turn}}}]}}'


ASKED = '"messages": [{"role": "user", "content": "x"}]'
HUGE = 10**18
LINES = {
    "depth 10^5": DEEP,
    "a tool of depth 10^5": toolset(DEEP),
    "a tool of depth 500": toolset("[" * 500 + "]" * 500),
    "10^5 digits": session(ASKED, f'"start_ms": {"9" * 10**5},'),
    "a delay without end": session(f'{ASKED}, "delay_ms": 1e300'),
    "10^18 tokens": session(f'"input_length": {HUGE}, "block_size": {HUGE}, "hash_ids": [1]'),
    "an answer of 10^18 tokens": session(f'{ASKED}, "expect": {{"output_tokens": {HUGE}}}'),
}


@pytest.mark.parametrize("name", LINES)
def test_a_malicious_line_of_a_replay_file_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(LINES[name])
    for dry in ((), ("--dry-run", "27b")):
        assert "trace.jsonl:1: " in refused(capsys, "replay", str(path), *dry)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "line",
    [DEEP, f'{{"messages": {DEEP}}}', "9" * 10**5, '{"timestamp": 1e400}'],
    ids=["deep", "deep inside", "digits", "inf"],
)
def test_a_malicious_trace_is_refused(
    format: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.json").write_text(line)
    assert "in.json:" in refused(capsys, "import", format, str(tmp_path / "in.json"), str(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()


def test_a_full_disk_is_reported_for_every_result_file(
    sound: Path, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def last_line(*argv: str) -> str:
        assert main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "error: json='/dev/full': can't be written: No space left" in last_line(
        "replay", trace, *engine_flags(sound), "--json", "/dev/full"
    )
    assert "error: html='/dev/full': can't be written: No space left" in last_line(
        "replay", trace, *engine_flags(sound), "--html", "/dev/full"
    )
    assert "error: json='/dev/full'" in last_line("replay", trace, "--dry-run", "27b", "--json", "/dev/full")
    (tmp_path / "in.json").write_text('{"messages": [{"role": "user", "content": "x"}]}')
    assert "error: output='/dev/full'" in last_line("import", "openai-messages", str(tmp_path / "in.json"), "/dev/full")


def test_a_pipe_without_a_reader_is_refused_for_results(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"json=.*can't be written: No such device"):
        files.write(tmp_path / "pipe", b"x", field="json")


def test_a_full_disk_is_reported_for_stdout(trace: str) -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "agentspec", "replay", trace, "--dry-run", "27b"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS)
    assert (done.returncode, done.stderr) == (2, "agentspec: error: [Errno 28] No space left on device\n")


def test_a_full_disk_is_reported_for_a_quantised_checkpoint(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("agentspec.models.shard_files.save_file", full)
    with pytest.raises(CheckpointError, match=r"out: can't be written: .*No space left"):
        quantize(sound, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_error_is_one_line_for_any_file_content(
    checkpoint: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = safetensors.torch.load_file(checkpoint / "model.safetensors")
    safetensors.torch.save_file(tensors | {"a\nTraceback \x1b[31m": torch.zeros(1)}, checkpoint / "model.safetensors")
    assert "unexpected tensors: a\\u000aTraceback \\u001b[31m" in refused(
        capsys, "replay", trace, *engine_flags(checkpoint)
    )


def test_an_error_with_a_lone_surrogate_reaches_the_server() -> None:
    """The engine's process reads the checkpoint: its error message must reach the server's process."""
    assert b"\\ud800" in frame([Failed(error_data(CheckpointError("no \ud800.safetensors")))])
    assert b"\\ud800" in frame([Failed(error_data(ConfigError("model", "\ud800", "no \ud800")))])


def test_serve_prints_the_same_line_for_a_malicious_checkpoint(checkpoint: Path) -> None:
    """Only one file is bad at a time: three processes read the checkpoint in parallel, so either of two may be
    named."""
    for name, kind, words in (
        ("tokenizer.json", "pipe", "tokenizer.json: can't be read"),
        ("config.json", "device", "config.json: can't be read"),
    ):
        sound_bytes = (checkpoint / name).read_bytes()
        no_file(checkpoint / name, kind)
        command = [
            sys.executable,
            "-m",
            "agentspec",
            "serve",
            str(checkpoint),
            "--port",
            "0",
            "--device",
            "cpu",
            "--memory",
            "0.05",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        progress, line = done.stderr.removesuffix("\n").rpartition("\n")[::2]
        assert (done.returncode, done.stdout, "Traceback" in progress) == (2, "", False), done.stderr
        assert line.startswith("agentspec: error: ")
        assert words in line
        (checkpoint / name).unlink()
        (checkpoint / name).write_bytes(sound_bytes)


NUM_MUTATIONS = 15


def broken_checkpoint(directory: Path, rng: random.Random) -> list[str]:
    path = directory / rng.choice(NAMES[:-1])
    data = path.read_bytes()
    path.write_bytes(
        mutated_json(json.loads(data), rng)
        if path.suffix == ".json" and rng.random() < 0.8
        else mutated_bytes(data, rng)
    )
    return engine_flags(directory)


def broken_weights(directory: Path, rng: random.Random) -> list[str]:
    path = directory / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = mutated_json(json.loads(data[8:end]), rng)
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[end:])
    return engine_flags(directory)


def outcome(argv: list[str]) -> tuple[int, str]:
    """A command's exit status and its stderr."""
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        try:
            return main(argv), errors.getvalue()
        except SystemExit as left:
            return int(left.code or 0), errors.getvalue()


@pytest.mark.parametrize("change", [broken_checkpoint, broken_weights])
def test_any_change_of_a_checkpoint_loads_or_is_refused_in_one_line(
    change: Callable[[Path, random.Random], list[str]], sound: Path, tmp_path: Path, trace: str
) -> None:
    for seed in range(NUM_MUTATIONS):
        argv = ["replay", trace, *change(shutil.copytree(sound, tmp_path / str(seed)), random.Random(seed))]
        code, errors = outcome(argv)
        assert code in (0, 1) or (code == 2 and errors.count("\n") == 1 and errors.startswith("agentspec: error: ")), (
            f"seed {seed}: {errors}"
        )
        shutil.rmtree(tmp_path / str(seed))


CHAT_LINE = {
    "messages": [
        {"role": "system", "content": "s"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "a"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}
RUN_LINE = {"timestamp": 100, "input_length": 1000, "output_length": 20, "hash_ids": [1, 2]}
COUNTS = {"version": 1, "num_tokens": 100, "counts": {"1": 3}}


def test_any_change_of_another_file_loads_or_is_refused_in_one_line(tmp_path: Path, trace: str) -> None:
    toml = b"max-running = 8\nno-graphs = true\nserved-model-name = ['a', 'b']\nmemory = 0.5\n"
    sessions = Path(trace).read_bytes().splitlines()
    path, out = tmp_path / "changed", str(tmp_path / "out.jsonl")
    commands: list[tuple[list[str], Any]] = [
        (["replay", str(path), "--dry-run", "27b"], sessions),
        (["import", "openai-messages", str(path), out], [json.dumps(CHAT_LINE).encode()]),
        (["import", "mooncake", str(path), out], [json.dumps(RUN_LINE).encode()] * 2),
        (["warm", "--device", "cpu", "--config", str(path)], toml),
        (["replay", trace, "--memory", "0.05", "--token-counts", str(path)], [json.dumps(COUNTS).encode()]),
    ]
    for seed in range(10 * NUM_MUTATIONS):
        rng = random.Random(seed)
        argv, content = rng.choice(commands)
        if isinstance(content, bytes):
            data = mutated_bytes(content, rng)
        else:
            place = rng.randrange(len(content))
            changed = (
                mutated_json(json.loads(content[place]), rng)
                if rng.random() < 0.8
                else mutated_bytes(content[place], rng)
            )
            data = b"\n".join([*content[:place], changed, *content[place + 1 :]])
            data = mutated_bytes(gzip.compress(data), rng) if rng.random() < 0.1 else data
        path.write_bytes(data)
        code, errors = outcome(argv)
        assert code in (0, 1) or (code == 2 and errors.count("\n") == 1 and errors.startswith("agentspec: error: ")), (
            f"seed {seed}: {errors}"
        )


def test_a_template_with_endless_recursion_refuses_the_messages(tmp_path: Path) -> None:
    endless = ChatTemplate("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
    with pytest.raises(RequestError, match="the chat template refuses them"):
        endless.render([{"role": "user", "content": "x"}])


def test_a_session_may_be_as_long_as_the_line_limit(tmp_path: Path) -> None:
    save(chats(3, 2), tmp_path / "a.jsonl.gz")
    assert len(load(tmp_path / "a.jsonl.gz").sessions) == 3
