"""The bundled model: it is the default, the package contains it, and transformers gives the same outputs as
agentspec."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentspec.commands.cli import main
from agentspec.config import EngineConfig
from agentspec.engine import bundled
from agentspec.engine.in_process import Engine
from agentspec.replay.schema import Session, load, save
from agentspec.text.chat_template import ChatTemplate
from agentspec.text.messages import normalise
from agentspec.text.tokenizer import Tokenizer
from agentspec.text.tool_calls import detect_dialect
from agentspec.types import SamplingParams
from agentspec.wire import FinishEvent, Submit
from tests.fakes.compare import TOLERANCE, relative_error
from tests.fakes.loaded import load_model
from tests.fakes.sequence_driver import Driver
from tests.replay.builders import replay_file, said, turn, user
from tests.text.conversations import CONVERSATIONS, TOOLS

ROOT = Path(__file__).parents[1]
WORKLOAD = ROOT / "workloads" / "agentic.jsonl"
MAX_PACKAGE_BYTES = 40_000_000
MAX_SHARD_BYTES = 16 * 2**20
NEW_TOKENS = 60


def asset_names() -> set[str]:
    return {path.relative_to(bundled.DIRECTORY).as_posix() for path in bundled.DIRECTORY.rglob("*") if path.is_file()}


def test_names_that_resolve_to_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bundled.checkpoint_of(None) == bundled.checkpoint_of("tiny-agent") == str(bundled.DIRECTORY)
    for other in ("./tiny-agent", "someone/tiny-agent", "tiny-agent/", "elsewhere"):
        assert bundled.checkpoint_of(other) == other
    (tmp_path / "tiny-agent").mkdir()
    assert bundled.checkpoint_of("tiny-agent") == "tiny-agent"
    assert bundled.checkpoint_of(None) == str(bundled.DIRECTORY)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    turns = [turn(user(question), expect=said(), max_tokens=12) for question in ("Hello", "And now?")]
    path = tmp_path / "trace.jsonl"
    save(replay_file(Session(session_id="a", turns=turns)), path)
    return path


@pytest.mark.parametrize("flags", [[], ["--model", "tiny-agent"]], ids=["no model", "by name"])
def test_replay_runs_the_bundled_model(flags: list[str], trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert (
        main(
            [
                "replay",
                str(trace),
                "--device",
                "cpu",
                "--memory",
                "0.2",
                "--tool-delay",
                "zero",
                "--quiet",
                "--json",
                str(out),
                *flags,
            ]
        )
        == 0
    )
    report = json.loads(out.read_text())
    assert report["model"] == "tiny-agent"
    assert report["summary"]["turns"] == 2
    assert report["summary"]["drafted_tokens"] > 0, "its MTP head drafts by default"


def test_a_dry_run_uses_its_tokenizer(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(trace), "--dry-run", "27b"]) == 0
    assert "by the tokenizer of tiny-agent" in capsys.readouterr().out


def test_serve_runs_the_bundled_model() -> None:
    command = (
        "import sys; from agentspec.commands.cli import main; "
        "sys.exit(main(['serve', '--port', '0', '--device', 'cpu', '--memory', '0.2']))"
    )
    with subprocess.Popen([sys.executable, "-c", command], cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            greeting = re.fullmatch(r"agentspec \S+ serves tiny-agent at (http://\S+)\n", server.stdout.readline())
            assert greeting is not None
            models = httpx.get(f"{greeting[1]}/models").json()
            assert [model["id"] for model in models["data"]] == ["tiny-agent"]
            body = {"model": "tiny-agent", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            answer = httpx.post(f"{greeting[1]}/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the sources to keep older builds out."""
    root = tmp_path_factory.mktemp("package")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, root / name)
    shutil.copytree(ROOT / "agentspec", root / "agentspec", ignore=shutil.ignore_patterns("__pycache__"))
    command = "from setuptools import build_meta; build_meta.build_wheel('dist'); build_meta.build_sdist('dist')"
    done = subprocess.run([sys.executable, "-c", command], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return root / "dist"


def test_the_wheel_and_the_sdist_contain_it(distributions: Path) -> None:
    [wheel], [sdist] = distributions.glob("*.whl"), distributions.glob("*.tar.gz")
    wanted = {f"agentspec/assets/tiny-agent/{name}" for name in asset_names()}
    assert wanted, f"{bundled.DIRECTORY} is empty"
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if "/assets/" in name} == wanted
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {name for name in names if "/assets/" in name} == wanted
    assert wheel.stat().st_size < MAX_PACKAGE_BYTES
    assert sdist.stat().st_size < MAX_PACKAGE_BYTES


def test_the_wheel_contains_every_data_file(distributions: Path) -> None:
    """Every data file that the package reads must be in pyproject.toml's package-data."""
    files = (path for path in (ROOT / "agentspec").rglob("*") if path.is_file() and path.suffix != ".pyc")
    wanted = {path.relative_to(ROOT).as_posix() for path in files}
    [wheel] = distributions.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert wanted - set(archive.namelist()) == set()


