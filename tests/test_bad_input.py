"""Invalid input from users: the command line prints one line that names the fault and exits with 2; HTTP answers 400
and names the field."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from agentspec.commands.cli import main
from agentspec.config import EngineConfig
from agentspec.engine.local_server import load
from agentspec.engine.settings import AUTO_MAX_DRAFTS
from agentspec.replay.schema import save
from tests.fakes.checkpoints import rewrite, write_checkpoint
from tests.fakes.text import write_text_assets
from tests.replay.builders import chats

SHAPE: dict[str, Any] = {"num_hidden_layers": 4, "vocab_size": 272, "eos_token_id": 257, "max_position_embeddings": 512}
LM = "model.language_model."


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that works. Tests copy it before they break it."""
    directory = write_checkpoint(tmp_path_factory.mktemp("bad") / "good", "dense", **SHAPE)
    write_text_assets(directory)
    return directory


@pytest.fixture(scope="module")
def headless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without an MTP head and without a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("bad") / "headless", "dense", mtp=False, **SHAPE)


@pytest.fixture
def broken(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "broken")


PROGRESS = re.compile(r"agentspec: [^:]*, \d+ s$")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    save(chats(1, 1), path)
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail; return its one line of error. A slow machine also prints how the start goes."""
    try:
        code = main(argv)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else -1
    shown = capsys.readouterr()
    assert (code, shown.out) == (2, ""), shown.err
    lines = [line for line in shown.err.splitlines() if not PROGRESS.match(line)]
    assert len(lines) == 1, shown.err
    assert lines[0].startswith("agentspec: error: ")
    return lines[0].removeprefix("agentspec: error: ")


def test_an_empty_model_name_is_refused(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["serve"], ["replay", trace], ["replay", trace, "--dry-run", "27b"]):
        assert refused(capsys, *command, "--model", "").startswith("model='': name a checkpoint directory")


@pytest.mark.parametrize("name", ["./nowhere", "nowhere", "a/b/c"])
def test_a_missing_model_directory_is_refused(name: str, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{name!r}: no such directory" in refused(capsys, "replay", trace, "--model", name)


def edit_json(directory: Path, name: str, **changes: Any) -> None:
    path = directory / name
    raw = json.loads(path.read_text())
    text = raw.get("text_config", raw)
    for key, value in changes.items():
        (text if key in text else raw)[key] = value
    path.write_text(json.dumps(raw))


BROKEN: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("no config", lambda d: (d / "config.json").unlink(), ["config.json: no such file"]),
    ("config that is no JSON", lambda d: (d / "config.json").write_text("{"), ["config.json: unreadable JSON"]),
    ("config that is a list", lambda d: (d / "config.json").write_text("[]"), ["config.json", "JSON object"]),
    (
        "config that is no text",
        lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"),
        ["config.json: unreadable JSON"],
    ),
    (
        "unknown architecture",
        lambda d: edit_json(d, "config.json", model_type="qwen4_exp", text_config={"model_type": "qwen4_exp"}),
        ["qwen4_exp"],
    ),
    ("another family", lambda d: (d / "config.json").write_text('{"model_type": "llama"}'), ["model_type='llama'"]),
    (
        "a missing field",
        lambda d: edit_json(d, "config.json", num_attention_heads=None),
        ["num_attention_heads", "missing"],
    ),
    ("a field of the wrong type", lambda d: edit_json(d, "config.json", hidden_size="big"), ["hidden_size='big'"]),
    ("a field out of range", lambda d: edit_json(d, "config.json", num_hidden_layers=0), ["num_hidden_layers=0"]),
    ("an activation we lack", lambda d: edit_json(d, "config.json", hidden_act="gelu"), ["hidden_act='gelu'"]),
    (
        "quantised weights",
        lambda d: edit_json(d, "config.json", quantization_config={"quant_method": "awq"}),
        ["quantization_config", "awq"],
    ),
    ("no weights", lambda d: (d / "model.safetensors").unlink(), ["model.safetensors"]),
    (
        "weights that are none",
        lambda d: (d / "model.safetensors").write_bytes(b"junk"),
        ["model.safetensors: not a readable safetensors file"],
    ),
    ("a missing tensor", lambda d: rewrite(d, lambda t: t.pop("lm_head.weight")), ["missing tensors: lm_head.weight"]),
    (
        "an extra tensor",
        lambda d: rewrite(d, lambda t: t.update({"model.audio.w": torch.zeros(1)})),
        ["unexpected tensors: model.audio.w"],
    ),
    (
        "a tensor of the wrong shape",
        lambda d: rewrite(d, lambda t: t.update({f"{LM}norm.weight": torch.zeros(63)})),
        ["model.norm.weight has shape [63], expected [64]"],
    ),
    (
        "a tensor of the wrong type",
        lambda d: rewrite(d, lambda t: t.update({f"{LM}norm.weight": torch.zeros(64, dtype=torch.int8)})),
        ["model.norm.weight (I8)"],
    ),
    ("a tokenizer that is none", lambda d: (d / "tokenizer.json").write_text("{}"), ["tokenizer.json"]),
    ("a template that is none", lambda d: (d / "chat_template.jinja").write_text("{% if %}"), ["chat_template.jinja"]),
    (
        "tokenizer settings that are none",
        lambda d: (d / "tokenizer_config.json").write_text("[]"),
        ["tokenizer_config.json"],
    ),
]


@pytest.mark.parametrize(("damage", "words"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_damaged_checkpoint_is_refused_with_the_fault_named(
    damage: Callable[[Path], object], words: list[str], broken: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(broken)
    line = refused(capsys, "replay", trace, "--model", str(broken), "--memory", "0.05", "--quiet")
    assert all(word in line for word in words), line


def test_a_model_that_is_a_file_is_refused(good: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a file" in refused(capsys, "replay", trace, "--model", str(good / "config.json"))


BAD_FLAGS: list[tuple[list[str], str]] = [
    (["--speculate"], "--speculate"),
    (["--draft", "2"], "--draft"),
    (["--device", "tpu"], "'tpu'"),
    (["--dtype", "float16"], "'float16'"),
    (["--draft-tokens", "8"], "draft_tokens=8"),
    (["--draft-tokens", "-1"], "draft_tokens=-1"),
    (["--draft-tokens", "1.5"], "'1.5'"),
    (["--max-running", "0"], "max_running=0"),
    (["--max-running", "-3"], "max_running=-3"),
    (["--max-running", "two"], "'two'"),
    (["--prefill-budget", "63"], "prefill_budget=63"),
    (["--prefill-budget", "lots"], "'lots'"),
    (["--fair-cost", "0"], "fair_cost=0.0"),
    (["--fair-cost", "1.5"], "fair_cost=1.5"),
    (["--memory", "0"], "memory=0.0"),
    (["--memory", "-1"], "memory=-1.0"),
    (["--memory", "nan"], "memory=nan"),
    (["--memory", "inf"], "memory=inf"),
    (["--memory", "8GB"], "'8GB'"),
    (["--host-memory", "-1"], "host_memory=-1.0"),
    (["--host-memory", "nan"], "host_memory=nan"),
    (["--host-memory", "0.001"], "host_memory=0.001"),
    (["--host-memory", "1", "--no-prefix-cache"], "host_memory=1.0"),
    (["--seed", "-1"], "seed=-1"),
    (["--seed", str(2**63)], f"seed={2**63}"),
    (["--seed", "x"], "'x'"),
    (["--force-acceptance", "high"], "force_acceptance='high'"),
    (["--force-acceptance", ""], "force_acceptance=''"),
    (["--force-acceptance", "0.5,,0.5"], "force_acceptance='0.5,,0.5'"),
    (["--force-acceptance", "0.9,1.1"], "force_acceptance=(0.9, 1.1)"),
    (["--force-acceptance", "-0.1"], "force_acceptance=(-0.1,)"),
    (["--force-acceptance", "nan"], "force_acceptance=(nan,)"),
    (["--force-acceptance", ",".join(["0.5"] * 8)], "force_acceptance"),
    (["--force-acceptance", "2.5"], "force_acceptance='2.5'"),
    (["--force-acceptance", "2.5", "--draft-tokens", "1"], "force_acceptance='2.5'"),
    (["--force-acceptance", "inf", "--draft-tokens", "3"], "force_acceptance='inf'"),
    (["--force-acceptance", "0.5", "--draft-tokens", "3"], "force_acceptance=(0.5,)"),
    (["--force-acceptance", "0.5,0.5", "--draft-tokens", "1"], "force_acceptance=(0.5, 0.5)"),
    (["--force-acceptance", "0.5", "--draft-tokens", "0"], "force_acceptance=(0.5,)"),
    (["--model"], "--model"),
]


@pytest.mark.parametrize(("flags", "words"), BAD_FLAGS, ids=[" ".join(case[0]) for case in BAD_FLAGS])
def test_an_invalid_engine_flag_is_refused_by_name(
    flags: list[str], words: str, good: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, "replay", trace, *([] if flags == ["--model"] else ["--model", str(good)]), *flags)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused(good: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "device='cuda'" in refused(capsys, "replay", trace, "--model", str(good), "--device", "cuda")


def test_drafts_without_an_mtp_head_are_refused(headless: Path, trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "replay", trace, "--model", str(headless), "--draft-tokens", "2")
    assert "draft_tokens=2" in line
    assert "no MTP head" in line
    assert "force_acceptance=(0.5,)" in refused(
        capsys, "replay", trace, "--model", str(headless), "--force-acceptance", "0.5"
    )


@pytest.mark.parametrize("max_running", [1, 8])
def test_too_little_memory_reports_the_amount_needed(
    max_running: int, good: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", str(good), "--max-running", str(max_running), "--memory")
    line = refused(capsys, "replay", trace, *flags, "0.0001")
    assert line.startswith("memory=")
    assert f"{max_running} running requests with up to {AUTO_MAX_DRAFTS} drafts" in line
    (needed,) = re.findall(r"at least ([\d.]+) GiB", line)
    assert main(["replay", trace, *flags, needed, "--quiet"]) == 0
    capsys.readouterr()


BAD_FILES: list[tuple[str, bytes, list[str]]] = [
    ("nothing", b"", [":1: ", "no sessions"]),
    ("no JSON", b'{"type": "meta", "schema": "agentspec.replay/1"}\n{"type": "session", \n', [":2: "]),
    (
        "a wrong type",
        b'{"type": "session", "session_id": "a", "turns": '
        b'[{"messages": [{"role": "user", "content": "x"}], "delay_ms": "soon"}]}\n',
        [":1: ", "delay_ms"],
    ),
    (
        "an unknown key",
        b'\n{"type": "session", "session_id": "a", "turns": '
        b'[{"messages": [{"role": "user", "content": "x"}], "dealy_ms": 1}]}\n',
        [":2: ", "dealy_ms", "turns[0]"],
    ),
    ("no text", b"\xff\xfe\x00\x01", [":1: "]),
    ("a cut gzip", gzip.compress(b'{"type": "meta"}' * 100)[:-10], ["can't be read"]),
    ("gzip garbage", b"\x1f\x8b" + b"garbage" * 20, ["can't be read"]),
    ("gzip of garbage", gzip.compress(b"\x00\x01\x02"), [":1: "]),
]


@pytest.mark.parametrize(("content", "words"), [case[1:] for case in BAD_FILES], ids=[case[0] for case in BAD_FILES])
@pytest.mark.parametrize("dry", [(), ("--dry-run", "27b")], ids=["engine", "dry run"])
def test_a_malformed_replay_file_is_refused_with_its_line(
    content: bytes, words: list[str], dry: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content)
    line = refused(capsys, "replay", str(file), *dry)
    assert line.startswith(f"{file}:")
    assert all(word in line for word in words), line


@pytest.mark.parametrize("dry", [(), ("--dry-run", "27b")], ids=["engine", "dry run"])
def test_a_missing_replay_file_is_refused(
    dry: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        assert str(path) in refused(capsys, "replay", str(path), *dry)


@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_unwritable_result_files_are_refused(
    flag: str, good: Path, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "none" / "out", tmp_path):
        line = refused(capsys, "replay", trace, "--model", str(good), flag, str(path))
        assert line.startswith(f"{flag.removeprefix('--')}=")


class Server:
    """An engine on the good checkpoint, with an in-process HTTP client."""

    def __init__(self, model: Path) -> None:
        self._runner = asyncio.Runner()
        local = load(EngineConfig(model=str(model), device="cpu", memory_gib=0.05, max_running=2))
        self.local = local
        self._context = local.client()
        self._client: httpx.AsyncClient = self._runner.run(self._context.__aenter__())

    def post(self, path: str, body: Any, **settings: Any) -> httpx.Response:
        return self._runner.run(self._client.post(path, **(settings or {"json": body})))

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._runner.run(self._client.get("/stats")).json()
        return answer

    def close(self) -> None:
        self._runner.run(self._context.__aexit__(None, None, None))
        self._runner.close()


@pytest.fixture(scope="module")
def server(good: Path) -> Any:
    running = Server(good)
    yield running
    assert running.post("/v1/completions", COMPLETION).status_code == 200, "bad requests must not affect others"
    assert running.stats()["engine"]["finished"]["error"] == 0
    assert (running.stats()["running"], running.stats()["waiting"]) == (0, 0)
    running.close()


COMPLETION: dict[str, Any] = {"model": "good", "prompt": [1, 2, 3], "max_tokens": 2}
CHAT: dict[str, Any] = {"model": "good", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}

BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"suffix": "end"}, "suffix", "is not supported"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": None}, "prompt", "is required"),
    ({"prompt": ""}, "prompt", "at least one token"),
    ({"prompt": [1, "two"]}, "prompt[0]", "must be a text or a non-empty list"),
    ({"prompt": [1, 1.5]}, "prompt[0]", "must be a text or a non-empty list"),
    ({"prompt": [[1], []]}, "prompt[1]", "non-empty"),
    ({"prompt": [1, 272]}, "prompt", "272"),
    ({"prompt": [1, -1]}, "prompt", "-1"),
    ({"prompt": [2**40]}, "prompt", str(2**40)),
    ({"prompt": [1] * 512}, "prompt", "512 tokens"),
    ({"prompt": [1] * 512, "max_tokens": 13}, "prompt", "max_tokens 13 exceeds the context limit of 512"),
    ({"max_tokens": -1}, "max_tokens", "-1"),
    ({"max_tokens": "many"}, "max_tokens", "many"),
    ({"max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"temperature": -1}, "temperature", "-1"),
    ({"top_p": 0}, "top_p", "0"),
    ({"top_k": 273}, "top_k", "273"),
    ({"min_p": 1}, "min_p", "1"),
    ({"presence_penalty": 3}, "presence_penalty", "3"),
    ({"frequency_penalty": -3}, "frequency_penalty", "-3"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"logit_bias": {"272": 1}}, "logit_bias", "272"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]", "101"),
    ({"logit_bias": {"five": 1}}, "logit_bias", "five"),
    ({"seed": -1}, "seed", "-1"),
    ({"seed": 2**64}, "seed", str(2**64)),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": 5}, "stop", "5"),
    ({"stop_token_ids": [272]}, "stop_token_ids", "272"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids", str(2**40)),
    ({"logprobs": 21, "echo": True}, "logprobs", "21"),
    ({"logprobs": -1}, "logprobs", "-1"),
    ({"n": 200}, "n", "200"),
    ({"best_of": 2}, "best_of", "n=1"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"structured_outputs": {}}, "structured_outputs", "one of"),
    ({"stream": "yes"}, "stream", "yes"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "field", "words"), BAD_COMPLETIONS, ids=[json.dumps(case[0])[:40] for case in BAD_COMPLETIONS]
)
def test_an_invalid_completion_request_gets_400_with_the_field(
    changes: dict[str, Any], field: str, words: str, stream: bool, server: Server
) -> None:
    body = COMPLETION | ({"stream": True, "echo": True, "return_token_ids": True} if stream else {}) | changes
    if "stream_options" in changes and stream:
        body["stream"] = False
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)
    assert field in error["message"]
    assert words in error["message"] or stream


BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": "hi"}, "prompt", "is not supported"),
    ({"messages": []}, "messages", ""),
    ({"messages": None}, "messages", "required"),
    ({"messages": "hi"}, "messages", "hi"),
    ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role", "judge"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "image_url"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "Unicode"),
    ({"messages": [{"role": "system", "content": "no question"}]}, "messages", "no user message"),
    ({"messages": [{"role": "user", "content": "word " * 200}]}, "messages", "exceeds the context limit of 512"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "tool", "content": "1", "tool_call_id": "c9"}]},
        "messages[1].tool_call_id",
        "c9",
    ),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "disagrees"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "function"),
    ({"tool_choice": "required"}, "tool_choice", "required"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"logprobs": "yes"}, "logprobs", "yes"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"n": 0}, "n", "0"),
    ({"reasoning_effort": 3}, "reasoning_effort", "3"),
    ({"top_k": -2}, "top_k", "-2"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens", "no"),
    ({"return_token_ids": "input"}, "return_token_ids", "input"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs", "3"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("changes", "field", "words"), BAD_CHATS, ids=[json.dumps(case[0])[:40] for case in BAD_CHATS])
def test_an_invalid_chat_request_gets_400_with_the_field(
    changes: dict[str, Any], field: str, words: str, stream: bool, server: Server
) -> None:
    answer = server.post(
        "/v1/chat/completions",
        None,
        content=json.dumps(CHAT | {"stream": stream} | changes),
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field or error["code"] == "invalid_json", error
    assert words in error["message"] or error["code"] == "invalid_json", error


@pytest.mark.parametrize("max_tokens", [12, 13, 10**30])
def test_max_tokens_beyond_the_context_is_clamped(max_tokens: int, server: Server) -> None:
    """A real engine generates up to the context limit, and the answer reports the clamped limit."""
    body = COMPLETION | {"prompt": [1] * 500, "max_tokens": max_tokens, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage["completion_tokens"], answer.json()["choices"][0]["finish_reason"]) == (12, "length")
    told = (answer.headers.get("x-agentspec-max-tokens"), usage.get("max_tokens_clamped_to"))
    assert told == ((None, None) if max_tokens == 12 else ("12", 12))


def test_malformed_bodies_get_400(server: Server) -> None:
    for content in (b"", b"{", b"[1]", b"\xff", b'"text"', b"null"):
        answer = server.post("/v1/completions", None, content=content)
        assert answer.status_code == 400, content
        assert answer.json()["error"]["message"]


def test_an_unknown_model_gets_404(server: Server) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        answer = server.post(path, body | {"model": "gpt-9"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "gpt-9" in answer.json()["error"]["message"]
        assert "good" in answer.json()["error"]["message"]


def test_unknown_paths_and_methods_get_404_and_405(server: Server) -> None:
    assert server.post("/v1/nothing", {}).status_code == 404
    assert server.post("/health", {}).status_code == 405


def test_a_checkpoint_without_a_tokenizer_accepts_only_token_ids(headless: Path) -> None:
    running = Server(headless)
    try:
        answer = running.post("/v1/completions", {"model": "headless", "prompt": "text"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        answer = running.post("/v1/completions", {"model": "headless", "prompt": [1], "stop": ["x"]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")
        answer = running.post(
            "/v1/chat/completions", {"model": "headless", "messages": [{"role": "user", "content": "x"}]}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        answer = running.post(
            "/v1/completions", {"model": "headless", "prompt": [1, 2], "max_tokens": 3, "ignore_eos": True}
        )
        assert answer.status_code == 200
        assert len(answer.json()["choices"][0]["token_ids"]) == 3
    finally:
        running.close()
