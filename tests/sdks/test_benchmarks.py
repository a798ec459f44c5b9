"""Real benchmark clients measure the bundled model over a socket, with the model's own tokenizer directory.

They run in their own environments: `make test-sdks` installs them; missing ones are skipped. aiperf's test is in
tests/frameworks, because `make test` also runs it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentspec.engine import bundled
from agentspec.server.unknown_fields import HEADER
from scripts.clients.agents import Place, quiet
from scripts.clients.record import Recorder
from tests.sdks.recorded import recorded

ROOT = Path(__file__).parents[2]


def run(venv: str, program: str, arguments: list[str], scratch: Path, url: str) -> None:
    """Run a client from an empty directory, without network access."""
    place = Place(scratch=scratch, url=url)
    place.home.mkdir(exist_ok=True)
    environment = quiet(place) | {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    command = [str(ROOT / f".venv-{venv}" / "bin" / program), *arguments]
    done = subprocess.run(
        command, env=environment, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def skip_if_missing(venv: str) -> None:
    if not (ROOT / f".venv-{venv}" / ".installed").exists():
        pytest.skip(f".venv-{venv} is not there: `make test-sdks` makes it")


def bodies(recorder: Recorder, path: str) -> list[dict[str, Any]]:
    """Return the request bodies of a path. Checks that all requests were answered and no field was ignored."""
    assert {request["status"] for request in recorder.requests} == {200}
    assert [answer[HEADER] for answer in recorder.answers if HEADER in answer] == []
    return [request["body"] for request in recorder.requests if request["path"] == path]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(path: str, tmp_path: Path) -> None:
    skip_if_missing("guidellm")
    with recorded() as (url, recorder):
        arguments = [
            *(
                "run",
                "--backend",
                f"kind=openai_http,target={url},model={bundled.NAME},request_format={path}",
                "--disable-console",
            ),
            *(
                "--tokenizer",
                f"kind=huggingface_auto,model={bundled.DIRECTORY}",
                "--data",
                "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
            ),
            *(
                "--profile",
                "kind=concurrent,streams=2",
                "--constraint",
                "kind=max_requests,count=6",
                "--output",
                "kind=json,path=result.json",
            ),
        ]
        run("guidellm", "guidellm", arguments, tmp_path, url)
    assert len(bodies(recorder, path)) >= 6
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    assert benchmark["metrics"]["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert [request["output_tokens"] for request in benchmark["requests"]["successful"]] == [16] * 6


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_evalscope_perf_with_least_tokens(stream: str, tmp_path: Path) -> None:
    """The questions have short answers; `min_tokens` makes them longer."""
    skip_if_missing("benchmarks")
    (tmp_path / "questions.txt").write_text(
        "What is the status of order O-4071?\nList the open orders.\nWho ordered the lamp?\n"
    )
    with recorded() as (url, recorder):
        arguments = [
            *("perf", "--url", f"{url}/v1/chat/completions", "--api", "openai", "--model", bundled.NAME),
            *(
                "--tokenizer-path",
                str(bundled.DIRECTORY),
                "--dataset",
                "line_by_line",
                "--dataset-path",
                "questions.txt",
                stream,
            ),
            *(
                "--number",
                "6",
                "--parallel",
                "2",
                "--min-tokens",
                "120",
                "--max-tokens",
                "120",
                "--outputs-dir",
                "results",
                "--no-timestamp",
            ),
        ]
        run("benchmarks", "evalscope", arguments, tmp_path, url)
    asked = [body for body in bodies(recorder, "/v1/chat/completions") if "min_tokens" in body]
    assert len(asked) >= 6
    assert all(body["min_tokens"] == 120 and not body.get("ignore_eos") for body in asked)
    result = json.loads(
        (tmp_path / "results" / bundled.NAME / "parallel_2_number_6" / "benchmark_summary.json").read_text()
    )
    assert (result["Success Requests"], result["Failed Requests"], result["Avg Output Tokens"]) == (6, 0, 120.0)


DOCUMENTS = (
    {"question": "An order that is sent is", "choices": [" shipped", " open"], "answer": 0},
    {"question": "An order that is called off is", "choices": [" paid", " cancelled"], "answer": 1},
)
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "writing": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.mark.parametrize(
    ("model", "path", "tasks", "num_requests"),
    [
        # A request for each choice, scored by `echo` and `logprobs`, and one for each document.
        ("local-completions", "/v1/completions", ["choice", "writing"], 6),
        ("local-chat-completions", "/v1/chat/completions", ["writing"], 2),
    ],
)
def test_lm_eval(model: str, path: str, tasks: list[str], num_requests: int, tmp_path: Path) -> None:
    skip_if_missing("benchmarks")
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    for name in tasks:
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **TASKS[name]}))
    with recorded() as (url, recorder):
        settings = f"base_url={url}{path},model={bundled.NAME},num_concurrent=2"
        if model == "local-completions":
            settings += f",tokenizer={bundled.DIRECTORY},tokenizer_backend=huggingface"
        arguments = [
            *(
                "run",
                "--model",
                model,
                "--model_args",
                settings,
                "--tasks",
                ",".join(tasks),
                "--include_path",
                str(tmp_path),
            ),
            *("--output_path", "results", *(["--apply_chat_template"] if "chat" in model else [])),
        ]
        run("benchmarks", "lm_eval", arguments, tmp_path, url)
    assert len(bodies(recorder, path)) == num_requests
    (file,) = (tmp_path / "results").rglob("results_*.json")
    result = json.loads(file.read_text())
    assert {name: samples["effective"] for name, samples in result["n-samples"].items()} == dict.fromkeys(
        tasks, len(DOCUMENTS)
    )