def test_its_files_are_complete_small_and_without_machine_specific_paths() -> None:
    shards = {name for name in asset_names() if name.endswith(".safetensors")}
    texts = {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert asset_names() == shards | texts
    index = json.loads((bundled.DIRECTORY / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == shards
    source = ROOT / "scripts" / "tiny_agent" / "chat_template.jinja"
    assert (bundled.DIRECTORY / "chat_template.jinja").read_bytes() == source.read_bytes(), (
        "the chat template differs from the one of its training"
    )
    path_of_a_machine = re.compile(
        r"(?<![\w.:/])/(?:home|Users|root|work|mnt|data|tmp)/\w|[A-Z]:\\\\Users|_name_or_path"
    )
    for name in sorted(texts):
        found = path_of_a_machine.search((bundled.DIRECTORY / name).read_text(encoding="utf-8"))
        assert found is None, f"{name}: {found}"
    for name in sorted(shards):
        assert (bundled.DIRECTORY / name).stat().st_size <= MAX_SHARD_BYTES, name
        with safe_open(bundled.DIRECTORY / name, "pt") as file:
            assert not path_of_a_machine.search(str(file.metadata())), name
            kinds = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        assert set(kinds.values()) <= {"BF16", "F32"}, name
        assert all(
            kind == "BF16" or key.endswith(("A_log", "linear_attn.norm.weight")) for key, kind in kinds.items()
        ), name


@dataclass(frozen=True)
class Case:
    """A chat with tools, and its prompt as transformers renders and encodes it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    prompt_ids: list[int]


@pytest.fixture(scope="module")
def their_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(bundled.DIRECTORY)


@pytest.fixture(scope="module")
def their_model() -> Any:
    made: Any = AutoModelForCausalLM.from_pretrained(bundled.DIRECTORY, dtype=torch.float32, output_loading_info=True)
    model, loaded = made
    assert not any(loaded[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), (
        loaded
    )
    assert model.config.architectures == [type(model).__name__], (
        "all weights of the class in the config are loaded, and no vision tower is random"
    )
    return model.eval()


@pytest.fixture(scope="module")
def cases(their_tokenizer: Any) -> list[Case]:
    """The openings of three sessions of the workload, and a tool loop that isn't in the workload."""
    file = load(WORKLOAD)
    with_tools = [session for session in file.sessions if file.tools(session) and session.turns[0].messages]
    chosen = with_tools[:: len(with_tools) // 3][:3]
    chats_with_tools = [(msgspec.to_builtins(session.turns[0].messages), file.tools(session)) for session in chosen]
    found = []
    for messages, tools in [*chats_with_tools, (CONVERSATIONS["tool loop"], TOOLS)]:
        ids = their_tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        found.append(Case(messages=messages, tools=tools, prompt_ids=ids))
    assert min(len(case.prompt_ids) for case in found) > 200
    return found


def test_transformers_renders_the_same_prompts(cases: list[Case], their_tokenizer: Any) -> None:
    tokenizer, template = Tokenizer.from_directory(bundled.DIRECTORY), ChatTemplate.from_directory(bundled.DIRECTORY)
    assert tokenizer is not None
    assert template is not None
    assert detect_dialect(template.source) == "qwen3_coder"
    assert tokenizer.eos_id == their_tokenizer.eos_token_id == tokenizer.special_ids["<|im_end|>"]
    for case in cases:
        assert tokenizer.encode(template.render(normalise(case.messages), case.tools).text) == case.prompt_ids


def test_transformers_computes_the_same_logits(cases: list[Case], their_model: Any) -> None:
    model = load_model(bundled.DIRECTORY, device=torch.device("cpu"), dtype=torch.float32)
    assert set(model.spec.stop_token_ids) == set(their_model.generation_config.eos_token_id)
    for number, case in enumerate(cases):
        driver = Driver(model, max_tokens=len(case.prompt_ids))
        ours = model.logits(driver.prefill(case.prompt_ids, (200,)))
        with torch.no_grad():
            theirs = their_model(input_ids=torch.tensor([case.prompt_ids])).logits[0]
        real = model.spec.num_real_tokens  # rows after the real tokens are padding, which is never sampled
        assert relative_error(ours[:, :real], theirs[:, :real]) < TOLERANCE, f"prompt {number}"


@pytest.fixture(scope="module")
def their_answers(cases: list[Case], their_model: Any) -> list[list[int]]:
    """Greedy output of transformers, including the end of turn if it comes within NEW_TOKENS."""
    answers = []
    for case in cases:
        prompt = torch.tensor([case.prompt_ids])
        whole = their_model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        answers.append(whole[0, len(case.prompt_ids) :].tolist())
    return answers


@pytest.fixture(scope="module", params=[0, 3], ids=["no drafts", "3 drafts"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(EngineConfig(device="cpu", memory_gib=0.3, draft_tokens=request.param)) as engine:
        yield engine


def test_transformers_generates_the_same_tokens(
    engine: Engine, cases: list[Case], their_answers: list[list[int]], their_tokenizer: Any
) -> None:
    """Each prompt runs twice: computed, and resumed from the prefix cache."""
    for number, (case, expected) in enumerate(zip(cases, their_answers, strict=True)):
        for attempt in ("computed", "resumed"):
            submit = Submit(
                request_id=f"{number} {attempt}",
                prompt_ids=case.prompt_ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS),
            )
            events = list(engine.stream(submit))
            finish = events[-1]
            assert isinstance(finish, FinishEvent)
            ids = list(
                itertools.chain.from_iterable(
                    event.token_ids for event in events[:-1] if not isinstance(event, FinishEvent)
                )
            )
            assert ids == expected, submit.request_id
            assert "".join(event.text for event in events) == their_tokenizer.decode(expected, skip_special_tokens=True)
            assert (finish.usage.cached_tokens > 0) == (attempt == "resumed")
            assert (finish.usage.spec.num_drafted > 0) == (engine.info.max_draft_tokens > 0)
